// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queues x CPUs: the frames that each queue sends into each CPU's backlog.

use ratatui::Frame;
use ratatui::layout::{Constraint, Rect};
use ratatui::style::Style;
use ratatui::text::Text;
use ratatui::widgets::{self, Table};

use super::figures::{WIDTH, count, figure, magnitude, time};
use super::keys::{Focus, State};
use super::model::{Cell, Row, View};
use super::palette::Palette;
use super::panel;

/// Columns that name a number: `dropped/s`, `INLINE`.
const LABEL: u16 = 9;
const NUMBER: u16 = 6;

/// Numbers of a queue before those of its backlogs.
const NUMBERS: [&str; 5] = ["recv/s", "drop/s", "queued", "move/s", "INLINE"];

/// Lines below the queues, with sums over them.
const SUMS: usize = 3;

/// How a backlog's rate is written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scale {
    /// In [`WIDTH`] columns.
    Figures,
    /// As a power of ten: one column, for many CPUs.
    Magnitudes,
}

/// What fits.
struct Plan<'a> {
    label: u16,
    scale: Scale,
    /// Digits of the largest CPU's number, of those that are scrolled to too.
    digits: u16,
    cpus: &'a [u32],
}

impl<'a> Plan<'a> {
    fn new(view: &'a View, width: u16, first_cpu: &mut usize) -> Self {
        let names = view.rows.iter().map(|row| row.name.chars().count() as u16);
        let label = names
            .max()
            .unwrap_or(0)
            .clamp(LABEL, (width / 6).max(LABEL));
        let left = width.saturating_sub(label + NUMBERS.len() as u16 * (NUMBER + 1));
        let room = |width: u16| usize::from(left / (width + 1));
        let (scale, room) = match view.cpus.len() <= room(WIDTH) {
            true => (Scale::Figures, room(WIDTH)),
            false => (Scale::Magnitudes, room(1)),
        };
        *first_cpu = (*first_cpu).min(view.cpus.len().saturating_sub(room));
        let cpus = &view.cpus[*first_cpu..view.cpus.len().min(*first_cpu + room)];
        let digits = view
            .cpus
            .last()
            .map_or(1, |cpu| cpu.to_string().len() as u16);
        Self {
            label,
            scale,
            digits,
            cpus,
        }
    }

    fn widths(&self) -> Vec<Constraint> {
        let width = match self.scale {
            Scale::Figures => WIDTH,
            Scale::Magnitudes => 1,
        };
        let numbers = NUMBERS.map(|_| Constraint::Length(NUMBER));
        let cpus = self.cpus.iter().map(|_| Constraint::Length(width));
        let label = std::iter::once(Constraint::Length(self.label));
        label.chain(numbers).chain(cpus).collect()
    }

    /// Lines of the header: the digits of a CPU's number stand below each other in one column.
    fn header_height(&self) -> u16 {
        match self.scale {
            Scale::Figures => 1,
            Scale::Magnitudes => self.digits,
        }
    }

    fn header(&self, palette: Palette) -> widgets::Row<'static> {
        let height = usize::from(self.header_height());
        let low = |text: String| "\n".repeat(height - 1) + &text;
        let cpu = |cpu: &u32| match self.scale {
            Scale::Figures if *cpu < 100 => format!("CPU{cpu:2}"),
            Scale::Figures => cpu.to_string(),
            Scale::Magnitudes => {
                let digits = format!("{cpu:height$}");
                let digits: Vec<String> = digits.chars().map(String::from).collect();
                digits.join("\n")
            }
        };
        let numbers = NUMBERS.map(|name| right(low(name.to_owned())));
        let cells = std::iter::once(widgets::Cell::from(low("queue".to_owned())))
            .chain(numbers)
            .chain(self.cpus.iter().map(|c| right(cpu(c))));
        widgets::Row::new(cells)
            .style(palette.header())
            .height(height as u16)
    }

    fn rate(&self, rate: f64) -> String {
        match (self.scale, rate > 0.0) {
            (Scale::Figures, true) => figure(rate),
            (Scale::Figures, false) => "·".to_owned(),
            (Scale::Magnitudes, _) => magnitude(rate).to_string(),
        }
    }

    fn queue(&self, row: &Row, largest: f64, palette: Palette) -> widgets::Row<'static> {
        let alarm = |text: String, zero: bool| match zero {
            true => right(text),
            false => right(text).style(palette.alarm()),
        };
        let rates = &row.rates;
        let numbers = [
            right(figure(rates.received)),
            alarm(figure(rates.dropped), rates.dropped == 0.0),
            right(count(row.queued)),
            right(figure(rates.moves)),
            right(figure(rates.inline)).style(palette.heat(rates.inline, largest)),
        ];
        let cells = self.cpus.iter().map(|cpu| {
            let cell = row.cells.get(cpu).cloned().unwrap_or_default();
            let text = match cell.stalled {
                true => "!".to_owned(),
                false => self.rate(cell.redirected),
            };
            right(text).style(palette.heat(cell.redirected, largest))
        });
        let name = std::iter::once(widgets::Cell::from(row.name.clone()));
        widgets::Row::new(name.chain(numbers).chain(cells))
    }

    /// A line with a number of each CPU.
    fn sums(
        &self,
        name: &str,
        view: &View,
        text: impl Fn(&Cell) -> (String, Style),
    ) -> widgets::Row<'static> {
        let cells = self.cpus.iter().map(|cpu| {
            let (text, style) = text(&view.totals.get(cpu).cloned().unwrap_or_default());
            right(text).style(style)
        });
        let label = widgets::Cell::from(name.to_owned());
        let empty = NUMBERS.map(|_| widgets::Cell::from(""));
        widgets::Row::new(std::iter::once(label).chain(empty).chain(cells))
    }
}

