// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the daemon itself takes in each mode, all other options at their defaults: CPU time without traffic and under it, memory
//! besides its tables, and the time until it steers. `make overhead` prints it for a release build.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::helpers::process::{RXSTEER, Rxsteer};
use crate::helpers::scrape::scrape;
use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::LinkConfig;
use rxlab::lab::netns::Netns;
use rxlab::testing::testbed::{POLLING_CPU, Testbed};
use rxsteer::api::client;

const NR_STARTS: usize = 21;

/// Time for which CPU time is counted, seconds.
const SECONDS: u32 = 20;

/// Flows, and the frames that they send each second.
const NR_FLOWS: u32 = 1000;
const RATE: u64 = 1_000_000;

/// Mappings of maps; the larger ones are the tables.
const TABLE: &str = "anon_inode:bpf-map";

/// `rxsteer run` of the program to measure: a release build that the
/// environment names, or the build of the tests.
fn command(netns: &Netns, args: &[&str]) -> Result<Command> {
    let program = std::env::var("RXSTEER_PROGRAM").unwrap_or(RXSTEER.to_owned());
    let mut command = netns.command(&program)?;
    command
        .arg("run")
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    Ok(command)
}

fn steering(netns: &Netns, command: Command) -> Result<Rxsteer> {
    Rxsteer::spawn(netns, command, true)?.map_err(|ended| anyhow::anyhow!("{ended:?}"))
}

/// The time from fork() until it reports that it steers.
fn start(bed: &Testbed, mode: &str) -> Result<Duration> {
    let dut = &bed.link.dut;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("notify");
    let manager = UnixDatagram::bind(&path)?;
    manager.set_read_timeout(Some(Duration::from_secs(30)))?;
    let mut command = command(&dut.netns, &[&dut.name, mode])?;
    command.env("NOTIFY_SOCKET", &path);
    let begin = Instant::now();
    let mut child = command.stderr(Stdio::null()).spawn()?;
    let mut message = [0; 256];
    let ready = manager.recv(&mut message);
    let taken = begin.elapsed();
    let steered = dut
        .netns
        .run(client::status)
        .map(|status| status.devices.len());
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM)?;
    ensure!(child.wait()?.success(), "it ends with an error");
    let message = String::from_utf8_lossy(&message[..ready?]);
    ensure!(message.starts_with("READY=1"), "{message}");
    ensure!(steered? == 1, "ready before it steers");
    Ok(taken)
}

/// Memory of a process, KiB: its tables' share, and all else, both as PSS.
fn memory(pid: u32) -> Result<[u64; 2]> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let (mut sums, mut is_table) = ([0, 0], false);
    for line in text.lines() {
        let mut words = line.split_whitespace();
        match words.next().context("no empty lines")? {
            "Pss:" => {
                let kib: u64 = words.next().context("a number")?.parse()?;
                sums[usize::from(!is_table)] += kib;
            }
            // A mapping: its addresses, and at the end its file.
            first if !first.ends_with(':') => is_table = line.ends_with(TABLE),
            _ => {}
        }
    }
    ensure!(sums[0] > 0 && sums[1] > 0, "{text}");
    Ok(sums)
}

/// The daemon's CPU time in a second, and the packets that it has received in it.
fn load(rxsteer: &Rxsteer, scrapes: bool) -> Result<(Duration, u64)> {
    let received = rxsteer.received()?;
    let (begin, before) = (Instant::now(), rxsteer.cpu_time()?);
    for second in 1..=SECONDS {
        if scrapes {
            ensure!(scrape(&rxsteer.netns)?.contains("rxsteer_queue_received"));
        }
        let next = begin + Duration::from_secs(second.into());
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    let used = rxsteer.cpu_time()? - before;
    let elapsed = begin.elapsed().as_secs_f64();
    let received = (rxsteer.received()? - received) as f64 / elapsed;
    Ok((used.div_f64(elapsed), received as u64))
}

/// Measures a mode, and prints what it takes.
fn measure(mode: &str) -> Result<()> {
    let bed = Testbed::new(&LinkConfig::default())?;
    let mut starts = (0..NR_STARTS)
        .map(|_| start(&bed, mode))
        .collect::<Result<Vec<_>>>()?;
    starts.sort();
    println!("rxsteer run {mode}");
    println!(
        "  start until it steers: {:.1?}, of {NR_STARTS} the fastest {:.1?}, the slowest {:.1?}",
        starts[NR_STARTS / 2],
        starts[0],
        starts[NR_STARTS - 1]
    );

    let dut = &bed.link.dut;
    let command = command(&dut.netns, &[&dut.name, mode, "--metrics"])?;
    let rxsteer = steering(&dut.netns, command)?;
    let report = |what: &str, scrapes| -> Result<()> {
        let (used, rate) = load(&rxsteer, scrapes)?;
        let percent = used.as_secs_f64() * 100.0;
        println!("  {what}: {rate} packets/s, {percent:.2} % of a CPU");
        Ok(())
    };
    report("without traffic", false)?;
    report("without traffic, a scrape each second", true)?;
    let flows = UdpFlows::to(dut, NR_FLOWS);
    let receiver = bed.receiver_by_cpu(&flows)?;
    let flood = GeneratorConfig::flood(Frames::Udp(flows)).at(RATE);
    let generator = Generator::start(&bed.link, POLLING_CPU, &flood)?;
    report("under traffic, a scrape each second", true)?;
    let [tables, rest] = memory(rxsteer.child.id())?;
    drop(generator);
    drop(receiver);
    println!("  memory: {rest} KiB, and {tables} KiB of mapped tables (PSS)");
    ensure!(rxsteer.stop(Signal::SIGTERM)?.code == Some(0));
    Ok(())
}

#[test]
#[ignore = "a measurement, on an idle machine: make overhead"]
fn what_the_daemon_takes() -> Result<()> {
    in_lab!();
    for mode in ["--mode=native", "--mode=softirq"] {
        measure(mode)?;
    }
    Ok(())
}
