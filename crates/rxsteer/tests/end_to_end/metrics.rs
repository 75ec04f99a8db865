// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer run --metrics`: what it serves is what `rxsteer status --json` says, in the format of
//! Prometheus, and no client holds anything up.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::helpers::process::{Rxsteer, rxsteer};
use crate::helpers::scrape::{
    ADDRESS, Family, Labels, NEW, after_traffic, parse, promtool, request, scrape,
};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use rxlab::in_lab;
use rxlab::lab::link::LinkConfig;
use rxlab::lab::netns::{Netns, Thread};
use rxlab::lab::rtnl;
use rxlab::test_name;
use rxlab::testing::testbed::{POLLING_CPU, Testbed, until};
use rxlab::testing::{not_run, short_or_long};
use serde_json::Value;

/// The status as JSON, without flows.
fn json(netns: &Netns) -> Result<Value> {
    let output = rxsteer(netns, &["status", "--json"])?;
    ensure!(output.status.success(), "{output:?}");
    let mut status: Value = serde_json::from_slice(&output.stdout)?;
    // Flows have a time since their last packet.
    status["dropped_flows"].take();
    Ok(status)
}

fn labelled(of: &[(&str, &Value)]) -> Labels {
    let text = |value: &Value| value.as_str().map_or(value.to_string(), str::to_owned);
    let labels = of.iter();
    labels
        .map(|(name, value)| ((*name).to_owned(), text(value)))
        .collect()
}

/// The values that metrics with this prefix should have, by the fields of an object.
fn expected(prefix: &str, object: &Value, labels: &Labels) -> Vec<(String, Labels, f64)> {
    let fields = object.as_object().into_iter().flatten();
    let number = |value: &Value| value.as_f64().or(value.as_bool().map(|b| b.into()));
    let values = fields.filter_map(|(field, value)| Some((field, number(value)?)));
    values
        .map(|(field, value)| (format!("{prefix}_{field}"), labels.clone(), value))
        .collect()
}

/// The histogram of a CPU's backlogs is that of the only one, of this device.
fn compare_waits(
    metrics: &BTreeMap<String, Family>,
    device: &Value,
    backlog: &Value,
) -> Result<()> {
    const NAME: &str = "rxsteer_backlog_wait_seconds";
    let labels = labelled(&[("device", device), ("cpu", &backlog["cpu"])]);
    let of = |suffix: &str| -> Vec<(Labels, f64)> {
        let samples = metrics[&format!("{NAME}{suffix}")].samples.iter();
        let own = |is: &Labels| {
            labels
                .iter()
                .all(|(name, value)| is.get(name) == Some(value))
        };
        samples.filter(|(is, _)| own(is)).cloned().collect()
    };
    let waits = &backlog["waits"];
    let buckets = waits["buckets"].as_array().context("buckets")?;
    let is = of("_bucket");
    assert_eq!(is.len(), buckets.len());
    let (mut sum, mut bound) = (0.0, 2e-6);
    for (bucket, (labels, value)) in buckets.iter().zip(is) {
        sum += bucket.as_f64().context("a number")?;
        assert_eq!(value, sum, "{labels:?}");
        match &labels["le"][..] {
            "+Inf" => assert!(bound > 1.05, "{bound}"),
            le => assert_eq!(le.parse::<f64>()?, bound),
        }
        bound *= 2.0;
    }
    assert!(sum > 0.0, "{waits}");
    let one = |samples: Vec<(Labels, f64)>| samples.first().map(|(_, value)| *value);
    assert_eq!(one(of("_count")), Some(sum));
    let ns = waits["sum_ns"].as_f64().context("a sum")?;
    assert_eq!(one(of("_sum")), Some(ns / 1e9));
    Ok(())
}

