// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer run`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::value::table_size;
use crate::daemon::balance::MOVES_PER_SECOND;
use crate::daemon::options::{Hash, Mode, Options, QueueCpus, RpsCpus};
use crate::datapath::backlogs::LIMIT_MAX;
use crate::datapath::policy::Policy;
use crate::datapath::{BACKLOG_NICE, FLOW_LIMIT, RPS_FLOW_CNT, RPS_SOCK_FLOW_ENTRIES};
use crate::types::flow_tunnel;

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

    /// CPUs that may process packets: a list (3, 0-3,8), a mask (0xff), or auto: those that share a
    /// last-level cache with the interrupt's CPU
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
