// SPDX-License-Identifier: MIT OR Apache-2.0
//! Traffic of several kinds while everything moves, for as long as `make soak HOURS=8` says: what
//! rxsteer and the kernel hold for it does not grow.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::helpers::threads::{cpumaps, kthreads};
use anyhow::{Context, Result, ensure};
use libbpf_rs::query::{MapInfoIter, ProgInfoIter};
use libbpf_rs::{MapHandle, MapType};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::{End, LinkConfig};
use rxlab::lab::netns::{Netns, Thread};
use rxlab::testing::app::App;
use rxlab::testing::testbed::{Testbed, until};
use rxsteer::api::client;
use rxsteer::api::flows::Query;
use rxsteer::api::set::Change;

/// Length without `RXSTEER_SOAK_HOURS`, hours.
const HOURS: f64 = 1.0 / 60.0;

/// Fewest samples in a quarter of a run.
const QUARTER: usize = 3;

/// What is held at one time, by name.
type Sample = BTreeMap<&'static str, u64>;

/// How much each may grow from the first quarter to the last, as medians: absolute, and percent.
/// Numbers of things may not grow. Memory of the daemon settles with its allocator, that of the
/// kernel belongs to the whole machine.
const TOLERANCES: [(&str, u64, u64); 7] = [
    ("resident KiB", 512, 5),
    ("descriptors", 0, 0),
    ("threads", 0, 0),
    ("backlog threads", 0, 0),
    ("maps", 0, 0),
    ("programs", 0, 0),
    ("unreclaimable slab KiB", 8 << 10, 5),
];

fn median(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values[values.len() / 2]
}

/// What has grown beyond its tolerance, in words.
fn grown(samples: &[Sample]) -> Vec<String> {
    let quarter = samples.len() / 4;
    let (first, last) = (&samples[..quarter], &samples[samples.len() - quarter..]);
    let of = |samples: &[Sample], name| median(samples.iter().map(|s| s[name]).collect());
    let growth = TOLERANCES.iter().filter_map(|&(name, absolute, percent)| {
        let [before, after] = [first, last].map(|samples| of(samples, name));
        let limit = before + absolute.max(before * percent / 100);
        (after > limit)
            .then(|| format!("{name}: {before} in the first quarter, {after} in the last"))
    });
    growth.collect()
}

/// The number after `name` in a file of lines `name: number unit`.
fn number(file: &str, name: &str) -> Result<u64> {
    let text = fs::read_to_string(file)?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let words = line.with_context(|| format!("{name} in {file}"))?;
    Ok(words
        .split_whitespace()
        .next()
        .context("a number")?
        .parse()?)
}

fn sample(pid: u32) -> Result<Sample> {
    let entries =
        |dir: &str| anyhow::Ok(fs::read_dir(format!("/proc/{pid}/{dir}"))?.count() as u64);
    Ok(Sample::from([
        (
            "resident KiB",
            number(&format!("/proc/{pid}/status"), "VmRSS")?,
        ),
        ("descriptors", entries("fd")?),
        ("threads", entries("task")?),
        ("backlog threads", kthreads(&cpumaps(pid)?)?.len() as u64),
        ("maps", MapInfoIter::default().count() as u64),
        ("programs", ProgInfoIter::default().count() as u64),
        (
            "unreclaimable slab KiB",
            number("/proc/meminfo", "SUnreclaim")?,
        ),
    ]))
}

/// `rxsteer run` as a process, killed on drop.
struct Rxsteer(Child);

impl Rxsteer {
    fn start(dut: &End) -> Result<Self> {
        let mut command = dut.netns.command(env!("CARGO_BIN_EXE_rxsteer"))?;
        let args = ["run", "--mode=native", "--rps-cpus=0-1", &dut.name];
        command
            .args(args)
            .env("RXSTEER_LOG", "error")
            .stdin(Stdio::null());
        let this = Self(command.spawn()?);
        until("rxsteer steers", || Ok(dut.netns.run(client::status).ok()))?;
        Ok(this)
    }

