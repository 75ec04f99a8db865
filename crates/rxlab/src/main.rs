// SPDX-License-Identifier: MIT OR Apache-2.0
//! The `rxlab` command. Exit status: 0 done, 1 failed, 2 wrong usage.

use std::io::Write;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Parser, ValueEnum};
use indicatif::{HumanDuration, ProgressBar, ProgressStyle};
use rxlab::bench::experiment::{CasePlan, Effort, Only};
use rxlab::bench::measurement::Measurement;
use rxlab::bench::peer::server::Server;
use rxlab::bench::report::columns::Columns;
use rxlab::bench::report::compare::{Comparison, read};
use rxlab::bench::report::document::Document;
use rxlab::bench::report::files::{self, Files};
use rxlab::bench::report::host::{Stretch, nic};
use rxlab::bench::scenario::Scenario;
use rxlab::bench::setup::pace::Pace;
use rxlab::cli::{
    BenchArgs, BenchCommand, Cli, ColumnsArgs, Command, CompareArgs, DemoArgs, ServeArgs,
};
use rxlab::demo;
use rxsteer::cli::program::{self, end_with_the_reader, print_answer, stop_signals};
use rxsteer::host::caps::{self, Need};
use tracing::level_filters::LevelFilter;

fn main() -> ExitCode {
    let cli = Cli::parse();
    program::main(LevelFilter::ERROR, || execute(cli.command))
}

fn execute(command: Command) -> Result<ExitCode> {
    match command {
        Command::Demo(args) => demo(&args)?,
        Command::Bench(args) => match &args.command {
            Some(BenchCommand::Compare(reports)) => return compare(reports),
            Some(BenchCommand::Columns(reports)) => columns(reports)?,
            Some(BenchCommand::Serve(serve)) => bench_serve(serve)?,
            None => bench(&args)?,
        },
    }
    Ok(ExitCode::SUCCESS)
}

/// A bar that is told what runs now and how many things will.
fn progress(bar: &ProgressBar) -> impl Fn(&str, u64) + '_ {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}");
    bar.set_style(style.expect("a template without mistakes"));
    |what, total| {
        bar.set_length(total);
        bar.set_message(what.to_owned());
        bar.inc(1);
    }
}

/// Says in one line what the host lacks for a lab, if it lacks something.
fn needs_lab() -> Result<()> {
    match caps::missing(Need::Lab).first() {
        Some(missing) => bail!("{missing}"),
        None => Ok(()),
    }
}

fn demo(args: &DemoArgs) -> Result<()> {
    needs_lab()?;
    let bar = ProgressBar::new(0);
    let demo = demo::demo(&progress(&bar));
    bar.finish_and_clear();
    let demo = demo?;
    print_answer(args.json, &demo, demo::Demo::render)
}

fn bench_serve(args: &ServeArgs) -> Result<()> {
    let signals = stop_signals()?;
    let server = Server::bind(args.listen)?;
    // Who reads may stop reading.
    let say = |what: &str| drop(writeln!(std::io::stdout(), "{what}"));
    say(&format!("listening on {}", server.address()?));
    server.serve(signals.as_fd(), &say)
}

fn bench(args: &BenchArgs) -> Result<()> {
    let files = args.report.as_deref().map(Files::at).transpose()?;
    needs_lab()?;
    let effort = args.effort();
    let mut scenarios = args.scenarios.clone();
    if scenarios.is_empty() {
        scenarios = Scenario::value_variants().to_vec();
        scenarios.retain(|scenario| effort.on.is_none() || scenario.takes_peer());
    }
    let prepare = |scenario: &Scenario| Ok(Measurement::new(scenario.prepare(&effort)?, &effort));
    let mut measurements = scenarios.iter().map(prepare).collect::<Result<Vec<_>>>()?;
    let nr = measurements
        .iter()
        .map(|m| m.plan().nr_measurements(&effort))
        .sum();
    if nr == 0 && effort.only != Only::default() {
        bail!(
            "there is no such case, or no such mode; there are\n{}",
            names(&measurements)
        );
    }
    let mut document = Document::begin();
    if let Some(on) = &effort.on {
        document.host.nic = nic(&on.device)?;
    }
    announce(&measurements, &effort);

    let emulated = document.host.emulated.is_some();
    let pace = emulated.then(Pace::start).transpose()?;
    let stretch = emulated.then(Stretch::begin);
    let bar = ProgressBar::new(nr);
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {eta} left, {msg}");
    bar.set_style(style.expect("a template without mistakes"));
    // One that fails takes nothing away from the others, or from its own rounds before.
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
        if let Some(files) = &files {
            files.write(&document)?;
        }
    }
    bar.finish_and_clear();
    if args.json {
        print!("{}", files::json(&document)?);
    } else {
        for report in &document.scenarios {
            println!("{}", report.render());
        }
    }
    match failed.iter().filter(|failed| **failed).count() {
        0 => Ok(()),
        nr => bail!("{nr} of {} scenarios failed", failed.len()),
    }
}

fn columns(args: &ColumnsArgs) -> Result<()> {
    end_with_the_reader()?;
    let documents = args.reports.iter().map(|path| read(path));
    let columns = Columns::of(&documents.collect::<Result<Vec<_>>>()?);
    if let Some(page) = &args.report {
        files::write(page, &columns.page())?;
    }
    print_answer(args.json, &columns, Columns::render)
}

/// Fails, in the exit status alone, if a ratio differs.
fn compare(args: &CompareArgs) -> Result<ExitCode> {
    end_with_the_reader()?;
    let comparison = Comparison::of(&read(&args.old)?, &read(&args.new)?)?;
    print_answer(args.json, &comparison, Comparison::render)?;
    Ok(match comparison.nr_differ() {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

/// All cases and modes, a line each.
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

/// What is going to be done, and how long it will take.
fn announce(measurements: &[Measurement], effort: &Effort) {
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
    eprintln!("About {} in all.\n", HumanDuration(all));
}
