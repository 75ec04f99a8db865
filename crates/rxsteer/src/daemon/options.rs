// SPDX-License-Identifier: MIT OR Apache-2.0
//! The options of `rxsteer run`: on the command line, in the configuration file and in the manual.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use anyhow::{Error, Result, anyhow};
use clap::{Args, Command, FromArgMatches, ValueEnum};

use super::takedown::Bounds;
use crate::busy_poll::rule::Rule;
use crate::datapath::backlogs::LIMIT_MAX;
use crate::datapath::hash::Hash;
use crate::datapath::policy::Policy;
use crate::datapath::{INLINE_PORTS, RPS_FLOW_CNT, RPS_SOCK_FLOW_ENTRIES};
use crate::host::cpumask::{CpuMask, CpuMaskError};
use crate::host::device::name_of_altname;
use crate::host::number::whole;
use crate::host::sched::Class;
use crate::types::flow_option;

/// Address of `--metrics`: no other host can reach it. The port is not in the range of exporters of
/// Prometheus (9100 to 9999), which are all taken, nor among those that the kernel gives to clients.
const METRICS: &str = "127.0.0.1:14779";

/// Where packets are steered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// softirq; native for options that only it has (--pin, --prepare, --hash device), and where softirq is
    /// not possible
    #[default]
    Auto,
    /// an XDP program in the driver: for routers, floods and servers of small datagrams
    Native,
    /// after GRO, by the kernel's own RPS: keeps all that packets carry, works with every device
    Softirq,
}

/// What to do when kernel RPS is switched on for a steered device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OnKernelRps {
    /// say so in the log and in `rxsteer status`
    #[default]
    Warn,
    /// return every flow to the polling CPU, detach and end with exit status 1
    Stop,
}

/// The CPUs of a queue, given or to be found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RpsCpus {
    /// Those near the interrupt's CPU ([`crate::host::auto`]).
    Auto,
    /// These CPUs.
    Mask(CpuMask),
}

impl std::str::FromStr for RpsCpus {
    type Err = CpuMaskError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let mask: CpuMask = text.parse()?;
        if mask.is_empty() {
            return Err(CpuMaskError::Empty);
        }
        Ok(Self::Mask(mask))
    }
}

/// `[DEVICE:]QUEUE=CPUS`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueCpus {
    /// Needed only when several devices are steered.
    pub device: Option<String>,
    /// `rx_queue_index`.
    pub queue: u32,
    /// The queue's CPUs.
    pub cpus: RpsCpus,
}

impl std::str::FromStr for QueueCpus {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (place, cpus) = text
            .split_once('=')
            .ok_or_else(|| anyhow!("write QUEUE=CPUS, for example 0=0-3 or eth0:0=0-3"))?;
        let (device, queue) = match place.rsplit_once(':') {
            Some((device, queue)) => (Some(device_name(device).map_err(Error::msg)?), queue),
            None => (None, place),
        };
        let queue = queue
            .parse()
            .map_err(|_| anyhow!("{queue:?} is not a queue number: 0, 1, …"))?;
        Ok(Self {
            device,
            queue,
            cpus: cpus.parse()?,
        })
    }
}

/// Tunnels for which the inner flow can be the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Tunnel {
    /// IPIP, 6in4, 4in6, ip6ip6
    Ipip,
    /// GRE without sequence numbers
    Gre,
    /// VXLAN, on UDP ports 4789 and 8472
    Vxlan,
    /// GENEVE, on UDP port 6081
    Geneve,
    /// GTP-U without sequence numbers, on UDP port 2152
    GtpU,
    /// all of them
    All,
}

impl Tunnel {
    /// Bits of `enum flow_option`.
    pub fn bits(self) -> u32 {
        match self {
            Self::Ipip => flow_option::FLOW_TUNNEL_IPIP.0,
            Self::Gre => flow_option::FLOW_TUNNEL_GRE.0,
            Self::Vxlan => flow_option::FLOW_TUNNEL_VXLAN.0,
            Self::Geneve => flow_option::FLOW_TUNNEL_GENEVE.0,
            Self::GtpU => flow_option::FLOW_TUNNEL_GTPU.0,
            Self::All => {
                Self::bits_of(&[Self::Ipip, Self::Gre, Self::Vxlan, Self::Geneve, Self::GtpU])
            }
        }
    }
    /// The bits of several tunnels.
    pub fn bits_of(tunnels: &[Self]) -> u32 {
        tunnels.iter().fold(0, |bits, tunnel| bits | tunnel.bits())
    }
}

