// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxlab bench serve`, and the address where it listens.

use std::io::Write;
use std::net::{AddrParseError, SocketAddr};
use std::os::fd::AsFd;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use rxsteer::cli::program::stop_signals;

use crate::bench::peer::server::{PORT, Server};

/// Options of `rxlab bench serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Where to listen: ADDRESS or ADDRESS:PORT, TCP [default: port 5533 of all addresses]
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = peer)]
    pub listen: Option<SocketAddr>,
}

impl ServeArgs {
    pub(super) fn run(&self) -> Result<ExitCode> {
        let signals = stop_signals()?;
        let server = Server::bind(self.listen)?;
        // Serving goes on when stdout is closed.
        let say = |what: &str| drop(writeln!(std::io::stdout(), "{what}"));
        say(&format!("listening on {}", server.address()?));
        server.serve(signals.as_fd(), &say)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Parses ADDRESS or ADDRESS:PORT; without a port, [`PORT`].
pub(super) fn peer(text: &str) -> Result<SocketAddr, String> {
    let address = text.trim_start_matches('[').trim_end_matches(']').parse();
    text.parse()
        .or_else(|_| address.map(|address| SocketAddr::new(address, PORT)))
        .map_err(|_: AddrParseError| {
            format!("{text:?} is not an address: write 192.0.2.2, 192.0.2.2:{PORT} or [2001:db8::2]:{PORT}")
        })
}
