// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};

use crate::backlogs::LIMIT_MAX;
use crate::balance::MOVES_PER_SECOND;
use crate::busy_poll::rule::Rule;
use crate::cpumask::CpuMaskError;
use crate::datapath::{BACKLOG_NICE, FLOW_LIMIT, RPS_FLOW_CNT, RPS_SOCK_FLOW_ENTRIES};
use crate::explain::Target;
use crate::flows;
use crate::netdev::{Settings, Threaded};
use crate::policy::Policy;
use crate::run::{Change, Hash, Mode, Options, QueueCpus, RpsCpus};
use crate::rx::types::flow_tunnel;

/// Receive steering for Linux: decides on which CPU each received packet is processed.
#[derive(Debug, Parser)]
#[command(version, propagate_version = true, max_term_width = 100)]
pub struct Cli {
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// One per thing that rxsteer does.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Steer the packets that devices receive, until stopped
    Run(RunArgs),
    /// Show what a running rxsteer does, and how much of it
    Status(StatusArgs),
    /// Show the flows of a running rxsteer: where they are, and where they want to be
    Flows(FlowsArgs),
    /// Say why a flow is on the CPU where it is
    Explain(ExplainArgs),
    /// Change what a running rxsteer does: CPUs, policy, sizes of tables
    Set(SetArgs),
    /// Let the sockets of applications poll their device's queue, until stopped
    Poll(PollArgs),
    /// What `poll` leaves behind for the case that it is killed
    #[command(hide = true)]
    PutBack,
    /// Show the NAPI instances of devices and the sockets that are on them, or set them until stopped
    Napi(NapiArgs),
    /// What `napi` leaves behind, while it sets, for the case that it is killed
    #[command(hide = true)]
    PutBackNapi,
    /// Say what stands in the way on this host and its devices, and what the settings of NAPI instances
    /// amount to. Exit status: 1 if something does, of the host or of a device that is named
    Doctor(DoctorArgs),
}

/// Options of `rxsteer run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Network devices, for example eth0
    #[arg(required_unless_present = "config", value_name = "DEVICE")]
    pub devices: Vec<String>,

    /// A file with options (TOML): policy = "rfs", rps-cpus = "0-3", devices = ["eth0"]; and with
    /// [[busy_poll]] tables, each with the options of `rxsteer poll`. What is given here too, holds
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// How packets find their CPU: rfs (to where the flow's application runs), rps (by hash, over
    /// --rps-cpus) or off, and to the first two may be added +idle (an idle CPU near a busy
    /// application), +adapt (a flow stays where it is received while that CPU has room) and
    /// +balance (between the CPUs of RPS). adaptive is rfs with all three [default: adaptive; with
    /// --hash device: rps+adapt+balance]
    #[arg(long)]
    pub policy: Option<Policy>,

    /// Large flows are those with more than so many percent of their queue's packets. They are
    /// dropped first: at half a backlog, or when the CPU that polls can't keep up; 0: no flow is
    /// large
    #[arg(long, value_name = "PERCENT", default_value_t = FLOW_LIMIT,
          value_parser = clap::value_parser!(u32).range(0..=100))]
    pub flow_limit: u32,

    /// Under +balance: of the 1024 slots over which each queue's flows are spread, at most so many go to
    /// another CPU in a second; 0: none
    #[arg(long, value_name = "SLOTS", default_value_t = MOVES_PER_SECOND)]
    pub balance_moves: u32,

    /// CPUs that may process packets: a mask as in rps_cpus (ff), a list (0-3,8), or auto: those
    /// that share a last-level cache with the interrupt's CPU. A single number is a mask: 8 is CPU
    /// 3, which as a list is 3-3
    #[arg(long, value_name = "CPUS", default_value = "auto")]
    pub rps_cpus: RpsCpus,

    /// A receive queue with CPUs of its own; may be given several times
    #[arg(long = "queue", value_name = "[DEVICE:]QUEUE=CPUS")]
    pub queues: Vec<QueueCpus>,

    /// Where XDP is attached
    #[arg(long, value_enum, default_value_t)]
    pub mode: Mode,

    /// Decide and count, but move nothing
    #[arg(long)]
    pub dry_run: bool,

    /// Frames that a backlog may hold, 1 to 16368 [default: net.core.netdev_max_backlog, or 1000
    /// where that can't be read]
    #[arg(long, value_name = "FRAMES",
          value_parser = clap::value_parser!(u32).range(1..=i64::from(LIMIT_MAX)))]
    pub backlog: Option<u32>,

    /// Nice value of the threads that process backlogs: the higher, the more of a shared CPU is
    /// left to applications
    #[arg(long, value_name = "NICE", default_value_t = BACKLOG_NICE, allow_negative_numbers = true,
          value_parser = clap::value_parser!(i32).range(-20..=19))]
    pub backlog_nice: i32,

    /// Entries of the table that tells where applications are, rounded up to a power of two; 0: no
    /// flow follows its application
    #[arg(long, value_name = "ENTRIES", default_value_t = RPS_SOCK_FLOW_ENTRIES,
          value_parser = table_size())]
    pub rps_sock_flow_entries: u32,

    /// Slots of each queue's flow table, rounded up to a power of two; 0: no flow follows its
    /// application
    #[arg(long, value_name = "SLOTS", default_value_t = RPS_FLOW_CNT, value_parser = table_size())]
    pub rps_flow_cnt: u32,

    /// Don't follow applications on unconnected UDP sockets, as the kernel does not: for servers
    /// whose threads take turns at one socket
    #[arg(long)]
    pub ignore_unconnected: bool,

    /// Tunnels to look into, separated by commas: their inner flows are steered, not the tunnel
    #[arg(long, value_enum, value_name = "LIST", value_delimiter = ',')]
    pub tunnels: Vec<Tunnel>,

    /// What names a flow
    #[arg(long, value_enum, default_value_t)]
    pub hash: Hash,
}

