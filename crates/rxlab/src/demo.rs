// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxlab demo`: one UDP flood without steering, with the kernel's steering and with rxsteer.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use anyhow::Result;
use rxsteer::cli::table::table;
use serde::Serialize;

use crate::bench::experiment::{Condition, Gro, Napi, Unfit};
use crate::bench::scenario::flood::{Sample, Sockets, measure};
use crate::bench::setup::mode::{Cpus, Mode, Way};
use crate::bench::setup::testbed::{INTERRUPT_CPU, Testbed};
use crate::bench::setup::watch::STEAL;

/// Rounds. Modes are interleaved within a round, since the load of the machine varies.
const ROUNDS: usize = 3;

/// Length of one measurement, s.
const WINDOW_SECONDS: f64 = 1.5;

/// Attempts for a measurement. On a busy machine, threads of the lab may not run in time.
const TRIES: u32 = 5;

/// Flows spread over CPUs by hash, in the order of a round.
const SPREAD: [Mode; 3] = [Mode::None, Mode::KernelRps, Mode::RxsteerRps];

/// The same over all CPUs; rxsteer by default considers the load of the CPUs.
const ADAPT: [Mode; 3] = [Mode::None, Mode::KernelRps, Mode::Rxsteer];

/// Flows follow their application.
const FOLLOW: [Mode; 3] = [Mode::None, Mode::KernelRfs, Mode::Rxsteer];

/// One mode: the round with the median number of delivered packets.
#[derive(Debug, Serialize)]
pub struct Row {
    /// The mode's name, as in `rxlab bench`.
    pub mode: String,
    /// Packets per second that the device accepted.
    pub accepted_pps: f64,
    /// Packets per second that the application received.
    pub delivered_pps: f64,
    /// Packets per second that were accepted and then lost.
    pub dropped_pps: f64,
    /// Each CPU's share of the packets that the network stack processed, 0 to 1, by CPU number.
    pub cpu_share: BTreeMap<u32, f64>,
}

/// Modes that are compared over the same CPUs.
#[derive(Debug, Serialize)]
pub struct Case {
    /// CPUs that may process packets in the steering modes; with `follow`, those for flows without
    /// an application.
    pub rps_cpus: String,
    /// Flows follow the application, which has a connected socket per flow.
    pub follow: bool,
    /// Number of UDP flows.
    pub flows: u32,
    pub rows: Vec<Row>,
}

/// Result of the demo.
#[derive(Debug, Serialize)]
pub struct Demo {
    /// The CPU that polls the only receive queue.
    pub interrupt_cpu: u32,
    /// One case per mask that the kernel's documentation recommends (all CPUs, all but the
    /// interrupt's) and one for flows that follow the application.
    pub cases: Vec<Case>,
    /// Largest share of all CPUs' time that the hypervisor took during a measurement, 0 to 1.
    pub steal_share: f64,
}

/// Runs the demo. `progress` is called before each measurement with the mode and the number of all
/// measurements.
///
/// # Errors
/// When the host does not allow the lab, or a measurement did not measure what it claims.
pub fn demo(progress: &dyn Fn(&str, u64)) -> Result<Demo> {
    let testbed = Testbed::new(Condition {
        napi: Napi::Thread,
        gro: Gro::On,
    })?;
    let cases = [
        (Cpus::Others, Sockets::Server, SPREAD),
        (Cpus::All, Sockets::Server, ADAPT),
        (Cpus::All, Sockets::Connected, FOLLOW),
    ];
    let mut steal_share = 0f64;
    let total = (cases.len() * ROUNDS * SPREAD.len()) as u64;
    let cases = cases
        .into_iter()
        .map(|(cpus, sockets, modes)| {
            let mut samples = modes.map(|_| Vec::new());
            for _ in 0..ROUNDS {
                for (mode, samples) in modes.iter().zip(&mut samples) {
                    let way = Way { mode: *mode, cpus };
                    progress(&way.to_string(), total);
                    let sample = fit(way, || measure(&testbed, way, sockets, WINDOW_SECONDS))?;
                    steal_share = steal_share.max(sample.seen.steal_share);
                    samples.push(sample);
                }
            }
            let rows = modes.iter().zip(samples).map(|(mode, mut samples)| {
                samples.sort_by_key(|s: &Sample| s.traffic.meanwhile.delivered);
                Row::new(*mode, &samples[ROUNDS / 2])
            });
            Ok(Case {
                rps_cpus: match cpus {
                    Cpus::Others => testbed.masks().others.to_string(),
                    _ => testbed.masks().all.to_string(),
                },
                follow: sockets == Sockets::Connected,
                flows: sockets.nr_flows(),
                rows: rows.collect(),
            })
        })
        .collect::<Result<_>>()?;
    Ok(Demo {
        interrupt_cpu: INTERRUPT_CPU,
        cases,
        steal_share,
    })
}

