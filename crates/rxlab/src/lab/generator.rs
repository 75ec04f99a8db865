// SPDX-License-Identifier: MIT OR Apache-2.0
//! The in-kernel packet generator: BPF_PROG_TEST_RUN with live frames.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::unistd::Pid;
use rxsteer::host::cpumask::CpuMask;

pub use super::ring::RingCounts;

use super::frame::Frames;
use super::link::{Link, LinkConfig};
use super::netns::{self, Netns};
use super::ring::{Ring, TIMEOUT};
use super::{programs, run_ns, schedule, thread_cpu_ns, xdp};
use crate::lab_skel::LabSkel;
use crate::lab_skel::types::xdp_md;

/// Frames that test_run sends before it flushes and may reschedule: one NAPI poll.
const BATCH: u32 = 64;

/// Program runs per test_run, some tens of milliseconds. Each test_run creates a page pool, which
/// the kernel is slow to free.
const REPEAT: i32 = 65536;

/// The longest burst of a paced or lossless generator: half a veth ring.
const BURST: u64 = 128;

/// The longest burst, all threads together, of a paced generator with CPUs of its own: its timing
/// is exact to a few us, so bursts need not fill the ring of 256 frames.
const APART_BURST: u64 = 32;

/// Frames under way count as dropped when none was received for this time.
const DROP_TIMEOUT: Duration = Duration::from_millis(50);

/// Frames, count and rate of a [`Generator`].
#[derive(Clone, Debug)]
pub struct GeneratorConfig {
    pub frames: Frames,
    /// Frames to send; None: until stopped.
    pub count: Option<u64>,
    /// Frames per second; None: as fast as the CPU can. A generator that shares its CPU and is not
    /// lossless runs as SCHED_IDLE, so that it does not starve the NAPI there.
    pub rate: Option<u64>,
    /// Waits until the ring has room, so that nothing is lost there. No other generator or socket
    /// may send into the same queue.
    pub lossless: bool,
    /// Makes a lossless generator wait for the application, too.
    pub window: Option<Window>,
}

impl GeneratorConfig {
    /// As fast as the CPU can, until stopped.
    pub fn flood(frames: Frames) -> Self {
        Self {
            frames,
            count: None,
            rate: None,
            lossless: false,
            window: None,
        }
    }

    /// As fast as the receiver's ring has room, `count` frames or until stopped.
    pub fn lossless(frames: Frames, count: Option<u64>) -> Self {
        Self {
            count,
            lossless: true,
            ..Self::flood(frames)
        }
    }

    /// Limits the rate to `rate` frames per second.
    pub fn at(self, rate: u64) -> Self {
        Self {
            rate: Some(rate),
            ..self
        }
    }
}

/// Limit on the frames under way.
#[derive(Clone)]
pub struct Window {
    /// Frames sent and not yet received, at most.
    pub frames: u64,
    /// Number of this generator's frames that were received.
    pub received: Arc<dyn Fn() -> u64 + Send + Sync>,
    /// Frames may be dropped on the way: when none was received for 50 ms, those under way are
    /// given up.
    pub may_drop: bool,
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Window({})", self.frames)
    }
}

/// What a generator has sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GeneratorReport {
    pub sent: u64,
    /// Frames that found the receiver's ring full, of those sent. `sent - lost` reached its NAPI.
    pub lost: u64,
    /// CPU time of the sending threads, ns. Includes the NAPI's work if that runs in softirq on the
    /// same CPU.
    pub cpu_ns: u64,
    /// Time from first to last frame, ns.
    pub elapsed_ns: u64,
}

/// Sends frames from the tester's end into one queue, with one thread on one CPU or with several
/// that send the same flows.
pub struct Generator {
    threads: Vec<Thread>,
    ring: Ring,
    before: RingCounts,
}

struct Thread {
    handle: netns::Thread<Result<(GeneratorReport, Sender)>>,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    sent: AtomicU64,
}

impl Generator {
    /// Starts to send on `cpu`. The receiving queue is `cpu` modulo the link's queues.
    ///
    /// # Errors
    /// A frame exceeds the MTU or a page; the receiving end has no NAPI (neither GRO nor an XDP
    /// program); the kernel has no live frames (before 5.18).
    pub fn start(link: &Link, cpu: u32, config: &GeneratorConfig) -> Result<Self> {
        Self::start_all(link, &[cpu], config, false)
    }

    /// Starts to send into one queue on several CPUs, each of which sends its share. The CPUs must
    /// be reserved for this: the threads never yield.
    ///
    /// # Errors
    /// As [`Self::start`]; the CPUs belong to several queues; the generator is lossless, or sends
    /// TCP, which needs a single counter of sequence numbers.
    pub fn apart(link: &Link, cpus: &CpuMask, config: &GeneratorConfig) -> Result<Self> {
        let cpus: Vec<u32> = cpus.iter().collect();
        Self::start_all(link, &cpus, config, true)
    }

