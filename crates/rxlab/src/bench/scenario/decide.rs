// SPDX-License-Identifier: MIT OR Apache-2.0
//! `decide`: cost of one steering decision, compared with an XDP program that only passes.
//!
//! BPF_PROG_TEST_RUN runs the XDP program repeatedly over one packet, with tables of its own and
//! without attaching it: redirects are not carried out, and caches are warm. The kernel reports the
//! mean time of a run in ns.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Instant;

use anyhow::{Context, Result};
use etherparse::PacketBuilder;
use indexmap::IndexMap;
use libbpf_rs::{MapCore, MapFlags};
use nix::unistd::Pid;
use rxsteer::daemon::options::Tunnel;
use rxsteer::datapath::hash::Hash;
use rxsteer::datapath::policy::Policy;
use rxsteer::datapath::rps_map::RpsMap;
use rxsteer::datapath::{
    Config, Datapath, DeviceConfig, INLINE_PORTS, RPS_FLOW_CNT, RPS_SOCK_FLOW_ENTRIES, SoftirqKind,
    draw_secret, inline_ports,
};
use rxsteer::host::device::RxMode;
use rxsteer::host::sched::Class;
use rxsteer::types::rx_reason;

use crate::bench::experiment::{CasePlan, Effort, Experiment, Plan, Values, fit, headline};
use crate::bench::report::document::Better;
use crate::bench::report::document::SUBJECT;
use crate::lab::netns::{Netns, bind};
use crate::lab::programs;
use crate::lab_skel::LabSkel;

/// linux/bpf.h
const XDP_PASS: u32 = 2;
const XDP_REDIRECT: u32 = 4;
/// linux/pkt_cls.h
const TC_ACT_REDIRECT: u32 = 7;

/// Program runs per test_run.
const REPEAT: u32 = 200_000;

/// Program runs in a window of the saturated queue: 10 ms at a million packets per second.
const WINDOW: u32 = 10_000;

/// Numbers of flows in rotation, to show how the cost grows.
const FLOWS: [u32; 4] = [1_000, 10_000, 100_000, 1_000_000];

struct Packet {
    case: String,
    tunnels: u32,
    /// With more than one, a program that varies the source address runs before the program under
    /// test.
    nr_flows: u32,
    bytes: Vec<u8>,
}

/// Program under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// A program that only passes.
    Empty,
    /// rxsteer by RPS alone.
    Rps,
    /// rxsteer by RFS.
    Rfs,
    /// rxsteer by RFS, without its rule of order.
    Unguarded,
    /// rxsteer with its default policy, at light load.
    Adaptive,
    /// The same with a saturated polling CPU and no room on any other.
    Saturated,
    /// rxsteer by RFS in softirq mode. The kernel runs the program again over the packet that it has
    /// marked: each second run is that of a packet that has changed its CPU, and whose CPU is
    /// offline, since it runs where the first one did.
    Softirq,
}

impl Subject {
    const ALL: [Self; 7] = [
        Self::Empty,
        Self::Rps,
        Self::Rfs,
        Self::Unguarded,
        Self::Adaptive,
        Self::Saturated,
        Self::Softirq,
    ];

    fn mode(self) -> &'static str {
        match self {
            Self::Empty => "none",
            Self::Rps => "rxsteer-rps",
            Self::Rfs => "rxsteer-rfs",
            Self::Unguarded => "unguarded",
            Self::Adaptive => SUBJECT,
            Self::Saturated => "rxsteer-saturated",
            Self::Softirq => "rxsteer-softirq-rfs",
        }
    }

    /// Expected return value for every packet.
    fn verdict(self) -> u32 {
        match self {
            Self::Empty | Self::Adaptive | Self::Saturated => XDP_PASS,
            Self::Rps | Self::Rfs | Self::Unguarded => XDP_REDIRECT,
            Self::Softirq => TC_ACT_REDIRECT,
        }
    }

    /// Runs per test_run.
    fn repeat(self) -> u32 {
        match self {
            Self::Saturated => WINDOW,
            // Odd: the last run is one that decides.
            Self::Softirq => REPEAT + 1,
            _ => REPEAT,
        }
    }

    fn runs_per_packet(self) -> u32 {
        if self == Self::Softirq { 2 } else { 1 }
    }

    fn policy(self) -> Policy {
        match self {
            Self::Empty | Self::Rps => Policy::RPS,
            Self::Rfs | Self::Unguarded | Self::Softirq => Policy::RFS,
            Self::Adaptive | Self::Saturated => Policy::ADAPTIVE,
        }
    }
}