/// Measures until a measurement is valid, at most [`TRIES`] times.
fn fit(way: Way, mut measure: impl FnMut() -> Result<Sample>) -> Result<Sample> {
    let mut tries = 1..TRIES;
    loop {
        match measure() {
            Err(e) if e.is::<Unfit>() && tries.next().is_some() => {}
            Err(e) if e.is::<Unfit>() => {
                return Err(e.context(format!(
                    "{way}: none of {TRIES} measurements was valid, which other load on this \
                     machine explains: run the demo again while it is idle. The last one"
                )));
            }
            measured => return measured,
        }
    }
}

impl Row {
    fn new(mode: Mode, sample: &Sample) -> Self {
        let traffic = &sample.traffic;
        let (accepted_pps, delivered_pps) = (traffic.accepted_pps(), traffic.delivered_pps());
        let by_cpu = sample.seen.processed();
        let processed: u64 = by_cpu.values().sum();
        let share = |n: u64| {
            if processed == 0 {
                0.0
            } else {
                n as f64 / processed as f64
            }
        };
        Self {
            mode: mode.to_string(),
            accepted_pps,
            delivered_pps,
            // Packets under way when the generator stopped are not lost.
            dropped_pps: accepted_pps * traffic.loss(),
            cpu_share: by_cpu.iter().map(|(&cpu, &n)| (cpu, share(n))).collect(),
        }
    }
}

impl Demo {
    /// The tables and their legend; ends with a newline.
    pub fn render(&self) -> String {
        let mut out = String::new();
        let _ = writeln!(
            out,
            "One receive queue, polled on CPU {}; UDP flows, as fast as they can be made;\n\
             an application elsewhere. Packets per second, medians of {ROUNDS} rounds.",
            self.interrupt_cpu
        );
        for case in &self.cases {
            let how = match case.follow {
                true => "following the application, a connected socket each".to_owned(),
                false => match case.rps_cpus.parse::<u32>() {
                    Ok(cpu) => format!("spread over CPU {cpu} alone"),
                    Err(_) => format!("spread over CPUs {} by their hash", case.rps_cpus),
                },
            };
            let _ = writeln!(out, "\n{} flows, {how}", case.flows);
            let _ = writeln!(out, "{}", case.table());
        }
        let _ = writeln!(
            out,
            "\n\
             accepted:  taken from the wire\n\
             delivered: read by the application\n\
             dropped:   accepted, and lost on the way to the application\n\
             CPU n:     its share of the packets that the network stack processed"
        );
        let _ = writeln!(
            out,
            "\n\
             With the same CPUs rxsteer delivered {} times as many packets as the kernel's steering,\n\
             and {} times as many as no steering.",
            self.delivered_over(1),
            self.delivered_over(0)
        );
        if self.steal_share >= STEAL {
            let _ = writeln!(
                out,
                "\n\
                 This machine was disturbed: its hypervisor took up to {:.0} % of the CPUs' time for\n\
                 others. Another time the figures may be different ones.",
                100.0 * self.steal_share
            );
        }
        out
    }
}

