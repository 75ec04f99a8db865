// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer status`: the accounting of a running rxsteer as text.

use std::fmt::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use comfy_table::Table;
use schemars::{JsonSchema, Schema};
use serde::Serialize;

use super::program::end_with_the_reader;
use super::value::seconds;
use super::{pinned, poll};
use crate::api::flows::Entry;
use crate::api::line::printable_message;
use crate::api::status::{Device, NOT_STEERED, Pinned, Queue, Status};
use crate::api::{busy_poll, client};
use crate::cli::table::{align_left, table};
use crate::datapath::waits::Waits;
use crate::host::record;

/// Options of `rxsteer status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Print JSON, one object per line
    #[arg(long)]
    pub json: bool,

    /// Print again every so many seconds, until interrupted
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub interval: Option<Duration>,
}

impl StatusArgs {
    pub(super) fn run(&self) -> Result<ExitCode> {
        end_with_the_reader()?;
        loop {
            let polling = client::busy_poll()?;
            let steering = match client::status_if_there() {
                Err(_) if polling.is_some() => None,
                steering => steering?,
            };
            let pinned = match &steering {
                Some(_) => Vec::new(),
                None => pinned::in_force()?,
            };
            let not_put_back = record::words();
            if steering.is_none() && polling.is_none() && pinned.is_empty() {
                // With the error that says how to start one.
                client::status().map_err(|e| match not_put_back.first() {
                    Some(left) => e.context(left.clone()),
                    None => e,
                })?;
            }
            let (steering, polling) = (steering.as_ref(), polling.as_ref());
            if self.json {
                println!("{}", json(steering, &pinned, polling, &not_put_back)?);
            } else {
                print!("{}", text(steering, &pinned, polling));
                for left in &not_put_back {
                    println!("\nwarning: {}", printable_message(left));
                }
            }
            match self.interval {
                Some(interval) => std::thread::sleep(interval),
                None => return Ok(ExitCode::SUCCESS),
            }
        }
    }
}

/// The status of steering, of a process or pinned, and of busy polling as text; ends with a newline.
pub fn text(
    steering: Option<&Status>,
    pinned: &[Pinned],
    polling: Option<&busy_poll::Status>,
) -> String {
    let steering = steering.map(render).into_iter();
    let parts = steering.chain(pinned.iter().map(pinned::render));
    let parts = parts.chain(polling.map(poll::render));
    parts.collect::<Vec<_>>().join("\n")
}

/// The status of steering, with that of busy polling. Without a process that steers, only the fields
/// below are there.
#[derive(Serialize, JsonSchema)]
#[schemars(title = "rxsteer status --json")]
struct Both<'a> {
    #[serde(flatten)]
    steering: Option<&'a Status>,
    /// Steering that goes on without a process, since it is pinned; empty if a process steers.
    pinned: &'a [Pinned],
    /// Null if no sockets are set to poll.
    busy_poll: Option<&'a busy_poll::Status>,
    /// What a rxsteer has changed that was killed before it was put back, in sentences with remedies;
    /// empty as a rule.
    not_put_back: &'a [String],
}

