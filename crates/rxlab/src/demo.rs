// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxlab demo`: UDP floods to an application and through a firewall, without steering, with the
//! kernel's steering and with rxsteer.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;
use rxsteer::cli::table::table;
use rxsteer::host::cpumask::CpuMask;
use serde::Serialize;

use crate::bench::experiment::{Condition, DeviceKind, Gro, Napi, Unfit};
use crate::bench::scenario::flood::{self, NR_FLOWS, Sample, Sockets};
use crate::bench::scenario::forward;
use crate::bench::setup::mode::{Cpus, Mode, Way};
use crate::bench::setup::router::{NR_BLOCKED, Router, Ruleset};
use crate::bench::setup::testbed::{Masks, Testbed};
use crate::bench::setup::traffic::Counts;
use crate::bench::setup::watch::STEAL;

/// Rounds. Modes are interleaved within a round, since the load of the machine varies.
const ROUNDS: usize = 3;

/// Attempts for a measurement. On a busy machine, threads of the lab may not run in time.
const TRIES: u32 = 5;

/// Time before each measurement in which the lab rests, so that what is busy are other programs.
const REST: Duration = Duration::from_millis(100);

/// Mean share of all CPUs' time that other programs may take.
const OTHERS: f64 = 0.1;

/// A mode delivers most if it delivers this share of the maximum: medians of three rounds are no
/// more exact.
const MOST: f64 = 0.95;

const CONDITION: Condition = Condition {
    napi: Napi::Thread,
    gro: Gro::On,
    device: DeviceKind::Nic,
};

/// The floods: sockets, and the kernel's steering for them.
const FLOODS: [(Sockets, Mode); 2] = [
    (Sockets::Reuseport, Mode::KernelRps),
    (Sockets::Connected, Mode::KernelRfs),
];

/// One mode: the round with the median number of delivered packets.
#[derive(Debug, Serialize)]
pub struct Row {
    /// The mode's name, as in `rxlab bench`.
    pub mode: String,
    /// Packets per second that the device accepted.
    pub accepted_pps: f64,
    /// Packets per second that the application, or the host behind the firewall, received.
    pub delivered_pps: f64,
    /// Packets per second that were accepted and then lost.
    pub dropped_pps: f64,
    /// Each CPU's share of the packets that the network stack processed, 0 to 1, by CPU number.
    pub cpu_share: BTreeMap<u32, f64>,
}

/// Modes that are compared under the same traffic.
#[derive(Debug, Serialize)]
pub struct Case {
    /// The traffic, in words.
    pub traffic: String,
    /// No steering, the kernel's, and rxsteer.
    pub rows: [Row; 3],
}

/// Tasks of the CPUs.
#[derive(Debug, Serialize)]
pub struct Roles {
    /// Poll the only receive queue.
    pub polling: CpuMask,
    /// Generate the traffic.
    pub generators: CpuMask,
    /// Run the applications.
    pub applications: CpuMask,
    /// The mask of kernel RPS and RFS.
    pub kernel: CpuMask,
    /// The default mask of rxsteer.
    pub rxsteer: CpuMask,
}

/// Result of the demo.
#[derive(Debug, Serialize)]
pub struct Demo {
    pub cpus: Roles,
    /// Floods to an application.
    pub floods: Vec<Case>,
    /// A flood through a firewall.
    pub firewall: Option<Case>,
    /// Why there is no firewall.
    pub no_firewall: Option<String>,
    /// Largest share of all CPUs' time that the hypervisor took during a measurement, 0 to 1.
    pub steal_share: f64,
    /// Mean share of all CPUs' time that other programs took before the measurements, 0 to 1.
    pub others_share: f64,
}