#[test]
fn the_metrics_say_what_the_status_says() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let running = after_traffic(&bed)?;
    let status = json(&running.netns)?;
    let text = scrape(&running.netns)?;
    let metrics = parse(&text)?;
    assert_eq!(json(&running.netns)?, status, "it is at rest");

    let mut should = Vec::new();
    let device = &status["devices"][0];
    for queue in device["queues"].as_array().context("queues")? {
        let labels = labelled(&[("device", &device["device"]), ("queue", &queue["queue"])]);
        should.extend(expected("rxsteer_queue", queue, &labels));
        for backlog in queue["backlogs"].as_array().context("backlogs")? {
            let mut labels = labels.clone();
            labels.extend(labelled(&[("cpu", &backlog["cpu"])]));
            should.extend(expected("rxsteer_backlog", backlog, &labels));
            compare_waits(&metrics, &device["device"], backlog)?;
        }
    }
    let mut compared = BTreeSet::new();
    for (name, labels, value) in should {
        // Queues have the sums of their backlogs in the status, which queries can form.
        let full = ["_frames_total", "_total", "_frames", ""].map(|end| format!("{name}{end}"));
        let Some(full) = full.iter().find(|full| metrics.contains_key(*full)) else {
            continue;
        };
        let samples = &metrics[full].samples;
        let is = samples.iter().find(|(is, _)| *is == labels);
        assert_eq!(is, Some(&(labels, value)), "{full}: {samples:?}");
        compared.insert(full.clone());
    }
    let nr_compared = metrics.keys().filter(|name| {
        ["rxsteer_queue_", "rxsteer_backlog_"]
            .iter()
            .any(|start| name.starts_with(start))
    });
    // Of a load: busy, polls, polling CPU, pressure; and of the process the limit of backlogs. The
    // histogram has been compared.
    let left: Vec<_> = nr_compared
        .filter(|name| !compared.contains(*name))
        .collect();
    let others = [
        "rxsteer_backlog_limit_frames",
        "rxsteer_backlog_wait_seconds",
        "rxsteer_backlog_wait_seconds_bucket",
        "rxsteer_backlog_wait_seconds_count",
        "rxsteer_backlog_wait_seconds_sum",
        "rxsteer_queue_busy_ratio",
        "rxsteer_queue_polling_cpu",
        "rxsteer_queue_polls_ratio",
        "rxsteer_queue_pressure",
    ];
    assert_eq!(left, others);
    let one = |name: &str| metrics[name].samples[0].1;
    let load = &device["queues"][0]["load"];
    let percent = load["busy_percent"].as_f64().context("a load")?;
    assert_eq!((one("rxsteer_queue_busy_ratio") * 100.0).round(), percent);
    assert_eq!(one("rxsteer_queue_polling_cpu"), f64::from(POLLING_CPU));
    assert_eq!(one("rxsteer_backlog_limit_frames"), 8.0);
    assert_eq!(one("rxsteer_device_foreign_frames_total"), 0.0);
    let states = &metrics["rxsteer_queue_pressure"].samples;
    let state = states.iter().filter(|(_, value)| *value == 1.0);
    let state: Vec<_> = state.map(|(labels, _)| &labels["pressure"]).collect();
    assert_eq!(state, [load["pressure"].as_str().context("a state")?]);
    // There was something to compare.
    assert_eq!(one("rxsteer_queue_received_frames_total"), 20_000.0);
    assert!(
        one("rxsteer_backlog_redirected_frames_total") > 0.0,
        "{text}"
    );
    let ended = running.stop(Signal::SIGTERM)?;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    Ok(())
}

/// The text with one line replaced.
fn broken(text: &str, starts: &str, by: &str) -> String {
    let lines = text.lines();
    let lines = lines.map(|line| if line.starts_with(starts) { by } else { line });
    lines.collect::<Vec<_>>().join("\n") + "\n"
}

#[test]
fn prometheus_accepts_the_metrics() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let running = after_traffic(&bed)?;
    let text = scrape(&running.netns)?;
    let metrics = parse(&text)?;
    assert!(metrics.len() > 25, "{:?}", metrics.keys());
    let known = [
        "cpu", "device", "le", "mode", "policy", "pressure", "queue", "version",
    ];
    for (labels, _) in metrics.values().flat_map(|family| &family.samples) {
        let unknown = labels.keys().find(|name| !known.contains(&&name[..]));
        assert_eq!(unknown, None);
    }
    let line = "rxsteer_queue_moves_total";
    let controls = [
        broken(&text, &format!("# HELP {line}"), ""),
        broken(&text, &format!("# TYPE {line}"), ""),
        broken(&text, line, "rxsteer_queue_moves_total{queue=\"0\" 1"),
        broken(&text, line, "rxsteer_queue_moves_total nothing"),
        text.replace(line, "rxsteer_queue_moves"),
    ];
    for control in &controls {
        assert_ne!(*control, text);
        assert!(parse(control).is_err(), "{control}");
    }
    let Some(found) = promtool(&["metrics"], &text)? else {
        not_run(
            test_name!(),
            "promtool is missing: Debian's package prometheus has it",
        );
        return Ok(());
    };
    // Recommendations are printed without a failure.
    assert_eq!(found, Ok(String::new()), "{text}");
    // Without TYPE a sample has no type, which is allowed.
    for control in controls.iter().filter(|control| !control.contains("\n\n")) {
        assert_ne!(
            promtool(&["metrics"], control)?,
            Some(Ok(String::new())),
            "{control}"
        );
    }
    Ok(())
}

fn nr_threads(running: &Rxsteer) -> Result<usize> {
    Ok(fs::read_dir(format!("/proc/{}/task", running.child.id()))?.count())
}

