// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer flows` as text.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use comfy_table::Table;

use super::pinned;
use super::program::{end_with_the_reader, print_answer};
use super::table::{align_left, table};
use crate::api::client;
use crate::api::flows::{Entry, Flows, LIMIT_MAX, Location, Query, Reason};
use crate::daemon::options::device_name;
use crate::host::number::whole;

/// Options of `rxsteer flows`.
#[derive(Debug, Args)]
pub struct FlowsArgs {
    /// Only this device's
    #[arg(long, value_parser = device_name)]
    pub device: Option<String>,

    /// At most so many, those with the most packets
    #[arg(long, value_name = "FLOWS", default_value_t = 100,
          value_parser = whole(1, LIMIT_MAX, "flows"))]
    pub limit: usize,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl FlowsArgs {
    pub(super) fn run(self) -> Result<ExitCode> {
        end_with_the_reader()?;
        let flows = client::flows(Query {
            device: self.device,
            limit: self.limit,
            ..Query::default()
        });
        let flows = pinned::or_say(flows, "only a running rxsteer lists its flows")?;
        print_answer(self.json, &flows, render)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The reason for a flow's wanted location, in few words.
pub(super) fn why(entry: &Entry) -> String {
    // If the CPU that the flow wants polls, the wanted location is INLINE.
    let rps = match (entry.wanted, entry.polling_cpu) {
        (Location::Inline, Some(cpu)) => format!("RPS: CPU {cpu}, which polls"),
        _ => "RPS".to_owned(),
    };
    match (entry.reason, entry.application_cpu) {
        (Reason::Application, cpu) => format!(
            "application on CPU {}{}",
            cpu.unwrap_or_default(),
            match entry.wanted {
                Location::Inline => ", which polls",
                Location::Cpu(_) => "",
            }
        ),
        (Reason::BusyPoll, _) => "its application polls".to_owned(),
        (Reason::Rps, Some(cpu)) if entry.application_offline => {
            format!("{rps}; the application's CPU {cpu} is offline")
        }
        (Reason::Rps, Some(cpu)) => format!("{rps}; the application's CPU {cpu} takes no flows"),
        (Reason::Rps, None) => rps,
        (Reason::PolicyOff, _) => "policy off".to_owned(),
        (Reason::Offline, _) => "its CPUs are offline or stalled".to_owned(),
        (Reason::Undecided, _) => "undecided".to_owned(),
        (Reason::Room, _) => "the polling CPU has room".to_owned(),
        (Reason::NoGain, _) => "no other CPU has room".to_owned(),
        (Reason::Consumer, _) => "its application is there".to_owned(),
        (Reason::Spread, _) => "RPS: has room".to_owned(),
        (Reason::IdleCpu, _) => match entry.base {
            Some(base) => format!("was idle; {base} is busy"),
            None => "was idle".to_owned(),
        },
        (Reason::Stay, _) => "it is there".to_owned(),
        (Reason::Merged, _) => "GRO merges it".to_owned(),
        (Reason::Unhelpful, _) => "moving did not help".to_owned(),
    }
}

/// A time in a suitable unit.
pub(crate) fn ago(seconds: f64) -> String {
    match seconds {
        s if s < 0.9995 => format!("{:.0} ms", s * 1e3),
        s if s < 99.95 => format!("{s:.1} s"),
        s if s < 5999.5 => format!("{:.0} min", s / 60.0),
        s => format!("{:.0} h", s / 3600.0),
    }
}

/// The text; ends with a newline.
pub fn render(flows: &Flows) -> String {
    let mut out = String::new();
    if !flows.flows.is_empty() {
        out += &format!("{}\n\n", flows_table(&flows.flows).trim_fmt());
    }
    out += &match (flows.total, flows.flows.len()) {
        (0, _) => "no flows".to_owned(),
        (1, 1) => "1 flow".to_owned(),
        (total, shown) if shown == total => format!("{total} flows"),
        (total, shown) => format!("{shown} of {total} flows, those with the most packets"),
    };
    out.push('\n');
    out
}

fn flows_table(flows: &[Entry]) -> Table {
    let mut table = table([
        "flow", "hash", "device", "queue", "packets", "dropped", "moves", "idle", "is at", "wants",
        "why",
    ]);
    align_left(&mut table, &[0, 2, 10]);
    for entry in flows {
        table.add_row([
            entry.flow.map_or("unknown".to_owned(), |f| f.to_string()),
            entry.hash.to_string(),
            entry.device.clone(),
            entry.queue.to_string(),
            entry.packets.to_string(),
            entry.dropped.to_string(),
            entry.moves.to_string(),
            ago(entry.idle_seconds),
            entry.location.to_string(),
            entry.wanted.to_string(),
            why(entry),
        ]);
    }
    table
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::datapath::flow::FlowHash;
    use crate::types::rx_reason;

    /// A flow that is at its application, on CPU 3; CPU 0 polls.
    pub(crate) fn entry() -> Entry {
        Entry {
            flow: Some("udp/192.0.2.1:1024/9".parse().unwrap()),
            hash: FlowHash(0x1234_5678),
            device: "eth0".to_owned(),
            queue: 2,
            location: Location::Cpu(3),
            wanted: Location::Cpu(3),
            reason: Reason::Application,
            application_cpu: Some(3),
            application_offline: false,
            polling_cpu: Some(0),
            base: None,
            packets: 17,
            dropped: 0,
            moves: 1,
            idle_seconds: 0.012,
            shed: false,
        }
    }

    #[test]
    fn each_reason_of_the_data_path_has_a_name() {
        let mut words = std::collections::BTreeSet::new();
        for raw in 1..rx_reason::NR_RX_REASONS.0 as u8 {
            let reason = Reason::from_raw(raw).expect("a reason");
            words.insert(why(&Entry { reason, ..entry() }));
        }
        assert_eq!(words.len(), rx_reason::NR_RX_REASONS.0 as usize - 1);
        for raw in [0, rx_reason::NR_RX_REASONS.0 as u8, u8::MAX] {
            assert_eq!(Reason::from_raw(raw), None);
        }
    }

    #[test]
    fn the_table_says_where_and_why() {
        let inline = Entry {
            flow: None,
            location: Location::Cpu(1),
            wanted: Location::Inline,
            application_cpu: Some(0),
            idle_seconds: 75.0,
            ..entry()
        };
        let offline = Entry {
            wanted: Location::Cpu(1),
            reason: Reason::Rps,
            application_offline: true,
            ..entry()
        };
        let rps = Entry {
            application_cpu: None,
            wanted: Location::Inline,
            ..offline.clone()
        };
        let flows = Flows {
            flows: vec![entry(), inline, offline, rps],
            total: 9,
            slots: 4096,
        };
        let text = render(&flows);
        for words in [
            "udp/192.0.2.1:1024/9  0x12345678  eth0        2       17        0      1   12 ms  CPU 3   CPU 3  \
             application on CPU 3",
            "75.0 s  CPU 1  INLINE  application on CPU 0, which polls",
            "CPU 3   CPU 1  RPS; the application's CPU 3 is offline",
            "CPU 3  INLINE  RPS: CPU 0, which polls",
            "\n\n4 of 9 flows, those with the most packets\n",
        ] {
            assert!(text.contains(words), "not {words:?} in\n{text}");
        }
        let none = render(&Flows {
            flows: Vec::new(),
            total: 0,
            slots: 4096,
        });
        assert_eq!(none, "no flows\n");
    }

    #[test]
    fn times_have_the_unit_that_suits_them() {
        for (seconds, text) in [
            (0.0, "0 ms"),
            (0.9994, "999 ms"),
            (0.9996, "1.0 s"),
            (99.9, "99.9 s"),
            (120.0, "2 min"),
            (7200.0, "2 h"),
        ] {
            assert_eq!(ago(seconds), text);
        }
    }
}