    fn start_all(link: &Link, cpus: &[u32], config: &GeneratorConfig, apart: bool) -> Result<Self> {
        let first = *cpus.first().context("a generator needs a CPU to send on")?;
        let queue = first % link.dut.queues;
        ensure!(
            cpus.iter().all(|cpu| cpu % link.dut.queues == queue),
            "generators on CPUs {cpus:?} would send into several queues of {}",
            link.dut.name
        );
        ensure!(
            !apart || !(config.lossless || matches!(config.frames, Frames::Tcp(_))),
            "a lossless generator, or one of TCP, has one thread, which yields"
        );
        let mut ring = Ring::new(link, queue)?;
        ring.shared = cpus.len() > 1;
        let mut generator = Self {
            threads: Vec::new(),
            before: ring.counts()?,
            ring,
        };
        // All senders are loaded before the first one sends.
        let nr = cpus.len() as u64;
        let senders = (0..).zip(cpus).map(|(index, &cpu)| {
            let share = |all: u64| (all + nr - 1 - index) / nr;
            let config = GeneratorConfig {
                count: config.count.map(share),
                rate: config.rate.map(share),
                ..config.clone()
            };
            let burst = config.rate.map(|rate| match apart {
                true => (rate / 50_000).clamp(1, (APART_BURST / nr).max(1)),
                false => burst(rate),
            });
            let sender = Sender::new(link, cpu, config, burst, !apart)?;
            Ok((cpu, sender))
        });
        let senders: Vec<(u32, Sender)> = senders.collect::<Result<_>>()?;
        for (cpu, sender) in senders {
            let shared = sender.shared.clone();
            let netns = &link.tester.netns;
            let handle = netns.spawn(Some(cpu), &format!("generator/{cpu}"), move || {
                sender.send()
            })?;
            generator.threads.push(Thread { handle, shared });
        }
        Ok(generator)
    }

    /// Frames accepted by the receiver's ring so far, and frames refused. No other generator may
    /// send into the same queue.
    ///
    /// # Errors
    /// When the device is gone.
    pub fn counts(&self) -> Result<RingCounts> {
        let now = self.ring.counts()?;
        Ok(RingCounts {
            accepted: now.accepted - self.before.accepted,
            refused: now.refused - self.before.refused,
        })
    }

    /// Frames sent so far; at full speed up to 65536 frames per thread behind.
    pub fn sent(&self) -> u64 {
        let sent = |g: &Thread| g.shared.sent.load(Ordering::Relaxed);
        self.threads.iter().map(sent).sum()
    }

    /// Moves the generator to another CPU, on a link with one queue. A device that is polled in
    /// softirq is then polled on that CPU.
    ///
    /// # Errors
    /// The CPU is offline.
    pub fn move_to(&self, cpu: u32) -> Result<()> {
        let mut threads = self.threads.iter();
        threads.try_for_each(|thread| thread.handle.move_to(cpu))
    }

    /// CPU time of the threads so far, ns.
    ///
    /// # Errors
    /// When a thread has ended.
    pub fn cpu_ns(&self) -> Result<u64> {
        let threads = self.threads.iter();
        threads.map(|thread| run_ns(thread.handle.tid)).sum()
    }

    /// Stops the threads and returns what was sent.
    pub fn stop(self) -> Result<GeneratorReport> {
        self.tell_to_stop();
        self.wait()
    }

    /// Waits until the configured count was sent.
    pub fn wait(mut self) -> Result<GeneratorReport> {
        let mut all = GeneratorReport::default();
        // Detach all programs at once at the end: each detaching rewrites the XDP dispatcher, which
        // the other threads still execute.
        let mut ended = Vec::new();
        for thread in self.threads.drain(..) {
            let (report, sender) = thread.handle.join()?;
            ended.push(sender);
            all.sent += report.sent;
            all.cpu_ns += report.cpu_ns;
            all.elapsed_ns = all.elapsed_ns.max(report.elapsed_ns);
        }
        all.lost = all.sent - self.ring.emptied()?.saturating_sub(self.before.accepted);
        Ok(all)
    }