/// More clients than there are connections send nothing, or half a request, or read nothing.
#[test]
fn slow_clients_of_the_metrics_hold_up_nobody() -> Result<()> {
    in_lab!();
    const CLIENTS: usize = 40;
    let bed = Testbed::new(&LinkConfig::default())?;
    let running = after_traffic(&bed)?;
    let netns = &running.netns;
    scrape(netns)?;
    let before = nr_threads(&running)?;
    let mut slow = Vec::new();
    for i in 0..CLIENTS {
        let mut stream = netns.run(|| Ok(TcpStream::connect(ADDRESS)?))?;
        stream.write_all(&b"GET /metrics HTTP/1.1\r\n\r\n"[..i % 26])?;
        slow.push(stream);
    }
    let start = Instant::now();
    running.status()?;
    ensure!(
        start.elapsed() < Duration::from_secs(1),
        "{:?}",
        start.elapsed()
    );
    // The control socket's thread for the status ends by itself.
    until("no slow client has a thread", || {
        Ok((nr_threads(&running)? <= before).then_some(()))
    })?;
    // Those that send nothing whole are given up, and others take their places.
    let first = slow.first_mut().context("there are some")?;
    first.set_read_timeout(Some(Duration::from_secs(60)))?;
    assert_eq!(first.read(&mut [0; 1])?, 0);
    drop(slow);
    scrape(netns)?;
    let ended = running.stop(Signal::SIGTERM)?;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    Ok(())
}

/// Half a request.
const HALF: &[u8] = b"GET /metr";

/// A connection on which reads end after the time that Prometheus gives a scrape.
fn connect(netns: &Netns) -> Result<TcpStream> {
    let stream = netns.run(|| Ok(TcpStream::connect(ADDRESS)?))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    Ok(stream)
}

/// Whether the server closed the connection without an answer.
fn is_closed(mut stream: &TcpStream) -> Result<bool> {
    match stream.read(&mut [0; 1]) {
        Ok(read) => Ok(read == 0),
        Err(e) if e.kind() == ErrorKind::ConnectionReset => Ok(true),
        Err(e) => Err(e).context("a client that is not served stays connected"),
    }
}

/// Opens half-open requests until it is dropped. As many as before the first scrape stay open.
struct Attack {
    stop: Arc<AtomicBool>,
    thread: Option<Thread<Result<()>>>,
}

impl Attack {
    fn start(netns: &Netns, open: usize) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = stop.clone();
        let (tell, started) = std::sync::mpsc::channel();
        let thread = netns.spawn(None, "attack", move || {
            let mut half = VecDeque::new();
            while !seen.load(Ordering::Relaxed) {
                let mut stream = TcpStream::connect(ADDRESS)?;
                // The server may have closed it already.
                let _ = stream.write_all(HALF);
                half.push_back(stream);
                if half.len() > open {
                    half.pop_front();
                    let _ = tell.send(());
                }
            }
            Ok(())
        })?;
        started.recv().context("the attack goes on")?;
        let thread = Some(thread);
        Ok(Self { stop, thread })
    }

    fn end(mut self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().context("it runs")?.join()
    }
}

/// Half-open requests, also new ones all the time, give way to a scrape.
#[test]
fn half_open_requests_hold_up_no_scrape() -> Result<()> {
    in_lab!();
    const CLIENTS: usize = 64;
    const SCRAPES: usize = 20;
    let bed = Testbed::new(&LinkConfig::default())?;
    let running = after_traffic(&bed)?;
    let netns = &running.netns;
    let mut half = Vec::new();
    for _ in 0..CLIENTS {
        let mut stream = connect(netns)?;
        stream.write_all(HALF)?;
        half.push(stream);
    }
    let answer = |mut stream: TcpStream, rest: &[u8]| -> Result<String> {
        stream.write_all(rest)?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    const WHOLE: &[u8] = b"GET /metrics HTTP/1.1\r\n\r\n";
    let scraped = answer(connect(netns)?, WHOLE).context("a scrape")?;
    assert!(scraped.starts_with("HTTP/1.1 200 "), "{scraped}");
    for stream in &half {
        assert!(is_closed(stream)?, "half a request has no answer");
    }

    let attack = Attack::start(netns, CLIENTS)?;
    for _ in 0..SCRAPES {
        let scraped = answer(connect(netns)?, WHOLE).context("a scrape in an attack")?;
        assert!(scraped.starts_with("HTTP/1.1 200 "), "{scraped}");
    }
    attack.end()?;

    // The control: who sends a request in two parts, within the second, is served.
    until("a request in two parts is answered", || {
        let mut stream = connect(netns)?;
        stream.write_all(&WHOLE[..HALF.len()])?;
        let answer = answer(stream, &WHOLE[HALF.len()..]);
        let served = answer.is_ok_and(|answer| answer.starts_with("HTTP/1.1 200 "));
        Ok(served.then_some(()))
    })
}

#[test]
fn other_requests_are_answered() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let running = Rxsteer::steering(&bed.link.dut.netns, &[&bed.link.dut.name, "--metrics"])?;
    let long = format!(
        "GET /metrics HTTP/1.1\r\nX: {}\r\n\r\n",
        "x".repeat(100_000)
    );
    for (ask, status) in [
        ("GET / HTTP/1.1\r\n\r\n", "404"),
        ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
        ("GET /metrics HTTP/1.0\r\n\r\n", "200"),
        ("GET /metrics?x=1 HTTP/1.1\r\n\r\n", "200"),
        ("nonsense\r\n\r\n", "400"),
    ] {
        let (head, _) = request(&running.netns, ask)?;
        assert_eq!(head.split(' ').nth(1), Some(status), "{ask}: {head}");
    }
    // The end of a connection may reach the client before the answer does.
    if let Ok((head, _)) = request(&running.netns, &long) {
        assert_eq!(head.split(' ').nth(1), Some("431"), "{head}");
    }
    scrape(&running.netns)?;
    Ok(())
}

