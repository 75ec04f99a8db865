// SPDX-License-Identifier: MIT OR Apache-2.0
//! What keys change.

use std::time::Duration;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::flows::Sort;

/// The intervals that `+` and `-` go through.
const INTERVALS: [Duration; 8] = [
    Duration::from_millis(250),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(10),
    Duration::from_secs(30),
    Duration::from_secs(60),
];

/// Lines that a page has, for the keys that go on by a page.
const PAGE: usize = 10;

/// The part of the screen that the arrows move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Focus {
    #[default]
    Flows,
    Queues,
}

/// What the user has chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    pub interval: Duration,
    pub paused: bool,
    pub help: bool,
    pub sort: Sort,
    /// The text that flows must contain.
    pub filter: String,
    /// Keys are characters of the filter.
    pub typing: bool,
    pub focus: Focus,
    /// Number of the first flow, queue and CPU that is shown; the screen has the upper limits.
    pub first_flow: usize,
    pub first_queue: usize,
    pub first_cpu: usize,
}

impl State {
    pub fn new(interval: Duration) -> Self {
        Self {
            interval,
            paused: false,
            help: false,
            sort: Sort::default(),
            filter: String::new(),
            typing: false,
            focus: Focus::default(),
            first_flow: 0,
            first_queue: 0,
            first_cpu: 0,
        }
    }

    /// Changes the state by a key; returns whether to go on.
    pub fn press(&mut self, key: KeyEvent) -> bool {
        if key.kind == KeyEventKind::Release {
            return true;
        }
        // In raw mode it is no signal.
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        if control && key.code == KeyCode::Char('c') {
            return false;
        }
        if self.typing {
            self.type_filter(key.code);
            return true;
        }
        match key.code {
            KeyCode::Char('q') => return false,
            KeyCode::Esc if self.help => self.help = false,
            KeyCode::Esc => self.filter_by(String::new()),
            KeyCode::Char('?' | 'h') => self.help ^= true,
            KeyCode::Char('s') => {
                self.sort = self.sort.next();
                self.first_flow = 0;
            }
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Char(' ') => self.paused ^= true,
            KeyCode::Char('+' | '=') => {
                let longer = INTERVALS.into_iter().find(|i| *i > self.interval);
                self.interval = longer.unwrap_or(self.interval);
            }
            KeyCode::Char('-') => {
                let shorter = INTERVALS.into_iter().rfind(|i| *i < self.interval);
                self.interval = shorter.unwrap_or(self.interval);
            }
            KeyCode::Tab | KeyCode::BackTab => {
                self.focus = match self.focus {
                    Focus::Flows => Focus::Queues,
                    Focus::Queues => Focus::Flows,
                }
            }
            KeyCode::Down | KeyCode::Char('j') => self.scroll(|n| n + 1),
            KeyCode::Up | KeyCode::Char('k') => self.scroll(|n| n.saturating_sub(1)),
            KeyCode::PageDown => self.scroll(|n| n + PAGE),
            KeyCode::PageUp => self.scroll(|n| n.saturating_sub(PAGE)),
            KeyCode::Home => self.scroll(|_| 0),
            KeyCode::Right => self.first_cpu += 1,
            KeyCode::Left => self.first_cpu = self.first_cpu.saturating_sub(1),
            _ => {}
        }
        true
    }

    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.filter_by(String::new());
            }
            KeyCode::Backspace => {
                let mut filter = self.filter.clone();
                filter.pop();
                self.filter_by(filter);
            }
            KeyCode::Char(c) => self.filter_by(format!("{}{c}", self.filter)),
            _ => {}
        }
    }

    fn filter_by(&mut self, filter: String) {
        self.filter = filter;
        self.first_flow = 0;
    }

    fn scroll(&mut self, to: fn(usize) -> usize) {
        match self.focus {
            Focus::Flows => self.first_flow = to(self.first_flow),
            Focus::Queues => self.first_queue = to(self.first_queue),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn press(state: &mut State, codes: &[KeyCode]) -> bool {
        codes.iter().all(|code| state.press((*code).into()))
    }

    fn text(text: &str) -> Vec<KeyCode> {
        text.chars().map(KeyCode::Char).collect()
    }

    fn state() -> State {
        State::new(Duration::from_secs(1))
    }

    #[test]
    fn q_and_control_c_end_it() {
        let mut state = state();
        assert!(!press(&mut state, &text("q")));
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert!(!state.press(control_c));
        state.typing = true;
        assert!(!state.press(control_c));
        // The control.
        assert!(press(&mut state, &text("q")));
        assert_eq!(state.filter, "q");
    }

    #[test]
    fn the_filter_is_typed() {
        let mut state = state();
        state.first_flow = 7;
        press(&mut state, &text("/s q"));
        assert_eq!((&state.filter[..], state.first_flow), ("s q", 0));
        assert_eq!((state.sort, state.paused), (Sort::Rate, false));
        press(&mut state, &[KeyCode::Backspace, KeyCode::Enter]);
        press(&mut state, &text("s"));
        assert_eq!((&state.filter[..], state.sort), ("s ", Sort::Drops));
        press(&mut state, &[KeyCode::Esc]);
        assert_eq!(state.filter, "");
    }

    #[test]
    fn the_interval_has_steps() {
        let mut state = State::new(Duration::from_millis(700));
        press(&mut state, &text("+"));
        assert_eq!(state.interval, Duration::from_secs(1));
        press(&mut state, &text("-"));
        assert_eq!(state.interval, Duration::from_millis(500));
        press(&mut state, &text("-----"));
        assert_eq!(state.interval, Duration::from_millis(250));
        press(&mut state, &text("+++++++++++"));
        assert_eq!(state.interval, Duration::from_secs(60));
    }

    #[test]
    fn arrows_move_the_part_that_has_the_focus() {
        let mut state = state();
        press(
            &mut state,
            &[KeyCode::Down, KeyCode::Char('j'), KeyCode::Up],
        );
        assert_eq!((state.first_flow, state.first_queue), (1, 0));
        press(
            &mut state,
            &[KeyCode::Tab, KeyCode::PageDown, KeyCode::Right],
        );
        assert_eq!((state.first_flow, state.first_queue), (1, PAGE));
        press(&mut state, &text("kkk"));
        assert_eq!((state.first_queue, state.first_cpu), (PAGE - 3, 1));
        press(&mut state, &[KeyCode::Left, KeyCode::Left, KeyCode::Home]);
        assert_eq!((state.first_queue, state.first_cpu), (0, 0));
    }

    #[test]
    fn help_and_pause_are_switched() {
        let mut state = state();
        press(&mut state, &text("? "));
        assert!(state.help && state.paused);
        press(&mut state, &[KeyCode::Esc, KeyCode::Char(' ')]);
        assert!(!state.help && !state.paused);
    }
}
