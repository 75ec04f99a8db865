// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer top` in a terminal: what it shows of a running rxsteer, what keys do, and how it leaves the
//! terminal.

use std::process::Command;

use crate::helpers::pinned::mount_bpffs;
use crate::helpers::process::{RXSTEER, Rxsteer, rxsteer};
use crate::helpers::terminal::Terminal;
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::LinkConfig;
use rxlab::lab::netns::Netns;
use rxlab::testing::testbed::{OTHER_CPU, POLLING_CPU, Testbed, until};
use vt100::{Color, Screen};

const SIZE: (u16, u16) = (80, 24);

/// Frames per second.
const RATE: u64 = 4_000;

const FLOWS: u32 = 3;

fn top(netns: &Netns, args: &[&str]) -> Result<Command> {
    let mut command = netns.command(RXSTEER)?;
    command.arg("top").args(args).env_remove("NO_COLOR");
    Ok(command)
}

/// `rxsteer top` that shows figures.
fn showing(netns: &Netns, args: &[&str]) -> Result<Terminal> {
    let args = [&["--interval=0.25"], args].concat();
    let mut terminal = Terminal::start(top(netns, &args)?, SIZE)?;
    terminal.shows("received ")?;
    Ok(terminal)
}

fn steering(bed: &Testbed) -> Result<Rxsteer> {
    let dut = &bed.link.dut;
    let cpus = format!("--rps-cpus={OTHER_CPU}");
    Rxsteer::steering(&dut.netns, &[&dut.name, &cpus])
}

fn traffic(bed: &Testbed) -> Result<Generator> {
    let flows = UdpFlows::to(&bed.link.dut, FLOWS);
    let config = GeneratorConfig::lossless(Frames::Udp(flows), None).at(RATE);
    Generator::start(&bed.link, POLLING_CPU, &config)
}

/// The numbers of the line that begins with this word.
fn numbers<'a>(text: &'a str, begins: &str) -> Option<Vec<&'a str>> {
    let line = text.lines().find(|line| line.starts_with(begins))?;
    Some(line[begins.len()..].split_whitespace().collect())
}

/// Whether a figure is not zero, nor unknown.
fn is_some(figure: &str) -> bool {
    !["0", "·", "-"].contains(&figure)
}

/// The terminal is as it was before.
fn is_restored(terminal: &mut Terminal) -> Result<()> {
    ensure!(terminal.is_cooked()?, "the terminal is still raw");
    terminal.drain();
    let modes = terminal.screen(|s| (s.alternate_screen(), s.hide_cursor()));
    ensure!(
        modes == (false, false),
        "alternate screen, cursor: {modes:?}"
    );
    Ok(())
}

/// While it runs, the terminal is not.
fn is_taken(terminal: &Terminal) -> Result<()> {
    let modes = terminal.screen(|s| (s.alternate_screen(), s.hide_cursor()));
    ensure!(modes == (true, true) && !terminal.is_cooked()?, "{modes:?}");
    Ok(())
}

#[test]
fn it_shows_queues_and_flows() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let name = format!("{}:0", bed.link.dut.name);
    let steering = steering(&bed)?;
    let mut terminal = showing(&steering.netns, &[&bed.link.dut.name])?;
    terminal.shows(&name)?;
    // The control: without traffic nothing has a rate.
    let text = terminal.text();
    assert!(text.contains("received 0/s"), "{text}");
    let idle = numbers(&text, &name).context("the queue")?;
    assert_eq!(idle, ["0", "0", "0", "0", "0", "·"], "{text}");
    assert!(text.contains("0 of 0 flows by rate"), "{text}");

    let wire = traffic(&bed)?;
    terminal.when("the queue's rates, and its backlog's", |text| {
        let numbers = numbers(text, &name)?;
        (is_some(numbers[0]) && is_some(numbers.get(5)?)).then_some(())
    })?;
    terminal.when("the flows, at the CPU where they want to be", |text| {
        let there = format!("CPU {OTHER_CPU}   CPU {OTHER_CPU}");
        let flows = text.lines().filter(|line| {
            let numbers = numbers(line, "udp/198.18.");
            numbers.is_some_and(|n| is_some(n[1])) && line.ends_with(&there)
        });
        (flows.count() == FLOWS as usize).then_some(())
    })?;
    let heat = |screen: &Screen| {
        let (columns, rows) = SIZE;
        let cells = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
        let cells = cells.filter_map(|(row, column)| screen.cell(row, column));
        cells
            .filter(|cell| cell.bgcolor() != Color::Default)
            .count()
    };
    assert!(terminal.screen(heat) > 0);

    let sent = wire.stop()?;
    until("all frames received", || {
        Ok((steering.received()? >= sent.sent).then_some(()))
    })?;
    terminal.shows("received 0/s")?;
    // Flows that are idle are left out, and are still in the table.
    terminal.hides("udp/198.18.")?;
    let flows = rxsteer(&steering.netns, &["flows"])?;
    assert!(
        String::from_utf8_lossy(&flows.stdout).contains("udp/198.18."),
        "{flows:?}"
    );
    Ok(())
}

