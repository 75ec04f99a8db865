// SPDX-License-Identifier: MIT OR Apache-2.0
//! Inner flows of tunnels (`--tunnels`): whoever sends the packets of somebody else's inner flow does
//! not come into that flow's slot.

use anyhow::{Result, ensure};
use rxlab::bench::setup::mode::Active;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows, Vxlan};
use rxlab::lab::link::LinkConfig;
use rxlab::testing::testbed::{OTHER_CPU, Testbed, at_rest};
use rxsteer::api::flows::{Entry, Location};
use rxsteer::daemon::options::{Options, Tunnel};
use rxsteer::datapath::hash::Hash;
use rxsteer::datapath::policy::Policy;

use super::asking::*;

/// Packets of the victim's tunnel, and of each forger.
const OF_VICTIM: u32 = 50;
const OF_FORGER: u32 = 30;

type Forged = fn(Vxlan) -> Vxlan;

/// Packets in each slot of an inner flow, of which the end of a tunnel sends [`OF_VICTIM`] and each forger
/// [`OF_FORGER`]; most first. Unless the hash is symmetric, all are found by the inner flow's name, and follow
/// its application.
fn slots(hash: Hash, forgers: &[Forged]) -> Result<Vec<u32>> {
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let udp = own(UdpFlows::to(dut, 1));
    let mut options = Options {
        tunnels: vec![Tunnel::Vxlan],
        hash,
        ..options(&bed)
    };
    if hash == Hash::Symmetric {
        options.policy = Policy::RPS;
    }
    let follows = options.policy.follows();
    let app = app(&dut.netns, bind(&dut.netns, &udp, true)?)?;
    app.move_to(OTHER_CPU)?;
    let active = Active::steer(dut, options)?;
    if follows {
        settle_at(&bed, &udp, Location::Cpu(OTHER_CPU))?;
    }
    let mut received = rest(&active)?;
    let outside = flows(&dut.netns, 10)?.flows;

    let tunnel = Vxlan::to(dut, 7);
    let forged = forgers
        .iter()
        .map(|forge| (forge(tunnel.clone()), OF_FORGER));
    for (tunnel, count) in std::iter::once((tunnel.clone(), OF_VICTIM)).chain(forged) {
        bed.send(Frames::Vxlan(tunnel, udp.clone()), count.into())?;
        received += u64::from(count);
    }
    at_rest(&active, 0, received)?;
    let mut inside = flows(&dut.netns, 10)?.flows;
    inside.retain(|entry| outside.iter().all(|other| other.hash != entry.hash));
    if follows {
        let name = flow_of(&udp);
        let followed = |entry: &Entry| entry.application_cpu == Some(OTHER_CPU);
        ensure!(
            inside.iter().all(|e| e.flow == Some(name) && followed(e)),
            "{inside:?}"
        );
        let answer = explain(&dut.netns, &name.to_string())?;
        let found = &answer.explanations.flows;
        let followed = found
            .iter()
            .filter(|e| e.application.cpu == Some(OTHER_CPU));
        ensure!(
            followed.count() == inside.len() + outside.len(),
            "{answer:?}"
        );
    }
    active.stop()?;
    Ok(inside.iter().map(|entry| entry.packets).collect())
}

#[test]
fn a_forged_inner_flow_has_a_slot_of_its_own() -> Result<()> {
    in_lab!();
    let elsewhere: Forged = |tunnel| Vxlan {
        saddr: (tunnel.saddr.to_bits() + 1).into(),
        ..tunnel
    };
    let other_network: Forged = |tunnel| Vxlan { vni: 8, ..tunnel };
    let both = [elsewhere, other_network];
    assert_eq!(
        slots(Hash::Packet, &both)?,
        [OF_VICTIM, OF_FORGER, OF_FORGER]
    );
    // The controls: from the same source in the same network it is the same flow, and so are all under
    // --hash symmetric, where the two ends of a tunnel send the packets of one flow.
    let same: Forged = |tunnel| tunnel;
    let one = [OF_VICTIM + OF_FORGER];
    assert_eq!(slots(Hash::Packet, &[same])?, one);
    assert_eq!(slots(Hash::Symmetric, &[elsewhere])?, one);
    Ok(())
}