fn right(text: String) -> widgets::Cell<'static> {
    widgets::Cell::from(Text::from(text).right_aligned())
}

/// Lines that all of it would take.
pub fn height(view: &View, width: u16) -> u16 {
    let header = Plan::new(view, width, &mut 0).header_height();
    panel::TITLE + header + view.rows.len() as u16 + SUMS as u16
}

/// Draws what fits, and limits what is scrolled to.
pub fn draw(frame: &mut Frame<'_>, area: Rect, view: &View, state: &mut State, palette: Palette) {
    let plan = Plan::new(view, area.width, &mut state.first_cpu);
    let fixed = panel::TITLE + plan.header_height() + SUMS as u16;
    let room = usize::from(area.height.saturating_sub(fixed));
    let rows = view.rows.len();
    state.first_queue = state.first_queue.min(rows.saturating_sub(room));
    let shown = state.first_queue..rows.min(state.first_queue + room);

    let part = |shown: usize, all: usize, first: usize, what: &str| match shown < all {
        true => format!("{what}s {}-{} of {all}", first + 1, first + shown),
        false if all == 1 => format!("1 {what}"),
        false => format!("{all} {what}s"),
    };
    let queues = part(shown.len(), rows, state.first_queue, "queue");
    let cpus = part(plan.cpus.len(), view.cpus.len(), state.first_cpu, "CPU");
    let unit = match plan.scale {
        Scale::Figures => "frames/s into each CPU's backlog",
        Scale::Magnitudes => "frames/s into each CPU's backlog, as a power of ten",
    };
    let title = format!("{queues} x {cpus}: {unit}");
    let body = panel::draw(frame, area, title, state.focus == Focus::Queues, palette);

    let cells = view.rows.iter().flat_map(|row| row.cells.values());
    let rates = view.rows.iter().map(|row| row.rates.inline);
    let largest = cells.map(|c| c.redirected).chain(rates).fold(0.0, f64::max);
    let queue = |row: &Row| plan.queue(row, largest, palette);
    let queued = plan.sums("queued", view, |cell| {
        let text = match (plan.scale, cell.queued) {
            (_, 0) => "·".to_owned(),
            (Scale::Figures, frames) => count(frames),
            (Scale::Magnitudes, frames) => magnitude(frames as f64).to_string(),
        };
        (text, Style::new())
    });
    let dropped = plan.sums("dropped/s", view, |cell| {
        let style = match cell.dropped > 0.0 {
            true => palette.alarm(),
            false => Style::new(),
        };
        (plan.rate(cell.dropped), style)
    });
    let waits = plan.sums("99 % <", view, |cell| {
        let text = match (plan.scale, cell.waits.samples(), cell.waits.p99_below_us) {
            (_, 0, _) => "·".to_owned(),
            (Scale::Figures, _, us) => time(us),
            // Longer ones are those of seconds.
            (Scale::Magnitudes, _, us) => magnitude(us.unwrap_or(1_000_000) as f64).to_string(),
        };
        (text, Style::new())
    });
    let sums = [queued, dropped, waits];
    let lines = view.rows[shown].iter().map(queue).chain(sums);
    let table = Table::new(lines, plan.widths())
        .header(plan.header(palette))
        .column_spacing(1);
    frame.render_widget(table, body);
}
