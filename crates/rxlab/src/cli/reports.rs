// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxlab bench compare` and `columns`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use rxsteer::cli::program::{end_with_the_reader, print_answer};

use crate::bench::report::columns::Columns;
use crate::bench::report::compare::{Comparison, read};

/// Options of `rxlab bench columns`.
#[derive(Debug, Args)]
pub struct ColumnsArgs {
    /// Reports, as --json printed or --report wrote them, in the order of the columns
    #[arg(value_name = "REPORT.json", required = true)]
    pub reports: Vec<PathBuf>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl ColumnsArgs {
    pub(super) fn run(&self) -> Result<ExitCode> {
        end_with_the_reader()?;
        let documents = self.reports.iter().map(|path| read(path));
        let columns = Columns::of(&documents.collect::<Result<Vec<_>>>()?);
        print_answer(self.json, &columns, Columns::render)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Options of `rxlab bench compare`.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// A report, as --json printed or --report wrote it
    #[arg(value_name = "OLD.json")]
    pub old: PathBuf,

    /// Another one, of the same machine
    #[arg(value_name = "NEW.json")]
    pub new: PathBuf,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl CompareArgs {
    /// Returns exit status 1, without an error, if a ratio differs.
    pub(super) fn run(&self) -> Result<ExitCode> {
        end_with_the_reader()?;
        let comparison = Comparison::of(&read(&self.old)?, &read(&self.new)?)?;
        print_answer(self.json, &comparison, Comparison::render)?;
        Ok(match comparison.nr_differ() {
            0 => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        })
    }
}
