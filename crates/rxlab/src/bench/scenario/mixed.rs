// SPDX-License-Identifier: MIT OR Apache-2.0
//! `mixed`: TCP connections in bulk beside small UDP packets at a rate, in one queue.
//!
//! The two want different hops: frames for the datagrams, merged packets for the connections
//! (docs/policy.md).

use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;
use indexmap::IndexMap;

use super::flood::{Application, Sockets};
use crate::bench::experiment::{
    CasePlan, Condition, Effort, Experiment, Gro, Napi, Plan, Values, detail, headline,
};
use crate::bench::report::document::Better;
use crate::bench::setup::mode::{Mode, Way};
use crate::bench::setup::streams::Streams;
use crate::bench::setup::testbed::Testbed;
use crate::bench::setup::traffic::{Destination, SETTLING};
use crate::bench::setup::watch::Seen;
use crate::lab::generator::{Generator, GeneratorConfig};
use crate::lab::stream::Consumer;

/// Number of the connections.
const CONNECTIONS: u32 = 4;

/// Datagrams per second: a few, and as much work as the connections.
const RATES: [u64; 2] = [100_000, 300_000];

/// See the module's documentation.
pub struct Mixed {
    conditions: Vec<Condition>,
    testbeds: Vec<Testbed>,
    ways: Vec<Way>,
    seconds: f64,
}

impl Mixed {
    /// Prepares the lab.
    ///
    /// # Errors
    /// The host does not allow it, or has a single CPU.
    pub fn new(effort: &Effort) -> Result<Self> {
        use Mode::{KernelRfs, KernelRps, None, Rxsteer, RxsteerRfs, RxsteerSoftirq};
        let conditions = effort.conditions(&[Napi::Interrupt], &[Gro::On]);
        let testbeds = Testbed::each(&conditions)?;
        let modes = [
            None,
            KernelRps,
            KernelRfs,
            RxsteerRfs,
            Rxsteer,
            RxsteerSoftirq,
        ];
        Ok(Self {
            ways: testbeds[0].masks().ways(&modes),
            conditions,
            testbeds,
            seconds: effort.seconds,
        })
    }

    /// Testbed and rate of a case.
    fn get(&self, case: usize) -> (&Testbed, u64) {
        (
            &self.testbeds[case / RATES.len()],
            RATES[case % RATES.len()],
        )
    }
}

impl Experiment for Mixed {
    fn plan(&self) -> Plan {
        use Better::{Higher, Neither};
        let cases = self.conditions.iter().flat_map(|condition| {
            RATES.iter().map(|rate| {
                let name = format!("{CONNECTIONS} connections, {rate} datagrams/s");
                CasePlan {
                    case: condition.case(&name, &self.conditions),
                    modes: self.ways.iter().map(Way::to_string).collect(),
                }
            })
        });
        Plan {
            scenario: "mixed",
            question: "What do bulk TCP connections and small datagrams get from one queue?",
            metrics: IndexMap::from([
                headline("mbit_per_s", "Throughput of TCP", "Mbit/s", Higher),
                headline("datagrams_pps", "Datagrams delivered", "packets/s", Higher),
                detail("cpu_percent", "CPU, of all CPUs", "%", Neither),
            ]),
            cases: cases.collect(),
            conditions: self.testbeds[0].conditions(&self.conditions),
            notes: vec![
                "The datagrams go to 64 connected sockets. With two or more CPUs for generators, the last \
                 one sends the datagrams, and the others send on the connections, which may be their \
                 limit; otherwise all share a CPU, and the datagrams wait for room in the ring."
                    .to_owned(),
            ],
            seconds_each: SETTLING.as_secs_f64() + self.seconds + 0.5,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let (testbed, rate) = self.get(case);
        let way = self.ways[mode];
        let active = testbed.start(way)?;
        let application = Application::start(testbed, Sockets::Connected)?;
        let sample = Sample::take(testbed, &application, rate, self.seconds);
        // Stop also after an error: the next measurement binds the same address.
        application.stop()?;
        let Sample { values, seen } = sample?;
        testbed.verify(
            &active,
            way,
            &seen,
            CONNECTIONS + Sockets::Connected.nr_flows(),
        )?;
        active.stop()?;
        Ok(values)
    }
}

/// Result of one measurement.
struct Sample {
    values: Values,
    seen: Seen,
}

impl Sample {
    fn take(testbed: &Testbed, to: &Application, rate: u64, seconds: f64) -> Result<Self> {
        let cpus = testbed.senders();
        let (datagrams, connections) = match &cpus[..] {
            [connections @ .., last] if !connections.is_empty() => (*last, connections),
            _ => (cpus[0], &cpus[..]),
        };
        let streams = Streams::start(testbed, CONNECTIONS, Consumer::Blocks, None, connections)?;
        let shared = connections.contains(&datagrams);
        let config = GeneratorConfig {
            lossless: shared,
            ..GeneratorConfig::flood(testbed.frames(&Sockets::Connected.flows(testbed))).at(rate)
        };
        let generator = match shared {
            true => Generator::start(&testbed.link, datagrams, &config)?,
            false => Generator::apart(&testbed.link, &[datagrams].into_iter().collect(), &config)?,
        };
        sleep(SETTLING);
        let watch = testbed.watch()?;
        let (bytes, received) = (streams.taken(), to.received());
        sleep(Duration::from_secs_f64(seconds));
        let bytes = streams.taken().since(bytes).bytes;
        let received = to.received() - received;
        let seen = watch.end()?;
        generator.stop()?;
        streams.stop()?;
        let values = vec![
            ("mbit_per_s", bytes as f64 * 8.0 / 1e6 / seen.seconds),
            ("datagrams_pps", received as f64 / seen.seconds),
            ("cpu_percent", 100.0 * seen.busy_share),
        ];
        Ok(Self { values, seen })
    }
}
