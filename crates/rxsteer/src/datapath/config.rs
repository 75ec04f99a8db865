// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the data path is made for.

use anyhow::{Result, bail};

use crate::host::device::XdpMode;
use crate::types::flow_secret;

/// Nice value of the backlogs' threads unless configured. A thread that shares its CPU with the
/// application must not take half of it for packets that the application then has no time to read
/// (docs/backlog.md has the measurement); nor must it starve beside a CPU-bound one.
pub const BACKLOG_NICE: i32 = 5;

/// A flow with more than this part of its queue's frames, in percent, is large, unless configured:
/// no more than eight flows can be.
pub const FLOW_LIMIT: u32 = 12;

/// `rps_sock_flow_entries` unless configured: what the kernel's documentation suggests for a busy
/// host.
pub const RPS_SOCK_FLOW_ENTRIES: u32 = 32768;

/// `rps_flow_cnt` unless configured, in slots per queue: a queue's share of the above.
pub const RPS_FLOW_CNT: u32 = 4096;

/// What the data path is made for. Fixed from load to the end.
#[derive(Clone, Debug)]
pub struct Config {
    /// Frames a backlog may hold. More than [`crate::datapath::backlogs::LIMIT_MAX`] only where nothing is ever
    /// redirected in truth: no ring would hold it.
    pub backlog_limit: u32,
    /// Nice value of the backlogs' threads, -20 to 19.
    pub backlog_nice: i32,
    /// Entries of the `sock_flow_table`, rounded up to a power of two as the kernel does; 0: no
    /// flow follows its application.
    pub rps_sock_flow_entries: u32,
    /// Slots of each queue's `dev_flow_table`; likewise, but the rule of order needs a table, so
    /// that 0 stands for [`RPS_FLOW_CNT`] slots and flows that follow nobody.
    pub rps_flow_cnt: u32,
    /// Follow applications on unconnected UDP sockets too.
    pub unconnected: bool,
    /// Decide and count, move nothing.
    pub dry_run: bool,
    /// Bits of `enum flow_tunnel`: whose inner flow is the key.
    pub tunnels: u32,
    /// Steer by the hash that the device computed, where it has one.
    pub rx_hash: bool,
    /// Flows with a larger part of their queue's frames, in percent, are shed first; 0: none are.
    pub flow_limit: u32,
    /// The rule of order switched off: for tests and measurements that need a control.
    pub unguarded: bool,
    /// The key of the flow hash.
    pub secret: flow_secret,
}

impl Config {
    /// Whether there are tables to follow applications with.
    pub fn can_follow(&self) -> bool {
        self.rps_sock_flow_entries > 0 && self.rps_flow_cnt > 0
    }
}

/// A device to steer: what the tables need to know of it.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// In the network namespace of the thread that calls [`Datapath::attach`].
    pub ifindex: u32,
    /// Receive queues, `rx_queue_index` 0 to `nr_rx_queues` - 1.
    pub nr_rx_queues: u32,
    /// Where [`Datapath::attach`] is going to attach.
    pub mode: XdpMode,
}

/// Draws the flow hash's secret from the kernel's random number generator.
///
/// # Errors
/// When the kernel has no entropy to give.
pub fn draw_secret() -> Result<flow_secret> {
    let mut secret = flow_secret::default();
    let words = std::iter::once(&mut secret.addend).chain(secret.multiplier.iter_mut());
    for word in words {
        let mut bytes = [0u8; 8];
        // SAFETY: writes at most 8 bytes into an 8 byte buffer.
        let n = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        if n != 8 {
            bail!(
                "the kernel gives no random numbers: {}",
                std::io::Error::last_os_error()
            );
        }
        *word = u64::from_ne_bytes(bytes);
    }
    Ok(secret)
}
