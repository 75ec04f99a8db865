// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer man` and `rxlab man`: write the man pages, which have the texts of `--help`, and the completions of
//! shells. For `make install`.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, Command};
use clap_complete::Shell;
use clap_mangen::Man;

/// System administration commands (man-pages(7)).
const SECTION: &str = "8";

/// Options of `man`.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// Where the pages are written
    pub folder: PathBuf,

    /// Where the completions are written: `PROGRAM.bash`, `_PROGRAM` and `PROGRAM.fish`
    pub completions: Option<PathBuf>,
}

impl ManArgs {
    /// Writes the pages of the program `cli` and its subcommands, and the completions.
    ///
    /// # Errors
    /// When a folder or a file can't be written: its path is in the message.
    pub fn run(self, mut cli: Command) -> Result<ExitCode> {
        let folder = self.folder.display().to_string();
        fs::create_dir_all(&self.folder).context(folder)?;
        cli = cli.disable_help_subcommand(true);
        cli.build();
        let subcommands = cli
            .get_subcommands()
            .filter(|command| !command.is_hide_set());
        for command in std::iter::once(&cli).chain(subcommands) {
            let man = Man::new(command.clone()).section(SECTION);
            let path = self.folder.join(man.get_filename());
            let page = File::create(&path).and_then(|mut file| man.render(&mut file));
            page.with_context(|| path.display().to_string())?;
        }
        let Some(folder) = self.completions else {
            return Ok(ExitCode::SUCCESS);
        };
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        let program = cli.get_name().to_owned();
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            clap_complete::generate_to(shell, &mut cli, &program, &folder)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
