// SPDX-License-Identifier: MIT OR Apache-2.0
//! Filters of sockets, and programs that choose one of a group: classic BPF, and one of the lab's programs.

use std::os::fd::{AsFd, AsRawFd};

use anyhow::{Context, Result};
use socket2::SockFilter;

use super::{option, programs};

/// An instruction of a classic program that does not jump.
pub fn instruction(code: u32, k: u32) -> SockFilter {
    SockFilter::new(code as u16, 0, 0, k)
}

/// Loads what is beside a packet, as `SKF_AD_CPU`.
pub fn extension(offset: i32) -> SockFilter {
    let at = (libc::SKF_AD_OFF + offset) as u32;
    instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, at)
}

/// Selects the socket of an SO_REUSEPORT group by what a classic program returns, numbered in the order of their
/// bind().
///
/// # Errors
/// When the socket is in no group.
pub fn choose_by(socket: &impl AsRawFd, program: &mut [SockFilter]) -> Result<()> {
    let program = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr().cast(),
    };
    let name = libc::SO_ATTACH_REUSEPORT_CBPF;
    option::set(socket, libc::SOL_SOCKET, name, &program)
}

/// Attaches a filter that passes all, and for which the kernel clears `skb->cb`.
///
/// # Errors
/// When the kernel refuses the program.
pub fn clear_cb(socket: &impl AsRawFd) -> Result<()> {
    let skel = programs::load(|open| {
        open.progs.filter.set_autoload(true);
        Ok(())
    })?;
    let program = skel.progs.filter.as_fd().as_raw_fd();
    option::set(socket, libc::SOL_SOCKET, libc::SO_ATTACH_BPF, &program)
        .context("attaching a filter to a socket")
}
