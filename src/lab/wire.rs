// SPDX-License-Identifier: MIT OR Apache-2.0
//! The in-kernel generator: BPF_PROG_TEST_RUN with live frames.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::unistd::Pid;

use super::ethtool::Ethtool;
use super::frame::Frames;
use super::link::{End, Link, LinkConfig};
use super::netns::{self, Netns};
use super::{thread_cpu_ns, xdp};
use crate::lab_skel::LabSkel;
use crate::lab_skel::types::xdp_md;

/// Frames that test_run hands over before it flushes, and lets others have the CPU: one NAPI poll.
const BATCH: u32 = 64;

/// Runs of the program in one test_run, some tens of milliseconds: each test_run makes a page pool,
/// and the kernel is slow to get rid of one.
const REPEAT: i32 = 65536;

/// A veth ring holds 256 frames (VETH_RING_SIZE), and gives consumed slots back in batches of 16
/// (ptr_ring); with more than this in it, a burst may not fit.
const RING_ROOM: u64 = 256 - 16;

/// The longest burst of a paced or lossless wire: half a veth ring.
const BURST: u64 = 128;

/// Frames that may be dropped have been if none was received for so long.
const DROPPED: Duration = Duration::from_millis(50);

/// How long a wire waits for a receiver that takes nothing, or a kernel without page pools.
const PATIENCE: Duration = Duration::from_secs(5);

/// What and how a [`Wire`] sends.
#[derive(Clone, Debug)]
pub struct WireConfig {
    /// What it sends.
    pub frames: Frames,
    /// Frames to send; None: until stopped.
    pub count: Option<u64>,
    /// Frames per second; None: as fast as the CPU can. Unless it is lossless, with the CPU
    /// time that nobody else wants: it must not starve the NAPI there.
    pub rate: Option<u64>,
    /// Never more in the ring than it holds: it waits for the receiver and loses nothing there.
    /// No other wire or socket may send into the same queue meanwhile.
    pub lossless: bool,
    /// A lossless wire's way to wait for the application too.
    pub window: Option<Window>,
}

/// Frames that may be under way: so many fewer to be dropped anywhere.
#[derive(Clone)]
pub struct Window {
    /// That is sent and not received.
    pub frames: u64,
    /// Of this wire's frames, those that have been received.
    pub received: Arc<dyn Fn() -> u64 + Send + Sync>,
    /// Some may be dropped: when none has been received for 50 ms, the others are given up.
    pub may_drop: bool,
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Window({})", self.frames)
    }
}

/// What a wire did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WireReport {
    /// Frames sent.
    pub sent: u64,
    /// Of these, frames that found the receiver's ring full. `sent - lost` reached its NAPI.
    pub lost: u64,
    /// CPU time of the sending thread, ns. With a NAPI in softirq it includes what that did on
    /// this CPU between the thread's own work.
    pub cpu_ns: u64,
    /// From first to last frame, ns.
    pub elapsed_ns: u64,
}

/// A running generator: one thread on one CPU at the tester's end.
pub struct Wire {
    thread: Option<JoinHandle<Option<Result<WireReport>>>>,
    shared: Arc<Shared>,
    ring: Ring,
    accepted_before: u64,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    sent: AtomicU64,
    /// The thread's id, once it has begun.
    thread: AtomicI32,
}

