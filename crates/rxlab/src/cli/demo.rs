// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxlab demo`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use rxsteer::cli::program::print_answer;
use rxsteer::cli::value::seconds;

use super::lab::needs_lab;
use crate::demo;

/// Options of `rxlab demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Length of one measurement
    #[arg(long, value_name = "SECONDS", default_value = "1.5", value_parser = seconds)]
    pub seconds: Duration,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl DemoArgs {
    pub(super) fn run(&self) -> Result<ExitCode> {
        needs_lab()?;
        let bar = ProgressBar::new(0);
        let demo = demo::demo(self.seconds.as_secs_f64(), &progress(&bar));
        bar.finish_and_clear();
        let demo = demo?;
        print_answer(self.json, &demo, demo::Demo::render)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Progress bar. The callback takes the current mode and the number of all measurements.
fn progress(bar: &ProgressBar) -> impl Fn(&str, u64) + '_ {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}");
    bar.set_style(style.expect("a template without mistakes"));
    |what, total| {
        bar.set_length(total);
        bar.set_message(what.to_owned());
        bar.inc(1);
    }
}
