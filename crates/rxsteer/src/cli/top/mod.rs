// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer top`: rates, backlogs and the busiest flows of a running rxsteer, on a screen that is drawn
//! again and again.

mod figures;
mod flows;
mod heat;
mod keys;
mod model;
mod palette;
mod panel;
mod sampler;
mod screen;
mod snapshot;
mod words;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use ratatui::crossterm::event::{self, Event};
use ratatui::{DefaultTerminal, Frame};
use tracing::subscriber::{NoSubscriber, with_default};

use self::keys::State;
use self::model::{Sample, View};
use self::palette::Palette;
use self::sampler::Pace;
use self::screen::Shown;
use super::program::{end_with_the_reader, stop_signals};
use super::value::seconds;
use crate::daemon::options::device_name;

/// Options of `rxsteer top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Only this device's queues and flows
    #[arg(value_parser = device_name)]
    pub device: Option<String>,

    /// Time between two samples
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "1")]
    pub interval: Duration,

    /// Print text once, after two samples, and end
    #[arg(long)]
    pub once: bool,
}

impl TopArgs {
    pub(super) fn run(self) -> Result<ExitCode> {
        let state = State::new(self.interval);
        let first = sampler::sample(self.device.as_deref(), pace(&state))?;
        match self.once {
            true => self.print(&first, pace(&state))?,
            false => {
                ensure!(
                    std::io::stdin().is_terminal() && std::io::stdout().is_terminal(),
                    "there is no terminal: use `rxsteer top --once`"
                );
                Top::new(first, state, self.device).run()?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }

    fn print(&self, first: &Sample, pace: Pace) -> Result<()> {
        end_with_the_reader()?;
        thread::sleep(self.interval);
        let device = self.device.as_deref();
        let second = sampler::sample(device, pace)?;
        let view = View::between(first, &second, device);
        print!(
            "{}",
            snapshot::render(&view.context("rxsteer was started anew: ask again")?)
        );
        Ok(())
    }
}

fn pace(state: &State) -> Pace {
    Pace {
        interval: state.interval,
        paused: state.paused,
        most: state.sort.most(),
    }
}

/// What wakes the loop up.
enum Message {
    Input(Event),
    Sampled(Result<Box<Sample>>),
    /// A signal, or the terminal is gone.
    Stop,
}

/// Takes the terminal over, and gives it back on drop. ratatui gives it back on a panic too, before the
/// message is printed.
struct Screen(DefaultTerminal);

impl Screen {
    fn new() -> Result<Self> {
        Ok(Self(ratatui::try_init().context("the terminal")?))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // The terminal may be gone.
        let _ = ratatui::try_restore();
    }
}

struct Top {
    device: Option<String>,
    last: Sample,
    state: State,
    shown: Shown,
}

impl Top {
    fn new(first: Sample, state: State, device: Option<String>) -> Self {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let shown = Shown {
            host: host.trim().to_owned(),
            ..Shown::default()
        };
        Self {
            device,
            last: first,
            state,
            shown,
        }
    }

    fn run(mut self) -> Result<()> {
        // Threads inherit that the signals are blocked.
        let signals = stop_signals()?;
        let mut screen = Screen::new()?;
        let palette = Palette::from_env();
        let (sender, messages) = mpsc::channel();
        let (paces, pace_receiver) = mpsc::channel();
        self.start_sampler(sender.clone(), pace_receiver)?;
        let stop = sender.clone();
        start("signals", move || {
            let _ = signals.read_signal();
            let _ = stop.send(Message::Stop);
        })?;
        start("keys", move || {
            while let Ok(event) = event::read() {
                if sender.send(Message::Input(event)).is_err() {
                    return;
                }
            }
            let _ = sender.send(Message::Stop);
        })?;
        loop {
            let (shown, state) = (&self.shown, &mut self.state);
            let draw = |frame: &mut Frame<'_>| screen::draw(frame, shown, state, palette);
            screen.0.draw(draw).context("the terminal")?;
            let before = pace(&self.state);
            match messages.recv() {
                Ok(Message::Sampled(sample)) => self.take(sample.map(|sample| *sample)),
                Ok(Message::Input(Event::Key(key))) if !self.state.press(key) => return Ok(()),
                Ok(Message::Input(_)) => {}
                Ok(Message::Stop) | Err(_) => return Ok(()),
            }
            if pace(&self.state) != before {
                paces.send(pace(&self.state)).context("the sampler ended")?;
            }
        }
    }

    fn start_sampler(&self, sender: Sender<Message>, paces: Receiver<Pace>) -> Result<()> {
        let device = self.device.clone();
        let pace = pace(&self.state);
        start("sampler", move || {
            // The log would be written across the screen.
            let log = NoSubscriber::default();
            with_default(log, || {
                sampler::run(device.as_deref(), pace, &paces, |sample| {
                    sender.send(Message::Sampled(sample.map(Box::new))).is_ok()
                });
            });
        })
    }

    /// Without an answer the last view stays.
    fn take(&mut self, sample: Result<Sample>) {
        match sample {
            Ok(sample) => {
                let view = View::between(&self.last, &sample, self.device.as_deref());
                self.shown = Shown {
                    host: std::mem::take(&mut self.shown.host),
                    view,
                    lost: None,
                };
                self.last = sample;
            }
            Err(e) => self.shown.lost = Some(format!("{e:#}")),
        }
    }
}

fn start(name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = thread::Builder::new().name(name.to_owned());
    thread
        .spawn(run)
        .with_context(|| format!("a thread for {name}"))?;
    Ok(())
}
