// SPDX-License-Identifier: MIT OR Apache-2.0
//! The log in the journal, whose part a socket of the test plays: entries with fields. Elsewhere it is
//! text.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::time::Duration;

use crate::helpers::process::Rxsteer;
use anyhow::{Context, Result, ensure};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rxlab::in_lab;
use rxlab::lab::link::LinkConfig;
use rxlab::test_name;
use rxlab::testing::not_run;
use rxlab::testing::testbed::{Testbed, until};
use rxsteer::api::client;

/// The journal's socket is in `journal/` there.
const SYSTEMD: &str = "/run/systemd";

type Entry = BTreeMap<String, String>;

/// An entry in the journal's protocol: lines NAME=VALUE, and values after their length.
fn entry(mut data: &[u8]) -> Result<Entry> {
    let mut entry = Entry::new();
    while !data.is_empty() {
        let end = data.iter().position(|&byte| byte == b'\n');
        let (line, mut rest) = data.split_at(end.context("no end of a line")?);
        rest = &rest[1..];
        let line = std::str::from_utf8(line)?;
        if let Some((name, value)) = line.split_once('=') {
            entry.insert(name.to_owned(), value.to_owned());
        } else {
            let (length, value) = rest.split_first_chunk().context("no length")?;
            let length = u64::from_le_bytes(*length) as usize;
            ensure!(value.len() > length, "a value is short");
            let text = String::from_utf8(value[..length].to_vec())?;
            entry.insert(line.to_owned(), text);
            rest = &value[length + 1..];
        }
        data = rest;
    }
    Ok(entry)
}

/// What a socket has received.
fn entries(socket: &UnixDatagram) -> Result<Vec<Entry>> {
    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    let mut entries = Vec::new();
    let mut data = vec![0; 64 << 10];
    loop {
        match socket.recv(&mut data) {
            // By which the program asks whether there is a journal.
            Ok(0) => {}
            Ok(length) => entries.push(entry(&data[..length])?),
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(entries),
            Err(e) => return Err(e.into()),
        }
    }
}

/// Steers a device once, with a log to a file, which is the journal's stream or not. Returns what
/// the journal and the file have then.
fn logs(bed: &Testbed, to_the_journal: bool) -> Result<(Vec<Entry>, String)> {
    let dut = &bed.link.dut;
    let folder = tempfile::tempdir()?;
    fs::create_dir(folder.path().join("journal"))?;
    let journal = UnixDatagram::bind(folder.path().join("journal/socket"))?;
    let text = tempfile::NamedTempFile::new()?;
    let facts = text.as_file().metadata()?;
    let inode = facts.ino() + u64::from(!to_the_journal);
    let mut command = Rxsteer::command(&dut.netns, &[&dut.name])?;
    command
        .env("JOURNAL_STREAM", format!("{}:{inode}", facts.dev()))
        .stderr(text.reopen()?);
    let own = folder.path().to_owned();
    // SAFETY: the closure makes system calls, and allocates nothing before the program starts but
    // what nix needs for its paths.
    unsafe {
        command.pre_exec(move || {
            unshare(CloneFlags::CLONE_NEWNS)?;
            let none = None::<&Path>;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
            mount(Some(&own), SYSTEMD, none, MsFlags::MS_BIND, none)?;
            Ok(())
        });
    }
    let mut child = command.spawn()?;
    let steers = until("rxsteer steers, or ends", || {
        let status = dut.netns.run(client::status);
        let steers = status.is_ok_and(|s| s.pid == child.id());
        let ended = child.try_wait()?.is_some();
        Ok((steers || ended).then_some(steers))
    })?;
    if steers {
        kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM)?;
    }
    let status = child.wait()?;
    let text = fs::read_to_string(text.path())?;
    ensure!(status.success(), "{status}: {text}");
    Ok((entries(&journal)?, text))
}

#[test]
fn the_journal_gets_fields() -> Result<()> {
    in_lab!();
    if !Path::new(SYSTEMD).exists() {
        not_run(
            test_name!(),
            "this machine has no /run/systemd to put a socket into",
        );
        return Ok(());
    }
    let bed = Testbed::new(&LinkConfig::default())?;
    let (entries, text) = logs(&bed, true)?;
    assert_eq!(text, "");
    let account = |entry: &&Entry| entry["MESSAGE"].contains("queue 0: received ");
    let accounts: Vec<_> = entries.iter().filter(account).collect();
    let [account] = accounts[..] else {
        panic!("{entries:?}");
    };
    for (name, value) in [
        ("RXSTEER_DEVICE", &bed.link.dut.name[..]),
        ("RXSTEER_QUEUE", "0"),
        ("PRIORITY", "6"),
        ("SYSLOG_IDENTIFIER", "rxsteer"),
    ] {
        assert_eq!(
            account.get(name).map(String::as_str),
            Some(value),
            "{account:?}"
        );
    }
    // The control: another stream.
    let (entries, text) = logs(&bed, false)?;
    assert!(entries.is_empty(), "{entries:?}");
    let line = text
        .lines()
        .find(|line| line.contains("queue 0: received "));
    let line = line.context(text.clone())?.trim_start();
    let message = &account["MESSAGE"];
    assert_eq!(line, format!("INFO {message}"));
    Ok(())
}
