// SPDX-License-Identifier: MIT OR Apache-2.0
//! The screen: header, queues, flows, keys.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Block, Cell, Clear, Paragraph, Row, Table, Wrap};

use super::figures::{count, maybe};
use super::flows::{FlowRow, sorted};
use super::keys::{Focus, State};
use super::model::View;
use super::palette::Palette;
use super::{heat, panel, words};
use crate::cli::flows::{ago, why};

/// The least size: 80x24, with lines for a multiplexer's status.
const LEAST: (u16, u16) = (80, 20);

/// Columns from which on more is told of flows.
const WIDE: u16 = 120;

/// Lines for warnings at most, and for flows at least.
const WARNINGS: usize = 3;
const FLOWS: u16 = 5;

const KEYS: &str = "q quit  s sort  / filter  space pause  +/- interval  tab other part  ? help";

const HELP: &str = "\
q            quit (Ctrl-C too)
s            sort flows by rate, drops or moves
/            filter flows: text of a line; Enter keeps it, Esc ends it
space        pause, and go on
+ -          longer and shorter interval
up down j k  scroll; PgUp, PgDn: by ten; Home: to the start
tab          scroll queues instead of flows, and back
left right   scroll CPUs
?            this help

A queue's line: frames received, dropped in XDP, waiting in backlogs,
moves of flows, frames processed INLINE, and those that go to each CPU.
! is a backlog without progress. - is a rate that is not known yet.
99 % <: 99 % of the frames waited for less in the CPU's backlogs.";

/// What is shown.
#[derive(Debug, Default)]
pub struct Shown {
    /// Name of the host.
    pub host: String,
    /// The last view.
    pub view: Option<View>,
    /// Why there is no later one.
    pub lost: Option<String>,
}

/// Draws the screen, and limits what is scrolled to.
pub fn draw(frame: &mut Frame<'_>, shown: &Shown, state: &mut State, palette: Palette) {
    let area = frame.area();
    let (width, height) = LEAST;
    if area.width < width || area.height < height {
        let text = format!(
            "too small: {}x{}, at least {width}x{height} are needed",
            area.width, area.height
        );
        frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), area);
        return;
    }
    let header = header(shown, state, palette, area.width.into());
    let [top, middle, bottom] = Layout::vertical([
        Constraint::Length(header.len() as u16),
        Constraint::Fill(1),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(Text::from(header), top);
    frame.render_widget(last_line(state, palette), bottom);
    if let Some(view) = &shown.view {
        let most = middle.height.saturating_sub(FLOWS).max(middle.height / 2);
        let [queues, flows] = Layout::vertical([
            Constraint::Length(heat::height(view, area.width).min(most)),
            Constraint::Fill(1),
        ])
        .areas(middle);
        heat::draw(frame, queues, view, state, palette);
        draw_flows(frame, flows, view, state, palette);
    }
    if state.help {
        draw_help(frame, middle);
    }
}

/// The words of a text, in lines of at most this width.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::<String>::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

fn header<'a>(shown: &'a Shown, state: &State, palette: Palette, width: usize) -> Vec<Line<'a>> {
    let mut lines = Vec::new();
    let title = |rest: &str| {
        let paused = if state.paused { " PAUSED" } else { "" };
        let every = state.interval.as_secs_f64();
        format!("rxsteer top {} every {every} s{paused}  {rest}", shown.host)
    };
    match &shown.view {
        Some(view) => {
            lines.push(Line::styled(title(&words::subject(view)), palette.title()));
            lines.push(Line::from(words::totals(view)));
        }
        None => lines.push(Line::styled(title("measuring"), palette.title())),
    }
    if let Some(why) = &shown.lost {
        let text = format!("! rxsteer has stopped, or does not answer: trying again ({why})");
        let text = wrapped(&text, width).into_iter();
        lines.extend(text.map(|line| Line::styled(line, palette.alarm())));
    }
    let warnings = shown.view.iter().flat_map(|view| &view.warnings);
    let nr_warnings = warnings.clone().count();
    let fit = match nr_warnings > WARNINGS {
        true => WARNINGS - 1,
        false => nr_warnings,
    };
    let warning = |text: String| Line::styled(format!("! {text}"), palette.warning());
    lines.extend(warnings.take(fit).map(|text| warning(text.clone())));
    if fit < nr_warnings {
        let more = format!("{} more: see `rxsteer status`", nr_warnings - fit);
        lines.push(warning(more));
    }
    lines
}

