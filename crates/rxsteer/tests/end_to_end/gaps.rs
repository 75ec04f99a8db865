// SPDX-License-Identifier: MIT OR Apache-2.0
//! CPU ids with gaps: tables are as long as the highest id needs, and polls of a CPU without an
//! element in a table prove nothing.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::{fs, io};

use anyhow::Result;
use nix::mount::{MsFlags, mount};
use nix::unistd::Pid;
use rxlab::lab::netns::{Netns, bind};
use rxlab::{in_lab, test_name};
use rxsteer::datapath::hash::Hash;
use rxsteer::datapath::rps_map::{INLINE, RpsMap, SLOTS};
use rxsteer::datapath::{
    Config, Datapath, DeviceConfig, RPS_FLOW_CNT, RPS_SOCK_FLOW_ENTRIES, SoftirqKind, draw_secret,
    inline_ports, native,
};
use rxsteer::host::device::RxMode;
use rxsteer::host::sched::Class;
use rxsteer::host::topology::Topology;
use rxsteer::types::{backlog, rps_dev_flow, rps_map, rx_facts, rx_queue, rx_verdict};

/// `/sys/devices/system/cpu/possible` of a host on which no CPU has id 0: libbpf counts one CPU.
const POSSIBLE: &str = "1\n";
const CPU: u32 = 1;
const OTHER: u32 = 0;

const XDP_PASS: u32 = 2;
const XDP_REDIRECT: u32 = 4;

fn load() -> Result<Datapath> {
    let config = Config {
        backlog_limit: 64,
        backlog_sched: Class::default(),
        most_backlogs: 1,
        rps_sock_flow_entries: RPS_SOCK_FLOW_ENTRIES,
        rps_flow_cnt: RPS_FLOW_CNT,
        unconnected: false,
        follow_nat: false,
        more_devices: false,
        dry_run: false,
        tunnels: 0,
        inline_ports: inline_ports(&[]).expect("they are few"),
        hash: Hash::Packet,
        flow_limit: 0,
        unguarded: false,
        secret: draw_secret()?,
    };
    let device = DeviceConfig {
        ifindex: 1,
        nr_rx_queues: 1,
        mode: RxMode::Native,
        gro: true,
        kind: SoftirqKind::default(),
    };
    let datapath = Datapath::load(&config, &[device])?;
    datapath.backlogs().make(0, OTHER)?;
    Ok(datapath)
}

/// The program's verdict on a packet of one flow, on this thread's CPU.
fn verdict(program: BorrowedFd<'_>) -> Result<u32> {
    let mut packet = Vec::new();
    etherparse::PacketBuilder::ethernet2([2; 6], [4; 6])
        .ipv4([192, 0, 2, 1], [198, 51, 100, 2], 64)
        .udp(40_000, 443)
        .write(&mut packet, &[0; 20])?;
    let mut opts = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as libbpf_sys::size_t,
        data_in: packet.as_ptr().cast(),
        data_size_in: packet.len() as u32,
        repeat: 1,
        ..Default::default()
    };
    // SAFETY: the packet and the options outlive the call.
    let result = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &mut opts) };
    if result < 0 {
        return Err(io::Error::from_raw_os_error(-result).into());
    }
    Ok(opts.retval)
}

#[test]
fn tables_have_an_element_for_the_highest_cpu_id() -> Result<()> {
    in_lab!();
    if !Topology::host().online()?.contains(CPU) {
        rxlab::testing::not_run(test_name!(), "there is no CPU 1");
        return Ok(());
    }
    let netns = Netns::new("gaps")?;
    let possible = tempfile::NamedTempFile::new()?;
    fs::write(possible.path(), POSSIBLE)?;
    netns.run(|| {
        let none = None::<&str>;
        let target = "/sys/devices/system/cpu/possible";
        mount(Some(possible.path()), target, none, MsFlags::MS_BIND, none)?;
        assert_eq!(libbpf_rs::num_possible_cpus()?, 1, "the mount is not seen");
        bind(Pid::from_raw(0), CPU)?;

        let datapath = load()?;
        assert_eq!(datapath.nr_cpus(), CPU + 1);
        // INLINE, and no poll has ended since.
        assert_eq!(verdict(datapath.program(0)?)?, XDP_PASS);
        datapath.set_rps_map(0, &RpsMap::inline().spread_over(&[OTHER]));
        assert_eq!(verdict(datapath.program(0)?)?, XDP_PASS);
        let queue = datapath.rx_queue(0);
        assert_eq!((queue.nr_moves, queue.nr_held), (0, 1));
        assert_eq!(native::poll_stamp_cpu(queue.poll), CPU as u16);

        // The control: a flow without earlier packets goes there at once.
        let control = load()?;
        control.set_rps_map(0, &RpsMap::inline().spread_over(&[OTHER]));
        control.settle(0);
        assert_eq!(verdict(control.program(0)?)?, XDP_REDIRECT);
        Ok(())
    })
}

/// Polls on CPU 1, in which a flow that was INLINE first wants CPU 0; returns whether it has left.
fn leaves_inline(no_stamp: bool) -> bool {
    let mut facts = rx_facts {
        entries: 1 << OTHER,
        interruptible: 1 << OTHER,
        off_rq: 1 << OTHER,
        limit: 64,
        nr_cpus: 2,
        cpu_mask: 3,
        gro_empty: 1,
        no_stamp: no_stamp.into(),
        ..Default::default()
    };
    let mut q = rx_queue {
        epoch: 1,
        ..Default::default()
    };
    let mut backlogs = [backlog::default(); 2];
    let mut flow = rps_dev_flow::default();
    let mut verdict = rx_verdict::RX_PASS;
    for location in [INLINE, OTHER as u16, OTHER as u16] {
        let map = rps_map {
            location: [location; SLOTS],
        };
        verdict = native::rx_steer(&mut facts, &mut q, &mut backlogs, &map, &mut flow, 7, CPU);
        facts.nr_polls += 1;
    }
    verdict == rx_verdict::RX_REDIRECTED
}

#[test]
fn polls_that_are_not_counted_prove_nothing() {
    assert!(!leaves_inline(true));
    assert!(leaves_inline(false), "the control");
}
