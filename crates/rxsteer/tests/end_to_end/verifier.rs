// SPDX-License-Identifier: MIT OR Apache-2.0
//! The cost of the programs for the verifier: the kernel's limit is a million processed
//! instructions, and another loop or branch can multiply them.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::slice;

use anyhow::{Context, Result};
use clap::ValueEnum;
use libbpf_rs::skel::{OpenSkel, Skel, SkelBuilder};
use libbpf_rs::{Object, OpenMapMut, OpenObject};
use rxlab::lab::link::{Link, LinkConfig};
use rxlab::lab::netns::Netns;
use rxlab::lab_skel::LabSkelBuilder;
use rxlab::{in_lab, test_name};
use rxsteer::bpf::dissector_skel::DissectorSkelBuilder;
use rxsteer::bpf::hash_skel::HashSkelBuilder;
use rxsteer::bpf::hops_skel::HopsSkelBuilder;
use rxsteer::bpf::rx_skel::RxSkelBuilder;
use rxsteer::bpf::socket_skel::SocketSkelBuilder;
use rxsteer::bpf::trace_skel::TraceSkelBuilder;
use rxsteer::daemon::options::Tunnel;
use rxsteer::host::caps;
use rxsteer::host::xdp::Bound;
use rxsteer::types::{flow_option, rx_config};

/// A quarter of the kernel's limit (BPF_COMPLEXITY_LIMIT_INSNS): kernels prune differently,
/// and growth should show here long before a user's kernel refuses a program, and before it slows
/// the start down. With clang 14 the largest program, softirq mode with tunnels, takes 155
/// thousand on Linux 6.18, and more on 6.1.
const CEILING: u32 = 260_000;

/// Instructions that the verifier processed for each program that was loaded.
fn verified(object: &Object, what: &str) -> Result<Vec<u32>> {
    let loaded = object.progs().filter(|prog| prog.as_fd().as_raw_fd() >= 0);
    loaded
        .map(|prog| {
            let mut info = libbpf_sys::bpf_prog_info::default();
            let mut len = size_of_val(&info) as u32;
            // SAFETY: `info` has `len` bytes.
            let ret = unsafe {
                libbpf_sys::bpf_obj_get_info_by_fd(
                    prog.as_fd().as_raw_fd(),
                    (&raw mut info).cast(),
                    &mut len,
                )
            };
            nix::errno::Errno::result(ret).context("a program tells about itself")?;
            let name = prog.name().to_string_lossy();
            println!("{:>8} {name} {what}", info.verified_insns);
            assert!(info.verified_insns > 0, "{name} {what}: not verified?");
            assert!(
                info.verified_insns < CEILING,
                "{name} {what}: the verifier processed {} instructions, more than {CEILING}",
                info.verified_insns
            );
            Ok(info.verified_insns)
        })
        .collect()
}

/// The constants, of any object. More than one of each, or the verifier could prune what a real
/// host needs.
fn constants() -> rx_config {
    rx_config {
        nr_cpus: 64,
        nr_rx_queues: 8,
        queue_base: 8,
        flow_limit: 100,
        ..Default::default()
    }
}

fn set_constants(rodata: &mut OpenMapMut<'_>, constants: rx_config) -> Result<()> {
    // SAFETY: the structure has no padding but fields called so.
    let bytes = unsafe {
        slice::from_raw_parts((&raw const constants).cast::<u8>(), size_of::<rx_config>())
    };
    Ok(rodata.set_initial_value(bytes)?)
}

#[test]
fn the_data_path_stays_far_from_the_verifiers_limit() -> Result<()> {
    in_lab!();
    let mut tunnels = vec![("no tunnels".to_owned(), 0)];
    for tunnel in Tunnel::value_variants() {
        tunnels.push((format!("{tunnel:?}"), tunnel.bits()));
    }
    let all_tunnels = tunnels.iter().fold(0, |all, (_, bits)| all | bits);
    let symmetric = flow_option::FLOW_SYMMETRIC.0;
    for bits in [symmetric, symmetric | all_tunnels] {
        tunnels.push((format!("both directions alike, tunnels {bits:#x}"), bits));
    }
    let mut xdp = Vec::new();
    for (name, bits) in tunnels {
        for dry_run in [false, true] {
            let mut slot = MaybeUninit::<OpenObject>::uninit();
            let mut open = RxSkelBuilder::default().open(&mut slot)?;
            let constants = rx_config {
                flow_options: bits,
                dry_run: dry_run.into(),
                ..constants()
            };
            set_constants(&mut open.maps.rodata, constants)?;
            open.progs.rxsteer.set_autoload(true);
            let skel = open.load()?;
            let what = format!("{name}{}", if dry_run { ", dry run" } else { "" });
            let all = verified(skel.object(), &what)?;
            assert_eq!(all.len(), 1, "the XDP program alone");
            xdp.push(all[0]);
        }
    }
    for flow_options in [0, all_tunnels, symmetric | all_tunnels] {
        let mut slot = MaybeUninit::<OpenObject>::uninit();
        let mut open = DissectorSkelBuilder::default().open(&mut slot)?;
        let constants = rx_config {
            flow_options,
            hop_mask: 1023,
            ..constants()
        };
        set_constants(&mut open.maps.rodata, constants)?;
        verified(
            open.load()?.object(),
            &format!("softirq mode, options {flow_options:#x}"),
        )?;
    }
    let mut slot = MaybeUninit::<OpenObject>::uninit();
    let mut open = HashSkelBuilder::default().open(&mut slot)?;
    let constants = rx_config {
        flow_options: Tunnel::All.bits(),
        ..constants()
    };
    set_constants(&mut open.maps.rodata, constants)?;
    verified(open.load()?.object(), "all tunnels")?;
    let mut slot = MaybeUninit::<OpenObject>::uninit();
    let hops = HopsSkelBuilder::default().open(&mut slot)?.load()?;
    verified(hops.object(), "softirq mode")?;
    // The control: the figures differ by program and by options.
    let (none, all) = (xdp[0], xdp[xdp.len() - 2]);
    assert!(none < all, "no tunnels {none}, all tunnels {all}");
    Ok(())
}