/// The schema of [`json`].
pub fn schema() -> Schema {
    schemars::schema_for!(Both<'_>)
}

/// The same as JSON.
///
/// # Errors
/// When the status can't be written as JSON.
pub fn json(
    steering: Option<&Status>,
    pinned: &[Pinned],
    polling: Option<&busy_poll::Status>,
    not_put_back: &[String],
) -> serde_json::Result<String> {
    serde_json::to_string(&Both {
        steering,
        pinned,
        busy_poll: polling,
        not_put_back,
    })
}

/// The text; ends with a newline.
pub fn render(status: &Status) -> String {
    let mut out = String::new();
    let dry_run = if status.dry_run {
        ", dry run: nothing is moved"
    } else {
        ""
    };
    let _ = writeln!(
        out,
        "rxsteer {} (process {}): policy {}, at most {} frames per backlog{dry_run}",
        status.version, status.pid, status.policy, status.backlog_limit
    );
    if status.refused_backlogs > 0 {
        let _ = writeln!(
            out,
            "{} backlogs exist, the most that may exist: flows that want {} others stay inline \
             until idle backlogs are taken down",
            status.nr_backlogs, status.refused_backlogs
        );
    }
    if !status.patterns.is_empty() {
        let _ = writeln!(
            out,
            "devices that match {} are steered when they come",
            status.patterns.join(" or ")
        );
    }
    if let Some(trial) = &status.trial {
        let _ = writeln!(out, "{trial}");
    }
    if let Some(lost) = lost(status) {
        let _ = writeln!(out, "{lost}");
    }
    for device in &status.devices {
        if device.queues_of.is_some() && device.unsteered.is_empty() {
            continue;
        }
        let mode = match device.mode.as_str() {
            NOT_STEERED => "not steered".to_owned(),
            mode => format!("{mode} mode"),
        };
        let _ = writeln!(out, "\n{} ({mode})", device.device);
        let shares = |other: &&Device| other.queues_of.as_ref() == Some(&device.device);
        let others = status.devices.iter().filter(shares);
        let others: Vec<&str> = others.map(|other| &other.device[..]).collect();
        if !others.is_empty() {
            let _ = writeln!(out, "with the packets of {}", others.join(", "));
        }
        for why in &device.unsteered {
            let _ = writeln!(out, "warning: {why}");
        }
        if !device.queues.is_empty() {
            let _ = writeln!(out, "{}", queues(device).trim_fmt());
        }
        if device.foreign > 0 {
            let _ = writeln!(
                out,
                "{} more frames were not steered: they came from other queues or devices",
                device.foreign
            );
        }
        if device.queues.iter().any(|q| !q.backlogs.is_empty()) {
            let _ = writeln!(out, "\n{}", backlogs(device, status.dry_run).trim_fmt());
        }
        if device.queues.iter().any(|q| q.load.is_some()) {
            let _ = writeln!(out, "\n{}", loads(device).trim_fmt());
        }
        for q in &device.queues {
            for b in q.backlogs.iter().filter(|b| b.stalled) {
                let _ = writeln!(
                    out,
                    "queue {}: the backlog for CPU {} is stalled: new flows go elsewhere (see the log)",
                    q.queue, b.cpu
                );
            }
            if q.inline_ports > 0 {
                let _ = writeln!(
                    out,
                    "queue {}: {} of the inline frames by --inline-ports",
                    q.queue, q.inline_ports
                );
            }
            if q.rx_hash > 0 {
                let _ = writeln!(
                    out,
                    "queue {}: {} frames steered by the device's hash",
                    q.queue, q.rx_hash
                );
            }
            if let Some(why) = q.imbalance() {
                let _ = writeln!(out, "queue {}: {why} (packets are on their way)", q.queue);
            }
        }
    }
    if let Some(dropped) = &status.dropped_flows
        && !dropped.flows.is_empty()
    {
        let flows = dropped_flows(&dropped.flows);
        let _ = writeln!(out, "\n{}", flows.trim_fmt());
    }
    out
}

/// Packets that did not reach an application, by where they were lost; `None` if all did.
fn lost(status: &Status) -> Option<String> {
    let queues = || status.devices.iter().flat_map(|device| &device.queues);
    let sum = |of: fn(&Queue) -> u64| queues().map(of).sum::<u64>();
    let [received, dropped, after] = [|q: &Queue| q.received, Queue::dropped, Queue::lost].map(sum);
    let full = status.socket_full;
    (dropped + after + full > 0).then(|| {
        format!(
            "lost: {} of {received} packets: {dropped} dropped by rxsteer, {after} on their way to \
             the other CPU, {full} at full UDP sockets",
            dropped + after + full
        )
    })
}

fn queues(device: &Device) -> Table {
    let mut table = table([
        "queue",
        "CPUs",
        "received",
        "inline",
        "redirected",
        "dropped",
        "shed",
        "limited",
        "no flow",
        "moves",
        "held",
    ]);
    for q in &device.queues {
        table.add_row([
            q.queue.to_string(),
            if q.rps_cpus.is_empty() {
                "-".to_owned()
            } else {
                q.rps_cpus.clone()
            },
            q.received.to_string(),
            q.inline.to_string(),
            q.sums.redirected.to_string(),
            q.sums.dropped.to_string(),
            q.sums.shed.to_string(),
            q.sums.limited.to_string(),
            (q.no_flow_truncated + q.no_flow_unknown).to_string(),
            q.moves.to_string(),
            q.held.to_string(),
        ]);
    }
    table
}

fn backlogs(device: &Device, dry_run: bool) -> Table {
    let mut header = vec![
        "queue",
        "to CPU",
        "redirected",
        "delivered",
        "lost",
        "vanished",
        "queued",
        "dropped",
        "shed",
        "limited",
        "half <",
        "99 % <",
    ];
    if dry_run {
        header.push("would redirect");
    }
    let mut table = table(header);
    let rows = device
        .queues
        .iter()
        .flat_map(|q: &Queue| q.backlogs.iter().map(move |b| (q, b)));
    for (q, b) in rows {
        let mut row = [
            u64::from(q.queue),
            b.cpu.into(),
            b.terms.redirected,
            b.terms.delivered,
            b.terms.lost,
            b.terms.vanished,
            b.terms.queued,
            b.terms.dropped,
            b.terms.shed,
            b.terms.limited,
        ]
        .map(|number| number.to_string())
        .to_vec();
        row.extend([b.waits.half_below_us, b.waits.p99_below_us].map(|us| below(&b.waits, us)));
        if dry_run {
            row.push(b.terms.would_redirect.to_string());
        }
        table.add_row(row);
    }
    table
}

/// The upper bound of a share of the times, in a suitable unit.
pub(super) fn below(waits: &Waits, us: Option<u64>) -> String {
    match us {
        Some(us) => time(us),
        None if waits.samples() == 0 => "-".to_owned(),
        None => "longer".to_owned(),
    }
}

/// A time in us, in a suitable unit.
pub(super) fn time(us: u64) -> String {
    match us {
        0..1000 => format!("{us} us"),
        1000..10_000 => format!("{:.1} ms", us as f64 / 1e3),
        10_000..1_000_000 => format!("{:.0} ms", us as f64 / 1e3),
        _ => format!("{:.1} s", us as f64 / 1e6),
    }
}

/// The loads of queues with policies that depend on the load.
fn loads(device: &Device) -> Table {
    let mut table = table(["queue", "polled on", "load", "busy", "in polls"]);
    let loads = device.queues.iter();
    for (q, load) in loads.filter_map(|q| Some((q, q.load.as_ref()?))) {
        table.add_row([
            q.queue.to_string(),
            match load.polling_cpu {
                Some(cpu) => format!("CPU {cpu}"),
                None => "-".to_owned(),
            },
            load.pressure.name().to_owned(),
            format!("{} %", load.busy_percent),
            format!("{} %", load.polls_percent),
        ]);
    }
    table
}

fn dropped_flows(flows: &[Entry]) -> Table {
    let mut table = table([
        "dropped most",
        "device",
        "queue",
        "dropped",
        "packets",
        "is at",
    ]);
    align_left(&mut table, &[0, 1]);
    for entry in flows {
        table.add_row([
            entry.flow.map_or(entry.hash.to_string(), |f| f.to_string()),
            entry.device.clone(),
            entry.queue.to_string(),
            entry.dropped.to_string(),
            entry.packets.to_string(),
            entry.location.to_string(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::flows::Flows;
    use crate::api::status::{Backlog, Terms};
    use crate::cli::flows;
    use crate::datapath::load::{Load, Pressure};
    use crate::datapath::trial::Trial;
    use crate::datapath::waits::BUCKETS;

    fn status(queue: Queue, dropped_flows: Option<Flows>) -> Status {
        Status {
            pid: 7,
            version: "0.1.0".to_owned(),
            policy: "adaptive".to_owned(),
            dry_run: false,
            backlog_limit: 1000,
            nr_backlogs: 2048,
            most_backlogs: 2048,
            refused_backlogs: 0,
            devices: vec![Device {
                device: "eth0".to_owned(),
                ifindex: 2,
                mode: "native".to_owned(),
                foreign: 0,
                unsteered: Vec::new(),
                queues_of: None,
                shares_queues: false,
                queues: vec![queue],
            }],
            socket_full: 0,
            trial: None,
            patterns: Vec::new(),
            dropped_flows,
        }
    }

    /// Samples of 8 to 16 us and of 16 to 33 ms.
    fn waits(short: u64, long: u64) -> Waits {
        let mut buckets = [0; BUCKETS];
        (buckets[3], buckets[14]) = (short, long);
        Waits::new(buckets, 0)
    }

    #[test]
    fn bounds_have_the_unit_that_suits_them() {
        for (us, text) in [
            (Some(2), "2 us"),
            (Some(512), "512 us"),
            (Some(2048), "2.0 ms"),
            (Some(1 << 14), "16 ms"),
            (Some(1 << 19), "524 ms"),
            (Some(1 << 20), "1.0 s"),
            (None, "longer"),
        ] {
            assert_eq!(below(&waits(1, 0), us), text);
        }
        assert_eq!(below(&Waits::default(), None), "-");
    }

    #[test]
    fn what_was_dropped_and_for_whom() {
        let terms = Terms {
            redirected: 40,
            delivered: 40,
            limited: 7,
            ..Terms::default()
        };
        let queue = Queue {
            rps_cpus: "1".to_owned(),
            received: 97,
            inline: 50,
            sums: terms.clone(),
            load: Some(Load {
                polling_cpu: Some(0),
                pressure: Pressure::Saturated,
                busy_percent: 97,
                polls_percent: 61,
            }),
            backlogs: vec![Backlog {
                cpu: 1,
                stalled: true,
                terms,
                waits: waits(98, 2),
            }],
            ..Queue::default()
        };
        assert_eq!(queue.dropped(), 7);
        let flow = Entry {
            dropped: 9,
            ..flows::tests::entry()
        };
        let flows = Flows {
            flows: vec![flow],
            total: 1,
            slots: 8192,
        };
        let mut status = status(queue, Some(flows));
        status.socket_full = 3;
        status.trial = Some(Trial {
            moving_bytes_per_second: 30_000_000,
            inline_bytes_per_second: 20_000_000,
            seconds_ago: 4,
            helps: true,
        });
        assert_eq!(
            render(&status),
            "rxsteer 0.1.0 (process 7): policy adaptive, at most 1000 frames per backlog
moving flows helps: 240 Mbit/s of packets delivered while they moved, 160 Mbit/s while inline (1.50 times, 4 s ago)
lost: 10 of 97 packets: 7 dropped by rxsteer, 0 on their way to the other CPU, 3 at full UDP sockets

eth0 (native mode)
 queue  CPUs  received  inline  redirected  dropped  shed  limited  no flow  moves  held
     0     1        97      50          40        0     0        7        0      0     0

 queue  to CPU  redirected  delivered  lost  vanished  queued  dropped  shed  limited  half <  99 % <
     0       1          40         40     0         0       0        0     0        7   16 us   33 ms

 queue  polled on       load  busy  in polls
     0      CPU 0  saturated  97 %      61 %
queue 0: the backlog for CPU 1 is stalled: new flows go elsewhere (see the log)

 dropped most          device  queue  dropped  packets  is at
 udp/192.0.2.1:1024/9  eth0        2        9       17  CPU 3
"
        );
    }

    #[test]
    fn a_device_without_a_mode_is_not_steered() {
        let mut status = status(Queue::default(), None);
        let says = |status: &Status, words| render(status).contains(words);
        assert!(says(&status, "eth0 (native mode)\n"));
        status.devices[0].mode = NOT_STEERED.to_owned();
        assert!(says(&status, "eth0 (not steered)\n"));
    }

    #[test]
    fn backlogs_that_may_not_exist_are_counted() {
        let mut status = status(Queue::default(), None);
        let line = "2048 backlogs exist, the most that may exist: flows that want 17 others";
        assert!(!render(&status).contains("may exist"));
        status.refused_backlogs = 17;
        assert!(render(&status).contains(line), "{}", render(&status));
    }

    #[test]
    fn where_no_policy_looks_at_the_load_none_is_shown() {
        let text = render(&status(Queue::default(), None));
        for absent in ["polled on", "dropped most", "stalled"] {
            assert!(!text.contains(absent), "{text}");
        }
    }
}
