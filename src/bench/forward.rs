// SPDX-License-Identifier: MIT OR Apache-2.0
//! `forward`: what a router carries that has a firewall and tracks connections.
//!
//! As `lossfree`, but the packets go on through the router to another network, and end there as soon
//! as they arrive: no application takes a CPU.

use anyhow::Result;

use super::bed::{Bed, INTERRUPT_CPU};
use super::flood::NR_FLOWS;
use super::lossfree::{metrics, notes, search, search_seconds};
use super::mode::{Mode, Way};
use super::router::{Passed, Router};
use super::traffic::Traffic;
use super::{CasePlan, Condition, Effort, Experiment, Gro, Napi, Plan, Values, fit};
use crate::lab::frame::Frames;

/// Of the forwarded packets, those that may have passed by another rule than the one for known
/// connections.
const FRESH: f64 = 0.001;

/// The scenario.
pub struct Forward {
    conditions: Vec<Condition>,
    beds: Vec<(Bed, Router)>,
    ways: Vec<Way>,
    seconds: f64,
}

impl Forward {
    /// Makes the lab.
    ///
    /// # Errors
    /// When the host does not allow it, or has a single CPU; [`Unfit`](super::Unfit) when it has no
    /// `nft`, or no connection tracking.
    pub fn new(effort: &Effort) -> Result<Self> {
        let conditions = effort.conditions(&[Napi::Thread], &[Gro::On]);
        let beds = conditions
            .iter()
            .map(|condition| {
                let bed = Bed::new(*condition)?;
                let router = Router::new(&bed.link.dut)?;
                establish(&bed, &router)?;
                Ok((bed, router))
            })
            .collect::<Result<Vec<_>>>()?;
        let modes = [Mode::None, Mode::KernelRps, Mode::Cpumap, Mode::Rxsteer];
        Ok(Self {
            conditions,
            ways: beds[0].0.masks().ways(&modes),
            beds,
            seconds: effort.seconds,
        })
    }
}

/// Makes all flows known connections, whatever is measured next.
fn establish(bed: &Bed, router: &Router) -> Result<()> {
    let plain = bed.start(Way::by_default(Mode::None))?;
    let flows = router.flows(&bed.link.dut, NR_FLOWS);
    router.establish(&bed.link, INTERRUPT_CPU, &flows)?;
    plain.stop()
}

/// Whether all that was forwarded belonged to known connections.
fn check(before: Passed, after: Passed, traffic: &Traffic) -> Result<()> {
    let forwarded = traffic.all.delivered + traffic.dropped;
    let established = after.established - before.established;
    let astray = forwarded.abs_diff(established) + (after.fresh - before.fresh);
    fit!(
        (astray as f64) < FRESH * forwarded as f64,
        "of {forwarded} forwarded packets only {established} belonged to connections that the firewall knew"
    );
    Ok(())
}

impl Experiment for Forward {
    fn plan(&self) -> Plan {
        let modes: Vec<String> = self.ways.iter().map(Way::to_string).collect();
        let name = format!("router, {NR_FLOWS} flows");
        let cases = self.conditions.iter().map(|condition| CasePlan {
            case: condition.case(&name, &self.conditions),
            modes: modes.clone(),
        });
        let mut notes = notes(self.seconds);
        notes.push(
            "The router's nftables ruleset drops what is not allowed, tracks connections, and \
             knows all flows, which have seen a reply, before anything is measured: the firewall's \
             counters show that every packet passed by the rule for known connections. Routes have \
             no next hop to look up but a permanent neighbour. Packets leave by a veth of one queue, \
             and end at its other end, on the CPU that forwarded them, in an XDP program. No \
             application takes a CPU, and the kernel checks UDP's checksums itself, which hardware \
             would do for an unsteered queue and kernel RPS."
                .to_owned(),
        );
        Plan {
            scenario: "forward",
            question: "How many UDP packets does a router with a firewall forward without loss, and \
                       how many when more come?",
            metrics: metrics(),
            cases: cases.collect(),
            conditions: self.beds[0].0.conditions(&self.conditions),
            notes,
            seconds_each: search_seconds(self.seconds),
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let ((bed, router), way) = (&self.beds[case], self.ways[mode]);
        establish(bed, router)?;
        let frames = Frames::Udp(router.flows(&bed.link.dut, NR_FLOWS));
        let active = bed.start(way)?;
        let before = router.passed()?;
        let (values, all) = search(bed, &active, way, router, &frames, self.seconds)?;
        check(before, router.passed()?, &all)?;
        active.stop()?;
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Unfit;
    use crate::bench::traffic::Counts;

    #[test]
    fn packets_of_connections_that_nobody_knows_are_refused() {
        let traffic = Traffic {
            all: Counts {
                delivered: 9_000,
                ..Default::default()
            },
            dropped: 1_000,
            ..Default::default()
        };
        let check = |established: u64, fresh: u64| {
            let before = Passed {
                established: 5,
                fresh: 5,
            };
            let after = Passed {
                established: 5 + established,
                fresh: 5 + fresh,
            };
            check(before, after, &traffic)
        };
        check(10_000, 0).unwrap();
        check(9_995, 4).unwrap();
        for (established, fresh) in [(9_900, 0), (10_100, 0), (10_000, 100), (0, 10_000)] {
            let refused = check(established, fresh);
            assert!(refused.is_err_and(|error| error.is::<Unfit>()));
        }
    }
}