/// Runs the demo with measurements of `seconds`. `progress` is called before each measurement with
/// the mode and the number of all measurements.
///
/// # Errors
/// When the host does not allow the lab, or a measurement did not measure what it claims.
pub fn demo(seconds: f64, progress: &dyn Fn(&str, u64)) -> Result<Demo> {
    let [testbed, routed] = [Testbed::new(CONDITION)?, Testbed::new(CONDITION)?];
    let (router, no_firewall) = match Router::new(&routed.link.dut, Ruleset::Blocklist) {
        Ok(router) => (Some(router), None),
        Err(why) if why.is::<Unfit>() => (None, Some(why.to_string())),
        Err(e) => return Err(e),
    };
    let masks = testbed.masks();
    let nr_cases = FLOODS.len() + usize::from(router.is_some());
    let mut rounds = Rounds {
        kernel: kernel_cpus(masks),
        progress: &|way| progress(&way.to_string(), (nr_cases * ROUNDS * 3) as u64),
        others_share: &|| {
            let watch = testbed.watch()?;
            sleep(REST);
            Ok(watch.end()?.busy_share)
        },
        steal_share: 0.0,
        others: Vec::new(),
    };
    let floods = FLOODS.map(|(to, kernel)| {
        rounds.compare(format!("Flood: {to}"), kernel, |way| {
            flood::measure(&testbed, way, to, seconds)
        })
    });
    let firewall = router.map(|router| {
        let traffic = format!("Firewall: a router with {NR_BLOCKED} rules, {NR_FLOWS} flows");
        rounds.compare(traffic, Mode::KernelRps, |way| {
            forward::measure(&routed, &router, way, seconds)
        })
    });
    Ok(Demo {
        cpus: Roles::of(masks),
        floods: floods.into_iter().collect::<Result<_>>()?,
        firewall: firewall.transpose()?,
        no_firewall,
        steal_share: rounds.steal_share,
        others_share: rounds.others.iter().sum::<f64>() / rounds.others.len() as f64,
    })
}

/// The better one of the two masks that the kernel's documentation recommends
/// (networking/scaling.rst): without the polling CPU, if others have time for all packets. With two
/// CPUs only the application's would be left.
fn kernel_cpus(masks: &Masks) -> Cpus {
    match masks.apart() {
        true => Cpus::Others,
        false => Cpus::All,
    }
}

impl Roles {
    fn of(masks: &Masks) -> Self {
        Self {
            polling: masks.polling.clone(),
            generators: match masks.apart() {
                true => masks.generators.clone(),
                false => masks.polling.clone(),
            },
            applications: masks.others.clone(),
            kernel: match kernel_cpus(masks) {
                Cpus::Others => masks.others.clone(),
                _ => masks.all.clone(),
            },
            rxsteer: masks.auto.clone(),
        }
    }
}

/// The measurements of all cases.
struct Rounds<'a> {
    /// CPUs of the kernel's modes.
    kernel: Cpus,
    /// Called before each measurement.
    progress: &'a dyn Fn(Way),
    /// Measures the share of other programs, while the lab rests.
    others_share: &'a dyn Fn() -> Result<f64>,
    /// Largest share so far.
    steal_share: f64,
    /// Shares of other programs so far.
    others: Vec<f64>,
}

impl Rounds<'_> {
    /// Measures no steering, the kernel's steering `kernel`, and rxsteer.
    fn compare(
        &mut self,
        traffic: String,
        kernel: Mode,
        measure: impl Fn(Way) -> Result<Sample>,
    ) -> Result<Case> {
        let kernel = Way {
            mode: kernel,
            cpus: self.kernel,
        };
        let ways = [
            Way::by_default(Mode::None),
            kernel,
            Way::by_default(Mode::Rxsteer),
        ];
        let mut measured = ways.map(|way| (way, Vec::new()));
        for _ in 0..ROUNDS {
            for (way, samples) in &mut measured {
                (self.progress)(*way);
                self.others.push((self.others_share)()?);
                let sample = fit(*way, || measure(*way))?;
                self.steal_share = self.steal_share.max(sample.seen.steal_share);
                samples.push(sample);
            }
        }
        let rows = measured.map(|(way, mut samples)| {
            samples.sort_by_key(|sample| sample.traffic.meanwhile.delivered);
            Row::new(way.mode, &samples[ROUNDS / 2])
        });
        Ok(Case { traffic, rows })
    }
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
        let Counts {
            accepted,
            delivered,
            ..
        } = traffic.settled;
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
            // Packets under way when the generator stopped are not lost. Those that found the
            // device's ring full were not accepted.
            dropped_pps: accepted_pps * (1.0 - delivered as f64 / accepted as f64),
            cpu_share: by_cpu.iter().map(|(&cpu, &n)| (cpu, share(n))).collect(),
        }
    }
}