    fn stop(mut self) -> Result<()> {
        kill(Pid::from_raw(self.0.id() as i32), Signal::SIGTERM)?;
        ensure!(self.0.wait()?.success(), "rxsteer failed");
        Ok(())
    }
}

impl Drop for Rxsteer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Short TCP connections, one after the other: 16 KiB there and back.
struct Connections {
    stop: Arc<AtomicBool>,
    count: Arc<AtomicU64>,
    threads: Vec<Thread<()>>,
}

impl Connections {
    fn start(from: &Netns, to: &End) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let count = Arc::new(AtomicU64::new(0));
        let listener = to.netns.run(|| Ok(TcpListener::bind((to.ipv4, 0))?))?;
        let at = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let ended = stop.clone();
        let server = to.netns.spawn(None, "server", move || {
            while !ended.load(Ordering::Relaxed) {
                match listener.accept() {
                    Ok((stream, _)) => drop(echo(stream)),
                    Err(_) => std::thread::sleep(Duration::from_millis(1)),
                }
            }
        })?;
        let (ended, counted) = (stop.clone(), count.clone());
        let client = from.spawn(None, "client", move || {
            while !ended.load(Ordering::Relaxed) {
                // Packets of a flooded queue are lost: connections may fail.
                if request(at).is_ok() {
                    counted.fetch_add(1, Ordering::Relaxed);
                }
            }
        })?;
        let threads = vec![server, client];
        Ok(Self {
            stop,
            count,
            threads,
        })
    }

    /// Returns how many there were.
    fn stop(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.into_iter().for_each(Thread::join);
        self.count.load(Ordering::Relaxed)
    }
}

const BYTES: usize = 16 << 10;

fn echo(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    let mut bytes = vec![0; BYTES];
    stream.read_exact(&mut bytes)?;
    stream.write_all(&bytes)
}

fn request(at: SocketAddr) -> std::io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&at, Duration::from_secs(2))?;
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    stream.write_all(&vec![7; BYTES])?;
    stream.read_exact(&mut vec![0; BYTES])
}

