// SPDX-License-Identifier: MIT OR Apache-2.0
//! Skbs that are dropped on their way to another CPU, by nobody who reports it: there is a generic XDP
//! program for a while, which the kernel calls behind its RPS, and before tc.

use crate::helpers::process::{Rxsteer, accounts};
use anyhow::Result;
use nix::sys::signal::Signal;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::{End, LinkConfig};
use rxlab::lab::xdp::Xdp;
use rxlab::testing::testbed::{OTHER_CPU, POLLING_CPU, Testbed, until};
use rxsteer::api::client;
use rxsteer::api::set::Change;

const NR_FLOWS: u32 = 20;

/// A device whose flows are all at [`OTHER_CPU`].
struct Steered {
    bed: Testbed,
    flows: UdpFlows,
    running: Rxsteer,
}

impl Steered {
    fn new() -> Result<Self> {
        let bed = Testbed::new(&LinkConfig::default())?;
        let cpus = format!("--rps-cpus={OTHER_CPU}");
        let args = [
            &bed.link.dut.name[..],
            "--mode=softirq",
            "--policy=rps",
            &cpus,
        ];
        Ok(Self {
            running: Rxsteer::steering(&bed.link.dut.netns, &args)?,
            flows: UdpFlows::to(&bed.link.dut, NR_FLOWS),
            bed,
        })
    }

    fn dut(&self) -> &End {
        &self.bed.link.dut
    }

    fn traffic(&self) -> Result<Generator> {
        let frames = Frames::Udp(self.flows.clone());
        let paced = GeneratorConfig::lossless(frames, None).at(20_000);
        Generator::start(&self.bed.link, POLLING_CPU, &paced)
    }

    /// Waits until so many more packets have been redirected.
    fn redirects(&self, more: u64) -> Result<()> {
        let before = self.running.sums()?.redirected;
        until("packets are redirected", || {
            Ok((self.running.sums()?.redirected > before + more).then_some(()))
        })
    }

    /// Packets are dropped until the returned program is.
    fn losing(&self) -> Result<Xdp> {
        Xdp::drop_in_stack(self.dut())
    }

    /// Drops packets of each flow.
    fn lose(&self) -> Result<()> {
        let _losing = self.losing()?;
        self.redirects(10 * u64::from(NR_FLOWS))
    }
}

#[test]
fn flows_leave_in_order_after_skbs_vanished() -> Result<()> {
    in_lab!();
    let steered = Steered::new()?;
    let sink = steered.bed.receiver_in_order(&steered.flows)?;
    let wire = steered.traffic()?;
    steered.redirects(1_000)?;
    // The control: nothing has vanished.
    assert_eq!(steered.running.sums()?.vanished, 0);
    steered.lose()?;
    steered.redirects(1_000)?;
    let change = Change::rps_cpus(&steered.dut().name, None, "0");
    steered.dut().netns.run(|| client::set(change))?;
    until("every flow has left", || {
        let before = steered.running.sums()?.redirected;
        let sent = wire.sent();
        until("each flow has sent", || {
            let enough = sent + 10 * u64::from(NR_FLOWS);
            Ok((wire.sent() > enough).then_some(()))
        })?;
        Ok((steered.running.sums()?.redirected == before).then_some(()))
    })?;
    let sent = wire.stop()?;
    let sums = steered.running.at_rest()?;
    assert!(sums.vanished > 0, "{sums:?}");
    let arrived = sent.sent - sent.lost - sums.vanished - sums.lost;
    until("all others arrive", || {
        Ok((sink.received() + sink.dropped()? >= arrived).then_some(()))
    })?;
    let report = sink.stop()?;
    assert_eq!((report.reordered, report.dropped), (0, 0), "{report:?}");
    assert_eq!(report.received.iter().sum::<u64>(), arrived, "{sums:?}");
    let ended = steered.running.stop(Signal::SIGTERM)?;
    assert!(!ended.log.contains("overtake"), "{ended:?}");
    Ok(())
}

/// Else no flow could be proven to have left: a stop would wait in vain.
#[test]
fn skbs_that_vanished_are_found_without_packets() -> Result<()> {
    in_lab!();
    let steered = Steered::new()?;
    let wire = steered.traffic()?;
    steered.redirects(1_000)?;
    let losing = steered.losing()?;
    steered.redirects(100)?;
    wire.stop()?;
    drop(losing);
    until("they are found", || {
        let sums = steered.running.sums()?;
        Ok((sums.queued == 0 && sums.vanished > 0).then_some(()))
    })?;
    let ended = steered.running.stop(Signal::SIGTERM)?;
    assert!(!ended.log.contains("overtake"), "{ended:?}");
    assert!(!accounts(&ended.log)?.is_empty());
    Ok(())
}
