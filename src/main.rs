// SPDX-License-Identifier: MIT OR Apache-2.0
//! The `rxsteer` command. Exit status: 0 done, 1 failed, 2 wrong usage.

use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use nix::sys::signal::{SigHandler, SigSet, Signal, signal};
use nix::sys::signalfd::SignalFd;
use rxsteer::bench::{self, Effort};
use rxsteer::caps::{self, Need};
use rxsteer::cli::{
    BenchArgs, Cli, Command, DemoArgs, ExplainArgs, FlowsArgs, Scenario, StatusArgs,
};
use rxsteer::{demo, explain, flows, run, status};
use serde::Serialize;
use tracing_subscriber::filter::LevelFilter;

fn main() -> ExitCode {
    let cli = Cli::parse();
    // A run tells its story; the others have output of their own.
    let level = if matches!(cli.command, Command::Run(_)) {
        LevelFilter::INFO
    } else {
        LevelFilter::ERROR
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
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            for line in format!("{e:#}").lines() {
                tracing::error!("{line}");
            }
            ExitCode::FAILURE
        }
    }
}

fn execute(command: Command) -> Result<()> {
    match command {
        Command::Run(args) => {
            let signals = stop_signals()?;
            run::run(&args.into(), signals.as_fd())
        }
        Command::Status(args) => print_status(&args),
        Command::Flows(args) => print_flows(args),
        Command::Explain(args) => print_explanation(&args),
        Command::Demo(args) => demo(&args),
        Command::Bench(args) => bench(&args),
        Command::Set(args) => {
            for line in run::set(args.into())? {
                println!("{line}");
            }
            Ok(())
        }
    }
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

fn print_flows(args: FlowsArgs) -> Result<()> {
    end_with_the_reader()?;
    let flows = run::flows(flows::Query {
        device: args.device,
        local_ports: Vec::new(),
        limit: args.limit as usize,
    })?;
    if args.json {
        println!("{}", serde_json::to_string(&flows)?);
    } else {
        print!("{}", flows::render(&flows));
    }
    Ok(())
}

fn print_explanation(args: &ExplainArgs) -> Result<()> {
    end_with_the_reader()?;
    let answer = run::explain(args.target, args.limit as usize)?;
    if args.json {
        println!("{}", serde_json::to_string(&answer)?);
    } else {
        print!("{}", explain::render(&answer));
    }
    Ok(())
}

fn print_status(args: &StatusArgs) -> Result<()> {
    end_with_the_reader()?;
    loop {
        let now = run::status()?;
        if args.json {
            println!("{}", serde_json::to_string(&now)?);
        } else {
            print!("{}", status::render(&now));
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
    if args.json {
        println!("{}", serde_json::to_string(&demo)?);
    } else {
        print!("{}", demo.render());
    }
    Ok(())
}

fn bench(args: &BenchArgs) -> Result<()> {
    needs_lab()?;
    for scenario in &args.scenarios {
        let bar = ProgressBar::new(0);
        let effort = Effort {
            rounds: args.rounds,
            seconds: args.seconds.as_secs_f64(),
            progress: &progress(&bar),
        };
        let (json, text) = match scenario {
            Scenario::Decide => both(bench::decide::decide(&effort), bench::Report::render),
            Scenario::Record => both(bench::record::record(&effort), bench::Report::render),
            Scenario::Follow => both(bench::follow::follow(&effort), bench::Report::render),
            Scenario::Flood => both(bench::flood::flood(&effort), bench::Report::render),
            Scenario::Reorder => both(bench::reorder::reorder(&effort), |report| report.render()),
        }
        .inspect_err(|_| bar.finish_and_clear())?;
        bar.finish_and_clear();
        if args.json {
            println!("{json}");
        } else {
            print!("{text}");
        }
    }
    Ok(())
}

/// A report for programs and for people.
fn both<R: Serialize>(
    report: Result<R>,
    render: impl FnOnce(&R) -> String,
) -> Result<(String, String)> {
    let report = report?;
    Ok((serde_json::to_string(&report)?, render(&report)))
}
