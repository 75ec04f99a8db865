// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parameters of the data path.

use anyhow::{Result, bail};

use super::hash::Hash;
use crate::host::device::RxMode;
use crate::host::sched::Class;
use crate::types::{flow_inline, flow_option, flow_secret};

/// Default of `rps_sock_flow_entries`, suggested by the kernel's documentation for a busy host.
pub const RPS_SOCK_FLOW_ENTRIES: u32 = 32768;

/// Default of `rps_flow_cnt`, in slots per queue: [`RPS_SOCK_FLOW_ENTRIES`] divided by eight
/// queues.
pub const RPS_FLOW_CNT: u32 = 4096;

/// Ports whose UDP flows stay INLINE by default: those of NTP and of PTP's event messages, whose
/// hardware time stamps a redirect would lose.
pub const INLINE_PORTS: [u16; 2] = [123, 319];

/// A list of ports that ends with the first 0.
pub type InlinePorts = [u16; flow_inline::FLOW_INLINE_PORTS.0 as usize];

/// The list of these ports; `None` if they are too many. 0 is no port.
pub fn inline_ports(wanted: &[u16]) -> Option<InlinePorts> {
    let wanted: Vec<u16> = wanted.iter().copied().filter(|port| *port != 0).collect();
    let mut ports = InlinePorts::default();
    ports.get_mut(..wanted.len())?.copy_from_slice(&wanted);
    Some(ports)
}

/// Parameters of the data path. `Datapath::resize` changes the table sizes; all others are fixed.
#[derive(Clone, Debug)]
pub struct Config {
    /// Limit of frames in a backlog. More than [`crate::datapath::backlogs::LIMIT_MAX`] only if no
    /// frame is really redirected: no ring has room for them.
    pub backlog_limit: u32,
    /// Scheduling class of the backlogs' threads.
    pub backlog_sched: Class,
    /// Most backlogs of all queues.
    pub most_backlogs: usize,
    /// Entries of the `sock_flow_table`, rounded up to a power of two as the kernel does; 0: no
    /// flow follows its application.
    pub rps_sock_flow_entries: u32,
    /// Slots of each queue's `dev_flow_table`, rounded up likewise. The rule of order needs a
    /// table: 0 stands for [`RPS_FLOW_CNT`] slots, and no flow follows its application.
    pub rps_flow_cnt: u32,
    /// Follow applications on unconnected UDP sockets too.
    pub unconnected: bool,
    /// Follow applications behind NAT too: each skb gets the hash of its flow.
    pub follow_nat: bool,
    /// Devices may be added in softirq mode while others are steered ([`Datapath::add`]).
    ///
    /// [`Datapath::add`]: crate::datapath::Datapath::add
    pub more_devices: bool,
    /// Decide and count, move nothing.
    pub dry_run: bool,
    /// Tunnels for which the inner flow is the key: bits of `enum flow_option`.
    pub tunnels: u32,
    /// Ports whose UDP flows always stay INLINE.
    pub inline_ports: InlinePorts,
    /// By which flows are steered.
    pub hash: Hash,
    /// Share of its queue's frames, in percent, above which a flow is large; 0: no flow is large.
    pub flow_limit: u32,
    /// The rule of order is off: for tests and measurements that need a control.
    pub unguarded: bool,
    /// The secret of the flow hash.
    pub secret: flow_secret,
}

impl Config {
    /// What the parser does: bits of `enum flow_option`.
    pub fn flow_options(&self) -> u32 {
        match self.hash {
            Hash::Symmetric => self.tunnels | flow_option::FLOW_SYMMETRIC.0,
            Hash::Packet | Hash::Device => self.tunnels,
        }
    }

    /// Whether the tables have the entries needed to follow applications.
    pub fn can_follow(&self) -> bool {
        self.rps_sock_flow_entries > 0 && self.rps_flow_cnt > 0
    }
}

/// Facts about a device to steer, for the tables.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// Interface index in the network namespace of the thread that calls `Datapath::attach`.
    pub ifindex: u32,
    /// Receive queues, `rx_queue_index` 0 to `nr_rx_queues` - 1. Not used in softirq mode, where CPUs
    /// are the queues.
    pub nr_rx_queues: u32,
    /// The mode in which `Datapath::attach` will attach.
    pub mode: RxMode,
    /// Whether GRO merges what passes.
    pub gro: bool,
    /// In softirq mode.
    pub kind: SoftirqKind,
}

/// What distinguishes devices in softirq mode.
#[derive(Clone, Copy, Debug, Default)]
pub struct SoftirqKind {
    /// A tun device without NAPI: it receives outside of polls.
    pub unpolled: bool,
    /// lo: the host itself sends its packets.
    pub loopback: bool,
    /// It has another end, whose packets have the hash of their senders' sockets.
    pub veth: bool,
}

/// Draws the flow hash's secret from the kernel's random number generator.
///
/// # Errors
/// When the kernel returns no random numbers.
pub fn draw_secret() -> Result<flow_secret> {
    let mut secret = flow_secret::default();
    let words = std::iter::once(&mut secret.addend).chain(secret.multiplier.iter_mut());
    for word in words {
        *word = draw()?;
    }
    Ok(secret)
}

/// A random number from the kernel.
pub(super) fn draw() -> Result<u64> {
    let mut bytes = [0u8; 8];
    // SAFETY: writes at most 8 bytes into an 8 byte buffer.
    let n = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if n != 8 {
        bail!(
            "the kernel gives no random numbers: {}",
            std::io::Error::last_os_error()
        );
    }
    Ok(u64::from_ne_bytes(bytes))
}
