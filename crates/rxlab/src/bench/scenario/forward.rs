// SPDX-License-Identifier: MIT OR Apache-2.0
//! `forward`: throughput of a router with a firewall that tracks connections; `firewall`: of one
//! that compares each packet with a long list.
//!
//! As `lossfree`, but packets are routed to another network and dropped on arrival there: no
//! application takes CPU time.

use anyhow::Result;

use crate::bench::experiment::{
    CasePlan, Condition, Effort, Experiment, Gro, Napi, Plan, Values, fit,
};
use crate::bench::scenario::flood::{NR_FLOWS, Sample};
use crate::bench::scenario::lossfree::{metrics, notes, search, search_seconds};
use crate::bench::setup::mode::{Active, Mode, Way};
use crate::bench::setup::router::{NR_BLOCKED, Passed, Router, Ruleset};
use crate::bench::setup::testbed::{INTERRUPT_CPU, Testbed};
use crate::bench::setup::traffic::Traffic;
use crate::lab::frame::Frames;

/// Largest share of forwarded packets that may have matched another rule than the measured one.
const OTHERS: f64 = 0.001;

pub struct Forward {
    ruleset: Ruleset,
    conditions: Vec<Condition>,
    testbeds: Vec<(Testbed, Router)>,
    ways: Vec<Way>,
    seconds: f64,
}

impl Forward {
    /// Prepares the lab.
    ///
    /// # Errors
    /// The host does not allow it, or has a single CPU; [`Unfit`](crate::bench::experiment::Unfit)
    /// when it has no `nft`, or no connection tracking.
    pub fn new(effort: &Effort, ruleset: Ruleset) -> Result<Self> {
        let conditions = effort.conditions(&[Napi::Thread], &[Gro::On]);
        let testbeds = conditions
            .iter()
            .map(|condition| {
                let testbed = Testbed::new(*condition)?;
                let router = Router::new(testbed.device(), ruleset)?;
                establish(&testbed, &router)?;
                Ok((testbed, router))
            })
            .collect::<Result<Vec<_>>>()?;
        let modes = [
            Mode::None,
            Mode::KernelRps,
            Mode::Cpumap,
            Mode::Rxsteer,
            Mode::RxsteerSoftirqRps,
            Mode::RxsteerSoftirq,
        ];
        Ok(Self {
            ruleset,
            conditions,
            ways: testbeds[0].0.masks().ways(&Mode::on(effort.device, &modes)),
            testbeds,
            seconds: effort.seconds,
        })
    }
}

/// Makes all flows known connections, before a mode is switched on.
fn establish(testbed: &Testbed, router: &Router) -> Result<()> {
    let plain = testbed.start(Way::by_default(Mode::None))?;
    let flows = router.flows(testbed.device(), NR_FLOWS);
    let frames = testbed.frames(&flows);
    router.establish(&testbed.link, INTERRUPT_CPU, &flows, frames)?;
    plain.stop()
}

/// Sends to the host behind the router, under a way to steer: `send` gets the frames, and returns
/// its result and all traffic.
fn through<T>(
    testbed: &Testbed,
    router: &Router,
    way: Way,
    send: impl FnOnce(&Active<'_>, &Frames) -> Result<(T, Traffic)>,
) -> Result<T> {
    establish(testbed, router)?;
    let frames = testbed.frames(&router.flows(testbed.device(), NR_FLOWS));
    let active = testbed.start(way)?;
    let before = router.passed()?;
    let (result, all) = send(&active, &frames)?;
    check(before, router.passed()?, &all)?;
    active.stop()?;
    Ok(result)
}

/// Floods the host behind the router.
///
/// # Errors
/// As [`flood::measure`](crate::bench::scenario::flood::measure); and
/// [`Unfit`](crate::bench::experiment::Unfit) when packets matched another rule.
pub fn measure(testbed: &Testbed, router: &Router, way: Way, seconds: f64) -> Result<Sample> {
    through(testbed, router, way, |active, frames| {
        let sample = Sample::take(testbed, active, way, router, frames, seconds)?;
        let all = sample.traffic.clone();
        Ok((sample, all))
    })
}

/// Checks that all forwarded packets matched the measured rule.
fn check(before: Passed, after: Passed, traffic: &Traffic) -> Result<()> {
    let forwarded = traffic.all.delivered + traffic.dropped;
    let expected = after.expected - before.expected;
    let others = after.others - before.others;
    let astray = forwarded.abs_diff(expected) + others;
    fit!(
        (astray as f64) < OTHERS * forwarded as f64,
        "of {forwarded} forwarded packets {expected} passed by the firewall's rule for them; it saw \
         {others} others"
    );
    Ok(())
}

impl Experiment for Forward {
    fn plan(&self) -> Plan {
        let modes: Vec<String> = self.ways.iter().map(Way::to_string).collect();
        let cases = self.conditions.iter().map(|condition| CasePlan {
            case: condition.case(&format!("router, {NR_FLOWS} flows"), &self.conditions),
            modes: modes.clone(),
        });
        let (scenario, question, firewall) = match self.ruleset {
            Ruleset::Stateful => (
                "forward",
                "How many UDP packets does a router with a firewall forward without loss, and how \
                 many when more come?",
                "The router's nftables ruleset drops what is not allowed, tracks connections, and \
                 knows all flows, which have seen a reply, before anything is measured: the \
                 firewall's counters show that every packet passed by the rule for known connections."
                    .to_owned(),
            ),
            Ruleset::Blocklist => (
                "firewall",
                "How many UDP packets does a router forward that compares each with a long list of \
                 rules?",
                format!(
                    "The router's nftables ruleset has {NR_BLOCKED} rules that block a source each \
                     before the one that lets the packets pass, tracks no connections, and looks \
                     nothing up: the counters before the first rule and in the last one show that \
                     every packet was compared with all."
                ),
            ),
        };
        let mut notes = notes(self.seconds);
        notes.push(format!(
            "{firewall} Routes have no next hop to look up but a permanent neighbour. Packets leave \
             by a veth of one queue, and end at its other end, on the CPU that forwarded them, in an \
             XDP program. No application takes a CPU, and the kernel checks UDP's checksums itself, \
             which hardware would do for an unsteered queue and kernel RPS."
        ));
        Plan {
            scenario,
            question,
            metrics: metrics(),
            cases: cases.collect(),
            conditions: self.testbeds[0].0.conditions(&self.conditions),
            notes,
            seconds_each: search_seconds(self.seconds),
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let ((testbed, router), way) = (&self.testbeds[case], self.ways[mode]);
        through(testbed, router, way, |active, frames| {
            search(testbed, active, way, router, frames, self.seconds)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::experiment::Unfit;
    use crate::bench::setup::traffic::Counts;

    #[test]
    fn packets_that_met_another_rule_are_refused() {
        let traffic = Traffic {
            all: Counts {
                delivered: 9_000,
                ..Default::default()
            },
            dropped: 1_000,
            ..Default::default()
        };
        let check = |expected: u64, others: u64| {
            let before = Passed {
                expected: 5,
                others: 5,
            };
            let after = Passed {
                expected: 5 + expected,
                others: 5 + others,
            };
            check(before, after, &traffic)
        };
        check(10_000, 0).unwrap();
        check(9_995, 4).unwrap();
        for (expected, others) in [(9_900, 0), (10_100, 0), (10_000, 100), (0, 10_000)] {
            let refused = check(expected, others);
            assert!(refused.is_err_and(|error| error.is::<Unfit>()));
        }
    }
}