#[test]
fn keys_change_the_screen() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let steering = steering(&bed)?;
    let mut terminal = showing(&steering.netns, &[])?;
    let _wire = traffic(&bed)?;
    terminal.shows(&format!("{FLOWS} of {FLOWS} flows by rate"))?;
    terminal.press("/198.18.")?;
    terminal.shows("filter: 198.18._")?;
    terminal.shows(&format!(
        "{FLOWS} of {FLOWS} flows by rate, with \"198.18.\""
    ))?;
    terminal.press("nothing")?;
    terminal.shows(&format!(
        "0 of {FLOWS} flows by rate, with \"198.18.nothing\""
    ))?;
    assert!(!terminal.text().contains("udp/"), "{}", terminal.text());
    // Escape alone: the next key must not come with it.
    terminal.press("\u{1b}")?;
    terminal.hides(", with")?;
    terminal.shows(&format!("{FLOWS} of {FLOWS} flows by rate"))?;
    terminal.shows("udp/198.18.")?;

    terminal.press("s")?;
    terminal.shows("flows by drops")?;
    terminal.press("s")?;
    terminal.shows("flows by moves")?;
    terminal.press("?")?;
    terminal.shows("this help")?;
    terminal.press("?")?;
    terminal.hides("this help")?;
    terminal.press("+")?;
    terminal.shows("every 0.5 s")?;
    terminal.press(" ")?;
    terminal.shows("every 0.5 s PAUSED")?;
    terminal.press(" -")?;
    terminal.hides("PAUSED")?;
    terminal.shows("every 0.25 s")?;

    terminal.resize(79, 24)?;
    terminal.shows("too small: 79x24")?;
    terminal.resize(160, 50)?;
    terminal.shows("device queue packets")?;
    terminal.press("q")?;
    assert_eq!(terminal.ended()?, 0);
    is_restored(&mut terminal)
}

#[test]
fn signals_end_it_and_the_terminal_is_restored() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let steering = steering(&bed)?;
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let mut terminal = showing(&steering.netns, &[])?;
        is_taken(&terminal)?;
        terminal.signal(signal)?;
        assert_eq!(terminal.ended()?, 0, "{signal}");
        is_restored(&mut terminal)?;
    }
    // As a key.
    let mut terminal = showing(&steering.netns, &[])?;
    terminal.press("\u{3}")?;
    assert_eq!(terminal.ended()?, 0);
    is_restored(&mut terminal)?;
    // The control: a process that is killed can't restore it.
    let mut terminal = showing(&steering.netns, &[])?;
    terminal.signal(Signal::SIGKILL)?;
    assert_eq!(terminal.ended()?, -(Signal::SIGKILL as i32));
    assert!(is_restored(&mut terminal).is_err());
    Ok(())
}

