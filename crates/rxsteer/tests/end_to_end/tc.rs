// SPDX-License-Identifier: MIT OR Apache-2.0
//! Programs at a device's tc ingress: foreign ones stay, and none of ours does.

use std::io::Error;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::process::Command;

use anyhow::{Result, ensure};
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::link::{Link, LinkConfig};
use rxlab::lab::netns::Netns;
use rxlab::lab::witness::Witness;
use rxsteer::host::tc::{self, Hook};

/// `return TCX_NEXT;`, after a call of this helper function for the packet.
pub fn program(helper: Option<libbpf_sys::bpf_func_id>) -> Result<OwnedFd> {
    let instruction = |code: u32, imm: i32| libbpf_sys::bpf_insn {
        code: code as u8,
        imm,
        ..Default::default()
    };
    let mov = libbpf_sys::BPF_ALU64 | libbpf_sys::BPF_MOV | libbpf_sys::BPF_K;
    let exit = libbpf_sys::BPF_JMP | libbpf_sys::BPF_EXIT;
    let call = libbpf_sys::BPF_JMP | libbpf_sys::BPF_CALL;
    let call = helper.map(|helper| instruction(call, helper as i32));
    let next = [instruction(mov, -1), instruction(exit, 0)];
    let code: Vec<_> = call.into_iter().chain(next).collect();
    // SAFETY: the strings end with a zero, and `code` has as many instructions as it says.
    let fd = unsafe {
        libbpf_sys::bpf_prog_load(
            libbpf_sys::BPF_PROG_TYPE_SCHED_CLS,
            c"next".as_ptr(),
            c"GPL".as_ptr(),
            code.as_ptr(),
            code.len() as libbpf_sys::size_t,
            std::ptr::null_mut(),
        )
    };
    ensure!(fd >= 0, Error::from_raw_os_error(-fd));
    // SAFETY: the kernel has just opened it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The qdiscs and programs that a device has, as the kernel and `tc` show them.
fn there(link: &Link) -> Result<(usize, String)> {
    let name = &link.dut.name;
    link.dut.netns.run(|| {
        let mut query = libbpf_sys::bpf_prog_query_opts {
            sz: size_of::<libbpf_sys::bpf_prog_query_opts>() as libbpf_sys::size_t,
            ..Default::default()
        };
        // SAFETY: `query` outlives the call. Before Linux 6.6 it fails: there are none.
        unsafe {
            libbpf_sys::bpf_prog_query_opts(
                link.dut.ifindex as i32,
                libbpf_sys::BPF_TCX_INGRESS,
                &mut query,
            )
        };
        // SAFETY: the kernel fills in the number, whatever the kind of program.
        let links = unsafe { query.__bindgen_anon_1.prog_cnt } as usize;
        let mut shown = String::new();
        for what in ["qdisc show dev", "filter show ingress dev"] {
            let args = what.split(' ').chain([name.as_str()]);
            let output = Command::new("tc").args(args).output()?;
            shown += &String::from_utf8_lossy(&output.stdout);
        }
        Ok((links, shown))
    })
}

#[test]
fn a_program_is_attached_beside_foreign_ones() -> Result<()> {
    in_lab!();
    let link = Link::new(
        &Netns::new("tester")?,
        &Netns::new("dut")?,
        &LinkConfig::default(),
    )?;
    let attach = || {
        let program = program(None)?;
        let netns = &link.dut.netns;
        netns.run(|| tc::attach(program.as_fd(), link.dut.ifindex, Hook::Ingress))
    };
    for foreign in [false, true] {
        let _witness = match foreign {
            true => Some(Witness::new(
                &link.dut,
                &Frames::Udp(UdpFlows::to(&link.dut, 1)),
            )?),
            false => None,
        };
        let before = there(&link)?;
        let first = attach()?;
        let one = there(&link)?;
        let second = attach()?;
        let two = there(&link)?;
        assert!(before != one && one != two, "{before:?} {one:?} {two:?}");
        drop(first);
        drop(second);
        assert_eq!(there(&link)?, before);
    }
    Ok(())
}

#[test]
fn an_unknown_device_is_an_error() -> Result<()> {
    in_lab!();
    let error = tc::attach(program(None)?.as_fd(), u32::MAX >> 1, Hook::Ingress).unwrap_err();
    assert!(format!("{error:#}").contains("device"), "{error:#}");
    Ok(())
}
