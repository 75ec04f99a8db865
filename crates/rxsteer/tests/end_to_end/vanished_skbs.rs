// SPDX-License-Identifier: MIT OR Apache-2.0
//! Skbs that are dropped on their way to another CPU, by nobody who reports it: the carrier is down
//! for a while.

use crate::helpers::process::{Rxsteer, accounts};
use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::{End, LinkConfig};
use rxlab::lab::rtnl;
use rxlab::testing::not_run;
use rxlab::testing::testbed::{OTHER_CPU, POLLING_CPU, Testbed, until};
use rxlab::{in_lab, test_name};
use rxsteer::api::client;
use rxsteer::api::set::Change;
use rxsteer::host::device;
use rxsteer::host::setting::Setting;

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
        let args = [&bed.link.dut.name[..], "--mode=skb", "--policy=rps", &cpus];
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

    fn set_carrier(&self, up: bool) -> Result<()> {
        self.dut().netns.run(|| {
            let names = device::names()?;
            let carrier = names.iter().find(|name| name.starts_with("rxsteer"));
            rtnl::set_up(carrier.context("the carrier is there")?, up)
        })
    }

    /// Drops packets of each flow.
    fn lose(&self) -> Result<()> {
        self.set_carrier(false)?;
        self.redirects(10 * u64::from(NR_FLOWS))?;
        self.set_carrier(true)
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
    steered.set_carrier(false)?;
    steered.redirects(100)?;
    wire.stop()?;
    steered.set_carrier(true)?;
    until("they are found", || {
        let sums = steered.running.sums()?;
        Ok((sums.queued == 0 && sums.vanished > 0).then_some(()))
    })?;
    let ended = steered.running.stop(Signal::SIGTERM)?;
    assert!(!ended.log.contains("overtake"), "{ended:?}");
    assert!(!accounts(&ended.log)?.is_empty());
    Ok(())
}

/// Nothing proves then that the CPU has passed up what it held.
#[test]
fn flows_leave_a_cpu_that_goes_offline_after_skbs_vanished() -> Result<()> {
    in_lab!(alone: "it takes a CPU offline");
    let path = format!("/sys/devices/system/cpu/cpu{OTHER_CPU}/online");
    let Ok(online) = Setting::keep(&path) else {
        not_run(test_name!(), "this machine's CPUs can't go offline");
        return Ok(());
    };
    let steered = Steered::new()?;
    let wire = steered.traffic()?;
    steered.redirects(1_000)?;
    steered.set_carrier(false)?;
    steered.redirects(100)?;
    let inline = || -> Result<u64> {
        let status = steered.running.status()?;
        Ok(status.devices[0].queues.iter().map(|q| q.inline).sum())
    };
    let before = inline()?;
    online.set("0")?;
    until("flows leave", || {
        Ok((inline()? > before + 1_000).then_some(()))
    })?;
    let sums = steered.running.sums()?;
    assert!(sums.shed > 0 && sums.vanished == 0, "{sums:?}");
    steered.set_carrier(true)?;
    online.set("1")?;
    steered.redirects(1_000)?;
    wire.stop()?;
    let sums = steered.running.at_rest()?;
    assert!(sums.vanished > 0, "{sums:?}");
    Ok(())
}
