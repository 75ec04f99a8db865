// SPDX-License-Identifier: MIT OR Apache-2.0
//! The client of a closed loop: each flow has one request under way.
//!
//! An XDP program at the tester's end turns each reply into the next request and records latencies
//! (bpf/lab_client.h). It costs little, so the server's side is what is measured. User space sends
//! the first requests and repeats lost ones.

use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use etherparse::PacketBuilder;
use hdrhistogram::Histogram;
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use nix::time::{ClockId, clock_gettime};

use super::frame::{Frames, UdpFlows};
use super::link::Link;
use super::netns::Netns;
use super::{programs, xdp};
use crate::lab_skel::LabSkel;
use crate::lab_skel::types::{client_flow, client_step};

/// A request without a reply for this time is lost and sent again.
const RETRANSMIT_TIMEOUT: Duration = Duration::from_millis(500);

/// Longest sleep of a client with a pace.
const TICK: Duration = Duration::from_micros(20);

/// Interval of the search for lost requests.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// First requests sent at once: a quarter of a veth ring.
const BURST: usize = 64;

/// Limit on waiting for the replies to one burst of first requests.
const START_TIMEOUT: Duration = Duration::from_millis(250);

/// linux/in.h
const IPPROTO_TCP: u8 = 6;
const IPPROTO_UDP: u8 = 17;

/// Transport of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carrier {
    Udp,
    /// A segment on a persistent connection.
    Tcp,
    /// A new connection per request.
    Connection,
}

/// The client's program, and the state to send requests.
pub struct Client {
    skel: LabSkel<'static>,
    _link: OwnedFd,
    netns: Netns,
    socket: OwnedFd,
    ifindex: u32,
    flows: UdpFlows,
    carrier: Carrier,
    request_len: usize,
    port_bits: u32,
    lost: u64,
    pace: Option<Pace>,
}

/// Requests at a rate.
struct Pace {
    per_second: f64,
    since: Instant,
    /// Requests since then.
    asked: u64,
    /// The flow whose turn it is.
    next: u32,
}

/// Results of a measurement.
#[derive(Clone, Debug)]
pub struct Replies {
    /// Length of the measurement.
    pub seconds: f64,
    /// Time from each request to its reply, ns.
    pub latency: Histogram<u64>,
    /// Replies that took longer than 69 s, the histogram's range.
    pub clipped: u64,
    /// Requests sent again.
    pub lost: u64,
}

/// Results since the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    pub replies: u64,
    /// Requests sent again.
    pub lost: u64,
    /// Requests without a reply.
    pub unanswered: u64,
}

/// The program's counters at one time.
struct Counters {
    at: Instant,
    buckets: Vec<u64>,
    clipped: u64,
    lost: u64,
}

impl Client {
    /// Attaches the program and sends nothing yet. The server's sockets must exist and be connected
    /// to these flows. Requests and replies have `request_len` bytes.
    ///
    /// # Errors
    /// More flows than the program supports, or flows not over IPv4.
    pub fn new(link: &Link, frames: &Frames, request_len: usize) -> Result<Self> {
        let (flows, carrier, seq, ack) = match frames {
            Frames::Udp(flows) => (flows, Carrier::Udp, 0, 0),
            Frames::Tcp(tcp) => (&tcp.flows, Carrier::Tcp, tcp.first_seq, tcp.ack),
            _ => anyhow::bail!("requests are plain UDP or TCP"),
        };
        let mut client = Self::attach(link, flows, carrier, request_len)?;
        let bss = client.skel.maps.bss_data.as_mut().context("no .bss")?;
        for state in &mut bss.client_flows {
            (state.seq, state.ack) = (seq, ack);
        }
        Ok(client)
    }

    /// Like [`Self::new`], with a TCP connection for each request of one byte. A server listens at
    /// the flows' destination and closes after the client. Each flow uses a port range of its own,
    /// one port after the other.
    ///
    /// # Errors
    /// As [`Self::new`], and when there are more flows than ports.
    pub fn connecting(link: &Link, flows: &UdpFlows) -> Result<Self> {
        Self::attach(link, flows, Carrier::Connection, 1)
    }