pub struct Decide {
    packets: Vec<Packet>,
    seconds: f64,
}

impl Decide {
    /// Builds the packets; programs are loaded per measurement.
    ///
    /// # Errors
    /// When the packets can't be built.
    pub fn new(effort: &Effort) -> Result<Self> {
        // A single value, independent of traffic, needs less time.
        let seconds = effort.seconds / 4.0;
        let packets = packets()?;
        Ok(Self { packets, seconds })
    }
}

impl Experiment for Decide {
    fn plan(&self) -> Plan {
        let cases = self.packets.iter().map(|packet| CasePlan {
            case: packet.case.clone(),
            modes: subjects_of(packet).map(|s| s.mode().to_owned()).collect(),
        });
        Plan {
            scenario: "decide",
            question: "What does one decision cost, and how does that grow with the number of flows?",
            metrics: IndexMap::from([headline("ns_per_packet", "Time of one run", "ns", Better::Lower)]),
            cases: cases.collect(),
            conditions: IndexMap::new(),
            notes: vec![
                "none is a program that only passes: what running any program costs. rxsteer is what it \
                 costs at light load, where flows stay on the CPU that polls; with \
                 rxsteer-saturated that CPU has no time left and no other has room, and each flow \
                 searches all CPUs again in each window of 10,000 packets; in the other modes \
                 of rxsteer all flows go to another CPU. The time of rxsteer-softirq-rfs is that of \
                 two runs, of which the second is shorter than on the packet's new CPU. With many flows \
                 all modes run behind a program that changes the packet's source each time, and the \
                 tables have as many slots as there are flows."
                    .to_owned(),
            ],
            seconds_each: self.seconds + 0.15,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let (packet, subject, seconds) = (&self.packets[case], Subject::ALL[mode], self.seconds);
        let mean_ns = || mean_ns(packet, subject, seconds);
        // Softirq mode makes a device.
        let ns = Netns::new("decide")?.run(mean_ns)?;
        Ok(vec![("ns_per_packet", ns)])
    }
}

/// The program that varies the flow is one of XDP.
fn subjects_of(packet: &Packet) -> impl Iterator<Item = Subject> {
    let varied = packet.nr_flows > 1;
    let fits = move |subject: &Subject| !(varied && *subject == Subject::Softirq);
    Subject::ALL.into_iter().filter(fits)
}

/// Mean ns of a packet. On CPU 0, since the flows are steered to CPU 1.
fn mean_ns(packet: &Packet, subject: Subject, seconds: f64) -> Result<f64> {
    bind(Pid::from_raw(0), 0)?;
    let runner = Runner::new(packet, subject)?;
    // Two rounds of warm-up: in the first, all slots are empty.
    for _ in 0..(2 * packet.nr_flows).div_ceil(subject.repeat()) {
        runner.run(packet)?;
    }
    let (mut sum, mut nr_windows) = (0.0, 0.0);
    let start = Instant::now();
    while nr_windows == 0.0 || start.elapsed().as_secs_f64() < seconds {
        sum += f64::from(runner.run(packet)?);
        nr_windows += 1.0;
    }
    runner.check(packet)?;
    Ok(sum / nr_windows * f64::from(subject.runs_per_packet()))
}

/// The program under test and its map objects.
struct Runner {
    lab: LabSkel<'static>,
    datapath: Option<Datapath>,
    subject: Subject,
    varied: bool,
}

impl Runner {
    fn new(packet: &Packet, subject: Subject) -> Result<Self> {
        let varied = packet.nr_flows > 1;
        let lab = programs::load(|open| {
            open.progs.empty.set_autoload(true);
            open.progs.vary.set_autoload(varied);
            let constants = open.maps.rodata_data.as_mut().context("no .rodata")?;
            constants.vary_nr_flows = packet.nr_flows;
            // A prime that divides none of the numbers of flows: visits all flows in scattered
            // order.
            constants.vary_step = 618_041 % packet.nr_flows;
            Ok(())
        })?;
        let datapath = match subject {
            Subject::Empty => None,
            _ => {
                let entries = packet.nr_flows.next_power_of_two();
                let (slots, entries) = (
                    RPS_FLOW_CNT.max(entries),
                    RPS_SOCK_FLOW_ENTRIES.max(entries),
                );
                Some(self::subject(subject, packet.tunnels, slots, entries)?)
            }
        };
        let runner = Self {
            lab,
            datapath,
            subject,
            varied,
        };
        if varied {
            let program = runner.program()?.as_raw_fd().to_ne_bytes();
            let targets = &runner.lab.maps.vary_target;
            targets.update(&0u32.to_ne_bytes(), &program, MapFlags::ANY)?;
        }
        Ok(runner)
    }

