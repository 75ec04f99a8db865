// SPDX-License-Identifier: MIT OR Apache-2.0
//! Softirq mode on devices of each kind, and native mode below a PPPoE session: TCP and UDP arrive
//! complete and in order, redirected, and as before after the end.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use crate::helpers::process::Rxsteer;
use crate::helpers::transfer::{datagrams, many_flows, transfer};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use rxlab::lab::link::{Link, LinkConfig};
use rxlab::lab::netns::Netns;
use rxlab::lab::ppp::Session;
use rxlab::lab::stacked::{Kind, Stacked};
use rxlab::lab::tun::Tunnel;
use rxlab::testing::not_run;
use rxlab::testing::testbed::{OTHER_CPU, POLLING_CPU};
use rxlab::{in_lab, test_name};

fn link() -> Result<Link> {
    Link::new(
        &Netns::new("tester")?,
        &Netns::new("dut")?,
        &LinkConfig::default(),
    )
}

fn ends_in_order(running: Rxsteer) -> Result<()> {
    let ended = running.stop(Signal::SIGTERM)?;
    ensure!(ended.code == Some(0), "{ended:?}");
    ensure!(!ended.log.contains("overtake"), "{ended:?}");
    Ok(())
}

/// The namespaces of the tester and of the device under test.
fn ends(link: &Link) -> [&Netns; 2] {
    [&link.tester.netns, &link.dut.netns]
}

/// The device `name` with the address `ipv4`, under each policy that does not consider load. `anywhere`: its packets
/// may come on the other CPU, too, and stay there.
fn is_steered(
    [tester, dut]: [&Netns; 2],
    name: &str,
    ipv4: Ipv4Addr,
    anywhere: bool,
) -> Result<()> {
    let traffic = || {
        transfer(tester, dut, ipv4)?;
        datagrams(tester, dut, ipv4.into())
    };
    let cpus = format!("--rps-cpus={OTHER_CPU}");
    let under = |policy| {
        let running = Rxsteer::steering(dut, &[name, "--mode=auto", policy, &cpus])?;
        let mode = running.status()?.devices.remove(0).mode;
        ensure!(mode == "softirq", "{mode}");
        traffic()?;
        let sums = running.at_rest()?;
        let queues = running.status()?.devices.remove(0).queues;
        let there = queues.iter().filter(|q| anywhere && q.queue == OTHER_CPU);
        let there: u64 = there.map(|q| q.received).sum();
        ensure!(sums.redirected + there > 1_000, "{sums:?}, {there}");
        ensure!((sums.lost, sums.vanished) == (0, 0), "{sums:?}");
        ends_in_order(running)?;
        traffic()
    };
    for policy in ["--policy=rps", "--policy=rfs"] {
        under(policy).context(policy)?;
    }
    Ok(())
}

/// Runs the test for a kind, or reports that this kernel does not have it.
fn kind(test: &str, kind: Kind) -> Result<()> {
    in_lab!(test);
    let link = link()?;
    let stacked = match Stacked::new(&link, kind) {
        Ok(stacked) => stacked,
        Err(error) => {
            not_run(test, &format!("{error:#}"));
            return Ok(());
        }
    };
    // WireGuard's packets come on the CPU that has decrypted them.
    let anywhere = matches!(kind, Kind::WireGuard);
    is_steered(ends(&link), &stacked.name, stacked.ipv4, anywhere)
}

macro_rules! kinds {
    ($($name:ident: $kind:ident),* $(,)?) => {
        $(
            #[test]
            fn $name() -> Result<()> {
                kind(stringify!($name), Kind::$kind)
            }
        )*

        #[test]
        fn all_kinds_are_tested() {
            let mut tested = vec![$(format!("{:?}", Kind::$kind)),*];
            tested.extend(HANDED.map(|kind| format!("{kind:?}")));
            let all = Kind::ALL.map(|kind| format!("{kind:?}"));
            assert_eq!(BTreeSet::from_iter(tested), BTreeSet::from(all));
        }
    };
}

kinds! {
    a_bridge: Bridge,
    a_gre_tunnel: Gre,
    an_ipip_tunnel: IpIp,
    a_vxlan: Vxlan,
    wireguard: WireGuard,
}

