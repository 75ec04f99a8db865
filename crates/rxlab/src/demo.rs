// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxlab demo`: the main job on real packets, before and after, for a person to see.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use anyhow::Result;
use rxsteer::cli::table::table;
use serde::Serialize;

use crate::bench::experiment::{Condition, Gro, Napi};
use crate::bench::scenario::flood::{Sample, Sockets, measure};
use crate::bench::setup::mode::{Cpus, Mode, Way};
use crate::bench::setup::testbed::{INTERRUPT_CPU, Testbed};
use crate::bench::setup::watch::STEAL;

/// Each mode's turns, interleaved: the machine has other things to do too.
const ROUNDS: usize = 3;

/// Of one turn.
const WINDOW_SECONDS: f64 = 1.5;

/// Spread over CPUs by the flow's hash; in this order, in every round.
const SPREAD: [Mode; 3] = [Mode::None, Mode::KernelRps, Mode::RxsteerRps];

/// The same over all CPUs, where rxsteer by default looks at which of them has time.
const ADAPT: [Mode; 3] = [Mode::None, Mode::KernelRps, Mode::Rxsteer];

/// To the application's CPU.
const FOLLOW: [Mode; 3] = [Mode::None, Mode::KernelRfs, Mode::Rxsteer];

/// Packets per second in one mode: the turn with the median of what was delivered.
#[derive(Debug, Serialize)]
pub struct Row {
    /// Its name, as in `rxlab bench`.
    pub mode: String,
    /// Packets per second that the device took.
    pub accepted_pps: f64,
    /// Packets per second that the application got.
    pub delivered_pps: f64,
    /// Packets per second that got lost between the two.
    pub dropped_pps: f64,
    /// Of the packets that the network stack processed, each CPU's share, by CPU number.
    pub cpu_share: BTreeMap<u32, f64>,
}

/// The modes over the same CPUs.
#[derive(Debug, Serialize)]
pub struct Case {
    /// The CPUs that may process packets, in both steering modes; where flows follow the application,
    /// those that have none.
    pub rps_cpus: String,
    /// Flows follow the application, which has a connected socket for each.
    pub follow: bool,
    /// UDP flows.
    pub flows: u32,
    /// One per mode.
    pub rows: Vec<Row>,
}

/// What the demo found.
#[derive(Debug, Serialize)]
pub struct Demo {
    /// The CPU whose NAPI polls the only receive queue.
    pub interrupt_cpu: u32,
    /// One per mask that the kernel's documentation recommends, all CPUs, all but the interrupt's; and
    /// one for flows that follow the application.
    pub cases: Vec<Case>,
    /// Of all CPUs' time, what the hypervisor took for others, in the turn where that was most.
    pub steal_share: f64,
}

/// Runs it. `progress` is told what runs now, and how many turns there are.
///
/// # Errors
/// When the host does not allow the lab, or a turn did not measure what it claims.
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
                    let sample = measure(&testbed, way, sockets, WINDOW_SECONDS)?;
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
            // What was under way when the wire stopped is not lost.
            dropped_pps: accepted_pps * traffic.loss(),
            cpu_share: by_cpu.iter().map(|(&cpu, &n)| (cpu, share(n))).collect(),
        }
    }
}

impl Demo {
    /// The tables, with what it takes to read them; ends with a newline.
    pub fn render(&self) -> String {
        let mut out = String::new();
        let _ = writeln!(
            out,
            "One receive queue, polled on CPU {}; UDP flows, as fast as they can be made;\n\
             an application elsewhere. Packets per second, medians of {ROUNDS} turns.",
            self.interrupt_cpu
        );
        for case in &self.cases {
            let how = match case.follow {
                true => "following the application, a connected socket each".to_owned(),
                false => format!("spread over CPUs {} by their hash", case.rps_cpus),
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
        let header: Vec<&str> = header.iter().map(String::as_str).collect();
        let mut table = table(&header);
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
