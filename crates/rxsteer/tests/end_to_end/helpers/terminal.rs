// SPDX-License-Identifier: MIT OR Apache-2.0
//! A program in a pseudo-terminal, and the screen that it draws there.

use std::fs::File;
use std::io::{Read, Write};
use std::num::NonZero;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, Result, ensure};
use nix::pty::{Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::sys::termios::{LocalFlags, tcgetattr};
use nix::unistd::Pid;
use rxlab::testing::testbed::until;
use vt100::{Parser, Screen};

/// The program, killed on drop.
pub struct Terminal {
    child: Child,
    master: File,
    /// Open for as long as the state of the terminal is asked for.
    slave: Option<OwnedFd>,
    parser: Arc<Mutex<Parser>>,
    reader: Option<JoinHandle<()>>,
}

fn size(columns: u16, rows: u16) -> Winsize {
    Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}

fn cells(number: u16) -> Result<NonZero<u16>> {
    NonZero::new(number).context("a terminal has a size")
}

impl Terminal {
    /// Starts the program in a terminal of this size, which becomes its controlling terminal.
    pub fn start(mut command: Command, (columns, rows): (u16, u16)) -> Result<Self> {
        let pty = openpty(&size(columns, rows), None)?;
        let stdio = || Ok::<_, std::io::Error>(Stdio::from(pty.slave.try_clone()?));
        command.stdin(stdio()?).stdout(stdio()?).stderr(stdio()?);
        command.env("TERM", "xterm-256color");
        // SAFETY: the closure makes system calls only.
        unsafe {
            command.pre_exec(|| {
                nix::unistd::setsid()?;
                match libc::ioctl(0, libc::TIOCSCTTY, 0) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                }
            });
        }
        let child = command.spawn()?;
        // The command holds the terminal open too.
        drop(command);
        let parser = Arc::new(Mutex::new(Parser::new(cells(rows)?, cells(columns)?, 0)));
        let (mut output, screen) = (File::from(pty.master.try_clone()?), parser.clone());
        // It ends when nothing has the other end open.
        let reader = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(len @ 1..) = output.read(&mut bytes) {
                let mut parser = screen.lock().unwrap_or_else(PoisonError::into_inner);
                parser.process(&bytes[..len]);
            }
        });
        Ok(Self {
            child,
            master: pty.master.into(),
            slave: Some(pty.slave),
            parser,
            reader: Some(reader),
        })
    }

    fn parser(&self) -> MutexGuard<'_, Parser> {
        self.parser.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a function says of the screen.
    pub fn screen<T>(&self, of: impl FnOnce(&Screen) -> T) -> T {
        of(self.parser().screen())
    }

    /// The screen's text.
    pub fn text(&self) -> String {
        self.screen(Screen::contents)
    }

    /// Waits until the screen satisfies a condition; returns what that says.
    pub fn when<T>(
        &mut self,
        what: &str,
        mut condition: impl FnMut(&str) -> Option<T>,
    ) -> Result<T> {
        until(what, || {
            let ended = self.child.try_wait()?;
            let found = condition(&self.text());
            ensure!(
                found.is_some() || ended.is_none(),
                "it has ended: {ended:?}"
            );
            Ok(found)
        })
        .with_context(|| self.text())
    }

    /// Waits until the screen contains a text.
    pub fn shows(&mut self, what: &str) -> Result<()> {
        self.when(what, |text| text.contains(what).then_some(()))
    }

    /// Waits until the screen no longer contains a text.
    pub fn hides(&mut self, what: &str) -> Result<()> {
        let title = format!("no {what}");
        self.when(&title, |text| (!text.contains(what)).then_some(()))
    }

    /// Whether the terminal shows what is typed, and collects it into lines.
    pub fn is_cooked(&self) -> Result<bool> {
        let flags = tcgetattr(self.slave.as_ref().context("it is open")?)?.local_flags;
        Ok(flags.contains(LocalFlags::ECHO | LocalFlags::ICANON))
    }

    /// Presses keys. Only once the program has drawn something: the terminal would show them itself
    /// before, at the cursor.
    pub fn press(&mut self, keys: &str) -> Result<()> {
        ensure!(!self.is_cooked()?, "the program does not read keys yet");
        Ok(self.master.write_all(keys.as_bytes())?)
    }

    /// Changes the size of the terminal, and tells the program.
    pub fn resize(&mut self, columns: u16, rows: u16) -> Result<()> {
        let winsize = size(columns, rows);
        self.parser()
            .screen_mut()
            .set_size(cells(rows)?, cells(columns)?);
        // SAFETY: the structure outlives the call.
        let ret = unsafe { libc::ioctl(self.master.as_raw_fd(), libc::TIOCSWINSZ, &winsize) };
        ensure!(ret == 0, "{}", std::io::Error::last_os_error());
        Ok(())
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(Pid::from_raw(self.child.id() as i32), signal)?)
    }

    /// Waits until the program has ended; returns its exit status, negative for a signal. Everything
    /// that it wrote has been taken into the screen then.
    pub fn ended(&mut self) -> Result<i32> {
        let status = until("the program ends", || Ok(self.child.try_wait()?))
            .with_context(|| self.text())?;
        let code = status.code().or(status.signal().map(|signal| -signal));
        code.context("it has ended")
    }

    /// Waits until the reader has taken in all that was written. The terminal's state can't be asked
    /// for any more.
    pub fn drain(&mut self) {
        self.slave = None;
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.drain();
    }
}
