// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line.

use std::net::{AddrParseError, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use rxsteer::cli::value::seconds;

use crate::bench::experiment::{Effort, Gro, Napi, On, Only};
use crate::bench::peer::server::PORT;
use crate::bench::scenario::Scenario;

/// Traffic for rxsteer, in network namespaces of its own, and what it shows.
#[derive(Debug, Parser)]
#[command(version, propagate_version = true, max_term_width = 100)]
pub struct Cli {
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// One per thing that rxlab does.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// See it: the same flood without steering, with kernel RPS and with rxsteer
    Demo(DemoArgs),
    /// Measure, on this machine and in namespaces of its own
    Bench(Box<BenchArgs>),
}

/// Options of `rxlab demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

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
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
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

    /// Only cases whose names contain this
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

    /// Write a page for people, and beside it what --json prints (FILE.json)
    #[arg(long, value_name = "FILE.html", value_parser = html)]
    pub report: Option<PathBuf>,
}

/// What `rxlab bench` does besides measuring.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Say whether two reports agree. Exit status: 0 if no ratio differs, 1 otherwise
    Compare(CompareArgs),
    /// Put several reports side by side, such as one for each number of CPUs
    Columns(ColumnsArgs),
    /// Put load on other hosts that ask for it (rxlab bench --on), until stopped. Whoever reaches
    /// the port may ask, and gets it to the address from which it asked
    Serve(ServeArgs),
}

/// Options of `rxlab bench columns`.
#[derive(Debug, Args)]
pub struct ColumnsArgs {
    /// Reports, as --json printed or --report wrote them, in the order of the columns
    #[arg(value_name = "REPORT.json", required = true)]
    pub reports: Vec<PathBuf>,

    /// Write a page, too
    #[arg(long, value_name = "FILE.html")]
    pub report: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
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

/// The name of a page. Any other could be a slip, or the name of the JSON beside it.
fn html(path: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(path);
    match path.extension() {
        Some(extension) if extension == "html" => Ok(path),
        _ => Err("write FILE.html".to_owned()),
    }
}

impl BenchArgs {
    /// How often, how long, and under which conditions.
    pub fn effort(&self) -> Effort {
        Effort {
            rounds: self.rounds,
            seconds: self.seconds.as_secs_f64(),
            napi: self.napi.clone(),
            gro: self.gro.clone(),
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
}

/// Options of `rxlab bench serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Where to listen: ADDRESS or ADDRESS:PORT, TCP [default: port 5533 of all addresses]
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = peer)]
    pub listen: Option<SocketAddr>,
}

/// An address, with the peer's port unless it has one.
fn peer(text: &str) -> Result<SocketAddr, String> {
    let address = text.trim_start_matches('[').trim_end_matches(']').parse();
    text.parse()
        .or_else(|_| address.map(|address| SocketAddr::new(address, PORT)))
        .map_err(|_: AddrParseError| {
            format!("{text:?} is not an address: write 192.0.2.2, 192.0.2.2:{PORT} or [2001:db8::2]:{PORT}")
        })
}
