// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxlab bench`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, Subcommand, ValueEnum};
use indicatif::{HumanDuration, ProgressBar, ProgressStyle};
use rxsteer::cli::value::seconds;
use rxsteer::host::number::whole;

use super::lab::needs_lab;
use super::reports::{ColumnsArgs, CompareArgs};
use super::serve::{ServeArgs, peer};
use crate::bench::experiment::{CasePlan, DeviceKind, Effort, Gro, Napi, On, Only, Plan};
use crate::bench::measurement::Measurement;
use crate::bench::report::document::Document;
use crate::bench::report::files;
use crate::bench::report::host::{Stretch, nic};
use crate::bench::scenario::Scenario;
use crate::bench::setup::pace::Pace;

/// Options of `rxlab bench`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct BenchArgs {
    /// Something else than to measure
    #[command(subcommand)]
    pub command: Option<BenchCommand>,

    /// What to measure; without, all of it
    #[arg(value_enum, value_name = "SCENARIO")]
    pub scenarios: Vec<Scenario>,

    /// How often every mode runs, interleaved
    #[arg(long, default_value_t = 5, value_parser = whole(1, u32::MAX, "rounds"))]
    pub rounds: u32,

    /// Length of one measurement; some need less, or several of a part of it
    #[arg(long, value_name = "SECONDS", default_value = "0.5", value_parser = seconds)]
    pub seconds: Duration,

    /// How the queue under test is polled; both: one after the other. Default: as the scenario sees
    /// fit
    #[arg(long, value_enum, value_delimiter = ',')]
    pub napi: Vec<Napi>,

    /// GRO at the device under test. Default: as the scenario sees fit
    #[arg(long, value_enum, value_delimiter = ',')]
    pub gro: Vec<Gro>,

    /// The device under test, in the lab. All but nic are steered in softirq mode (flood, lossfree, forward,
    /// firewall; rr, rpc and stream, whose client is a peer on this machine then)
    #[arg(
        long,
        value_enum,
        default_value_t,
        hide_default_value = true,
        conflicts_with = "on"
    )]
    pub device: DeviceKind,

    /// Only cases with this text in their names
    #[arg(long, value_name = "TEXT")]
    pub case: Vec<String>,

    /// Only these modes, named as in the report: none, rxsteer, 'kernel-rps (all)', …
    #[arg(long, value_delimiter = ',', value_name = "MODE")]
    pub mode: Vec<String>,

    /// Measure on this device of the host, under the load of a peer host, rather than in namespaces
    /// (rr, rpc, stream). While a mode runs, the device has its XDP program or its kernel RPS
    #[arg(long, value_name = "DEVICE", requires = "peer", conflicts_with_all = ["napi", "gro"])]
    pub on: Option<String>,

    /// The peer host, where `rxlab bench serve` runs: ADDRESS or ADDRESS:PORT, for example
    /// [2001:db8::2]:5533. It sends to the device's address
    #[arg(long, value_name = "ADDRESS[:PORT]", requires = "on", value_parser = peer)]
    pub peer: Option<SocketAddr>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// Write what --json prints, after each round
    #[arg(long, value_name = "FILE.json", value_parser = json)]
    pub report: Option<PathBuf>,
}

/// What `rxlab bench` does besides measuring.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Say whether two reports agree. Exit status: 0 if no ratio differs, 1 otherwise
    Compare(CompareArgs),
    /// Put several reports side by side, such as one for each number of CPUs
    Columns(ColumnsArgs),
    /// Put load on other hosts that ask for it (rxlab bench --on), until stopped. Any host that
    /// reaches the port may ask; the load goes to the address from which it asked
    Serve(ServeArgs),
}

impl BenchArgs {
    /// Rounds, length and conditions of the measurements.
    pub fn effort(&self) -> Effort {
        Effort {
            rounds: self.rounds,
            seconds: self.seconds.as_secs_f64(),
            napi: self.napi.clone(),
            gro: self.gro.clone(),
            device: self.device,
            only: Only {
                cases: self.case.clone(),
                modes: self.mode.clone(),
            },
            on: self
                .on
                .clone()
                .zip(self.peer)
                .map(|(device, peer)| On { device, peer }),
        }
    }

    pub(super) fn run(&self) -> Result<ExitCode> {
        match &self.command {
            Some(BenchCommand::Compare(reports)) => reports.run(),
            Some(BenchCommand::Columns(reports)) => reports.run(),
            Some(BenchCommand::Serve(serve)) => serve.run(),
            None => self.measure(),
        }
    }