#[test]
fn an_address_that_is_taken_is_reported() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    for (address, why) in [("198.51.100.1:9", "198.51.100.1:9"), (ADDRESS, "in use")] {
        let _taken = dut
            .netns
            .run(|| Ok(std::net::TcpListener::bind(ADDRESS)?))?;
        let metrics = format!("--metrics={address}");
        let ended = Rxsteer::start(&dut.netns, &[&dut.name, &metrics])?;
        let ended = ended.err().context("it starts")?;
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert!(ended.log.contains(why), "{ended:?}");
    }
    // The control, with an address in full.
    let metrics = format!("--metrics={ADDRESS}");
    let running = Rxsteer::steering(&dut.netns, &[&dut.name, &metrics])?;
    scrape(&running.netns)?;
    Ok(())
}

/// CPU time of rxsteer with a scrape every second, and without.
fn cost(running: &Rxsteer) -> Result<[Duration; 2]> {
    let seconds = short_or_long(2, 10);
    let mut used = [Duration::ZERO; 2];
    for (used, scrapes) in used.iter_mut().zip([true, false]) {
        let before = running.cpu_time()?;
        for _ in 0..seconds {
            if scrapes {
                scrape(&running.netns)?;
            }
            std::thread::sleep(Duration::from_secs(1));
        }
        *used = (running.cpu_time()? - before) / seconds;
    }
    Ok(used)
}

#[test]
fn the_number_of_series_does_not_depend_on_the_number_of_devices() -> Result<()> {
    in_lab!();
    let devices = short_or_long(50, 500);
    let dut = Netns::new("dut")?;
    let running = Rxsteer::steering(&dut, &["nic*", "--mode=auto", "--metrics"])?;
    let series = || -> Result<Vec<(String, Labels)>> {
        std::thread::sleep(NEW);
        let metrics = parse(&scrape(&dut)?)?;
        let all = metrics.into_iter().flat_map(|(name, family)| {
            let samples = family.samples.into_iter();
            samples.map(move |(labels, _)| (name.clone(), labels))
        });
        Ok(all.collect())
    };
    let steered = |number| {
        until("all are steered", || {
            let devices = running.status()?.devices;
            Ok((devices.len() == number).then_some(()))
        })
    };
    dut.run(|| rtnl::veths("nic", 1))?;
    steered(1)?;
    let one = series()?;
    assert!(
        one.iter()
            .any(|(_, l)| l.get("device").is_some_and(|d| d == "softirq:all"))
    );
    // Its other end has a name that others are to get.
    dut.run(|| rtnl::rename("peer0", "other"))?;
    dut.run(|| rtnl::veths("nic-", devices))?;
    steered(1 + devices as usize)?;
    let many = series()?;
    let text = scrape(&dut)?;
    println!(
        "{} series for 1 device, {} for {}",
        one.len(),
        many.len(),
        devices + 1
    );
    println!(
        "CPU time per second with and without a scrape: {:?}",
        cost(&running)?
    );
    assert_eq!(many, one);
    let counted = format!("rxsteer_devices{{mode=\"softirq\"}} {}", devices + 1);
    assert!(text.contains(&counted), "{text}");
    Ok(())
}

#[test]
fn a_scrape_takes_little_time() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let running = after_traffic(&bed)?;
    let [with, without] = cost(&running)?;
    println!("CPU time per second with and without a scrape: {with:?}, {without:?}");
    // The figure is some 1 ms; a busy machine makes it more.
    assert!(
        with < without + Duration::from_millis(50),
        "{with:?}, {without:?}"
    );
    Ok(())
}