/// Kinds whose packets the kernel hands on from the device below, where it has chosen their CPU.
const HANDED: [Kind; 2] = [Kind::MacVlan, Kind::Vlan];

#[test]
fn devices_that_are_handed_packets_are_steered_below() -> Result<()> {
    in_lab!();
    for kind in HANDED {
        let link = link()?;
        let stacked = match Stacked::new(&link, kind) {
            Ok(stacked) => stacked,
            Err(error) => {
                not_run(test_name!(), &format!("{error:#}"));
                continue;
            }
        };
        let below = link.dut.name.as_str();
        let refused = Rxsteer::start(&link.dut.netns, &[&stacked.name, "--mode=auto"])?;
        let refused = refused.err().context("it is steered")?;
        ensure!(
            refused.log.contains(&format!("`rxsteer run {below}`")),
            "{refused:?}"
        );
        let running = Rxsteer::steering(
            &link.dut.netns,
            &[
                below,
                "--mode=softirq",
                "--policy=rps",
                &format!("--rps-cpus={OTHER_CPU}"),
            ],
        )?;
        transfer(&link.tester.netns, &link.dut.netns, stacked.ipv4)?;
        let sums = running.at_rest()?;
        // GRO has merged them.
        ensure!(sums.redirected > 0, "{kind:?}: {sums:?}");
        ends_in_order(running)?;
    }
    Ok(())
}

/// A device to which a process writes the packets, which are received outside of polls; the test makes
/// no other device that is polled.
fn written(kind: libc::c_int) -> Result<()> {
    let [tester, dut] = [Netns::new("tester")?, Netns::new("dut")?];
    let tunnel = Tunnel::new(&tester, &dut, kind, POLLING_CPU)?;
    is_steered([&tester, &dut], &tunnel.name, tunnel.ipv4, false)
}

#[test]
fn a_tun_device() -> Result<()> {
    in_lab!();
    written(libc::IFF_TUN)
}

#[test]
fn a_tap_device() -> Result<()> {
    in_lab!();
    written(libc::IFF_TAP)
}

/// Packets processed where they arrive, and those redirected, when flows have left INLINE.
fn places(link: &Link, running: &Rxsteer, to: Ipv4Addr) -> Result<[u64; 2]> {
    let traffic = || many_flows(&link.tester.netns, &link.dut.netns, to.into());
    let now = || {
        let redirected = running.at_rest()?.redirected;
        let queues = &running.status()?.devices[0].queues;
        anyhow::Ok([queues.iter().map(|q| q.inline).sum(), redirected])
    };
    traffic()?;
    let before = now()?;
    traffic()?;
    let after = now()?;
    Ok([0, 1].map(|place| after[place] - before[place]))
}

/// Flows to an address are processed on both CPUs, in order, when `device` is steered.
fn are_spread(link: &Link, device: &str, mode: &str, to: Ipv4Addr) -> Result<()> {
    // The control: with one CPU they are not.
    for (cpus, both) in [("0-1", true), ("1", false)] {
        let cpus = format!("--rps-cpus={cpus}");
        let args = [device, mode, "--policy=rps", &cpus];
        let running = Rxsteer::steering(&link.dut.netns, &args)?;
        let [inline, redirected] = places(link, &running, to)?;
        ensure!(redirected > 0, "{args:?}");
        let spread = inline > redirected / 100;
        ensure!(spread == both, "{args:?}: {inline}, {redirected}");
        ends_in_order(running)?;
    }
    Ok(())
}

#[test]
fn a_pppoe_session() -> Result<()> {
    in_lab!();
    let link = link()?;
    let session = match Session::new(&link) {
        Ok(session) => session,
        Err(error) => {
            not_run(test_name!(), &format!("{error:#}"));
            return Ok(());
        }
    };
    is_steered(ends(&link), &session.name, session.ipv4, false)?;
    are_spread(&link, &session.name, "--mode=softirq", session.ipv4)?;
    // The Ethernet device below, whose frames have PPPoE headers before IP.
    are_spread(&link, &link.dut.name, "--mode=native", session.ipv4)
}
