// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer mode`: configurations with a name, for hosts whose administrators want no knobs.

use std::fs;
use std::path::{Component, Path};
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use nix::sys::stat::Mode as Permissions;
use tempfile::Builder;

use super::files;

/// Options of `rxsteer mode`.
#[derive(Debug, Args)]
pub struct ModeArgs {
    /// The mode to use from the next start or reload on; without it, the modes are listed
    #[arg(value_enum)]
    pub name: Option<Name>,

    /// Print the mode's configuration, and change nothing
    #[arg(long, requires = "name")]
    pub show: bool,

    /// The service whose sockets poll in mode latency: its cgroup (v2), as /system.slice/NAME.service
    ///
    /// `systemctl show --property ControlGroup NAME` prints it. Polling takes CPU time, so that no mode
    /// lets all processes of the host poll. More services: [[busy_poll]] tables in a file of their own.
    #[arg(long, requires = "name", value_parser = of_service)]
    pub cgroup: Option<String>,

    /// Use no mode any more
    #[arg(long, conflicts_with = "name")]
    pub remove: bool,
}

/// The modes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Name {
    /// servers whose polling CPUs are saturated
    Throughput,
    /// services with few requests at a time, and CPU time to spare
    Latency,
    /// routers and firewalls
    Router,
    /// hosts of containers behind NAT
    ContainerHost,
}

impl Name {
    /// The mode's configuration, without its licence.
    pub fn text(self) -> &'static str {
        let text = match self {
            Self::Throughput => include_str!("throughput.toml"),
            Self::Latency => include_str!("latency.toml"),
            Self::Router => include_str!("router.toml"),
            Self::ContainerHost => include_str!("container-host.toml"),
        };
        text.split_once('\n').map_or(text, |(_licence, rest)| rest)
    }

    /// The mode's configuration, for the service with this cgroup; without one for an example.
    ///
    /// # Errors
    /// When the mode has no place for a service.
    fn text_for(self, cgroup: Option<&str>) -> Result<String> {
        let Some(cgroup) = cgroup else {
            return Ok(self.text().to_owned());
        };
        ensure!(
            self == Self::Latency,
            "--cgroup is for mode latency: no other one lets sockets poll"
        );
        let cgroup = toml::Value::from(cgroup).to_string();
        Ok(self.text().replace(EXAMPLE, &cgroup))
    }
}

/// A service's cgroup in the configuration of [`Name::Latency`].
const EXAMPLE: &str = "\"/system.slice/NAME.service\"";

/// A cgroup that does not have all processes of the host.
fn of_service(text: &str) -> Result<String, String> {
    let path = Path::new(text);
    match path.is_absolute()
        && path
            .components()
            .any(|part| matches!(part, Component::Normal(_)))
    {
        true => Ok(text.to_owned()),
        false => Err("name a service's cgroup, as /system.slice/NAME.service".to_owned()),
    }
}

impl ModeArgs {
    pub(super) fn run(&self) -> Result<ExitCode> {
        let file = files::of_mode();
        let shown = file.display();
        match self.name {
            Some(name) if self.show => print!("{}", name.text_for(self.cgroup.as_deref())?),
            Some(Name::Latency) if self.cgroup.is_none() => bail!(
                "mode latency lets the sockets of a service poll: name it, as in `rxsteer mode latency \
                 --cgroup /system.slice/NAME.service`"
            ),
            Some(name) => {
                let text = name.text_for(self.cgroup.as_deref())?;
                write(&file, &text).with_context(|| format!("writing {shown}"))?;
                println!("{shown} is written: `rxsteer reload` applies it, or the next start");
            }
            None if self.remove => {
                fs::remove_file(&file).with_context(|| format!("removing {shown}"))?;
                println!("{shown} is removed: `rxsteer reload` applies that, or the next start");
            }
            None => {
                let used = files::read(&file).ok();
                let used = used.map(|used| String::from_utf8_lossy(&used).into_owned());
                print!("{}", list(used.as_deref()));
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The modes, of which the one with this text is in use.
fn list(used: Option<&str>) -> String {
    let line = |name: &Name| {
        let value = name.to_possible_value().expect("no mode is hidden");
        let help = value.get_help().map(ToString::to_string);
        let mark = match used.is_some_and(|used| same(used, name.text())) {
            true => "*",
            false => " ",
        };
        format!(
            "{mark} {:<15} {}\n",
            value.get_name(),
            help.unwrap_or_default()
        )
    };
    Name::value_variants().iter().map(line).collect()
}

/// Whether two configurations are of one mode, whatever the service.
fn same(one: &str, other: &str) -> bool {
    fn lines(text: &str) -> impl Iterator<Item = &str> {
        text.lines().filter(|line| !line.starts_with("cgroup = "))
    }
    lines(one).eq(lines(other))
}

/// Replaces the file at once; a reader sees the old text or the new one.
fn write(path: &Path, text: &str) -> Result<()> {
    let folder = path.parent().context("no folder")?;
    fs::create_dir_all(folder)?;
    let new = Builder::new().prefix(".mode").tempfile_in(folder)?;
    fs::write(&new, text)?;
    let readable = Permissions::from_bits_truncate(0o644);
    nix::sys::stat::fchmod(&new, readable)?;
    new.persist(path)?;
    Ok(())
}
