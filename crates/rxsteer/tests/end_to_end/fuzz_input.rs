// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random and mutated requests to the control socket, and configuration files: each is answered,
//! with a message if it is refused, and nothing panics. `make fuzz` runs it at length.

use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::common::mutate::Random;
use crate::common::mutate::frames;
use anyhow::{Context, Result, ensure};
use clap::CommandFactory;
use rxlab::bench::setup::mode::Active;
use rxlab::in_lab;
use rxlab::lab::link::LinkConfig;
use rxlab::testing::testbed::{OTHER_CPU, Testbed, status};
use rxsteer::api::control::Request;
use rxsteer::cli::Cli;
use rxsteer::cli::config;
use serde_json::Value;

/// Of `RXSTEER_FRAMES`, which counts packets.
const FRAMES_PER_INPUT: u64 = 10_000;

/// Requests, and values in place of their values. `DEV` is the steered device.
const REQUESTS: [&str; 9] = [
    r#""status""#,
    r#""busy-poll""#,
    r#"{"set":{"device":"DEV","queue":0,"rps_cpus":"0-1"}}"#,
    r#"{"set":{"device":"DEV","queue":4294967295,"rps_cpus":"1"}}"#,
    r#"{"set":{"device":null,"policy":"rfs+idle"}}"#,
    r#"{"set":{"rps_sock_flow_entries":4294967295,"rps_flow_cnt":2147483649}}"#,
    r#"{"flows":{"device":"DEV","local_ports":[9,65535],"limit":3,"most":"dropped"}}"#,
    r#"{"explain":{"names":["udp/192.0.2.1:1024/9","0x1234"],"local_ports":[9],"unconnected":[9],"limit":18446744073709551615}}"#,
    r#"{"explain":{"names":[],"local_ports":[],"unconnected":[],"limit":0}}"#,
];
const VALUES: [&str; 20] = [
    "null",
    "true",
    "0",
    "1",
    "-1",
    "1.5",
    "1e99",
    "4294967295",
    "4294967296",
    "2147483649",
    "18446744073709551615",
    "16777217",
    r#""""#,
    r#""0x""#,
    r#""0-4294967295""#,
    r#""0-31:0/0""#,
    r#""0-1:2/0""#,
    r#""off""#,
    r#""\u0000\u001b[2J""#,
    "[[[[]]]]",
];

const CONFIGURATIONS: [&str; 3] = [
    "devices = [\"eth0\", \"eth1\"]\npolicy = \"rfs\"\nbacklog = 100\ndry-run = true\n",
    "devices = [\"eth0\"]\ntunnels = [\"gre\"]\nqueue = [\"eth0:0=1-1\"]\nrps-cpus = \"0-31:2/4\"\n\
     inline-ports = [123]\n[[busy_poll]]\ncomm = \"nginx\"\nusecs = 50\n",
    "devices = []\nflow-limit = 12\nbacklog-sched = \"nice=-5\"\nhash = \"device\"\nmode = \"native\"\n\
     [[busy_poll]]\nport = 53\nusecs = 20\nadaptive = true\n",
];

/// The syntax of JSON, TOML and lists of CPUs.
const TELLING: &[u8] = b"\"'{}[]:,=#.-+/\\\n 0189xeE\0\x1b\xff";

/// Replaces one value of a JSON document, or some bytes.
fn mutated(random: &mut Random, seed: &str) -> Vec<u8> {
    let mut input = seed.as_bytes().to_vec();
    for _ in 0..random.below(4) {
        if random.below(2) == 0 {
            random.mutate(&mut input, TELLING);
            continue;
        }
        let ends: Vec<usize> = (0..input.len())
            .filter(|&i| b":,[".contains(&input[i]))
            .collect();
        if let Some(&from) = ends.get(random.below(ends.len().max(1))) {
            let len = input[from + 1..]
                .iter()
                .position(|byte| b",]}".contains(byte));
            let to = from + 1 + len.unwrap_or(0);
            input.splice(from + 1..to, random.of(&VALUES).bytes());
        }
    }
    input
}

/// Tables of this size are legal, and large.
fn takes_memory(input: &[u8]) -> bool {
    let large = |size: Option<u32>| size.is_some_and(|size| (1 << 16..=1 << 24).contains(&size));
    match serde_json::from_slice(input) {
        Ok(Request::Set(change)) => {
            large(change.rps_sock_flow_entries) || large(change.rps_flow_cnt)
        }
        _ => false,
    }
}

fn ask(socket: &str, request: &[u8]) -> Result<Value> {
    let mut stream = UnixStream::connect(socket)?;
    stream.write_all(request)?;
    stream.shutdown(Shutdown::Write)?;
    let mut reply = String::new();
    BufReader::new(stream).read_line(&mut reply)?;
    serde_json::from_str(&reply).with_context(|| format!("the reply: {reply:?}"))
}

#[test]
fn every_request_is_answered() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let active = Active::steer(dut, bed.options(&[OTHER_CPU]))?;
    let socket = format!("/run/rxsteer/net-{}.sock", dut.netns.inode()?);
    let seed = Random::seed();
    let mut random = Random::new(seed);
    let (mut accepted, mut refused) = (0, 0);
    let wanted = frames(1_000 * FRAMES_PER_INPUT) / FRAMES_PER_INPUT;
    while accepted + refused < wanted {
        let request = random.of(&REQUESTS).replace("DEV", &dut.name);
        let input = mutated(&mut random, &request);
        if takes_memory(&input) || input.contains(&b'\n') {
            continue;
        }
        let reply = ask(&socket, &input);
        let at = || format!("seed {seed}: {:?}", String::from_utf8_lossy(&input));
        let reply = reply.with_context(at)?;
        match (reply.get("Ok"), reply.get("Err").and_then(Value::as_str)) {
            (Some(_), None) => accepted += 1,
            (None, Some(why)) if !why.is_empty() => refused += 1,
            _ => return Err(anyhow::anyhow!("{reply}").context(at())),
        }
    }
    // Control: both kinds are common, and it still answers.
    let [least, most] = [accepted.min(refused), accepted.max(refused)];
    ensure!(least * 10 > most, "{accepted} accepted, {refused} refused");
    status(&active)?;
    active.stop()
}

#[test]
fn every_configuration_is_read_or_refused() -> Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    let read = |text: &[u8]| {
        fs::write(&file, text)?;
        let line = ["rxsteer", "run", "--config=FILE"].map(OsString::from);
        config::read(&[file.path().to_owned()], Cli::command(), line)
    };
    let seed = Random::seed();
    let mut random = Random::new(seed);
    let (mut accepted, mut refused) = (0, 0);
    let wanted = frames(1_000 * FRAMES_PER_INPUT) / FRAMES_PER_INPUT;
    while accepted + refused < wanted {
        let input = {
            let text = *random.of(&CONFIGURATIONS);
            mutated(&mut random, text)
        };
        match catch_unwind(AssertUnwindSafe(|| read(&input))) {
            Ok(Ok(_)) => accepted += 1,
            Ok(Err(e)) if !format!("{e:#}").is_empty() => refused += 1,
            Ok(Err(_)) => ensure!(false, "seed {seed}: no message for {input:?}"),
            Err(panic) => {
                eprintln!("seed {seed}: {:?}", String::from_utf8_lossy(&input));
                resume_unwind(panic);
            }
        }
    }
    // Control: both kinds are common.
    let [least, most] = [accepted.min(refused), accepted.max(refused)];
    ensure!(least * 10 > most, "{accepted} accepted, {refused} refused");
    Ok(())
}