    fn attach(link: &Link, flows: &UdpFlows, carrier: Carrier, request_len: usize) -> Result<Self> {
        let IpAddr::V4(saddr) = flows.saddr else {
            anyhow::bail!("requests go over IPv4");
        };
        let port_bits = match carrier {
            Carrier::Connection => port_bits(flows)?,
            Carrier::Udp | Carrier::Tcp => 0,
        };
        let skel = programs::load(|open| {
            match carrier {
                Carrier::Connection => open.progs.client_connect.set_autoload(true),
                Carrier::Udp | Carrier::Tcp => open.progs.client.set_autoload(true),
            }
            let layout = open.maps.rodata_data.as_mut().context("no .rodata")?;
            let layout = &mut layout.client_layout;
            layout.saddr = saddr.to_bits();
            layout.saddr_mask = flows.nr_saddrs - 1;
            layout.saddr_shift = flows.nr_saddrs.trailing_zeros();
            layout.port_bits = port_bits;
            layout.nr_flows = flows.nr_flows;
            layout.sport = flows.sport;
            layout.dport = flows.dport;
            layout.proto = match carrier {
                Carrier::Udp => IPPROTO_UDP,
                Carrier::Tcp | Carrier::Connection => IPPROTO_TCP,
            };
            Ok(())
        })?;
        let states = &skel.maps.bss_data.as_ref().context("no .bss")?.client_flows;
        ensure!(
            flows.nr_flows as usize <= states.len(),
            "a client has at most {} flows, not {}",
            states.len(),
            flows.nr_flows
        );
        let program = match carrier {
            Carrier::Connection => skel.progs.client_connect.as_fd(),
            Carrier::Udp | Carrier::Tcp => skel.progs.client.as_fd(),
        };
        let attached = xdp::attach(&link.tester, program)?;
        let netns = link.tester.netns.clone();
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket = netns
            .run(|| Ok(socket(AddressFamily::Packet, SockType::Raw, flags, None)?))
            .context("no packet socket: CAP_NET_RAW is needed")?;
        Ok(Self {
            skel,
            _link: attached,
            netns,
            socket,
            ifindex: link.tester.ifindex,
            flows: flows.clone(),
            carrier,
            request_len,
            port_bits,
            lost: 0,
            pace: None,
        })
    }

    /// Asks at a rate, instead of after each reply: user space sends the requests, each over the next flow
    /// that has none under way. Where there is none, it waits for one, and makes up for it later.
    ///
    /// # Errors
    /// When the program's memory is gone.
    pub fn paced(mut self, per_second: f64) -> Result<Self> {
        self.answer_no_more()?;
        self.pace = Some(Pace {
            per_second,
            since: Instant::now(),
            asked: 0,
            next: 0,
        });
        Ok(self)
    }