    fn measure(&self) -> Result<ExitCode> {
        self.report.as_deref().map_or(Ok(()), files::writable)?;
        needs_lab()?;
        let effort = self.effort();
        let mut scenarios = self.scenarios.clone();
        if scenarios.is_empty() {
            scenarios = Scenario::value_variants().to_vec();
            scenarios.retain(|scenario| effort.on.is_none() || scenario.takes_peer());
        }
        let prepare =
            |scenario: &Scenario| Ok(Measurement::new(scenario.prepare(&effort)?, &effort));
        let mut measurements = scenarios.iter().map(prepare).collect::<Result<Vec<_>>>()?;
        let nr = measurements
            .iter()
            .map(|m| m.plan().nr_measurements(&effort))
            .sum();
        let plans = || measurements.iter().map(Measurement::plan);
        if let Some(unknown) = unknown(plans(), &effort.only) {
            bail!("no {unknown}; there are\n{}", names(&measurements));
        }
        if nr == 0 && effort.only != Only::default() {
            bail!(
                "no such case has such a mode; there are\n{}",
                names(&measurements)
            );
        }
        let mut document = Document::begin();
        if let Some(on) = &effort.on {
            document.host.nic = nic(&on.device)?;
        }
        let emulated = document.host.emulated.is_some();
        announce(&measurements, &effort, emulated);

        let pace = emulated.then(Pace::start).transpose()?;
        let stretch = emulated.then(Stretch::begin);
        let bar = ProgressBar::new(nr);
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {eta} left, {msg}");
        bar.set_style(style.expect("a template without mistakes"));
        // A scenario that fails keeps its complete rounds, and the others go on.
        let mut failed = vec![false; measurements.len()];
        for _ in 0..effort.rounds {
            for (measurement, failed) in measurements.iter_mut().zip(&mut failed) {
                if *failed {
                    continue;
                }
                let round = measurement.round(&effort, pace.as_ref(), &|what| {
                    bar.set_message(what.to_owned());
                    bar.inc(1);
                });
                if let Err(error) = round {
                    *failed = true;
                    bar.suspend(|| tracing::error!("{error:#}"));
                }
            }
            let reports = measurements.iter().filter_map(|m| m.report(&effort));
            document.scenarios = reports.collect();
            document.stretch = stretch.as_ref().and_then(Stretch::so_far);
            if let Some(path) = &self.report {
                files::write(path, &files::json(&document)?)?;
            }
        }
        bar.finish_and_clear();
        if self.json {
            print!("{}", files::json(&document)?);
        } else {
            print!("{}", document.render());
        }
        match failed.iter().filter(|failed| **failed).count() {
            0 => Ok(ExitCode::SUCCESS),
            nr => bail!("{nr} of {} scenarios failed", failed.len()),
        }
    }
}

/// Path of the report. Another extension may be a slip.
fn json(path: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(path);
    match path.extension() {
        Some(extension) if extension == "json" => Ok(path),
        _ => Err("write FILE.json".to_owned()),
    }
}

/// What the selection names, and no plan has.
fn unknown<'a>(plans: impl Iterator<Item = &'a Plan>, only: &Only) -> Option<String> {
    let cases: Vec<_> = plans.flat_map(|plan| &plan.cases).collect();
    let case = |part: &&String| !cases.iter().any(|case| case.case.contains(*part));
    let mode = |name: &&String| !cases.iter().any(|case| case.modes.contains(name));
    let case = only.cases.iter().find(case);
    let mode = only.modes.iter().find(mode);
    case.map(|part| format!("case with `{part}` in its name"))
        .or_else(|| mode.map(|name| format!("mode `{name}`")))
}

/// All cases and modes, one line per case.
fn names(measurements: &[Measurement]) -> String {
    let lines = measurements.iter().flat_map(|measurement| {
        let plan = measurement.plan();
        let line = |case: &CasePlan| {
            format!(
                "{}: {}: {}",
                plan.scenario,
                case.case,
                case.modes.join(", ")
            )
        };
        plan.cases.iter().map(line).collect::<Vec<_>>()
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Prints plan and estimated duration to stderr.
fn announce(measurements: &[Measurement], effort: &Effort, emulated: bool) {
    let mut all = Duration::ZERO;
    for plan in measurements.iter().map(Measurement::plan) {
        let each = plan.duration(effort);
        all += each;
        eprintln!(
            "{:<9} {} {} measurements, about {}.",
            plan.scenario,
            plan.question,
            plan.nr_measurements(effort),
            HumanDuration(each)
        );
    }
    let time = match emulated {
        true => " of this emulated machine's time, in which a second takes 10 to 20 s",
        false => "",
    };
    eprintln!("About {} in all{time}.\n", HumanDuration(all));
}
