// SPDX-License-Identifier: MIT OR Apache-2.0
//! One view as text.

use std::fmt::Write;

use super::figures::{count, figure, maybe};
use super::flows::{Sort, sorted};
use super::model::View;
use super::words;
use crate::cli::table::{align_left, table};

/// Flows that are listed.
const FLOWS: usize = 20;

/// The text; ends with a newline.
pub fn render(view: &View) -> String {
    let mut out = format!(
        "{}\n{}  (in {:.2} s)\n",
        words::subject(view),
        words::totals(view),
        view.seconds
    );
    for warning in &view.warnings {
        let _ = writeln!(out, "warning: {warning}");
    }
    let cpus = view.cpus.iter().map(|cpu| format!("CPU {cpu}"));
    let header = ["queue", "recv/s", "drop/s", "queued", "move/s", "INLINE"];
    let header = header.map(str::to_owned).into_iter().chain(cpus);
    let mut queues = table(header.collect::<Vec<_>>());
    for row in &view.rows {
        let rates = &row.rates;
        let numbers = [
            row.name.clone(),
            figure(rates.received),
            figure(rates.dropped),
            count(row.queued),
            figure(rates.moves),
            figure(rates.inline),
        ];
        let cell = |cpu| row.cells.get(cpu).map_or(0.0, |cell| cell.redirected);
        let cells = view.cpus.iter().map(|cpu| figure(cell(cpu)));
        queues.add_row(numbers.into_iter().chain(cells).collect::<Vec<_>>());
    }
    align_left(&mut queues, &[0]);
    let _ = writeln!(out, "\n{}", queues.trim_fmt());
    if view.flows.is_empty() {
        return out + "\nno flows\n";
    }
    let mut flows = table(["flow", "pkts/s", "drop/s", "move/s", "is at", "wants"]);
    for flow in sorted(&view.flows, Sort::Rate, "").into_iter().take(FLOWS) {
        flows.add_row([
            flow.name(),
            maybe(flow.rate),
            maybe(flow.drops),
            maybe(flow.moves),
            flow.entry.location.to_string(),
            flow.entry.wanted.to_string(),
        ]);
    }
    align_left(&mut flows, &[0]);
    let _ = writeln!(out, "\n{}", flows.trim_fmt());
    out
}