/// Tunnels whose inner flow can be the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Tunnel {
    /// IPIP, 6in4, 4in6, ip6ip6
    Ipip,
    /// GRE, with its optional fields
    Gre,
    /// VXLAN, on UDP ports 4789 and 8472
    Vxlan,
    /// GENEVE, on UDP port 6081
    Geneve,
    /// GTP-U, on UDP port 2152
    GtpU,
    /// All of them
    All,
}

impl Tunnel {
    /// As the kernel side has it: bits of `enum flow_tunnel`.
    pub fn bits(self) -> u32 {
        match self {
            Self::Ipip => flow_tunnel::FLOW_TUNNEL_IPIP.0,
            Self::Gre => flow_tunnel::FLOW_TUNNEL_GRE.0,
            Self::Vxlan => flow_tunnel::FLOW_TUNNEL_VXLAN.0,
            Self::Geneve => flow_tunnel::FLOW_TUNNEL_GENEVE.0,
            Self::GtpU => flow_tunnel::FLOW_TUNNEL_GTPU.0,
            Self::All => [Self::Ipip, Self::Gre, Self::Vxlan, Self::Geneve, Self::GtpU]
                .into_iter()
                .fold(0, |bits, tunnel| bits | tunnel.bits()),
        }
    }
}

impl From<RunArgs> for Options {
    fn from(args: RunArgs) -> Self {
        Self {
            devices: args.devices,
            policy: args.policy.unwrap_or(match args.hash {
                Hash::Packet => Policy::default(),
                Hash::Device => Policy::default().without_following(),
            }),
            rps_cpus: args.rps_cpus,
            queues: args.queues,
            mode: args.mode,
            dry_run: args.dry_run,
            backlog: args.backlog,
            backlog_nice: args.backlog_nice,
            rps_sock_flow_entries: args.rps_sock_flow_entries,
            rps_flow_cnt: args.rps_flow_cnt,
            unconnected: !args.ignore_unconnected,
            hash: args.hash,
            flow_limit: args.flow_limit,
            balance_moves: args.balance_moves,
            busy_poll: Vec::new(),
            unguarded: false,
            tunnels: args
                .tunnels
                .into_iter()
                .fold(0, |bits, tunnel| bits | tunnel.bits()),
        }
    }
}

/// Options of `rxsteer status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Print JSON, one object per line
    #[arg(long)]
    pub json: bool,

    /// Print again every so many seconds, until interrupted
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub interval: Option<Duration>,
}

/// Options of `rxsteer flows`.
#[derive(Debug, Args)]
pub struct FlowsArgs {
    /// Only this device's
    #[arg(long)]
    pub device: Option<String>,

