// SPDX-License-Identifier: MIT OR Apache-2.0
//! The lab: real packets on one machine, in namespaces that vanish with the process.
//!
//! A [`link::Link`] joins a tester and a device under test (RFC 2544's words); a [`generator::Generator`]
//! sends frames from inside the kernel; a [`nic::Nic`] makes the other end behave as a NIC whose
//! queues have CPUs; a [`receiver::Receiver`] is the application, or [`migrator::Migrators`] that never stay on a
//! CPU.

pub mod client;
pub mod ethtool;
pub mod frame;
pub mod generator;
pub mod hog;
pub mod link;
pub mod migrator;
pub mod netns;
pub mod nic;
pub mod receiver;
mod ring;
mod rtnl;
pub mod server;
pub mod sockets;
pub mod softnet;
pub mod stream;
pub mod switches;
pub mod witness;
pub mod xdp;

use std::fs;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;

/// Whether this machine allows a lab: namespaces, veth, BPF. The error says what is missing.
pub fn can_run() -> Result<()> {
    let netns = netns::Netns::new("probe")?;
    let link = link::Link::new(&netns, &netns, &link::LinkConfig::default())?;
    xdp::Xdp::pass(&link.dut, rxsteer::host::device::XdpMode::Native)?;
    Ok(())
}

/// CPU time of a thread, ns.
fn run_ns(thread: Pid) -> Result<u64> {
    let path = format!("/proc/{thread}/schedstat");
    let text = fs::read_to_string(&path).with_context(|| format!("{path}: the thread is gone"))?;
    let run_ns = text.split_whitespace().next();
    run_ns
        .and_then(|run_ns| run_ns.parse().ok())
        .with_context(|| format!("{path} is not what it was"))
}

/// Gives a thread, 0 for the calling one, a policy of the scheduler and a priority: 1 to 99 of a
/// real-time policy, 0 of any other (sched(7)).
///
/// # Errors
/// Without CAP_SYS_NICE; when the thread is gone.
pub(crate) fn schedule(thread: Pid, policy: libc::c_int, priority: libc::c_int) -> Result<()> {
    let param = libc::sched_param {
        sched_priority: priority,
    };
    // SAFETY: the parameter outlives the call.
    let ret = unsafe { libc::sched_setscheduler(thread.as_raw(), policy, &raw const param) };
    Errno::result(ret).with_context(|| format!("policy {policy} of the scheduler for {thread}"))?;
    Ok(())
}

/// CPU time of the calling thread, ns.
fn thread_cpu_ns() -> Result<u64> {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?;
    Ok(time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}
