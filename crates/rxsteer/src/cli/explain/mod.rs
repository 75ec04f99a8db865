// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer explain`: why a flow is on the CPU where it is.

mod words;

use std::fmt;
use std::process::ExitCode;
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use clap::Args;

pub use words::{Answer, render};

use super::endpoints::Endpoints;
use super::pinned;
use super::program::{end_with_the_reader, print_answer};
use crate::api::client;
use crate::api::explain::{Explanations, Name, Question};
use crate::api::flows::LIMIT_MAX;
use crate::datapath::flow::FlowError;
use crate::host::number::whole;

/// Options of `rxsteer explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// A flow as `rxsteer flows` prints it (udp/192.0.2.1:53/5353: the sender, and the local port),
    /// its hash (0x…), the sockets of a process (pid:NUMBER), the flows to a local port
    /// (port:NUMBER). A bare number is a local port if a flow or a connection has it, a process
    /// otherwise
    #[arg(value_name = "FLOW|HASH|PID|PORT")]
    pub target: Target,

    /// At most so many flows, those with the most packets
    #[arg(long, value_name = "FLOWS", default_value_t = 10,
          value_parser = whole(1, LIMIT_MAX, "flows"))]
    pub limit: usize,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl ExplainArgs {
    pub(super) fn run(self) -> Result<ExitCode> {
        end_with_the_reader()?;
        let answer = ask(self.target, self.limit);
        let answer = pinned::or_say(answer, "only a running rxsteer explains its flows")?;
        print_answer(self.json, &answer, render)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The target of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// One flow.
    Name(Name),
    /// The sockets of a process.
    Pid(u32),
    /// The flows to a local port.
    Port(u16),
    /// A local port if a flow or a connection has it, a process otherwise.
    Number(u32),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => name.fmt(f),
            Self::Pid(pid) => write!(f, "pid:{pid}"),
            Self::Port(port) => write!(f, "port:{port}"),
            Self::Number(number) => number.fmt(f),
        }
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |of: &str, text: &str, max: u32| match text.parse() {
            Ok(n) if n <= max => Ok(n),
            _ => Err(format!("{text:?} is not a {of}, 0 to {max}")),
        };
        if let Some(pid) = text.strip_prefix("pid:") {
            return number("process id", pid, i32::MAX as u32).map(Self::Pid);
        }
        if let Some(port) = text.strip_prefix("port:") {
            return number("port", port, u16::MAX.into()).map(|port| Self::Port(port as u16));
        }
        if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
            return number("port or process id", text, i32::MAX as u32).map(Self::Number);
        }
        text.parse().map(Self::Name).map_err(|e: FlowError| {
            format!("{e}; pid:NUMBER asks about a process, port:NUMBER about a local port")
        })
    }
}

/// Explains the target's flows, at most `limit` of them. This process looks up sockets, the running
/// rxsteer flows.
///
/// # Errors
/// When no rxsteer runs, the target does not exist or can't be examined, or no packet of it is
/// known.
pub fn ask(target: Target, limit: usize) -> Result<Answer> {
    let mut notes = Vec::new();
    let question = |sockets: Endpoints, ports: Vec<u16>| {
        let question = Question {
            names: sockets.flows.into_iter().map(Name::Flow).collect(),
            local_ports: ports,
            unconnected: sockets.unconnected,
            limit,
        };
        question.bounded()
    };
    let of_port = |port: u16| client::explain(question(Endpoints::of_port(port)?, vec![port]));
    let (target, explanations) = match target {
        Target::Name(name) => {
            let names = vec![name];
            let question = Question {
                names,
                unconnected: match name {
                    Name::Flow(flow) => {
                        flow.local_port()
                            .map(Endpoints::of_port)
                            .transpose()?
                            .unwrap_or_default()
                            .unconnected
                    }
                    Name::Hash(_) => Vec::new(),
                },
                limit,
                ..Question::default()
            };
            (target, client::explain(question)?)
        }
        Target::Port(port) => (target, of_port(port)?),
        Target::Pid(pid) => (target, of_process(pid, &mut notes, question)?),
        Target::Number(number) => {
            let as_port = match u16::try_from(number) {
                Ok(port) => Some((port, of_port(port)?)).filter(|(_, found)| found.total > 0),
                Err(_) => None,
            };
            match as_port {
                Some((port, found)) => {
                    notes.push(format!(
                        "{number} is taken for the local port; pid:{number} asks about the process."
                    ));
                    (Target::Port(port), found)
                }
                None => {
                    notes.push(format!(
                        "{number} is taken for the process: no flow or connection has that local \
                         port."
                    ));
                    (
                        Target::Pid(number),
                        of_process(number, &mut notes, question).with_context(|| {
                            format!("no flow or connection has the local port {number}")
                        })?,
                    )
                }
            }
        }
    };
    let devices = explanations.devices.join(", ");
    let nothing = match &explanations.flows[..] {
        [] => Some(format!(
            "no flow of {target} is known on {devices}; `rxsteer flows` lists those that are"
        )),
        [one] if one.seen.is_empty() => Some(one.not_seen(&explanations.devices)),
        all if all.iter().all(|one| one.seen.is_empty()) => Some(format!(
            "no packet of the {} flows of {target} is known on {devices}",
            explanations.total
        )),
        _ => None,
    };
    if let Some(mut nothing) = nothing {
        if explanations.device_hash {
            nothing += "; with --hash device ask by the hash that `rxsteer flows` prints";
        }
        bail!(nothing);
    }
    Ok(Answer {
        target: target.to_string(),
        notes,
        explanations,
    })
}

fn of_process(
    pid: u32,
    notes: &mut Vec<String>,
    question: impl Fn(Endpoints, Vec<u16>) -> Question,
) -> Result<Explanations> {
    let sockets = Endpoints::of_process(pid);
    if sockets.is_err() {
        // Without a running rxsteer, no process can be explained.
        client::status()?;
    }
    let sockets = sockets?;
    if sockets.foreign {
        notes.push(format!(
            "Process {pid} is in another network namespace: if addresses or ports are translated \
             on the way there, its flows have other names here, which `rxsteer flows` prints."
        ));
    }
    let ports = sockets.unconnected.clone();
    client::explain(question(sockets, ports))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::flow::FlowHash;

    #[test]
    fn targets() {
        let flow: Name = "udp/192.0.2.1:53/5353".parse().unwrap();
        for (text, target) in [
            ("udp/192.0.2.1:53/5353", Target::Name(flow)),
            ("0x00000010", Target::Name(Name::Hash(FlowHash(16)))),
            ("pid:1", Target::Pid(1)),
            ("port:53", Target::Port(53)),
            ("53", Target::Number(53)),
        ] {
            assert_eq!(text.parse(), Ok(target));
            assert_eq!(target.to_string(), text);
        }
        for (text, why) in [
            ("", "write PROTOCOL/ADDRESS:PORT/LOCAL-PORT"),
            ("eth0", "pid:NUMBER asks about a process"),
            ("pid:", "\"\" is not a process id"),
            ("pid:-1", "\"-1\" is not a process id"),
            ("port:65536", "\"65536\" is not a port, 0 to 65535"),
            ("4294967296", "is not a port or process id"),
            ("0xgg", "write 0x and up to 8 hex digits"),
        ] {
            let said = text.parse::<Target>().expect_err(text);
            assert!(said.contains(why), "{text}: {said}");
        }
    }
}
