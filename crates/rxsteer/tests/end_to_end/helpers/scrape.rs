// SPDX-License-Identifier: MIT OR Apache-2.0
//! A client of `--metrics`, and a strict parser of what it answers.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::netns::Netns;
use rxlab::testing::testbed::{POLLING_CPU, Testbed};

use super::process::Rxsteer;

/// Where `--metrics` without an address listens.
pub const ADDRESS: &str = "127.0.0.1:14779";

/// Longer than an answer is given again.
pub const NEW: Duration = Duration::from_millis(300);

/// Steers a device whose packets have been redirected, left inline and dropped, at rest.
pub fn after_traffic(bed: &Testbed) -> Result<Rxsteer> {
    let dut = &bed.link.dut;
    // The limit of the backlogs makes drops likely; +idle has the load computed.
    let args = [
        &dut.name,
        "--metrics",
        "--rps-cpus=1",
        "--policy=rps+idle",
        "--backlog=8",
    ];
    let running = Rxsteer::steering(&dut.netns, &args)?;
    let flows = UdpFlows::to(dut, 100);
    let config = GeneratorConfig::lossless(Frames::Udp(flows), Some(20_000));
    Generator::start(&bed.link, POLLING_CPU, &config)?.wait()?;
    running.at_rest()?;
    std::thread::sleep(NEW);
    Ok(running)
}

/// Sends a request; returns the head of the answer and its body.
pub fn request(netns: &Netns, request: &str) -> Result<(String, String)> {
    let mut stream = netns.run(|| Ok(TcpStream::connect(ADDRESS)?))?;
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let parts = answer.split_once("\r\n\r\n");
    let (head, body) = parts.with_context(|| format!("not HTTP: {answer:?}"))?;
    Ok((head.to_owned(), body.to_owned()))
}

/// The metrics as text.
pub fn scrape(netns: &Netns) -> Result<String> {
    let (head, body) = request(netns, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
    ensure!(head.starts_with("HTTP/1.1 200 "), "{head}\n{body}");
    ensure!(head.contains("text/plain; version=0.0.4"), "{head}");
    Ok(body)
}

pub type Labels = BTreeMap<String, String>;

/// A metric with all its series; of a histogram, those of each of its suffixes.
#[derive(Debug, Default)]
pub struct Family {
    pub kind: String,
    pub samples: Vec<(Labels, f64)>,
}

/// The metrics by name. Fails unless each has one HELP, then one TYPE, then its samples, counters end
/// in `_total` and nothing else does, and no series occurs twice.
pub fn parse(text: &str) -> Result<BTreeMap<String, Family>> {
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let (mut helped, mut now) = (None, None);
    ensure!(text.ends_with('\n'), "the last line has no end");
    for line in text.lines() {
        let mut read = || {
            if let Some(help) = line.strip_prefix("# HELP ") {
                let (name, help) = help.split_once(' ').context("a name without HELP")?;
                ensure!(help.ends_with('.'), "HELP is a sentence");
                helped = Some(name.to_owned());
                return Ok(());
            }
            if let Some(of) = line.strip_prefix("# TYPE ") {
                let (name, kind) = of.split_once(' ').context("a name without TYPE")?;
                ensure!(helped.as_deref() == Some(name), "TYPE without HELP");
                ensure!(
                    ["counter", "gauge", "histogram"].contains(&kind),
                    "another type"
                );
                ensure!(name.starts_with("rxsteer_"), "another prefix");
                ensure!(name.ends_with("_total") == (kind == "counter"), "a suffix");
                let kind = kind.to_owned();
                let samples = Vec::new();
                let before = families.insert(name.to_owned(), Family { kind, samples });
                ensure!(before.is_none(), "a metric occurs twice");
                now = Some(name.to_owned());
                return Ok(());
            }
            let (series, value) = line.rsplit_once(' ').context("no value")?;
            let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
            let of = now.as_deref().context("a sample without TYPE")?;
            let suffix = name.strip_prefix(of).context("a sample without TYPE")?;
            let kind = families[of].kind.clone();
            let suffixes = match &kind[..] {
                "histogram" => &["_bucket", "_sum", "_count"][..],
                _ => &[""],
            };
            ensure!(suffixes.contains(&suffix), "a sample without TYPE");
            let labels = self::labels(labels)?;
            let family = families.entry(name.to_owned()).or_default();
            family.kind = kind;
            let samples = &mut family.samples;
            let twice = samples.iter().any(|(others, _)| *others == labels);
            ensure!(!twice, "a series occurs twice");
            samples.push((labels, value.parse().context("not a number")?));
            Ok(())
        };
        read().with_context(|| format!("{line:?}"))?;
    }
    Ok(families)
}

/// The labels up to a brace. No value has a quote or a comma.
fn labels(text: &str) -> Result<Labels> {
    let text = text.strip_suffix('}').context("no closing brace")?;
    let pairs = text.split(',').filter(|pair| !pair.is_empty());
    let pair = |pair: &str| {
        let (name, value) = pair.split_once("=\"").context("no label")?;
        let value = value.strip_suffix('"').context("no closing quote")?;
        Ok((name.to_owned(), value.to_owned()))
    };
    pairs.map(pair).collect()
}

/// What promtool says to what it accepts, and to what it refuses.
pub type Verdict = std::result::Result<String, String>;

/// What `promtool check` says with these arguments and this text on stdin, if it is installed.
pub fn promtool(args: &[&str], text: &str) -> Result<Option<Verdict>> {
    let child = Command::new("promtool")
        .arg("check")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = match child {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        child => child?,
    };
    let mut stdin = child.stdin.take().context("it was piped")?;
    let text = text.to_owned();
    // It may end before it has read everything.
    let writer = std::thread::spawn(move || drop(stdin.write_all(text.as_bytes())));
    let output = child.wait_with_output()?;
    writer.join().expect("it does not panic");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    Ok(Some(match output.status.success() {
        true => Ok(said),
        false => Err(said),
    }))
}
