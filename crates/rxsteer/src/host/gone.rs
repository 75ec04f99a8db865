// SPDX-License-Identifier: MIT OR Apache-2.0
//! Devices, namespaces and processes that end while they are looked at.

use std::io;

use anyhow::Error;
use nix::errno::Errno;

/// Whether an error says that what was looked at is not there any longer: ENOENT (a file of /sys or
/// /proc), ENODEV and ENXIO (a device), ESRCH (a process).
pub fn is_gone(error: &Error) -> bool {
    let code = |cause: &(dyn std::error::Error + 'static)| match cause.downcast_ref::<io::Error>() {
        Some(error) => error.raw_os_error(),
        None => cause.downcast_ref::<Errno>().map(|errno| *errno as i32),
    };
    let gone = [libc::ENOENT, libc::ENODEV, libc::ENXIO, libc::ESRCH];
    let code = error.chain().find_map(code);
    code.is_some_and(|code| gone.contains(&code))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use anyhow::Context;

    use super::*;

    #[test]
    fn what_is_gone_is_told_from_what_fails() {
        let file = || fs::read("/proc/self/rxsteer-none").context("reading");
        assert!(is_gone(&file().unwrap_err()));
        assert!(is_gone(&Error::from(Errno::ENXIO).context("a device")));
        for other in [
            Error::msg("ENODEV"),
            Errno::EPERM.into(),
            Errno::EMFILE.into(),
        ] {
            assert!(!is_gone(&other), "{other}");
        }
    }
}