impl Demo {
    /// The tables and their legend, and a sentence that says what they show; ends with a newline.
    pub fn render(&self) -> String {
        let mut out = self.cpus.render();
        let _ = writeln!(out, "Packets per second, medians of {ROUNDS} rounds.");
        for case in self.floods.iter().chain(&self.firewall) {
            let _ = writeln!(out, "\n{}\n{}", case.traffic, case.table());
        }
        if let Some(why) = &self.no_firewall {
            let _ = writeln!(out, "\nFirewall: not measured. {why}.");
        }
        let _ = writeln!(
            out,
            "\n\
             accepted:  taken from the wire\n\
             delivered: read by the application, or received by the host behind the firewall\n\
             dropped:   accepted, and lost on the way\n\
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
        if self.others_share >= OTHERS {
            let _ = writeln!(
                out,
                "\n\
                 Other programs took {:.0} % of the CPUs' time: the figures tell more about them than\n\
                 about steering. Run the demo again while the machine is idle.",
                100.0 * self.others_share
            );
            return out;
        }
        let _ = writeln!(out, "\n{}", self.conclusion());
        out
    }

    /// What the tables show, in a sentence.
    fn conclusion(&self) -> String {
        let floods = &self.floods[..];
        let mut text = format!(
            "Of the floods rxsteer delivered {} times as many packets as no steering, the kernel's\n\
             steering {} times",
            times(floods, |[none, _, rxsteer]| rxsteer / none),
            times(floods, |[none, kernel, _]| kernel / none)
        );
        if let Some(case) = &self.firewall {
            let firewall = std::slice::from_ref(case);
            let _ = write!(
                text,
                "; through the firewall rxsteer {} times and kernel RPS {} times:\n{}",
                times(firewall, |[none, _, rxsteer]| rxsteer / none),
                times(firewall, |[none, kernel, _]| kernel / none),
                case.most()
            );
        }
        text + "."
    }
}

/// A ratio of delivered packets, from its lowest to its highest value.
fn times(cases: &[Case], ratio: fn([f64; 3]) -> f64) -> String {
    let ratios = cases.iter().map(|case| ratio(case.delivered()));
    let ratios: Vec<f64> = ratios.filter(|ratio| ratio.is_finite()).collect();
    let lowest = ratios.iter().copied().reduce(f64::min).unwrap_or(f64::NAN);
    let highest = ratios.iter().copied().reduce(f64::max).unwrap_or(f64::NAN);
    let [lowest, highest] = [lowest, highest].map(|ratio| format!("{ratio:.1}"));
    match lowest == highest {
        true => lowest,
        false => format!("{lowest} to {highest}"),
    }
}

impl Roles {
    fn render(&self) -> String {
        let cpus = |mask: &CpuMask| match mask.len() {
            1 => format!("CPU {mask}"),
            _ => format!("CPUs {mask}"),
        };
        let generators = match self.generators == self.polling {
            true => ", which also generates the traffic;".to_owned(),
            false => format!("; the traffic is generated on {},", cpus(&self.generators)),
        };
        format!(
            "One receive queue, polled on {}{generators}\nthe application runs on {}.\n\
             Kernel RPS and RFS may use {}, rxsteer {} by default.\n",
            cpus(&self.polling),
            cpus(&self.applications),
            cpus(&self.kernel),
            cpus(&self.rxsteer)
        )
    }
}

impl Case {
    /// Delivered packets per second.
    fn delivered(&self) -> [f64; 3] {
        self.rows.each_ref().map(|row| row.delivered_pps)
    }

    /// Which modes delivered most, in words.
    fn most(&self) -> &str {
        let most = MOST * self.delivered().into_iter().fold(0.0, f64::max);
        match self.delivered().map(|delivered| delivered >= most) {
            [true, ..] => "there steering does not pay",
            [_, true, true] => "there steering pays, with rxsteer as much as with kernel RPS",
            [_, true, _] => "there kernel RPS delivers most",
            _ => "there rxsteer delivers most",
        }
    }

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
    use crate::bench::setup::traffic::Traffic;
    use crate::bench::setup::watch::Seen;

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
    fn packets_that_found_the_ring_full_are_not_dropped_ones() {
        let counts = Counts {
            accepted: 1000,
            refused: 3000,
            delivered: 900,
        };
        let traffic = Traffic {
            settled: counts,
            meanwhile: counts,
            seconds: 1.0,
            apart: true,
            ..Default::default()
        };
        let seen = Seen::default();
        let row = Row::new(Mode::None, &Sample { traffic, seen });
        let pps = [row.accepted_pps, row.delivered_pps, row.dropped_pps];
        assert_eq!(pps.map(f64::round), [1000.0, 900.0, 100.0]);
    }

