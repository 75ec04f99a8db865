// SPDX-License-Identifier: MIT OR Apache-2.0
//! `lossfree`: the highest rate without loss, and delivery above it.
//!
//! A search ([`Throughput`]) runs while one mode is switched on. A trial takes 60 s in RFC 2544,
//! and a fraction of a second here.

use anyhow::Result;
use indexmap::IndexMap;

use crate::bench::experiment::{
    Effort, Experiment, Plan, Values, detail, fit, flow_limit_drops, headline,
};
use crate::bench::report::document::{Better, Metric};
use crate::bench::scenario::flood::{Application, Labs, Sockets};
use crate::bench::setup::mode::{Active, Mode, Way};
use crate::bench::setup::testbed::Testbed;
use crate::bench::setup::throughput::{FLOOR, LOSSFREE, Throughput, Trial};
use crate::bench::setup::traffic::{Destination, SETTLING, Traffic, check};
use crate::lab::frame::Frames;

/// Divides the length of a measurement into trials; a search takes about six.
const TRIALS: f64 = 5.0;

/// The shortest trial, s.
const SHORTEST: f64 = 0.1;

/// Trials per search, and seconds to start and stop each: for the estimate.
const TRIALS_EACH: f64 = 6.0;
const OVERHEAD: f64 = 0.05;

/// Rate at which the receiving CPU's time is measured, packets/s. At low rates, the wake-ups of a
/// thread that sleeps between bursts would dominate.
const STEADY: u64 = 200_000;

/// Length of a trial, s.
fn trial_seconds(seconds: f64) -> f64 {
    (seconds / TRIALS).max(SHORTEST)
}

/// Estimated duration of a search, s.
pub(super) fn search_seconds(seconds: f64) -> f64 {
    TRIALS_EACH * (SETTLING.as_secs_f64() + trial_seconds(seconds) + OVERHEAD)
}

/// Metrics of a search.
pub(super) fn metrics() -> IndexMap<String, Metric> {
    use Better::{Higher, Lower, Neither};
    let pps = "packets/s";
    IndexMap::from([
        headline("lossfree_pps", "Highest rate without loss", pps, Higher),
        headline(
            "delivered_at_2x_pps",
            "Delivered at twice that rate",
            pps,
            Higher,
        ),
        headline(
            "delivered_at_most_pps",
            "Delivered at the most that can be offered",
            pps,
            Higher,
        ),
        detail("offered_at_2x_pps", "Offered for the second", pps, Neither),
        detail("offered_at_most_pps", "Offered for the third", pps, Neither),
        detail(
            "generator_bound",
            "The generator offers no more than the first (1)",
            "1",
            Neither,
        ),
        detail(
            "rx_cpu_ns_per_packet",
            "Time of the thread that polls the queue",
            "ns/packet",
            Lower,
        ),
        flow_limit_drops("packets"),
    ])
}

/// Remarks for the reader of these figures.
pub(super) fn notes(seconds: f64) -> Vec<String> {
    vec![
        format!(
            "Without loss: less than {:.1} % of the packets that were offered did not arrive. Found \
             by growing steps from what is delivered of a flood, down to {FLOOR:.0} packets/s, and \
             then by bisection, to 5 %. A trial \
             lasts {:.2} s, not the 60 s of RFC 2544, after {:.1} s at the same rate in which nothing is \
             counted, so that flows find their CPUs: what queues can hold does not count as lost, which makes the rate of a short \
             trial up to a few per cent too high. kernel RPS and rxsteer hold \
             net.core.netdev_max_backlog packets per CPU, the naive cpumap 2048, a socket some 1900. \
             A trial that lost less than 1 % is repeated once: a wake-up that comes late costs packets \
             at any rate.",
            100.0 * LOSSFREE,
            trial_seconds(seconds),
            SETTLING.as_secs_f64(),
        ),
        "Generators with CPUs of their own send at their rate whatever becomes of it: what finds the \
         device's ring of 256 frames full is lost, and where they could not offer more than was carried \
         there is no figure. A generator that shares the CPU that polls the queue is another matter. At \
         a rate it sends bursts of 500 us, and \
         waits while the device's ring has no room: when that CPU has no more time, the generator goes \
         without, and nothing is lost. As fast as it can, it does not wait; what finds the ring full, \
         because it holds the CPU itself, does not count as offered. generator_bound is 1 where no rate \
         could be offered between the highest one without loss and one with loss: the device carries at \
         least that, and would more from a generator elsewhere. For modes that process packets on that \
         CPU, such as none, this is the rule; rx_cpu_ns_per_packet tells how much of the CPU was not the \
         generator's. A rate of which it could offer less than half, though it had offered that much as \
         fast as it can, gives no figure: something foreign had the CPU."
            .to_owned(),
        "Twice the rate, and the most: counted is what arrives while the generator runs, without \
         what lies in queues when it stops. Where twice the rate is more than the generator offers, \
         the figures are those at the most that it does; offered_at_2x_pps has what was offered."
            .to_owned(),
        format!(
            "rx_cpu_ns_per_packet: time of the thread that polls the queue, with the softirqs that \
             run in it, per packet at {STEADY} packets/s; not measured where the \
             queue is polled in softirq, or where that rate loses packets. What other CPUs, and other \
             threads of that CPU, spend on a packet that was moved there is not in it."
        ),
    ]
}

