// SPDX-License-Identifier: MIT OR Apache-2.0
//! A part of the screen with a title.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::text::Line;

use super::palette::Palette;

/// Lines of the title.
pub const TITLE: u16 = 1;

/// Draws the title, which shows whether the arrows move this part; returns the area below.
pub fn draw(
    frame: &mut Frame<'_>,
    area: Rect,
    title: String,
    has_focus: bool,
    palette: Palette,
) -> Rect {
    let parts = [Constraint::Length(TITLE), Constraint::Fill(1)];
    let [line, body] = Layout::vertical(parts).areas(area);
    let style = match has_focus {
        true => palette.focus(),
        false => palette.title(),
    };
    frame.render_widget(Line::styled(title, style), line);
    body
}
