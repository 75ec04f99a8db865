// SPDX-License-Identifier: MIT OR Apache-2.0
//! dnsperf, a client of name servers.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::Result;
use hdrhistogram::Histogram;
use rxsteer::host::cpumask::CpuMask;

use super::nsd::{NR_NAMES, ZONE};
use super::said::{NR_CLIENTS, Said, number, quantiles};
use crate::lab::netns::Netns;
use crate::lab::tool::{Running, Tool};

pub(super) const TOOL: Tool = Tool {
    program: "dnsperf",
    package: "dnsperf",
    needs: "sockets",
};

/// Asks for the zone's names from [`NR_CLIENTS`] sockets, with dnsperf's own limit of 100 requests under
/// way, or as many as there are sockets with a pace.
pub(super) fn start(
    netns: &Netns,
    cpus: &CpuMask,
    folder: &Path,
    to: SocketAddr,
    tcp: bool,
    pace: Option<f64>,
) -> Result<Running> {
    let names: String = (0..NR_NAMES)
        .map(|name| format!("h{name}.{ZONE} A\n"))
        .collect();
    let path = folder.join("names");
    fs::write(&path, names)?;
    let rate = pace.map_or("1000000000".to_owned(), |rate| format!("{rate:.0}"));
    let arguments = [
        "-s",
        &to.ip().to_string(),
        "-p",
        &to.port().to_string(),
        "-m",
        if tcp { "tcp" } else { "udp" },
        "-d",
        &path.to_string_lossy(),
        "-c",
        &NR_CLIENTS.to_string(),
        "-T",
        &cpus.len().min(NR_CLIENTS as usize).to_string(),
        // Again and again.
        "-l",
        "86400",
        "-Q",
        &rate,
        // Prints each answer: it has no other percentiles.
        "-v",
    ];
    TOOL.start(netns, cpus, arguments)
}

/// Lines of answers: `> NOERROR h1.example.test A 0.000123`, in s.
pub(super) fn said(printed: &str) -> Result<Said> {
    let mut us = Histogram::<u64>::new(3)?;
    for line in printed.lines().filter(|line| line.starts_with("> ")) {
        let seconds = line
            .rsplit(' ')
            .next()
            .and_then(|word| word.parse::<f64>().ok());
        // Those that were given up have no number.
        if let Some(seconds) = seconds {
            us.record((seconds * 1e6) as u64)?;
        }
    }
    let answers: u64 = number(printed, "Queries completed:")?;
    // Of the line with the codes, which is empty without answers; the code of an answer has a name behind it.
    let good = printed.lines().find_map(|line| {
        let (_, rest) = line.split_once("NOERROR ")?;
        rest.split_whitespace().next()?.parse::<u64>().ok()
    });
    Ok(Said {
        answers,
        rate: number(printed, "Queries per second:")?,
        lost: number::<u64>(printed, "Queries lost:")? + answers.saturating_sub(good.unwrap_or(0)),
        us: quantiles(&us),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_counted_from_what_it_prints() {
        let printed = "> NOERROR h0.example.test A 0.000100\n> NOERROR h1.example.test A 0.000300\n\
                       > T h2.example.test A\n  Queries sent:         3\n\
                       Queries completed:    3 (100.00%)\n  Queries lost:         1 (33.33%)\n\
                       Response codes:       NOERROR 2 (66.67%), SERVFAIL 1 (33.33%)\n\
                       Queries per second:   20.500000\n";
        let said = said(printed).unwrap();
        assert_eq!((said.answers, said.rate, said.lost), (3, 20.5, 2));
        assert_eq!(said.us, [100.0, 300.0, 300.0]);
    }

    #[test]
    fn without_answers_there_are_none() {
        let printed = "  Queries completed:    0 (-nan%)\n  Queries lost:         0 (-nan%)\n\
                       Response codes:       \n  Queries per second:   0.000000\n";
        assert_eq!(said(printed).unwrap(), Said::default());
    }
}