    /// Sends the first request of every flow in bursts, each after the replies to the burst before:
    /// a server that starts slowly would overflow its ring.
    ///
    /// # Errors
    /// When a request can't be sent.
    pub fn start(&mut self) -> Result<()> {
        let all: Vec<u32> = (0..self.flows.nr_flows).collect();
        for burst in all.chunks(BURST) {
            let sent: Vec<u64> = burst
                .iter()
                .map(|&flow| self.request(flow))
                .collect::<Result<_>>()?;
            let since = Instant::now();
            while since.elapsed() < START_TIMEOUT {
                sleep(Duration::from_millis(1));
                // The program answers each reply with the next request.
                let mut sent = burst.iter().zip(&sent);
                if sent.all(|(&flow, &at)| self.state(flow).is_ok_and(|now| now.sent_ns != at)) {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Runs the loop for `duration`.
    ///
    /// # Errors
    /// When a request can't be sent again.
    pub fn run(&mut self, duration: Duration) -> Result<Replies> {
        let before = self.counters()?;
        let mut checked = Instant::now();
        while before.at.elapsed() < duration {
            let interval = match self.pace {
                Some(_) => TICK,
                None => CHECK_INTERVAL,
            };
            sleep(interval.min(duration.saturating_sub(before.at.elapsed())));
            self.catch_up()?;
            if checked.elapsed() >= CHECK_INTERVAL {
                checked = Instant::now();
                self.resend()?;
            }
        }
        Replies::between(&before, &self.counters()?)
    }

    /// Sends what is due by the pace, if there is one.
    fn catch_up(&mut self) -> Result<()> {
        let Some(mut pace) = self.pace.take() else {
            return Ok(());
        };
        let due = (pace.since.elapsed().as_secs_f64() * pace.per_second) as u64;
        for _ in 0..self.flows.nr_flows {
            if pace.asked >= due {
                break;
            }
            if self.state(pace.next)?.sent_ns == 0 {
                self.request(pace.next)?;
                pace.asked += 1;
            }
            pace.next = (pace.next + 1) % self.flows.nr_flows;
        }
        self.pace = Some(pace);
        Ok(())
    }

    /// From now on replies are counted, but not answered.
    fn answer_no_more(&mut self) -> Result<()> {
        let bss = self.skel.maps.bss_data.as_mut().context("no .bss")?;
        // SAFETY: the program reads this byte while we write it.
        unsafe {
            (&raw mut bss.client_stopping)
                .cast::<u8>()
                .write_volatile(1)
        };
        Ok(())
    }

    /// Stops sending and waits for the last replies.
    ///
    /// # Errors
    /// When the program's memory is gone.
    pub fn stop(mut self) -> Result<Ended> {
        self.answer_no_more()?;
        let deadline = Instant::now() + RETRANSMIT_TIMEOUT;
        loop {
            let under_way = |flow| self.state(flow).is_ok_and(|state| state.sent_ns != 0);
            let unanswered = (0..self.flows.nr_flows).filter(|&f| under_way(f)).count();
            if unanswered == 0 || Instant::now() > deadline {
                return Ok(Ended {
                    replies: self.counters()?.buckets.iter().sum(),
                    lost: self.lost,
                    unanswered: unanswered as u64,
                });
            }
            sleep(Duration::from_millis(1));
        }
    }

    fn state(&self, flow: u32) -> Result<client_flow> {
        let bss = self.skel.maps.bss_data.as_ref().context("no .bss")?;
        // SAFETY: the program writes these words concurrently; each load is atomic.
        Ok(unsafe { (&raw const bss.client_flows[flow as usize]).read_volatile() })
    }

    fn counters(&self) -> Result<Counters> {
        let bss = self.skel.maps.bss_data.as_ref().context("no .bss")?;
        let at = Instant::now();
        // SAFETY: as in state().
        let read = |word: &u64| unsafe { (&raw const *word).read_volatile() };
        Ok(Counters {
            at,
            buckets: bss.client_buckets.iter().map(read).collect(),
            clipped: read(&bss.client_nr_clipped),
            lost: self.lost,
        })
    }

    /// Repeats requests that were lost at a full ring or a full socket.
    fn resend(&mut self) -> Result<()> {
        // The clock of bpf_ktime_get_ns().
        let now = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?);
        for flow in 0..self.flows.nr_flows {
            let sent = Duration::from_nanos(self.state(flow)?.sent_ns);
            if sent.is_zero() && self.pace.is_some() {
                continue;
            }
            if now.saturating_sub(sent) > RETRANSMIT_TIMEOUT {
                self.lost += 1;
                self.request(flow)?;
            }
        }
        Ok(())
    }

    /// Sends a flow's request, or repeats it; returns the recorded time of sending, ns.
    fn request(&mut self, flow: u32) -> Result<u64> {
        let now = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?);
        let bss = self.skel.maps.bss_data.as_mut().context("no .bss")?;
        let state = &raw mut bss.client_flows[flow as usize];
        let sent_ns = now.as_nanos() as u64;
        // SAFETY: the program writes these words only when it receives a frame of the flow.
        unsafe {
            if self.carrier == Carrier::Connection {
                // Use another port: the server may still know the last one.
                let mut next = state.read_volatile();
                next.port = (next.port + 1) % (1 << self.port_bits);
                next.step = client_step::CLIENT_SYN_SENT;
                next.seq = sent_ns as u32;
                next.begun_ns = sent_ns;
                state.write_volatile(next);
            }
            (&raw mut (*state).sent_ns).write_volatile(sent_ns);
        }
        let frame = self.frame(flow)?;
        // SAFETY: an address of zeros is valid; the kernel reads both during the call.
        let ret = unsafe {
            let mut to: libc::sockaddr_ll = std::mem::zeroed();
            to.sll_family = libc::AF_PACKET as u16;
            to.sll_ifindex = self.ifindex as i32;
            libc::sendto(
                self.socket.as_raw_fd(),
                frame.as_ptr().cast(),
                frame.len(),
                0,
                (&raw const to).cast(),
                size_of_val(&to) as libc::socklen_t,
            )
        };
        match Errno::result(ret) {
            // A full ring drops the request, as a wire would.
            Ok(_) | Err(Errno::ENOBUFS) => Ok(sent_ns),
            Err(error) => Err(error).context(format!("a request from {}", self.netns.name())),
        }
    }

    fn frame(&self, flow: u32) -> Result<Vec<u8>> {
        let (source, flows) = (self.flows.source(flow), &self.flows);
        let (IpAddr::V4(saddr), IpAddr::V4(daddr)) = (source.ip(), flows.daddr) else {
            anyhow::bail!("requests go over IPv4");
        };
        // From the client's own addresses, so that replies come to its device.
        let packet = PacketBuilder::ethernet2(flows.smac, flows.dmac);
        let packet = packet.ipv4(saddr.octets(), daddr.octets(), 64);
        let payload = vec![0; self.request_len];
        let mut frame = Vec::new();
        match self.carrier {
            Carrier::Udp => {
                let packet = packet.udp(source.port(), flows.dport);
                packet.write(&mut frame, &payload)?;
            }
            Carrier::Tcp => {
                let state = self.state(flow)?;
                let packet = packet.tcp(source.port(), flows.dport, state.seq, 1 << 10);
                packet.ack(state.ack).psh().write(&mut frame, &payload)?;
            }
            Carrier::Connection => {
                let state = self.state(flow)?;
                let range = flow / flows.nr_saddrs;
                let port = u32::from(flows.sport) + (range << self.port_bits) + state.port;
                let packet = packet.tcp(port as u16, flows.dport, state.seq, u16::MAX);
                packet.syn().write(&mut frame, &[])?;
            }
        }
        Ok(frame)
    }
}

/// Logarithm of the size of a flow's port range, a power of two.
fn port_bits(flows: &UdpFlows) -> Result<u32> {
    let ranges = flows.nr_flows.div_ceil(flows.nr_saddrs).max(1);
    let each = ((1 << 16) - u32::from(flows.sport)) / ranges;
    each.checked_ilog2()
        .with_context(|| format!("{} flows don't have a port each", flows.nr_flows))
}

impl Replies {
    fn between(before: &Counters, after: &Counters) -> Result<Self> {
        let mut latency = Histogram::new(3)?;
        for (index, (after, before)) in after.buckets.iter().zip(&before.buckets).enumerate() {
            latency.record_n(middle(index as u64), after - before)?;
        }
        Ok(Self {
            seconds: (after.at - before.at).as_secs_f64(),
            latency,
            clipped: after.clipped - before.clipped,
            lost: after.lost - before.lost,
        })
    }
}

/// Middle of a bucket, ns: the inverse of client_bucket().
fn middle(bucket: u64) -> u64 {
    /// CLIENT_BUCKET_BITS
    const BITS: u64 = 6;
    let shift = (bucket >> BITS).saturating_sub(1);
    let low = bucket - (shift << BITS);
    (low << shift) + (1 << shift) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_a_bucket_is_within_it() {
        // As in client_bucket().
        let bucket = |ns: u64| {
            let exponent = u64::from(ns.max(1).ilog2()).saturating_sub(6);
            (exponent << 6) + (ns >> exponent)
        };
        for ns in (0..36).flat_map(|bit| [1u64 << bit, (1 << bit) + 1, (1 << bit) * 3 / 2]) {
            let middle = middle(bucket(ns));
            assert_eq!(bucket(middle), bucket(ns), "{ns}");
            assert!(
                middle.abs_diff(ns) as f64 <= ns as f64 / 64.0,
                "{ns} {middle}"
            );
        }
    }
}