#[test]
fn so_do_the_tracepoints_and_the_programs_at_sockets() -> Result<()> {
    in_lab!();
    let mut slot = MaybeUninit::<OpenObject>::uninit();
    let mut open = TraceSkelBuilder::default().open(&mut slot)?;
    set_constants(&mut open.maps.rodata, constants())?;
    let trace = verified(open.load()?.object(), "in trace.bpf.c")?;
    assert!(trace.len() >= 4 + 3, "{trace:?}");

    let mut slot = MaybeUninit::<OpenObject>::uninit();
    let mut open = SocketSkelBuilder::default().open(&mut slot)?;
    let constants = rx_config {
        follow_nat: 1,
        ..constants()
    };
    set_constants(&mut open.maps.rodata, constants)?;
    // Before Linux 6.3 others stand in for those at the tracepoints.
    let sockets = caps::missing_tracepoints(&["sock_recv_length", "sock_send_length"])?.is_empty();
    open.progs.on_sock_recv.set_autoload(sockets);
    open.progs.on_sock_send.set_autoload(sockets);
    open.progs.on_inet_recv.set_autoload(!sockets);
    open.progs.on_inet_send.set_autoload(!sockets);
    let socket = verified(open.load()?.object(), "in socket.bpf.c")?;
    assert_eq!(socket.len(), 2 + 3, "{socket:?}");
    Ok(())
}

#[test]
fn so_does_the_program_bound_to_a_device() -> Result<()> {
    in_lab!();
    if !caps::has_device_hash()? {
        rxlab::testing::not_run(
            test_name!(),
            "before Linux 6.3 there are no devices' hashes",
        );
        return Ok(());
    }
    let netns = Netns::new("bound")?;
    let link = Link::new(&netns, &netns, &LinkConfig::default())?;
    netns.run(|| {
        let mut slot = MaybeUninit::<OpenObject>::uninit();
        let mut open = RxSkelBuilder::default().open(&mut slot)?;
        let constants = rx_config {
            flow_options: Tunnel::All.bits(),
            ..constants()
        };
        set_constants(&mut open.maps.rodata, constants)?;
        let bound = &mut open.progs.rxsteer_rx_hash;
        bound.set_autoload(true);
        bound.set_ifindex(link.dut.ifindex);
        bound.set_flags(libbpf_sys::BPF_F_XDP_DEV_BOUND_ONLY);
        // Dropped after the program, also by a failed assertion: the device must outlive it.
        let _bound;
        let skel = open.load()?;
        _bound = Bound::with(&skel.maps.rodata)?;
        let all = verified(skel.object(), "bound to a device")?;
        assert_eq!(all.len(), 1, "the XDP program alone");
        Ok(())
    })
}

#[test]
fn the_labs_programs_stay_far_from_it_too() -> Result<()> {
    in_lab!();
    // All optional programs at once.
    let mut slot = MaybeUninit::<OpenObject>::uninit();
    let mut open = LabSkelBuilder::default().open(&mut slot)?;
    for mut prog in open.open_object_mut().progs_mut() {
        prog.set_autoload(true);
    }
    let constants = open.maps.rodata_data.as_mut().context("no .rodata")?;
    let layout = &mut constants.generator_layout;
    layout.template_len = constants.generator_template.len() as u32;
    (layout.ipv4, layout.saddr, layout.ports) = (14, 26, 34);
    (layout.tcp_seq, layout.checksum, layout.stamp) = (38, 50, 54);
    layout.push = 1;
    let skel = open.load()?;
    let all = verified(skel.object(), "of the lab")?;
    assert!(all.len() > 4, "{all:?}");
    Ok(())
}