    /// At most so many, those with the most packets
    #[arg(long, value_name = "FLOWS", default_value_t = 100, value_parser = limit())]
    pub limit: u32,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Options of `rxsteer explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// A flow as `rxsteer flows` prints it (udp/192.0.2.1:53/5353: who sends, and the port here),
    /// its hash (0x…), the sockets of a process (pid:NUMBER), what comes to a local port
    /// (port:NUMBER). A bare number is a local port if a flow or a connection has it, a process
    /// otherwise
    #[arg(value_name = "FLOW|HASH|PID|PORT")]
    pub target: Target,

    /// At most so many flows, those with the most packets
    #[arg(long, value_name = "FLOWS", default_value_t = 10, value_parser = limit())]
    pub limit: u32,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

fn limit() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=flows::LIMIT_MAX as i64)
}

/// Options of `rxsteer set`.
#[derive(Debug, Args)]
pub struct SetArgs {
    /// The device whose CPUs are set; needed if several are steered
    pub device: Option<String>,

    /// The CPUs from now on: mask, list or auto
    #[arg(long, value_name = "CPUS", value_parser = rps_cpus,
          required_unless_present_any = ["policy", "rps_sock_flow_entries", "rps_flow_cnt"])]
    pub rps_cpus: Option<String>,

    /// Only this receive queue's CPUs
    #[arg(long, value_name = "QUEUE", requires = "rps_cpus")]
    pub queue: Option<u32>,

    /// How packets find their CPU from now on, on all devices: as in `run`
    #[arg(long)]
    pub policy: Option<Policy>,

    /// As in `run`. All flows start anew
    #[arg(long, value_name = "ENTRIES", value_parser = table_size())]
    pub rps_sock_flow_entries: Option<u32>,

    /// As in `run`. All flows start anew
    #[arg(long, value_name = "SLOTS", value_parser = table_size())]
    pub rps_flow_cnt: Option<u32>,
}

impl From<SetArgs> for Change {
    fn from(args: SetArgs) -> Self {
        Self {
            device: args.device,
            queue: args.queue,
            rps_cpus: args.rps_cpus,
            policy: args.policy,
            rps_sock_flow_entries: args.rps_sock_flow_entries,
            rps_flow_cnt: args.rps_flow_cnt,
        }
    }
}

/// Up to 16 Mi.
fn table_size() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(0..=1 << 24)
}

/// Checked here, understood by the running rxsteer, which knows the interrupt's CPU.
fn rps_cpus(text: &str) -> Result<String, CpuMaskError> {
    text.parse::<RpsCpus>().map(|_| text.to_owned())
}

/// A time of at least 10 ms, written in seconds.
///
/// # Errors
/// What to write instead.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text
        .parse()
        .map_err(|_| format!("{text:?} is not a number"))?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if duration >= Duration::from_millis(10) => Ok(duration),
        _ => Err("choose 0.01 seconds or more".to_owned()),
    }
}

/// Options of `rxsteer poll`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("whose")
    .args(["pid", "comm", "exe", "cgroup", "port"]).required(true).multiple(true))]
pub struct PollArgs {
    /// Whose, and for how long
    #[command(flatten)]
    pub rule: Rule,

    /// Let poll(), select() and, before Linux 6.9, epoll_wait() poll as well: only net.core.busy_poll
    /// does so. It is the whole host's: all epoll instances of all processes poll, too. It is put back
    /// at the end
    #[arg(long)]
    pub host_wide: bool,
}

/// Options of `rxsteer napi`.
#[derive(Debug, Args)]
pub struct NapiArgs {
    /// Network devices, for example eth0; without, all that have NAPI instances
    #[arg(value_name = "DEVICE")]
    pub devices: Vec<String>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// What to set, until stopped
    #[command(flatten)]
    pub set: Option<NapiSettings>,
}

/// Settings of all NAPI instances of the devices that are named.
#[derive(Debug, Args)]
#[group(multiple = true, requires = "devices", conflicts_with = "json")]
pub struct NapiSettings {
    /// Unmask the interrupt again after so many polls in a row that found nothing. It takes a
    /// --gro-flush-timeout, too
    #[arg(long, value_name = "POLLS", value_parser = clap::value_parser!(u32).range(..=i64::from(i32::MAX)))]
    pub defer_hard_irqs: Option<u32>,

    /// Poll again so long after a poll while the interrupt is masked
    #[arg(long, value_name = "NANOSECONDS")]
    pub gro_flush_timeout: Option<u64>,

    /// Suspend the interrupt for so long at most while an application finds packets by epoll: of
    /// instances with the two above, and epoll instances that prefer busy polling (Linux 6.13)
    #[arg(long, value_name = "NANOSECONDS")]
    pub irq_suspend_timeout: Option<u64>,

    /// Poll in a kernel thread rather than in softirq
    #[arg(long, value_enum)]
    pub threaded: Option<Threaded>,
}

impl From<NapiSettings> for Settings {
    fn from(args: NapiSettings) -> Self {
        Self {
            defer_hard_irqs: args.defer_hard_irqs,
            gro_flush_timeout: args.gro_flush_timeout,
            irq_suspend_timeout: args.irq_suspend_timeout,
            threaded: args.threaded,
        }
    }
}

/// Options of `rxsteer doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Network devices, for example eth0; without, all that are up, but for lo
    #[arg(value_name = "DEVICE")]
    pub devices: Vec<String>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