fn last_line(state: &State, palette: Palette) -> Line<'static> {
    match state.typing {
        true => Line::styled(
            format!("filter: {}_  (Enter keeps it, Esc ends it)", state.filter),
            palette.title(),
        ),
        false => Line::from(KEYS),
    }
}

/// A column of the flows: name, width, content.
type Column = (&'static str, Constraint, fn(&FlowRow) -> String);

const NAME: Column = ("flow", Constraint::Fill(1), FlowRow::name);

const NUMBERS: [Column; 5] = [
    ("pkts/s", Constraint::Length(6), |f| maybe(f.rate)),
    ("drop/s", Constraint::Length(6), |f| maybe(f.drops)),
    ("move/s", Constraint::Length(6), |f| maybe(f.moves)),
    ("is at", Constraint::Length(7), |f| {
        f.entry.location.to_string()
    }),
    ("wants", Constraint::Length(7), |f| {
        f.entry.wanted.to_string()
    }),
];

const WIDE_NUMBERS: [Column; 5] = [
    ("device", Constraint::Length(10), |f| f.entry.device.clone()),
    ("queue", Constraint::Length(5), |f| {
        f.entry.queue.to_string()
    }),
    ("packets", Constraint::Length(7), |f| {
        count(f.entry.packets.into())
    }),
    ("dropped", Constraint::Length(7), |f| {
        count(f.entry.dropped.into())
    }),
    ("idle", Constraint::Length(7), |f| ago(f.entry.idle_seconds)),
];

const WHY: Column = ("why", Constraint::Length(32), |f| why(&f.entry));

fn draw_flows(frame: &mut Frame<'_>, area: Rect, view: &View, state: &mut State, palette: Palette) {
    let flows = sorted(&view.flows, state.sort, &state.filter);
    // The title and the table's header take a line each.
    let room = usize::from(area.height.saturating_sub(panel::TITLE + 1));
    state.first_flow = state.first_flow.min(flows.len().saturating_sub(room));
    let shown = &flows[state.first_flow..flows.len().min(state.first_flow + room)];

    let mut text = format!(
        "{} of {} flows by {}",
        flows.len(),
        view.nr_flows,
        state.sort.name()
    );
    if !state.filter.is_empty() {
        text += &format!(", with {:?}", state.filter);
    }
    if state.first_flow > 0 {
        text += &format!(", from {} on", state.first_flow + 1);
    }
    let body = panel::draw(frame, area, text, state.focus == Focus::Flows, palette);

    let wide = area.width >= WIDE;
    let mut right: Vec<Column> = NUMBERS.to_vec();
    if wide {
        right.extend(WIDE_NUMBERS);
    }
    let why = wide.then_some(WHY);
    let cells = |cell: &dyn Fn(&Column) -> String| {
        let right = right.iter();
        let right = right.map(|column| Cell::from(Text::from(cell(column)).right_aligned()));
        let left = |column: &Column| Cell::from(cell(column));
        let cells = std::iter::once(left(&NAME)).chain(right);
        Row::new(cells.chain(why.as_ref().map(left)))
    };
    let widths = std::iter::once(&NAME).chain(&right).chain(&why);
    let widths = widths.map(|(_, width, _)| *width);
    let rows = shown.iter().map(|flow| {
        let style = match flow.drops {
            Some(drops) if drops > 0.0 => palette.alarm(),
            _ => ratatui::style::Style::new(),
        };
        cells(&|(_, _, content)| content(flow)).style(style)
    });
    let table = Table::new(rows, widths)
        .header(cells(&|(name, ..)| (*name).to_owned()).style(palette.header()))
        .column_spacing(1);
    frame.render_widget(table, body);
}

fn draw_help(frame: &mut Frame<'_>, area: Rect) {
    let height = HELP.lines().count() as u16 + 2;
    let width = HELP.lines().map(str::len).max().unwrap_or(0) as u16 + 4;
    let area = area.centered(Constraint::Length(width), Constraint::Length(height));
    frame.render_widget(Clear, area);
    let block = Block::bordered().title(" Keys ");
    frame.render_widget(Paragraph::new(HELP).block(block), area);
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::style::Color;

    use super::*;
    use crate::api::status::Queue;
    use crate::cli::top::flows::Sort;
    use crate::cli::top::model::Sample;
    use crate::cli::top::model::tests::{device, queue, sample};
    use crate::datapath::waits::{BUCKETS, Waits};

    fn state() -> State {
        State::new(Duration::from_secs(1))
    }

    /// A device with this number of queues, each for CPU 3.
    fn shown(queues: u32) -> Shown {
        let start = Instant::now();
        let at = |seconds, received| {
            let waits = |mut queue: Queue| {
                let mut buckets = [0; BUCKETS];
                buckets[3] = received;
                queue.backlogs[0].waits = Waits::new(buckets, 0);
                queue
            };
            let queues = (0..queues).map(|q| waits(queue(q, received, received / 2)));
            sample(
                start,
                seconds,
                vec![device("eth0", queues.collect())],
                received as u32,
            )
        };
        between(&at(0, 1000), &at(1, 251_000))
    }

    fn between(before: &Sample, now: &Sample) -> Shown {
        Shown {
            host: "host1".to_owned(),
            view: View::between(before, now, None),
            lost: None,
        }
    }

    fn terminal(
        size: (u16, u16),
        shown: &Shown,
        state: &mut State,
        palette: Palette,
    ) -> Terminal<TestBackend> {
        let mut terminal = Terminal::new(TestBackend::new(size.0, size.1)).unwrap();
        terminal
            .draw(|frame| draw(frame, shown, state, palette))
            .unwrap();
        terminal
    }

    /// The lines of the screen, without blanks at their ends.
    fn lines(size: (u16, u16), shown: &Shown, state: &mut State) -> Vec<String> {
        let terminal = terminal(size, shown, state, Palette::new(true));
        let cells = terminal.backend().buffer().content();
        let line = |cells: &[ratatui::buffer::Cell]| {
            let line: String = cells.iter().map(|cell| cell.symbol()).collect();
            line.trim_end().to_owned()
        };
        cells.chunks(size.0.into()).map(line).collect()
    }

    #[test]
    fn the_screen_at_80x24() {
        let lines = lines((80, 24), &shown(2), &mut state());
        let expected = "\
rxsteer top host1 every 1 s  policy adaptive  eth0 native

received 500k/s  inline 250k  redirected 250k  dropped 0  queued 24  lost 0  mov
2 queues x 2 CPUs: frames/s into each CPU's backlog
queue     recv/s drop/s queued move/s INLINE CPU 1 CPU 3
eth0:0      250k      0     12      0   125k     ·  125k
eth0:1      250k      0     12      0   125k     ·  125k
queued                                           ·    24
dropped/s                                        ·     ·
99 % <                                           ·  16us
1 of 9 flows by rate
flow                                        pkts/s drop/s move/s   is at   wants
udp/192.0.2.1:1024/9                          250k      0      0   CPU 3   CPU 3";
        let expected: Vec<&str> = expected.lines().filter(|line| !line.is_empty()).collect();
        assert_eq!(lines[..expected.len()], expected, "{}", lines.join("\n"));
        assert!(lines[expected.len()..23].iter().all(String::is_empty));
        assert_eq!(lines[23], KEYS);
    }

    #[test]
    fn a_wide_screen_tells_more_of_flows() {
        let lines = lines((160, 50), &shown(2), &mut state());
        let text = lines.join("\n");
        assert!(
            lines[1].ends_with("queued 24  lost 0  moves 0  backlogs 0/0"),
            "{text}"
        );
        let flow = "CPU 3   CPU 3       eth0     2    251k       0   12 ms application on CPU 3";
        assert!(lines[11].ends_with(flow), "{text}");
        assert_eq!(lines[49], KEYS);
    }

    #[test]
    fn what_does_not_fit_is_scrolled_to() {
        let (shown, mut state) = (shown(64), state());
        let text = lines((80, 24), &shown, &mut state).join("\n");
        assert!(text.contains("queues 1-11 of 64"), "{text}");
        assert!(
            text.contains("eth0:10 ") && !text.contains("eth0:11 "),
            "{text}"
        );
        state.first_queue = 1000;
        let text = lines((80, 24), &shown, &mut state).join("\n");
        assert!(text.contains("queues 54-64 of 64"), "{text}");
        assert!(text.contains("eth0:63 "), "{text}");
        assert_eq!(state.first_queue, 53);
    }

    #[test]
    fn many_cpus_are_powers_of_ten() {
        let start = Instant::now();
        let at = |seconds, received| {
            let mut queue = queue(0, received, received / 2);
            queue.rps_cpus = "0-127".to_owned();
            sample(start, seconds, vec![device("eth0", vec![queue])], 10)
        };
        let shown = between(&at(0, 1000), &at(1, 251_000));
        let mut state = state();
        let lines = lines((80, 24), &shown, &mut state);
        let text = lines.join("\n");
        assert!(lines[2].starts_with("1 queue x CPUs 1-18 of 128"), "{text}");
        assert!(lines[4].ends_with("  1 1 1 1 1 1 1 1"), "{text}");
        assert!(lines[5].ends_with("7 8 9 0 1 2 3 4 5 6 7"), "{text}");
        assert!(lines[6].contains("125k · · · 5 · ·"), "{text}");
        state.first_cpu = 500;
        let last = self::lines((80, 24), &shown, &mut state);
        assert!(
            last[2].starts_with("1 queue x CPUs 111-128 of 128"),
            "{last:?}"
        );
        assert!(last[6].contains("125k · · ·"), "{last:?}");
        assert!(!last[6].contains("· 5"), "{last:?}");
        // With room for all of them.
        let wide = self::lines((320, 50), &shown, &mut state);
        assert!(wide[2].starts_with("1 queue x 128 CPUs"), "{wide:?}");
        assert_eq!(state.first_cpu, 0);
    }

    #[test]
    fn keys_show_the_filter_the_order_and_help() {
        let (shown, mut state) = (shown(1), state());
        state.filter = "tcp".to_owned();
        state.sort = Sort::Drops;
        state.typing = true;
        state.paused = true;
        let lines = lines((80, 24), &shown, &mut state);
        let text = lines.join("\n");
        assert!(
            text.contains("0 of 9 flows by drops, with \"tcp\""),
            "{text}"
        );
        assert!(!text.contains("udp/"), "{text}");
        assert!(lines[0].contains("every 1 s PAUSED"), "{text}");
        assert!(lines[23].starts_with("filter: tcp_"), "{text}");
        assert!(!text.contains("this help"), "{text}");
        state.help = true;
        let text = self::lines((80, 20), &shown, &mut state).join("\n");
        for line in HELP.lines() {
            assert!(text.contains(line), "{line:?} is not in\n{text}");
        }
    }

    #[test]
    fn the_last_view_stays_when_nobody_answers() {
        let mut shown = shown(1);
        shown.lost = Some("no rxsteer is running".to_owned());
        let lines = lines((80, 24), &shown, &mut state());
        assert!(lines[2].starts_with("! rxsteer has stopped, or does not answer: trying again"));
        assert!(lines.join("\n").contains("udp/192.0.2.1"), "{lines:?}");
        // The reason is told to its end, and only then the queues follow.
        let ways = "`rxsteer run --pin` takes it over, `rxsteer detach` ends it";
        shown.lost = Some(format!(
            "no rxsteer is running, {}; {ways}",
            "and ".repeat(9)
        ));
        let lines = self::lines((80, 24), &shown, &mut state());
        let told = lines[2..5].join(" ");
        assert!(told.ends_with(&format!("{ways})")), "{lines:?}");
        assert!(lines[5].starts_with("1 queue x"), "{lines:?}");
        let none = Shown::default();
        let lines = self::lines((80, 24), &none, &mut state());
        assert!(lines[0].contains("measuring"), "{lines:?}");
    }

    #[test]
    fn many_warnings_are_counted() {
        let mut shown = shown(1);
        let warnings = &mut shown.view.as_mut().unwrap().warnings;
        warnings.extend((0..9).map(|i| format!("warning {i}")));
        let lines = lines((80, 24), &shown, &mut state());
        let expected = [
            "! warning 0",
            "! warning 1",
            "! 7 more: see `rxsteer status`",
        ];
        assert_eq!(lines[2..5], expected);
    }

    #[test]
    fn a_small_terminal_is_told_so() {
        for size in [(79, 24), (80, 19), (20, 5), (1, 1)] {
            let text = lines(size, &shown(1), &mut state()).concat();
            let told = text.starts_with("too small") || size == (1, 1);
            assert!(told, "{size:?}: {text}");
        }
        // The control.
        let text = lines((80, 20), &shown(1), &mut state()).concat();
        assert!(!text.contains("too small"), "{text}");
    }

    #[test]
    fn without_colours_nothing_has_one() {
        let coloured = |palette| {
            let terminal = terminal((80, 24), &shown(2), &mut state(), palette);
            let cells = terminal.backend().buffer().content().iter();
            let coloured = cells.filter(|c| [c.fg, c.bg].iter().any(|c| *c != Color::Reset));
            coloured.count()
        };
        assert_eq!(coloured(Palette::new(false)), 0);
        // The control.
        assert!(coloured(Palette::new(true)) > 10);
    }
}
