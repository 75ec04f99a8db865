// SPDX-License-Identifier: MIT OR Apache-2.0
//! The styles. Colours only repeat what characters say.

use ratatui::style::{Color, Modifier, Style};

/// Styles with or without colours.
#[derive(Clone, Copy, Debug)]
pub struct Palette {
    colours: bool,
}

impl Palette {
    pub fn new(colours: bool) -> Self {
        Self { colours }
    }

    /// Without colours if NO_COLOR is set and not empty (<https://no-color.org>).
    pub fn from_env() -> Self {
        Self::new(std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()))
    }

    fn colour(self, style: Style) -> Style {
        match self.colours {
            true => style,
            false => Style::new(),
        }
    }

    pub fn title(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    /// The title of the part that the arrows move.
    pub fn focus(self) -> Style {
        self.title().add_modifier(Modifier::UNDERLINED)
    }

    pub fn header(self) -> Style {
        self.colour(Style::new().fg(Color::Cyan))
            .add_modifier(Modifier::BOLD)
    }

    pub fn warning(self) -> Style {
        self.colour(Style::new().fg(Color::Yellow))
            .add_modifier(Modifier::BOLD)
    }

    /// What should be zero and is not.
    pub fn alarm(self) -> Style {
        self.colour(Style::new().fg(Color::Red))
            .add_modifier(Modifier::BOLD)
    }

    /// A cell of the heat map, by its share of the largest. The sixteen colours that every terminal
    /// has.
    pub fn heat(self, rate: f64, largest: f64) -> Style {
        let style = Style::new().fg(Color::Black);
        self.colour(match rate / largest {
            share if share > 0.5 => style.bg(Color::Red),
            share if share > 0.125 => style.bg(Color::Yellow),
            share if share > 1.0 / 64.0 => style.bg(Color::Green),
            share if share > 0.0 => style.bg(Color::Cyan),
            _ => Style::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_colours_no_style_has_one() {
        let heat = |palette: Palette| {
            [0.0, 0.01, 0.1, 0.3, 1.0].map(|share| palette.heat(share * 70.0, 70.0))
        };
        let styles = |palette: Palette| {
            let others = [palette.header(), palette.warning(), palette.alarm()];
            [&heat(palette)[..], &others].concat()
        };
        let coloured = |s: &&Style| s.fg.is_some() || s.bg.is_some();
        assert_eq!(
            styles(Palette::new(false)).iter().filter(coloured).count(),
            0
        );
        // The control.
        assert_eq!(
            styles(Palette::new(true)).iter().filter(coloured).count(),
            7
        );
        let mut levels = heat(Palette::new(true)).to_vec();
        levels.dedup();
        assert_eq!(levels.len(), 5);
    }
}