    fn program(&self) -> Result<BorrowedFd<'_>> {
        match &self.datapath {
            Some(datapath) => datapath.program(0),
            None => Ok(self.lab.progs.empty.as_fd()),
        }
    }

    /// Mean ns of [`Subject::repeat`] runs.
    fn run(&self, packet: &Packet) -> Result<u32> {
        let program = if self.varied {
            self.lab.progs.vary.as_fd()
        } else {
            self.program()?
        };
        if let (Subject::Saturated, Some(datapath)) = (self.subject, &self.datapath) {
            datapath.next_window(0);
        }
        test_run(program, &packet.bytes, self.subject)
    }

    /// Refuses the figure if the flows of the last window did not search the CPUs.
    fn check(&self, packet: &Packet) -> Result<()> {
        let (Subject::Saturated, Some(datapath)) = (self.subject, &self.datapath) else {
            return Ok(());
        };
        let load = datapath.rx_queue(0).load;
        let tables = datapath.tables();
        let slots = tables.dev_flows().range(0..tables.flow_cnt());
        let searched = slots.filter(|(_, flow)| {
            flow.window == load.window && flow.reason == rx_reason::RX_NO_GAIN.0 as u8
        });
        let (searched, flows) = (searched.count(), packet.nr_flows.min(WINDOW) as usize);
        // Flows may share a slot.
        fit!(
            searched > flows / 2,
            "{searched} of {flows} flows searched the CPUs for room in the last window"
        );
        let read = datapath.backlog(0, 1).looked;
        fit!(
            read == load.window.wrapping_add(1),
            "the load of CPU 1 was not read in the last window"
        );
        Ok(())
    }
}

/// A data path with one queue. All flows go to the backlog of CPU 1, the longest path of the
/// program; with a policy that considers load they stay inline, since no poll has reported any, or
/// since no CPU has room.
pub(super) fn subject(
    subject: Subject,
    tunnels: u32,
    rps_flow_cnt: u32,
    rps_sock_flow_entries: u32,
) -> Result<Datapath> {
    let config = Config {
        // Nothing is dequeued from the backlog.
        backlog_limit: u32::MAX,
        backlog_sched: Class::Nice(0),
        most_backlogs: 1,
        rps_sock_flow_entries,
        rps_flow_cnt,
        unconnected: true,
        follow_nat: false,
        more_devices: false,
        dry_run: false,
        tunnels,
        inline_ports: inline_ports(&INLINE_PORTS).context("they are few")?,
        hash: Hash::Packet,
        flow_limit: 0,
        unguarded: subject == Subject::Unguarded,
        secret: draw_secret()?,
    };
    let mut datapath = Datapath::load(
        &config,
        &[DeviceConfig {
            ifindex: 1,
            nr_rx_queues: 1,
            mode: match subject {
                Subject::Softirq => RxMode::Softirq,
                _ => RxMode::Native,
            },
            gro: true,
            kind: SoftirqKind::default(),
        }],
    )?;
    if subject != Subject::Softirq {
        // Fails on a host with a single CPU: the kernel makes no backlog for CPU 1.
        datapath.backlogs().make(0, 1)?;
    }
    datapath.set_rps_map(0, &RpsMap::inline().spread_over(&[1]));
    datapath.settle(0);
    datapath.steer_by(subject.policy())?;
    if subject == Subject::Saturated {
        datapath.saturate(0)?;
    }
    Ok(datapath)
}