/// One round of changes; at its end all settings are as before.
fn round(dut: &End, app: &App) -> Result<()> {
    let set = |change: Change| dut.netns.run(|| client::set(change));
    let masks = ["0", "1", "0x3"].map(|cpus| Change::rps_cpus(&dut.name, None, cpus));
    let sizes = [1024, 8192, 4096].map(|size| Change {
        rps_flow_cnt: Some(size),
        rps_sock_flow_entries: Some(8 * size),
        ..Change::default()
    });
    for (number, policy) in (0..).zip(["rps", "rfs", "off", "rfs+idle", "rps+adapt", "adaptive"]) {
        app.move_to(number % 2)?;
        set(Change {
            policy: Some(policy.parse().map_err(anyhow::Error::msg)?),
            ..Change::default()
        })?;
        std::thread::sleep(Duration::from_millis(100));
        // Under off there is no CPU to steer to.
        if policy != "off" {
            set(masks[number as usize % masks.len()].clone())?;
        }
        // A table is not replaced while its backlogs don't drain; then it stays as it was.
        let _ = set(sizes[number as usize % sizes.len()].clone());
        let query = Query {
            limit: 100,
            ..Query::default()
        };
        dut.netns.run(|| client::flows(query))?;
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// Runs for so long, and at least as many rounds as a verdict needs; `each` is called once a round.
/// Returns what has grown.
fn soak(length: Duration, mut each: impl FnMut() -> Result<()>) -> Result<Vec<String>> {
    let bed = Testbed::new(&LinkConfig {
        queues: 2,
        ..LinkConfig::default()
    })?;
    let dut = &bed.link.dut;
    let flows = UdpFlows::to(dut, 500);
    let sink = bed.receiver_in_order(&flows)?;
    let rxsteer = Rxsteer::start(dut)?;
    let pid = rxsteer.0.id();
    let wires = [(0, 60_000), (1, 20_000)].map(|(queue, rate)| {
        let flows = UdpFlows {
            // The order is checked for the first queue's flows; the others have no receiver.
            dport: flows.dport + queue,
            ..flows.clone()
        };
        let paced = GeneratorConfig::flood(Frames::Udp(flows)).at(rate);
        Generator::start(&bed.link, queue.into(), &paced)
    });
    let connections = Connections::start(&bed.link.tester.netns, dut)?;
    let app = App::start(&dut.netns, {
        let server = dut
            .netns
            .run(|| Ok(std::net::UdpSocket::bind((dut.ipv4, 11))?))?;
        server.set_read_timeout(Some(Duration::from_millis(5)))?;
        Box::new(move || server.recv(&mut [0; 64]))
    })?;
    let start = Instant::now();
    let mut samples = Vec::new();
    // The first round is the warm-up.
    while start.elapsed() < length || samples.len() < 4 * QUARTER {
        round(dut, &app)?;
        each()?;
        if samples.is_empty() && start.elapsed() < length / 20 {
            continue;
        }
        samples.push(sample(pid)?);
    }
    let status = dut.netns.run(client::status)?;
    let queues = &status.devices[0].queues;
    let redirected: Vec<u64> = queues.iter().map(|queue| queue.sums.redirected).collect();
    ensure!(redirected.iter().all(|&count| count > 0), "{queues:?}");
    for wire in wires {
        wire?.stop()?;
    }
    let nr_connections = connections.stop();
    ensure!(nr_connections > 0, "no connection");
    rxsteer.stop()?;
    let report = sink.stop()?;
    ensure!(report.reordered == 0, "{report:?}");
    eprintln!(
        "{} s, {} samples, {nr_connections} connections, {} datagrams in order, redirected \
         {redirected:?}\nfirst {:?}\nlast {:?}",
        start.elapsed().as_secs(),
        samples.len(),
        report.received[0],
        samples[0],
        samples[samples.len() - 1]
    );
    Ok(grown(&samples))
}

#[test]
#[ignore = "takes as long as it is told to: make soak HOURS=8"]
fn nothing_grows() -> Result<()> {
    in_lab!(alone: "it counts what the whole host holds");
    let hours = std::env::var("RXSTEER_SOAK_HOURS").map_or(Ok(HOURS), |hours| hours.parse())?;
    let grown = soak(Duration::from_secs_f64(hours * 3600.0), || Ok(()))?;
    ensure!(grown.is_empty(), "{}", grown.join("\n"));
    Ok(())
}

/// The control: a map that is leaked in each round is found.
#[test]
#[ignore = "with the soak: make soak"]
fn a_leak_is_found() -> Result<()> {
    in_lab!(alone: "it counts what the whole host holds");
    let mut leaked = Vec::new();
    let grown = soak(Duration::ZERO, || {
        let opts = libbpf_sys::bpf_map_create_opts {
            sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
            ..Default::default()
        };
        leaked.push(MapHandle::create(
            MapType::Array,
            Some("leak"),
            4,
            4,
            1,
            &opts,
        )?);
        Ok(())
    })?;
    ensure!(
        grown.iter().any(|what| what.starts_with("maps: ")),
        "{grown:?}"
    );
    Ok(())
}

#[test]
fn growth_is_seen_and_noise_is_not() {
    let series = |name: &'static str, value: fn(u64) -> u64| {
        let sample = |time| {
            let fixed = TOLERANCES.map(|(name, ..)| (name, 10_000));
            let mut sample = Sample::from(fixed);
            sample.insert(name, value(time));
            sample
        };
        grown(&(0..40).map(sample).collect::<Vec<_>>())
    };
    assert!(series("maps", |_| 10_000).is_empty());
    assert!(series("maps", |time| 10_000 + time % 3).is_empty());
    assert!(series("resident KiB", |time| 10_000 + 10 * time).is_empty());
    for (name, ..) in TOLERANCES {
        let leak = series(name, |time| 10_000 + 1_000 * time);
        assert!(leak.len() == 1 && leak[0].starts_with(name), "{leak:?}");
    }
    let one = series("descriptors", |time| 10_000 + time / 20);
    assert_eq!(one.len(), 1);
}