/// Where steering is pinned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pin {
    /// The folder of the network namespace.
    Default,
    /// This folder, with its whole path.
    Folder(PathBuf),
}

impl std::str::FromStr for Pin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "true" => Ok(Self::Default),
            _ if text.starts_with('/') => Ok(Self::Folder(text.into())),
            _ => Err("give the whole path of a folder, as /sys/fs/bpf/rxsteer".to_owned()),
        }
    }
}

/// What to steer, and how.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
#[group(skip)]
pub struct Options {
    /// Network devices, for example eth0, or patterns, for example 'veth*'
    ///
    /// A pattern has *, ? or [ ] as in a shell; quote it. Devices that match are steered in softirq mode, also
    /// those that come later. An altname stands for
    /// its device. Without DEVICE, the configuration names them.
    #[arg(value_name = "DEVICE", value_parser = device_name)]
    pub devices: Vec<String>,

    /// How packets find their CPU.
    #[arg(skip)]
    pub policy: Policy,

    /// CPUs that may process packets: a list (3, 0-3,8), a mask (0xff) or auto
    ///
    /// RPS spreads the flows of every queue over them. A flow follows its application only to these
    /// CPUs and to the polling one, unlike in the kernel; with an application elsewhere it is spread.
    /// auto: the CPUs that share a last-level cache and a NUMA node with
    /// the CPU of the queue's interrupt, without isolcpus= and nohz_full= CPUs, and without the
    /// interrupt's core if two CPUs remain. The mask follows the interrupt when it moves. If its CPU
    /// is unknown, the lowest housekeeping CPU replaces it, and the log says so.
    #[arg(long, value_name = "CPUS", default_value = "auto")]
    pub rps_cpus: RpsCpus,

    /// The CPUs of one queue; repeatable. DEVICE is required with several devices
    #[arg(long = "queue", value_name = "[DEVICE:]QUEUE=CPUS")]
    pub queues: Vec<QueueCpus>,

