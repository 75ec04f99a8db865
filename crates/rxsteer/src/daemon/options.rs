// SPDX-License-Identifier: MIT OR Apache-2.0
//! What to steer, and how.

use anyhow::{Result, anyhow};

use super::balance::MOVES_PER_SECOND;
use crate::busy_poll::rule::Rule;
use crate::datapath::policy::Policy;
use crate::datapath::{BACKLOG_NICE, FLOW_LIMIT, RPS_FLOW_CNT, RPS_SOCK_FLOW_ENTRIES};
use crate::host::cpumask::{CpuMask, CpuMaskError};

/// Where XDP is attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// Native, or generic with a warning where the driver has no XDP.
    #[default]
    Auto,
    /// In the driver.
    Native,
    /// In the stack: works with every driver that has NAPI, and costs an skb first.
    Generic,
}

/// What names a flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Hash {
    /// The packet's headers.
    #[default]
    Packet,
    /// The hash that the device computed, where its driver gives one to XDP (since 6.3); the
    /// packet's headers otherwise.
    Device,
}

/// The CPUs of a queue: as given, or to be found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RpsCpus {
    /// Those that share a last-level cache with the interrupt's CPU.
    Auto,
    /// These.
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
#[derive(Clone, Debug)]
pub struct QueueCpus {
    /// Needed only when several devices are steered.
    pub device: Option<String>,
    /// `rx_queue_index`.
    pub queue: u32,
    /// Its CPUs.
    pub cpus: RpsCpus,
}

impl std::str::FromStr for QueueCpus {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (place, cpus) = text
            .split_once('=')
            .ok_or_else(|| anyhow!("write QUEUE=CPUS, for example 0=0-3 or eth0:0=0-3"))?;
        let (device, queue) = match place.rsplit_once(':') {
            Some((device, queue)) => (Some(device.to_owned()), queue),
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

/// What to steer, and how. The defaults are those of the command line.
#[derive(Clone, Debug)]
pub struct Options {
    /// Interface names, at least one, all different.
    pub devices: Vec<String>,
    /// How packets find their CPU.
    pub policy: Policy,
    /// The CPUs of every queue that `queues` does not name.
    pub rps_cpus: RpsCpus,
    /// Queues with CPUs of their own.
    pub queues: Vec<QueueCpus>,
    /// Where XDP is attached.
    pub mode: Mode,
    /// Decide and count, move nothing.
    pub dry_run: bool,
    /// Frames a backlog may hold; `net.core.netdev_max_backlog` if there is none.
    pub backlog: Option<u32>,
    /// Nice value of the backlogs' threads.
    pub backlog_nice: i32,
    /// Entries of the table of applications' CPUs; 0: no flow follows its application.
    pub rps_sock_flow_entries: u32,
    /// Slots of each queue's flow table; 0: no flow follows its application.
    pub rps_flow_cnt: u32,
    /// Follow applications on unconnected UDP sockets too.
    pub unconnected: bool,
    /// Bits of `enum flow_tunnel`.
    pub tunnels: u32,
    /// What names a flow.
    pub hash: Hash,
    /// Percent of its queue's frames above which a flow is shed first; 0: no flow is.
    pub flow_limit: u32,
    /// Slots of each queue's `rps_map` that may move in a second, under a policy with `+balance`; 0: none.
    pub balance_moves: u32,
    /// Whose sockets poll meanwhile.
    pub busy_poll: Vec<Rule>,
    /// The rule of order switched off. Only the lab does so: no option of the command line does.
    pub unguarded: bool,
}

impl Options {
    /// The defaults for these devices.
    pub fn new(devices: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self {
            devices: devices.into_iter().map(Into::into).collect(),
            policy: Policy::default(),
            rps_cpus: RpsCpus::Auto,
            queues: Vec::new(),
            mode: Mode::default(),
            dry_run: false,
            backlog: None,
            backlog_nice: BACKLOG_NICE,
            rps_sock_flow_entries: RPS_SOCK_FLOW_ENTRIES,
            rps_flow_cnt: RPS_FLOW_CNT,
            unconnected: true,
            tunnels: 0,
            hash: Hash::default(),
            flow_limit: FLOW_LIMIT,
            balance_moves: MOVES_PER_SECOND,
            busy_poll: Vec::new(),
            unguarded: false,
        }
    }
}
