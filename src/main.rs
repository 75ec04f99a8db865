// SPDX-License-Identifier: MIT OR Apache-2.0
//! The `rxsteer` command. Exit status: 0 done, 1 failed, 2 wrong usage.

use std::io::{IsTerminal, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use indicatif::{HumanDuration, ProgressBar, ProgressStyle};
use nix::sys::signal::{SigHandler, SigSet, Signal, signal};
use nix::sys::signalfd::SignalFd;
use rxsteer::bench::columns::Columns;
use rxsteer::bench::compare::{Comparison, read};
use rxsteer::bench::files::{self, Files};
use rxsteer::bench::host::{Stretch, nic};
use rxsteer::bench::pace::Pace;
use rxsteer::bench::peer::Server;
use rxsteer::bench::{CasePlan, Document, Effort, Measurement, Only, Scenario};
use rxsteer::caps::{self, Need};
use rxsteer::cli::{
    BenchArgs, BenchCommand, Cli, ColumnsArgs, Command, CompareArgs, DemoArgs, DoctorArgs,
    ExplainArgs, FlowsArgs, NapiArgs, ServeArgs, StatusArgs,
};
use rxsteer::{busy_poll, config, demo, doctor, explain, flows, napi, napi_settings, run, status};
use serde::Serialize;
use tracing_subscriber::filter::LevelFilter;

fn main() -> ExitCode {
    let cli = Cli::parse();
    // A run tells its story; the others have output of their own.
    let level = match &cli.command {
        Command::Run(_) | Command::Poll(_) => LevelFilter::INFO,
        Command::Napi(args) if args.set.is_some() => LevelFilter::INFO,
        _ => LevelFilter::ERROR,
    };
    let level = match std::env::var("RXSTEER_LOG").map(|level| level.parse()) {
        Ok(Ok(level)) => level,
        Err(_) => level,
        Ok(Err(_)) => {
            eprintln!("RXSTEER_LOG is off, error, warn, info, debug or trace");
            return ExitCode::from(2);
        }
    };
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        // Colours are for a terminal, not for a journal or a file.
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        .init();
    match execute(cli.command) {
        Ok(status) => status,
        Err(e) => {
            for line in format!("{e:#}").lines() {
                tracing::error!("{line}");
            }
            ExitCode::FAILURE
        }
    }
}

fn execute(command: Command) -> Result<ExitCode> {
    match command {
        Command::Run(args) => {
            let signals = stop_signals()?;
            run::run(&config::with_file(args)?, signals.as_fd())?;
        }
        Command::Status(args) => print_status(&args)?,
        Command::Flows(args) => print_flows(args)?,
        Command::Explain(args) => print_explanation(&args)?,
        Command::Poll(args) => {
            let signals = stop_signals()?;
            let service = busy_poll::Service::new(&[args.rule], args.host_wide)?;
            service.serve(signals.as_fd())?;
        }
        Command::PutBack => busy_poll::undo::put_back()?,
        Command::Napi(args) => match args.set {
            Some(set) => {
                let signals = stop_signals()?;
                napi_settings::run(&args.devices, &set.into(), signals.as_fd())?;
            }
            None => print_napis(&args)?,
        },
        Command::Doctor(args) => return diagnose(&args),
        Command::PutBackNapi => napi_settings::put_back()?,
        Command::Demo(args) => demo(&args)?,
        Command::Bench(args) => match &args.command {
            Some(BenchCommand::Compare(reports)) => return compare(reports),
            Some(BenchCommand::Columns(reports)) => columns(reports)?,
            Some(BenchCommand::Serve(serve)) => bench_serve(serve)?,
            None => bench(&args)?,
        },
        Command::Set(args) => {
            for line in run::set(args.into())? {
                println!("{line}");
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// SIGINT, SIGTERM and SIGHUP as a file descriptor; they no longer end the process by themselves.
fn stop_signals() -> Result<SignalFd> {
    let mut stop = SigSet::empty();
    stop.add(Signal::SIGINT);
    stop.add(Signal::SIGTERM);
    stop.add(Signal::SIGHUP);
    stop.thread_block().context("blocking the stop signals")?;
    SignalFd::new(&stop).context("waiting for signals")
}

/// Who reads may stop reading: `rxsteer status --interval 1 | head`.
fn end_with_the_reader() -> Result<()> {
    // SAFETY: restores the default, which runs no code of ours.
    unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) }?;
    Ok(())
}

/// As JSON on one line, or as text.
fn print_answer<T: Serialize>(json: bool, answer: &T, render: fn(&T) -> String) -> Result<()> {
    match json {
        true => println!("{}", serde_json::to_string(answer)?),
        false => print!("{}", render(answer)),
    }
    Ok(())
}

fn print_flows(args: FlowsArgs) -> Result<()> {
    end_with_the_reader()?;
    let flows = run::flows(flows::Query {
        device: args.device,
        limit: args.limit as usize,
        ..flows::Query::default()
    })?;
    print_answer(args.json, &flows, flows::render)
}

fn print_explanation(args: &ExplainArgs) -> Result<()> {
    end_with_the_reader()?;
    let answer = run::explain(args.target, args.limit as usize)?;
    print_answer(args.json, &answer, explain::render)
}

fn print_napis(args: &NapiArgs) -> Result<()> {
    end_with_the_reader()?;
    let napis = napi::napis(&args.devices)?;
    print_answer(args.json, &napis, napi::render)
}

/// Fails, in the exit status alone, if something stands in the way.
fn diagnose(args: &DoctorArgs) -> Result<ExitCode> {
    end_with_the_reader()?;
    let diagnosis = doctor::diagnose(&args.devices)?;
    print_answer(args.json, &diagnosis, doctor::render)?;
    Ok(match diagnosis.in_the_way {
        false => ExitCode::SUCCESS,
        true => ExitCode::FAILURE,
    })
}

fn print_status(args: &StatusArgs) -> Result<()> {
    end_with_the_reader()?;
    loop {
        let polling = busy_poll::status()?;
        let steering = match run::status() {
            Err(_) if polling.is_some() => None,
            steering => Some(steering?),
        };
        if args.json {
            println!("{}", status::json(steering.as_ref(), polling.as_ref())?);
        } else {
            print!("{}", status::text(steering.as_ref(), polling.as_ref()));
        }
        match args.interval {
            Some(interval) => std::thread::sleep(interval),
            None => return Ok(()),
        }
    }
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
