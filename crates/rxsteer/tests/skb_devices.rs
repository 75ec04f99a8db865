// SPDX-License-Identifier: MIT OR Apache-2.0
//! Skb mode on devices of each kind: TCP and UDP arrive complete and in order, redirected, and as
//! before after the end.

mod common;

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use common::process::Rxsteer;
use common::transfer::{datagrams, transfer};
use nix::sys::signal::Signal;
use rxlab::in_lab;
use rxlab::lab::link::{Link, LinkConfig};
use rxlab::lab::netns::Netns;
use rxlab::lab::stacked::{Kind, Stacked};
use rxlab::testing::not_run;
use rxlab::testing::testbed::OTHER_CPU;

fn link() -> Result<Link> {
    Link::new(
        &Netns::new("tester")?,
        &Netns::new("dut")?,
        &LinkConfig::default(),
    )
}

fn is_steered(link: &Link, stacked: &Stacked, policy: &str) -> Result<()> {
    let (tester, dut) = (&link.tester.netns, &link.dut.netns);
    let traffic = || {
        transfer(tester, dut, stacked.ipv4)?;
        datagrams(tester, dut, stacked.ipv4.into())
    };
    let cpus = format!("--rps-cpus={OTHER_CPU}");
    let args = [&stacked.name[..], "--mode=auto", policy, &cpus];
    let running = Rxsteer::steering(dut, &args)?;
    let mode = running.status()?.devices.remove(0).mode;
    ensure!(mode == "skb", "{mode}");
    traffic()?;
    let sums = running.at_rest()?;
    ensure!(sums.redirected > 1_000, "{sums:?}");
    ensure!((sums.lost, sums.vanished) == (0, 0), "{sums:?}");
    let ended = running.stop(Signal::SIGTERM)?;
    ensure!(ended.code == Some(0), "{ended:?}");
    ensure!(!ended.log.contains("overtake"), "{ended:?}");
    traffic()
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
    for policy in ["--policy=rps", "--policy=rfs"] {
        is_steered(&link, &stacked, policy).map_err(|e| e.context(policy))?;
    }
    Ok(())
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
            let tested = [$(format!("{:?}", Kind::$kind)),*];
            let all = Kind::ALL.map(|kind| format!("{kind:?}"));
            assert_eq!(BTreeSet::from(tested), BTreeSet::from(all));
        }
    };
}

kinds! {
    a_bridge: Bridge,
    a_gre_tunnel: Gre,
    an_ipip_tunnel: IpIp,
    a_macvlan: MacVlan,
    a_vlan: Vlan,
    a_vxlan: Vxlan,
    wireguard: WireGuard,
}
