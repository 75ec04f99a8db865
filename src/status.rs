// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer status`: the accounting of a running rxsteer as text for people.

use std::fmt::Write;

use comfy_table::{CellAlignment, Table, presets};

use crate::accounting::{Device, Queue, Status};

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
    for device in &status.devices {
        let _ = writeln!(out, "\n{} ({} XDP)", device.device, device.mode);
        let _ = writeln!(out, "{}", queues(device).trim_fmt());
        if device.queues.iter().any(|q| !q.backlogs.is_empty()) {
            let _ = writeln!(out, "\n{}", backlogs(device, status.dry_run).trim_fmt());
        }
        for q in &device.queues {
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
    out
}

/// A table whose numbers line up on the right.
pub(crate) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header);
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn queues(device: &Device) -> Table {
    let mut table = table(&[
        "queue",
        "CPUs",
        "received",
        "inline",
        "redirected",
        "dropped",
        "shed",
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
        "queued",
        "dropped",
        "shed",
    ];
    if dry_run {
        header.push("would redirect");
    }
    let mut table = table(&header);
    let rows = device
        .queues
        .iter()
        .flat_map(|q: &Queue| q.backlogs.iter().map(move |b| (q, b)));
    for (q, b) in rows {
        let mut row = vec![
            q.queue.into(),
            b.cpu.into(),
            b.terms.redirected,
            b.terms.delivered,
            b.terms.lost,
            b.terms.queued,
            b.terms.dropped,
            b.terms.shed,
        ];
        if dry_run {
            row.push(b.terms.would_redirect);
        }
        table.add_row(row);
    }
    table
}