impl Wire {
    /// Starts to send on `cpu`, which decides the receiving queue: `cpu` modulo the link's queues.
    ///
    /// # Errors
    /// A frame is longer than the MTU or a page allows; the receiving end has no NAPI (neither GRO
    /// nor an XDP program); the kernel has no live frames (before 5.18).
    pub fn start(link: &Link, cpu: u32, config: &WireConfig) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let sender = Sender::new(link, cpu, config, shared.clone())?;
        let ring = Ring::new(link, cpu)?;
        let accepted_before = ring.accepted()?;
        let thread = link
            .tester
            .netns
            .spawn(Some(cpu), &format!("wire/{cpu}"), move || sender.send())?;
        Ok(Self {
            thread: Some(thread),
            shared,
            ring,
            accepted_before,
        })
    }

    /// Frames put into the receiver's ring so far. No other wire or socket may send into the same
    /// queue meanwhile.
    ///
    /// # Errors
    /// When the device is gone.
    pub fn accepted(&self) -> Result<u64> {
        Ok(self.ring.accepted()? - self.accepted_before)
    }

    /// Frames sent so far; up to 65536 late at full speed.
    pub fn sent(&self) -> u64 {
        self.shared.sent.load(Ordering::Relaxed)
    }

    /// Sends on another CPU from now on, on links of one queue: where a device is polled in softirq,
    /// it is polled there.
    ///
    /// # Errors
    /// The CPU is offline.
    pub fn move_to(&self, cpu: u32) -> Result<()> {
        match self.shared.thread.load(Ordering::Relaxed) {
            0 => Ok(()),
            thread => netns::bind(Pid::from_raw(thread), cpu),
        }
    }

    /// Stops it.
    pub fn stop(self) -> Result<WireReport> {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.wait()
    }

    /// Waits until it has sent its count.
    pub fn wait(mut self) -> Result<WireReport> {
        let thread = self.thread.take().context("the wire has ended")?;
        match thread.join() {
            Ok(report) => report.context("the wire did not start")?,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

impl Drop for Wire {
    /// The thread ends by itself, after what it sends just now.
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

struct Sender {
    skel: LabSkel<'static>,
    _parked: (Netns, OwnedFd),
    frame: Vec<u8>,
    ifindex: u32,
    ring: Ring,
    config: WireConfig,
    shared: Arc<Shared>,
}

impl Sender {
    fn new(link: &Link, cpu: u32, config: &WireConfig, shared: Arc<Shared>) -> Result<Self> {
        let (frame, mut layout) = config.frames.template()?;
        let skel = xdp::load(|open| {
            open.progs.wire.set_autoload(true);
            let constants = open.maps.rodata_data.as_mut().context("no .rodata")?;
            let written = match layout.template_len {
                0 => frame.len().min(constants.wire_template.len()),
                len => len as usize,
            };
            ensure!(
                written <= constants.wire_template.len(),
                "headers of {written} bytes are too long"
            );
            layout.template_len = written as u32;
            layout.first.wire = cpu.to_be();
            constants.wire_template[..written].copy_from_slice(&frame[..written]);
            constants.wire_layout = layout;
            if let (Some(rate), false) = (config.rate, config.lossless) {
                let burst = burst(rate);
                constants.wire_burst = burst as u32;
                constants.wire_burst_ns = burst * 1_000_000_000 / rate.max(1);
            }
            Ok(())
        })?;
        Ok(Self {
            _parked: park(&skel)?,
            skel,
            frame,
            ifindex: link.tester.ifindex,
            ring: Ring::new(link, cpu)?,
            config: config.clone(),
            shared,
        })
    }

    fn send(mut self) -> Result<WireReport> {
        let thread = nix::unistd::gettid().as_raw();
        self.shared.thread.store(thread, Ordering::Relaxed);
        // Sleeps between bursts are shorter than the default slack of 50 us.
        nix::sys::prctl::set_timerslack(1)?;
        if !self.config.lossless {
            yield_to_all()?;
        }
        let accepted = self.ring.accepted()?;
        let cpu = thread_cpu_ns()?;
        let start = Instant::now();
        let count = self.config.count.unwrap_or(u64::MAX);
        let sent = self.send_frames(count)?;
        let elapsed_ns = start.elapsed().as_nanos() as u64;
        let cpu_ns = thread_cpu_ns()? - cpu;
        Ok(WireReport {
            sent,
            lost: sent - (self.ring.accepted()? - accepted),
            cpu_ns,
            elapsed_ns,
        })
    }

    /// Sends `count` frames, or until it is to stop; a lossless wire in bursts, each when there is
    /// room for it in the ring.
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

    /// Runs the program `repeat` times, or a batch more, until `limit` frames are sent since the
    /// start; returns how many are.
    fn run(&mut self, limit: u64, repeat: i32) -> Result<u64> {
        let bss = self.skel.maps.bss_data.as_mut().context("no .bss")?;
        bss.wire_limit = limit;
        let before = bss.wire_nr_refused;
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
        let program = self.skel.progs.wire.as_fd().as_raw_fd();
        let start = Instant::now();
        let ret = loop {
            // SAFETY: the options, and all they point to, outlive the call.
            let ret = unsafe { libbpf_sys::bpf_prog_test_run_opts(program, &mut options) };
            // Each test_run makes a page pool, of which the kernel can number 65534. One whose
            // frames are still under way when it returns is looked at again a second later: many
            // runs use the numbers up (net/core/xdp.c, page_pool.c).
            if Errno::from_raw(-ret) != Errno::ENOSPC || start.elapsed() > PATIENCE {
                break ret;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        // SAFETY: only the program above writes them, and that has returned.
        let (sent, refused) = unsafe {
            (
                (&raw const bss.wire_nr_sent).read_volatile(),
                (&raw const bss.wire_nr_refused).read_volatile(),
            )
        };
        match Errno::from_raw(-ret) {
            // A signal for another purpose; the caller comes back for the rest.
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

/// Attaches the program to a device that carries nothing. Otherwise each test_run would put it into
/// the XDP dispatcher and take it out again, and wait for RCU each time: tens of milliseconds.
fn park(skel: &LabSkel) -> Result<(Netns, OwnedFd)> {
    let netns = Netns::new("wire")?;
    let link = Link::new(&netns, &netns, &LinkConfig::default())?;
    let attached = xdp::attach(
        &link.dut,
        skel.progs.wire.as_fd(),
        crate::device::XdpMode::Native,
    )?;
    Ok((netns, attached))
}

/// Frames per burst of a paced wire: 200 us worth, up to 640,000 frames a second.
fn burst(rate: u64) -> u64 {
    (rate / 5_000).clamp(1, BURST)
}

/// Puts the calling thread behind everybody else on its CPU.
fn yield_to_all() -> Result<()> {
    let param = libc::sched_param { sched_priority: 0 };
    // SAFETY: the parameter outlives the call; 0 is the calling thread.
    let ret = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const param) };
    Errno::result(ret).context("SCHED_IDLE")?;
    Ok(())
}

impl Window {
    /// Waits until `burst` more frames may be under way. Returns how many of the `sent` ones have
    /// been given up.
    fn wait(&self, sent: u64, burst: u64) -> Result<u64> {
        let mut received = (self.received)();
        let mut since = Instant::now();
        while sent + burst > received + self.frames {
            std::thread::sleep(Duration::from_micros(20));
            let now = (self.received)();
            if now != received {
                (received, since) = (now, Instant::now());
            } else if self.may_drop && since.elapsed() > DROPPED {
                return Ok(sent.saturating_sub(received));
            }
            ensure!(
                since.elapsed() < PATIENCE,
                "{} frames are under way and nobody receives one",
                sent - received
            );
        }
        Ok(0)
    }
}

/// When the next burst of a paced wire is due.
struct Schedule {
    rate: u64,
    /// Frames per burst: 200 us worth, up to 640,000 frames a second. A test_run costs about 50 us
    /// however little it sends: 0.5 us more per frame than at full speed.
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

    /// Sleeps until the next burst is due; returns its size. Lost time is caught up with up to a
    /// millisecond: more would be a flood, not a rate.
    fn wait(&mut self) -> u64 {
        let now = Instant::now();
        match self.due.checked_duration_since(now) {
            Some(early) => std::thread::sleep(early),
            None => self.due = self.due.max(now - Duration::from_millis(1)),
        }
        self.due += Duration::from_nanos(self.burst * 1_000_000_000 / self.rate);
        self.burst
    }
}

/// The receiving queue of a veth, as its counters show it.
struct Ring {
    tester: Ethtool,
    dut: Ethtool,
    accepted: String,
    taken: String,
    /// Taken less accepted when the ring is empty: as when the wire begins, or the most seen since.
    offset: u64,
}

impl Ring {
    fn new(link: &Link, cpu: u32) -> Result<Self> {
        let queue = cpu % link.dut.queues;
        let open = |end: &End| end.netns.run(|| Ethtool::open(&end.name));
        let mut ring = Self {
            tester: open(&link.tester)?,
            dut: open(&link.dut)?,
            accepted: format!("tx_queue_{queue}_xdp_xmit"),
            taken: format!("rx_queue_{queue}_xdp_packets"),
            offset: 0,
        };
        ring.offset = ring.taken()?.wrapping_sub(ring.accepted()?);
        Ok(ring)
    }

    /// Frames put into the ring since the device was made.
    fn accepted(&self) -> Result<u64> {
        let counters = self.tester.counters()?;
        let counter = counters.get(self.accepted.as_str());
        counter.copied().context("this kernel's veth doesn't count")
    }

    /// Frames polled out of it, counted at the end of each poll.
    fn taken(&self) -> Result<u64> {
        let counters = self.dut.counters()?;
        let counter = counters.get(self.taken.as_str());
        counter.copied().context("this kernel's veth doesn't count")
    }

    /// Waits until `burst` more frames fit.
    fn wait_for_room(&mut self, burst: u64) -> Result<()> {
        let start = Instant::now();
        let accepted = self.accepted()?;
        loop {
            let taken = self.taken()?.wrapping_sub(accepted);
            let held = self.offset.wrapping_sub(taken) as i64;
            if held < 0 {
                // It still held another wire's frames when this one began.
                self.offset = taken;
            }
            if held.max(0) as u64 + burst <= RING_ROOM {
                return Ok(());
            }
            ensure!(
                start.elapsed() < PATIENCE,
                "the receiver takes no frames: has its device a NAPI, and is that running?"
            );
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}