/// Searches under a way to steer, which must be switched on before any packet is sent.
///
/// # Errors
/// When the lab failed; [`Unfit`](crate::bench::experiment::Unfit) when the way had no effect, or
/// packets are unaccounted for or lost at any rate.
pub(super) fn search(
    testbed: &Testbed,
    active: &Active<'_>,
    way: Way,
    destination: &dyn Destination,
    frames: &Frames,
    seconds: f64,
) -> Result<(Values, Traffic)> {
    let length = trial_seconds(seconds);
    let mut all = Traffic::default();
    let mut send = |rate| -> Result<Traffic> {
        let traffic = Traffic::send(testbed, destination, frames, rate, length)?;
        all += &traffic;
        Ok(traffic)
    };
    let watch = testbed.watch()?;
    let found = Throughput::find(|rate| send(rate).map(|traffic| Trial::from(&traffic)))?;
    let steady = (found.lossfree > STEADY as f64).then(|| send(Some(STEADY)));
    let steady = steady.transpose()?;
    let seen = watch.end()?;
    check(testbed, active, way, &all, &seen)?;
    fit!(
        !(testbed.masks().apart() && found.generator_bound),
        "the generators were the limit: they offered {:.0} packets/s at most, and without loss {:.0}",
        found.at_most.offered,
        found.lossfree
    );

    let mut values = vec![
        ("lossfree_pps", found.lossfree),
        ("delivered_at_2x_pps", found.at_twice.delivered),
        ("delivered_at_most_pps", found.at_most.delivered),
        ("offered_at_2x_pps", found.at_twice.offered),
        ("offered_at_most_pps", found.at_most.offered),
        (
            "generator_bound",
            f64::from(u8::from(found.generator_bound)),
        ),
    ];
    if let Some((ns, frames)) = steady.and_then(|s| s.rx_cpu_ns.map(|ns| (ns, s.settled.accepted)))
    {
        values.push(("rx_cpu_ns_per_packet", ns as f64 / frames as f64));
    }
    if way.mode.is_kernels() {
        values.push(("flow_limit_drops", seen.flow_limit() as f64));
    }
    Ok((values, all))
}

impl From<&Traffic> for Trial {
    fn from(traffic: &Traffic) -> Self {
        Self {
            offered: traffic.offered_pps(),
            delivered: traffic.delivered_pps(),
            loss: traffic.loss(),
        }
    }
}

/// Cases: one socket; connected sockets, with kernel RFS.
pub struct Lossfree {
    labs: Labs,
    seconds: f64,
}

impl Lossfree {
    /// Prepares the lab.
    ///
    /// # Errors
    /// The host does not allow it, or has a single CPU.
    pub fn new(effort: &Effort) -> Result<Self> {
        use Mode::{Cpumap, KernelRfs, KernelRps, None, Rxsteer};
        let cases = [
            (Sockets::Server, &[None, KernelRps, Cpumap, Rxsteer][..]),
            (Sockets::Connected, &[None, KernelRfs, Cpumap, Rxsteer]),
        ];
        Ok(Self {
            labs: Labs::new(effort, &cases)?,
            seconds: effort.seconds,
        })
    }
}

impl Experiment for Lossfree {
    fn plan(&self) -> Plan {
        Plan {
            scenario: "lossfree",
            question: "How many UDP packets reach an application without loss, and how many when \
                       more come?",
            metrics: metrics(),
            cases: self.labs.cases(),
            conditions: self.labs.conditions(),
            notes: notes(self.seconds),
            seconds_each: search_seconds(self.seconds),
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let (testbed, to, way) = self.labs.get(case, mode);
        let active = testbed.start(way)?;
        let application = Application::start(testbed, to)?;
        let frames = testbed.frames(&to.flows(testbed));
        let found = search(testbed, &active, way, &application, &frames, self.seconds);
        // Stop also after an error: the next measurement binds the same address.
        application.stop()?;
        let (values, _) = found?;
        active.stop()?;
        Ok(values)
    }
}