impl Demo {
    /// How many times as many packets rxsteer delivered as the mode at this place of each case:
    /// from the lowest to the highest ratio.
    fn delivered_over(&self, place: usize) -> String {
        let ratios = self.cases.iter().filter_map(|case| {
            let delivered = case.rows.last()?.delivered_pps;
            Some(delivered / case.rows.get(place)?.delivered_pps)
        });
        let ratios: Vec<f64> = ratios.filter(|ratio| ratio.is_finite()).collect();
        let lowest = ratios.iter().copied().reduce(f64::min).unwrap_or(f64::NAN);
        let highest = ratios.iter().copied().reduce(f64::max).unwrap_or(f64::NAN);
        format!("{lowest:.1} to {highest:.1}")
    }
}

impl Case {
    fn table(&self) -> String {
        let cpus: BTreeSet<u32> = self
            .rows
            .iter()
            .flat_map(|r| r.cpu_share.keys().copied())
            .collect();
        let mut header = ["", "accepted", "delivered", "dropped"]
            .map(String::from)
            .to_vec();
        header.extend(cpus.iter().map(|cpu| format!("CPU {cpu}")));
        let mut table = table(header);
        for row in &self.rows {
            let mut cells = vec![row.mode.clone()];
            cells.extend(
                [row.accepted_pps, row.delivered_pps, row.dropped_pps].map(|n| format!("{n:.0}")),
            );
            cells.extend(cpus.iter().map(|cpu| {
                let share = row.cpu_share.get(cpu).copied().unwrap_or_default();
                format!("{:.0} %", 100.0 * share)
            }));
            table.add_row(cells);
        }
        table.trim_fmt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_measurement_is_repeated_and_other_errors_are_not() {
        let way = Way::by_default(Mode::None);
        let run = |nr_unfit: u32, then: fn() -> Result<Sample>| {
            let mut calls = 0;
            let result = fit(way, || {
                calls += 1;
                match calls <= nr_unfit {
                    true => Err(Unfit("the generator did not run".to_owned()).into()),
                    false => then(),
                }
            });
            (result, calls)
        };
        let (result, calls) = run(TRIES - 1, || Ok(Sample::default()));
        assert!(result.is_ok() && calls == TRIES);
        let (result, calls) = run(TRIES, || Ok(Sample::default()));
        let why = format!("{:#}", result.unwrap_err());
        assert!(
            why.starts_with("none: none of 5 ") && why.ends_with("did not run"),
            "{why}"
        );
        assert_eq!(calls, TRIES);
        let (result, calls) = run(0, || anyhow::bail!("no namespace"));
        assert!(result.is_err() && calls == 1);
    }

    #[test]
    fn the_last_sentence_says_what_the_tables_show() {
        let row = |mode: &str, delivered_pps| Row {
            mode: mode.to_owned(),
            accepted_pps: delivered_pps,
            delivered_pps,
            dropped_pps: 0.0,
            cpu_share: BTreeMap::new(),
        };
        let case = |cpus: &str, kernel, ours| Case {
            rps_cpus: cpus.to_owned(),
            follow: false,
            flows: 4096,
            rows: vec![
                row("none", 100.0),
                row("kernel-rps", kernel),
                row("rxsteer", ours),
            ],
        };
        let demo = Demo {
            interrupt_cpu: 0,
            cases: vec![case("1", 20.0, 60.0), case("0-1", 80.0, 90.0)],
            steal_share: 0.0,
        };
        let text = demo.render();
        for words in [
            "4096 flows, spread over CPU 1 alone\n",
            "4096 flows, spread over CPUs 0-1 by their hash\n",
            "rxsteer delivered 1.1 to 3.0 times as many packets as the kernel's steering,\n",
            "and 0.6 to 0.9 times as many as no steering.\n",
        ] {
            assert!(text.contains(words), "not {words:?} in\n{text}");
        }
    }
}
