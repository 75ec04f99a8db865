// SPDX-License-Identifier: MIT OR Apache-2.0
//! The `rxsteer` command. Exit status: 0 done, 1 failed, 2 wrong usage.

use std::os::fd::AsFd;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use rxsteer::cli::{Cli, Command, DoctorArgs, ExplainArgs, FlowsArgs, NapiArgs, StatusArgs};
use rxsteer::program::{self, end_with_the_reader, print_answer, stop_signals};
use rxsteer::{busy_poll, config, doctor, explain, flows, napi, napi_settings, run, status};
use tracing_subscriber::filter::LevelFilter;

fn main() -> ExitCode {
    let cli = Cli::parse();
    // A run tells its story; the others have output of their own.
    let level = match &cli.command {
        Command::Run(_) | Command::Poll(_) => LevelFilter::INFO,
        Command::Napi(args) if args.set.is_some() => LevelFilter::INFO,
        _ => LevelFilter::ERROR,
    };
    program::main(level, || execute(cli.command))
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
        Command::Set(args) => {
            for line in run::set(args.into())? {
                println!("{line}");
            }
        }
    }
    Ok(ExitCode::SUCCESS)
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
