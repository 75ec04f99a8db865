// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls of programs that user space may call (`SEC("syscall")` in bpf/trace.bpf.c).

use std::os::fd::{AsRawFd, BorrowedFd};

/// Runs a program; returns its result. The program may change its argument.
///
/// # Errors
/// When the kernel can't run it.
pub(super) fn call<T: Copy>(program: BorrowedFd<'_>, argument: &mut T) -> std::io::Result<u32> {
    let mut opts = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as libbpf_sys::size_t,
        ctx_in: std::ptr::from_mut(argument).cast(),
        ctx_size_in: size_of::<T>() as u32,
        ..Default::default()
    };
    // SAFETY: `argument` and `opts` outlive the call. The kernel copies the argument in and out, and
    // any bytes are a value of the plain C structs that programs take.
    let ret = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &raw mut opts) };
    match ret {
        0 => Ok(opts.retval),
        error => Err(std::io::Error::from_raw_os_error(-error)),
    }
}

/// Runs a program of type `BPF_PROG_TYPE_SCHED_CLS` on a packet; returns its result.
///
/// # Errors
/// When the kernel can't run it.
pub(super) fn on_packet(program: BorrowedFd<'_>, packet: &[u8]) -> anyhow::Result<u32> {
    let mut opts = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as libbpf_sys::size_t,
        data_in: packet.as_ptr().cast(),
        data_size_in: packet.len() as u32,
        ..Default::default()
    };
    // SAFETY: the packet and `opts` outlive the call; nothing is copied out.
    let ret = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &raw mut opts) };
    match ret {
        0 => Ok(opts.retval),
        error => Err(std::io::Error::from_raw_os_error(-error).into()),
    }
}