fn test_run(program: BorrowedFd<'_>, packet: &[u8], subject: Subject) -> Result<u32> {
    let mut opts = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as libbpf_sys::size_t,
        data_in: packet.as_ptr().cast(),
        data_size_in: packet.len() as u32,
        repeat: subject.repeat() as i32,
        ..Default::default()
    };
    // SAFETY: the packet and the options outlive the call.
    let result = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &mut opts) };
    if result < 0 {
        return Err(std::io::Error::from_raw_os_error(-result)).context("running the program");
    }
    let verdict = subject.verdict();
    // A poll of another device on this CPU would appear to have lasted since the first packet;
    // flows then do not stay inline.
    fit!(
        opts.retval == verdict,
        "the program said {} rather than {verdict}: it did not run, or something else was polled \
         on its CPU",
        opts.retval
    );
    Ok(opts.duration)
}

/// Plain packets and one tunnelled packet, of minimal size: the payload is never read.
fn packets() -> Result<Vec<Packet>> {
    const MACS: ([u8; 6], [u8; 6]) = ([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
    const V4: ([u8; 4], [u8; 4]) = ([192, 0, 2, 1], [192, 0, 2, 2]);
    const V6: ([u8; 16], [u8; 16]) = ([0x20; 16], [0x21; 16]);
    let ethernet = || PacketBuilder::ethernet2(MACS.0, MACS.1);
    let ipv4 = || ethernet().ipv4(V4.0, V4.1, 64);
    let vlan = || ethernet().single_vlan(etherparse::VlanId::try_new(7).expect("below 4096"));

    let mut inner = Vec::new();
    ipv4().tcp(40_000, 443, 1, 1024).write(&mut inner, &[])?;
    let mut vxlan = vec![8, 0, 0, 0, 0, 0, 42, 0];
    vxlan.extend(&inner);

    let mut packets = Vec::new();
    let mut add = |case: &str, tunnels, write: &dyn Fn(&mut Vec<u8>) -> Result<(), _>| {
        let mut bytes = Vec::new();
        let written: Result<(), etherparse::err::packet::BuildWriteError> = write(&mut bytes);
        packets.push(Packet {
            case: case.to_owned(),
            tunnels,
            nr_flows: 1,
            bytes,
        });
        written
    };
    add("tcp4", 0, &|b| {
        ipv4().tcp(40_000, 443, 1, 1024).write(b, &[])
    })?;
    add("udp4", 0, &|b| ipv4().udp(40_000, 443).write(b, &[0; 18]))?;
    add("tcp6", 0, &|b| {
        ethernet()
            .ipv6(V6.0, V6.1, 64)
            .tcp(40_000, 443, 1, 1024)
            .write(b, &[])
    })?;
    add("vlan-tcp4", 0, &|b| {
        vlan()
            .ipv4(V4.0, V4.1, 64)
            .tcp(40_000, 443, 1, 1024)
            .write(b, &[])
    })?;
    add("vxlan-tcp4", Tunnel::Vxlan.bits(), &|b| {
        ipv4().udp(40_000, 4789).write(b, &vxlan)
    })?;
    let tcp4 = packets[0].bytes.clone();
    packets.extend(FLOWS.map(|nr_flows| Packet {
        case: format!("tcp4, {nr_flows} flows"),
        tunnels: 0,
        nr_flows,
        bytes: tcp4.clone(),
    }));
    Ok(packets)
}