    /// Percentage of its queue's packets above which a flow is large; 0: no flow is large
    ///
    /// Packets of large flows are dropped before others, when their backlog is half full: for a queue with many
    /// flows. Among few flows every one is large: with 12 percent, each of eight equal ones.
    #[arg(long, value_name = "PERCENT", default_value_t = 0,
          value_parser = whole(0_u32, 100, "percent"))]
    pub flow_limit: u32,

    /// Where packets are steered
    #[arg(long, value_enum, default_value_t)]
    pub mode: Mode,

    /// Disable conflicting offloads; restore them on exit
    ///
    /// Turned off are, for native mode, the device's VLAN offload, LRO and hardware GRO; of a veth the
    /// VLAN and checksum offloads of its other end. The log names each before it is changed. A child process puts them
    /// back, also after kill -9, except those that another program has turned on meanwhile. With
    /// --dry-run they are named only.
    #[arg(long)]
    pub prepare: bool,

    /// Decide and count, move nothing
    #[arg(long)]
    pub dry_run: bool,

    /// Maximum number of queued frames per CPU and queue, 1 to 16368 [default:
    /// net.core.netdev_max_backlog, or 1000 if that can't be read]
    ///
    /// It can't be read outside of the initial network namespace.
    #[arg(long, value_name = "FRAMES",
          value_parser = whole(1, LIMIT_MAX, "frames"))]
    pub backlog: Option<u32>,

    /// Scheduling class of the backlog threads: nice=N (-20 to 19), batch or fifo
    ///
    /// Higher nice values leave more of a shared CPU to applications. batch: at nice 5, and a thread
    /// that wakes up does not preempt others. fifo: the real-time class with priority 1, before all
    /// ordinary threads; a thread that has used half of a tenth of a second is an ordinary thread
    /// for the rest of it.
    #[arg(long, value_name = "CLASS", default_value_t)]
    pub backlog_sched: Class,

    /// Entries of the sock_flow_table, rounded up to a power of two; 0: no flow follows its
    /// application
    ///
    /// An entry takes 12 bytes.
    #[arg(long, value_name = "ENTRIES", default_value_t = RPS_SOCK_FLOW_ENTRIES,
          value_parser = whole(0, TABLE_MAX, "entries"))]
    pub rps_sock_flow_entries: u32,

    /// Slots of each queue's dev_flow_table, rounded up to a power of two; 0: no flow follows its
    /// application
    ///
    /// A slot takes 112 bytes. Flows that share a slot share a location, so a small table causes
    /// needless moves. Order is kept without followed flows too, by a table of the default size.
    #[arg(long, value_name = "SLOTS", default_value_t = RPS_FLOW_CNT,
          value_parser = whole(0, TABLE_MAX, "slots"))]
    pub rps_flow_cnt: u32,

    /// Don't follow applications on unconnected UDP sockets, as the kernel does not
    ///
    /// For servers with several threads on one socket.
    #[arg(long)]
    pub ignore_unconnected: bool,

    /// Follow applications behind NAT too, as Docker and kube-proxy have them
    ///
    /// Each packet gets the hash of its flow, which its socket keeps. This takes some tens of
    /// nanoseconds a packet. Not with --hash device.
    #[arg(long)]
    pub follow_nat: bool,

    /// Tunnels to parse, so that inner flows are steered instead of the tunnel; separated by commas
    ///
    /// Senders choose the inner addresses. A packet with those of another's flow is of that flow, and can make it
    /// wait or lose packets, if it comes from the same outer source in the same network (VNI, key or TEID); with
    /// --hash symmetric from anywhere. From elsewhere it is of a flow of its own (docs/hash.md). These can be parsed
    #[arg(long, value_enum, value_name = "LIST", value_delimiter = ',')]
    pub tunnels: Vec<Tunnel>,

    /// UDP ports, of sender or receiver, whose flows always stay where they are received; separated
    /// by commas; 0: none
    ///
    /// A redirected packet loses the device's time stamp, which PTP (319) and NTP (123) may use. At
    /// most 16 ports. Other ports than these
    /// are refused with --hash device, which does not look at ports.
    #[arg(long, value_name = "PORTS", value_delimiter = ',', default_values_t = INLINE_PORTS,
          value_parser = whole(0, u16::MAX, "ports"))]
    pub inline_ports: Vec<u16>,

    /// Source of the flow hash
    #[arg(long, value_enum, default_value_t)]
    pub hash: Hash,

    /// What to do when another program switches kernel RPS on for a steered device
    ///
    /// The kernel then queues packets a second time that rxsteer leaves where they are received, and
    /// flows may lose their order. rxsteer looks once a second.
    #[arg(long, value_enum, default_value_t)]
    pub on_kernel_rps: OnKernelRps,

    /// Serve the counters of `rxsteer status` to Prometheus over HTTP, at /metrics
    ///
    /// At 127.0.0.1 if there is no ADDRESS, and without a value at 127.0.0.1:14779; in the configuration
    /// also true. Whoever can reach the address can read them.
    #[arg(long, value_name = "[ADDRESS:]PORT", num_args = 0..=1, require_equals = true,
          default_missing_value = METRICS, value_parser = metrics_address)]
    pub metrics: Option<SocketAddr>,

    /// Steering goes on when rxsteer stops, and a later start with --pin takes it over; `rxsteer detach`
    /// ends it
    ///
    /// Everything is pinned in FOLDER, in a BPF file system; without FOLDER in
    /// /sys/fs/bpf/rxsteer/net-INODE, by network namespace. Devices are steered in native mode.
    /// A start with the same programs and options goes on without a gap; another one
    /// first returns every flow to its polling CPU. Either way no packet is lost or overtaken. In the
    /// configuration also true.
    #[arg(long, value_name = "FOLDER", num_args = 0..=1, require_equals = true,
          default_missing_value = "true")]
    pub pin: Option<Pin>,

    /// Ids of pinned XDP programs, which this start takes over.
    #[arg(skip)]
    pub own_programs: BTreeSet<u32>,

    /// Receive queues that devices have at least while a program is attached, by name.
    #[arg(skip)]
    pub least_queues: BTreeMap<String, u32>,

    /// CPUs of the queues of softirq mode, by number; [`Self::rps_cpus`] for those beyond.
    #[arg(skip)]
    pub skb_cpus: Vec<RpsCpus>,

    /// A start anew: devices that are gone or refused are waited for.
    #[arg(skip)]
    pub anew: bool,

    /// Sockets that poll meanwhile: `[[busy_poll]]` in the configuration file.
    #[arg(skip)]
    pub busy_poll: Vec<Rule>,

    /// Shorter times and fewer backlogs; for the lab alone.
    #[arg(skip)]
    pub bounds: Bounds,

    /// The rule of order is off; for the lab alone.
    #[arg(skip)]
    pub unguarded: bool,
}