    fn tell_to_stop(&self) {
        for thread in &self.threads {
            thread.shared.stop.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for Generator {
    /// The threads end on their own, after the current test_run.
    fn drop(&mut self) {
        self.tell_to_stop();
    }
}

struct Sender {
    skel: LabSkel<'static>,
    _parked: (Netns, OwnedFd),
    frame: Vec<u8>,
    ifindex: u32,
    ring: Ring,
    config: GeneratorConfig,
    /// Runs as SCHED_IDLE.
    yields: bool,
    shared: Arc<Shared>,
}

impl Sender {
    /// `burst`: frames per burst of a paced generator.
    fn new(
        link: &Link,
        cpu: u32,
        config: GeneratorConfig,
        burst: Option<u64>,
        yields: bool,
    ) -> Result<Self> {
        let (frame, mut layout) = config.frames.template()?;
        let skel = programs::load(|open| {
            open.progs.generator.set_autoload(true);
            let constants = open.maps.rodata_data.as_mut().context("no .rodata")?;
            let written = match layout.template_len {
                0 => frame.len().min(constants.generator_template.len()),
                len => len as usize,
            };
            ensure!(
                written <= constants.generator_template.len(),
                "headers of {written} bytes are too long"
            );
            layout.template_len = written as u32;
            layout.first.generator = cpu.to_be();
            constants.generator_template[..written].copy_from_slice(&frame[..written]);
            constants.generator_layout = layout;
            if let (Some(rate), Some(burst), false) = (config.rate, burst, config.lossless) {
                constants.generator_burst = burst as u32;
                constants.generator_burst_ns = burst * 1_000_000_000 / rate.max(1);
            }
            Ok(())
        })?;
        Ok(Self {
            _parked: park(&skel)?,
            skel,
            frame,
            ifindex: link.tester.ifindex,
            ring: Ring::new(link, cpu % link.dut.queues)?,
            yields: yields && !config.lossless,
            config,
            shared: Arc::default(),
        })
    }

    fn send(mut self) -> Result<(GeneratorReport, Self)> {
        // Sleeps between bursts are shorter than the default timer slack of 50 us.
        nix::sys::prctl::set_timerslack(1)?;
        if self.yields {
            schedule(Pid::from_raw(0), libc::SCHED_IDLE, 0)?;
        }
        let cpu = thread_cpu_ns()?;
        let start = Instant::now();
        let count = self.config.count.unwrap_or(u64::MAX);
        let sent = self.send_frames(count)?;
        let elapsed_ns = start.elapsed().as_nanos() as u64;
        let cpu_ns = thread_cpu_ns()? - cpu;
        let report = GeneratorReport {
            sent,
            // Known for all threads together only.
            lost: 0,
            cpu_ns,
            elapsed_ns,
        };
        Ok((report, self))
    }

    /// Sends `count` frames, or until stopped. A lossless generator sends bursts, each when the
    /// ring has room for it.
    fn send_frames(&mut self, count: u64) -> Result<u64> {
        let rate = self.config.rate.filter(|_| self.config.lossless);
        let mut schedule = rate.map(|rate| Schedule::new(rate, Instant::now()));
        let mut sent = 0;
        let mut gone = 0;
        while sent < count && !self.shared.stop.load(Ordering::Relaxed) {
            sent = if self.config.lossless {
                let burst = schedule.as_mut().map_or(BURST, Schedule::wait);
                let burst = burst.min(count - sent);
                if let Some(window) = &self.config.window {
                    gone += window.wait(sent - gone, burst)?;
                }
                self.ring.wait_for_room(burst)?;
                self.run(sent + burst, burst as i32)?
            } else {
                self.run(count, REPEAT)?
            };
            self.shared.sent.store(sent, Ordering::Relaxed);
        }
        Ok(sent)
    }

    /// Runs the program `repeat` times, rounded up to a batch, until `limit` frames were sent since
    /// the start. Returns the frames sent since the start.
    fn run(&mut self, limit: u64, repeat: i32) -> Result<u64> {
        let bss = self.skel.maps.bss_data.as_mut().context("no .bss")?;
        bss.generator_limit = limit;
        let before = bss.generator_nr_refused;
        let context = xdp_md {
            data_end: self.frame.len() as u32,
            ingress_ifindex: self.ifindex,
            ..Default::default()
        };
        let mut options = libbpf_sys::bpf_test_run_opts {
            sz: size_of::<libbpf_sys::bpf_test_run_opts>() as _,
            data_in: self.frame.as_ptr().cast(),
            data_size_in: self.frame.len() as u32,
            ctx_in: (&raw const context).cast(),
            ctx_size_in: size_of::<xdp_md>() as u32,
            repeat,
            flags: libbpf_sys::BPF_F_TEST_XDP_LIVE_FRAMES,
            batch_size: BATCH.min(repeat as u32),
            ..Default::default()
        };
        let program = self.skel.progs.generator.as_fd().as_raw_fd();
        let start = Instant::now();
        let ret = loop {
            // SAFETY: the options and everything they point to outlive the call.
            let ret = unsafe { libbpf_sys::bpf_prog_test_run_opts(program, &mut options) };
            // Each test_run takes one of 65534 page pool ids. A pool with frames still under way is
            // checked for release once a second only, so a series of runs can exhaust the ids
            // (net/core/xdp.c, page_pool.c).
            if Errno::from_raw(-ret) != Errno::ENOSPC || start.elapsed() > TIMEOUT {
                break ret;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        // SAFETY: only the program writes these words, and it has returned.
        let (sent, refused) = unsafe {
            (
                (&raw const bss.generator_nr_sent).read_volatile(),
                (&raw const bss.generator_nr_refused).read_volatile(),
            )
        };
        match Errno::from_raw(-ret) {
            // Interrupted by an unrelated signal; the caller runs the rest.
            Errno::EINTR => Ok(sent),
            _ if ret == 0 && refused > before => {
                bail!("frames of {} bytes can't be written", self.frame.len())
            }
            _ if ret == 0 => Ok(sent),
            error => bail!(
                "the kernel sends no frames of {} bytes: {error}",
                self.frame.len()
            ),
        }
    }
}

/// Keeps the program attached to an idle device. Otherwise each test_run would add it to the XDP
/// dispatcher and remove it again, and wait for RCU each time: tens of milliseconds.
fn park(skel: &LabSkel) -> Result<(Netns, OwnedFd)> {
    let netns = Netns::new("generator")?;
    let link = Link::new(&netns, &netns, &LinkConfig::default())?;
    let attached = xdp::attach(&link.dut, skel.progs.generator.as_fd())?;
    Ok((netns, attached))
}

/// Frames per burst of a paced generator: 500 us worth, up to 256,000 frames/s. A test_run costs
/// about 50 us regardless of its length. Its page pool lives on for up to a second while frames are
/// under way, and a worker on the same CPU walks all pools for each of them
/// (page_pool_release_retry()): with 5,000 test_runs/s it kept the generator off the CPU for 4 ms
/// at a time.
fn burst(rate: u64) -> u64 {
    (rate / 2_000).clamp(1, BURST)
}

impl Window {
    /// Waits until `burst` more frames may be under way. Returns the number of `sent` frames that
    /// were given up.
    pub(super) fn wait(&self, sent: u64, burst: u64) -> Result<u64> {
        let mut received = (self.received)();
        let mut since = Instant::now();
        while sent + burst > received + self.frames {
            std::thread::sleep(Duration::from_micros(20));
            let now = (self.received)();
            if now != received {
                (received, since) = (now, Instant::now());
            } else if self.may_drop && since.elapsed() > DROP_TIMEOUT {
                return Ok(sent.saturating_sub(received));
            }
            ensure!(
                since.elapsed() < TIMEOUT,
                "{} frames are under way and none is received",
                sent - received
            );
        }
        Ok(0)
    }
}

/// Due times of the bursts of a paced generator.
struct Schedule {
    rate: u64,
    /// Frames per burst, see [`burst`].
    burst: u64,
    due: Instant,
}

impl Schedule {
    fn new(rate: u64, start: Instant) -> Self {
        Self {
            rate: rate.max(1),
            burst: burst(rate),
            due: start,
        }
    }

    /// Sleeps until the next burst is due; returns its size, frames.
    fn wait(&mut self) -> u64 {
        let now = Instant::now();
        if let Some(early) = self.due.checked_duration_since(now) {
            std::thread::sleep(early);
        }
        self.next(now)
    }

    /// Size of the burst due next, frames. If a test_run takes longer than the interval between
    /// bursts, longer bursts make up for it, for a delay of up to 1 ms: more would turn the rate
    /// into a flood.
    fn next(&mut self, now: Instant) -> u64 {
        self.due = self.due.max(now - Duration::from_millis(1));
        let late = now.saturating_duration_since(self.due).as_nanos() as u64;
        let burst = (self.burst + late * self.rate / 1_000_000_000).min(BURST);
        self.due += Duration::from_nanos(burst * 1_000_000_000 / self.rate);
        burst
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frames sent in one second if each burst takes `takes`.
    fn sent(rate: u64, takes: Duration) -> u64 {
        let start = Instant::now();
        let mut schedule = Schedule::new(rate, start);
        let (mut now, mut frames) = (start, 0);
        while now < start + Duration::from_secs(1) {
            now = now.max(schedule.due);
            frames += schedule.next(now);
            now += takes;
        }
        frames
    }

    #[test]
    fn a_rate_is_kept_where_a_burst_takes_longer_than_its_time() {
        for takes in [0, 50, 199, 230, 500].map(Duration::from_micros) {
            for rate in [5_000, 20_000, 200_000] {
                let frames = sent(rate, takes) as f64 / rate as f64;
                assert!(
                    (0.99..1.01).contains(&frames),
                    "{rate}, {takes:?}: {frames}"
                );
            }
        }
        // Control: bursts are limited to half a ring, and delays beyond 1 ms are not made up for.
        assert!(sent(640_000, Duration::from_micros(500)) < 300_000);
        assert!(sent(20_000, Duration::from_millis(2)) < 16_000);
    }
}
