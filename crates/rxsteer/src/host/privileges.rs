// SPDX-License-Identifier: MIT OR Apache-2.0
//! The privileges that steering needs (capabilities(7)). A process started by root has all of them, and
//! gives the rest back: a defect of rxsteer then reaches less of the host.

use anyhow::{Context, Result};
use caps::{CapSet, Capability, CapsHashSet};

/// What steering needs while it runs, as in the unit of systemd.
pub const NEEDED: [Capability; 7] = [
    // Attaches programs to devices.
    Capability::CAP_NET_ADMIN,
    // Load them.
    Capability::CAP_BPF,
    Capability::CAP_PERFMON,
    // Finds programs and maps by their ids, and the other ends of veths in their namespaces.
    Capability::CAP_SYS_ADMIN,
    // Sets the class of the backlog threads.
    Capability::CAP_SYS_NICE,
    // Reaches the sockets of processes that poll, and finds them in processes of other users.
    Capability::CAP_SYS_PTRACE,
    Capability::CAP_DAC_READ_SEARCH,
];

/// Gives all other capabilities back, for this process, its threads and its child processes; no program
/// that it starts has more either. To be called before the first thread is started.
///
/// # Errors
/// When the kernel refuses.
pub fn keep_needed() -> Result<()> {
    let why = "giving capabilities back";
    let permitted = caps::read(None, CapSet::Permitted).context(why)?;
    let kept: CapsHashSet = NEEDED
        .into_iter()
        .filter(|c| permitted.contains(c))
        .collect();
    // Only who may drop bounds has more to lose than `kept`.
    if caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP).context(why)? {
        for other in caps::runtime::thread_all_supported() {
            if !kept.contains(&other) {
                caps::drop(None, CapSet::Bounding, other).context(why)?;
            }
        }
    }
    for set in [CapSet::Effective, CapSet::Permitted, CapSet::Inheritable] {
        let kept = match set {
            CapSet::Inheritable => CapsHashSet::new(),
            _ => kept.clone(),
        };
        caps::set(None, set, &kept).context(why)?;
    }
    nix::sys::prctl::set_no_new_privs().context("no new privileges")
}