    fn case(traffic: &str, delivered: [f64; 3]) -> Case {
        let modes = [Mode::None, Mode::KernelRps, Mode::Rxsteer];
        let mut rows = modes.into_iter().zip(delivered);
        Case {
            traffic: traffic.to_owned(),
            rows: [(); 3].map(|()| {
                let (mode, delivered_pps) = rows.next().unwrap();
                Row {
                    mode: mode.to_string(),
                    accepted_pps: delivered_pps,
                    delivered_pps,
                    dropped_pps: 0.0,
                    cpu_share: BTreeMap::new(),
                }
            }),
        }
    }

    fn demo(apart: bool) -> Demo {
        let list = |text: &str| text.parse::<CpuMask>().unwrap();
        let [generators, applications, all] = match apart {
            true => ["6-7", "1-5", "0-5"],
            false => ["0", "1", "0-1"],
        };
        Demo {
            cpus: Roles {
                polling: list("0"),
                generators: list(generators),
                applications: list(applications),
                kernel: list(all),
                rxsteer: list(all),
            },
            floods: vec![
                case("Flood: a", [100.0, 20.0, 120.0]),
                case("Flood: b", [100.0, 90.0, 110.0]),
            ],
            firewall: Some(case("Firewall: c", [100.0, 150.0, 200.0])),
            no_firewall: None,
            steal_share: 0.5,
            others_share: 0.05,
        }
    }

    #[test]
    fn the_last_sentence_says_what_the_tables_show() {
        let mut demo = demo(false);
        let end = "\n\n\
             Of the floods rxsteer delivered 1.1 to 1.2 times as many packets as no steering, the kernel's\n\
             steering 0.2 to 0.9 times; through the firewall rxsteer 2.0 times and kernel RPS 1.5 times:\n\
             there rxsteer delivers most.\n";
        let text = demo.render();
        assert!(text.ends_with(end), "{text}");
        for (delivered, words) in [
            ([100.0, 80.0, 104.0], "there steering does not pay.\n"),
            ([100.0, 140.0, 144.0], "as much as with kernel RPS.\n"),
            ([100.0, 160.0, 110.0], "there kernel RPS delivers most.\n"),
        ] {
            demo.firewall = Some(case("Firewall: c", delivered));
            let text = demo.render();
            assert!(text.ends_with(words), "not {words:?} in\n{text}");
        }
    }

    #[test]
    fn beside_other_programs_the_tables_show_nothing() {
        let demo = Demo {
            others_share: 0.5,
            ..demo(false)
        };
        let text = demo.render();
        assert!(text.contains("\n\nOther programs took 50 % of"), "{text}");
        assert!(!text.contains("Of the floods"), "{text}");
    }

    #[test]
    fn a_firewall_that_was_not_measured_is_named() {
        let mut demo = demo(false);
        demo.firewall = None;
        demo.no_firewall = Some("nft is missing".to_owned());
        let text = demo.render();
        assert!(text.contains("\n\nFirewall: not measured. nft is missing.\n"));
        assert!(text.ends_with("steering 0.2 to 0.9 times.\n"), "{text}");
    }

    #[test]
    fn the_tasks_of_the_cpus_come_first() {
        let shared = "One receive queue, polled on CPU 0, which also generates the traffic;\n\
                      the application runs on CPU 1.\n\
                      Kernel RPS and RFS may use CPUs 0-1, rxsteer CPUs 0-1 by default.\n";
        let apart = "One receive queue, polled on CPU 0; the traffic is generated on CPUs 6-7,\n\
                     the application runs on CPUs 1-5.\n";
        for (text, begin) in [(demo(false).render(), shared), (demo(true).render(), apart)] {
            assert!(text.starts_with(begin), "{text}");
        }
    }
}