impl Options {
    /// A device that these name has another name now.
    pub fn rename(&mut self, before: &str, now: &str) {
        let named = self.devices.iter_mut().filter(|name| *name == before);
        named.for_each(|name| *name = now.to_owned());
    }

    /// Takes from others what a running rxsteer can change without a new start.
    pub(super) fn take_live(&mut self, others: &Self) {
        self.policy = others.policy;
        self.rps_cpus = others.rps_cpus.clone();
        self.queues = others.queues.clone();
        self.rps_sock_flow_entries = others.rps_sock_flow_entries;
        self.rps_flow_cnt = others.rps_flow_cnt;
        self.on_kernel_rps = others.on_kernel_rps;
    }

    /// Whether only a new start makes these of `before`.
    pub(super) fn need_a_start_after(&self, before: &Self) -> bool {
        let mut live = before.clone();
        live.take_live(self);
        live != *self
    }

    /// The defaults for these devices.
    ///
    /// # Panics
    /// Never: all options have defaults.
    pub fn new(devices: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let command = Self::augment_args(Command::new("run").no_binary_name(true));
        let options = command
            .try_get_matches_from([""; 0])
            .and_then(|matches| Self::from_arg_matches(&matches));
        Self {
            devices: devices.into_iter().map(Into::into).collect(),
            ..options.expect("all options have defaults")
        }
    }
}

/// Most entries of a flow table.
pub(crate) const TABLE_MAX: u32 = 1 << 24;

/// The form of `--metrics`, for messages.
const METRICS_FORM: &str = "write --metrics=[ADDRESS:]PORT, with an equals sign, an IP address of this \
                            host and a port from 1 to 65535, as --metrics=192.0.2.7:14779 or \
                            --metrics=14779";

/// Parses the value of `--metrics`.
fn metrics_address(text: &str) -> Result<SocketAddr, &'static str> {
    let port = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let address = text.parse().or_else(|_| text.parse().map(port));
    address
        .ok()
        .filter(|address: &SocketAddr| address.port() > 0)
        .ok_or(METRICS_FORM)
}

/// A name that a device may have, or a pattern: dev_valid_name() in net/core/dev.c. An altname is
/// resolved.
///
/// # Errors
/// What to write instead: `text` may be meant as the value of an option.
pub(crate) fn device_name(text: &str) -> Result<String, String> {
    if !text.is_empty() && !text.contains(|c: char| "/:".contains(c) || c.is_whitespace()) {
        return Ok(name_of_altname(text).unwrap_or_else(|| text.to_owned()));
    }
    let mut why = "no device has such a name".to_owned();
    if text.starts_with('/') {
        why += "; for the folder of --pin, write --pin=FOLDER, with an equals sign";
    } else if text.contains(':') {
        let _ = write!(why, "; for the address of --metrics, {METRICS_FORM}");
    }
    Err(why)
}

/// What to write if a device that is not there is meant as the port of `--metrics`.
pub(super) fn meant_as_port(name: &str) -> Option<&'static str> {
    let number = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
    number.then_some(METRICS_FORM)
}