#[test]
fn it_goes_on_when_rxsteer_is_back() -> Result<()> {
    in_lab!();
    const STOPPED: &str = "rxsteer has stopped";
    let bed = Testbed::new(&LinkConfig::default())?;
    let first = steering(&bed)?;
    let netns = first.netns.clone();
    let mut terminal = showing(&netns, &[])?;
    assert!(!terminal.text().contains(STOPPED), "{}", terminal.text());
    let ended = first.stop(Signal::SIGTERM)?;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    terminal.shows(STOPPED)?;
    let second = steering(&bed)?;
    terminal.hides(STOPPED)?;
    let _wire = traffic(&bed)?;
    terminal.when("rates", |text| {
        let numbers = numbers(text, &format!("{}:0", bed.link.dut.name))?;
        is_some(numbers[0]).then_some(())
    })?;
    drop(second);
    terminal.press("q")?;
    assert_eq!(terminal.ended()?, 0);
    is_restored(&mut terminal)
}

#[test]
fn it_says_that_pinned_steering_goes_on() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    mount_bpffs(&dut.netns)?;
    let pinned = [
        "steering goes on: it is pinned at /sys/fs/bpf/rxsteer/net-",
        "`rxsteer run --pin` takes it over, `rxsteer detach` ends it",
    ];
    // Without the ends of lines.
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let stopped = |pin: &[&str]| -> Result<String> {
        let args = [&[dut.name.as_str()][..], pin].concat();
        let steering = Rxsteer::steering(&dut.netns, &args)?;
        let mut terminal = showing(&dut.netns, &[])?;
        assert_eq!(steering.stop(Signal::SIGTERM)?.code, Some(0));
        terminal.when("the end", |text| {
            let text = words(text);
            let whole = text.contains("has stopped") && text.contains(") ");
            whole.then_some(text)
        })
    };
    let text = stopped(&["--pin"])?;
    assert!(pinned.iter().all(|part| text.contains(part)), "{text}");
    assert!(rxsteer(&dut.netns, &["detach"])?.status.success());
    // The control: nothing is pinned.
    let text = stopped(&[])?;
    assert!(!pinned.iter().any(|part| text.contains(part)), "{text}");
    Ok(())
}

#[test]
fn without_colours_there_are_none() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let steering = steering(&bed)?;
    let _wire = traffic(&bed)?;
    let coloured = |no_color: &str| -> Result<usize> {
        let mut command = top(&steering.netns, &["--interval=0.25"])?;
        command.env("NO_COLOR", no_color);
        let mut terminal = Terminal::start(command, SIZE)?;
        terminal.shows("received ")?;
        Ok(terminal.screen(|screen| {
            let (columns, rows) = SIZE;
            let cells = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
            let cells = cells.filter_map(|(row, column)| screen.cell(row, column));
            let colours = cells.flat_map(|cell| [cell.fgcolor(), cell.bgcolor()]);
            colours.filter(|colour| *colour != Color::Default).count()
        }))
    };
    assert_eq!(coloured("1")?, 0);
    // The control: an empty value says nothing.
    assert!(coloured("")? > 0);
    Ok(())
}

#[test]
fn once_prints_text() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let steering = steering(&bed)?;
    let netns = &steering.netns;
    let once = |device: &str| rxsteer(netns, &["top", device, "--once", "--interval=0.25"]);
    let text = || -> Result<String> {
        let output = once(&bed.link.dut.name)?;
        ensure!(output.status.success(), "{output:?}");
        Ok(String::from_utf8(output.stdout)?)
    };
    // The control.
    let before = text()?;
    assert!(
        before.contains("received 0/s") && before.contains("no flows"),
        "{before}"
    );
    let _wire = traffic(&bed)?;
    until("rates", || {
        let text = text()?;
        let queue = text
            .lines()
            .find_map(|l| numbers(l.trim_start(), &format!("{}:0", bed.link.dut.name)));
        let flow = text
            .lines()
            .find_map(|line| numbers(line.trim_start(), "udp/198.18."));
        let rated = |n: Option<Vec<&str>>, at: usize| n.is_some_and(|n| is_some(n[at]));
        Ok((!text.contains('\u{1b}') && rated(queue, 0) && rated(flow, 1)).then_some(()))
    })?;
    let output = once("no-such")?;
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("no-such"),
        "{output:?}"
    );
    let output = rxsteer(netns, &["top"])?;
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("--once"),
        "{output:?}"
    );
    Ok(())
}
