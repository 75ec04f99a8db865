// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer advise --trial`: steers the devices and does not, in turns, and compares what the host
//! delivered.

use std::fmt::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use procfs::net::{snmp, snmp6};
use serde::Serialize;

use super::asked::Asked;
use super::run::Run;
use super::watch::statistic;
use super::words::count;
use crate::api::status::{Queue, Status};
use crate::cli::status::time;
use crate::cli::table::table;
use crate::host::cpu_times::{CpuTimes, busy_shares, cpu_times};
use crate::host::device::Device;
use crate::host::softnet::{self, Softnet};

/// Turns, of which each second one is steered. The first and the last one are not.
const TURNS: u32 = 9;

/// This part of a turn passes before it counts: senders adapt to the change.
const SETTLE: u32 = 4;

/// A median ratio below this, or above its inverse, is a difference, if all ratios agree.
const DIFFERS: f64 = 1.05;

/// What the host did in a turn, per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Turn {
    /// Packets that the devices received.
    pub packets: f64,
    /// Bytes that reached sockets, or were forwarded: those received, without the share of lost packets.
    pub bytes: f64,
    /// Packets that rxsteer or the kernel dropped before the network stack had them.
    pub dropped: f64,
    /// Datagrams that UDP sockets of this network namespace had no room for.
    pub socket_full: f64,
    /// CPUs that were busy: the sum of their shares.
    pub busy_cpus: f64,
    /// 99 % of the packets that moved waited less than this, in us; null if none moved.
    pub waits_below_us: Option<u64>,
}

/// The answer of `rxsteer advise --trial`.
#[derive(Clone, Debug, Serialize)]
pub struct Trial {
    /// Length of a turn, s.
    pub turn_seconds: f64,
    /// Medians of the turns with steering.
    pub steered: Turn,
    /// Medians of those without.
    pub unsteered: Turn,
    /// Bytes of each steered turn over the mean of the turns before and after it, sorted.
    pub ratios: Vec<f64>,
    /// Their median.
    pub ratio: f64,
}

/// Counters since boot.
struct Reading {
    at: Instant,
    packets: u64,
    bytes: u64,
    socket_full: u64,
    times: Vec<CpuTimes>,
    softnet: Vec<Softnet>,
    status: Option<Status>,
}

/// Steers these devices, and does not, in turns.
///
/// # Errors
/// When `rxsteer run` would fail; when counters can't be read; without traffic;
/// [`Stopped`](super::asked::Stopped).
pub(super) fn trial(devices: &[Device], asked: &Asked<'_>) -> Result<Trial> {
    let names: Vec<String> = devices.iter().map(|device| device.name.clone()).collect();
    let time = asked.time / TURNS;
    let mut turns = Vec::new();
    for turn in 0..TURNS {
        let mut run = match turn % 2 {
            1 => Some(Run::start(&names, asked, &[], false)?),
            _ => None,
        };
        (asked.pause)(time / SETTLE)?;
        let before = Reading::new(devices, run.as_ref())?;
        (asked.pause)(time - time / SETTLE)?;
        turns.push(Reading::new(devices, run.as_ref())?.since(&before));
        if let Some(run) = &mut run {
            run.end()?;
        }
    }
    Trial::of(&turns, time)
}

impl Reading {
    fn new(devices: &[Device], run: Option<&Run>) -> Result<Self> {
        let [mut packets, mut bytes] = [0, 0];
        for device in devices {
            packets += statistic(device, "rx_packets")?;
            bytes += statistic(device, "rx_bytes")?;
        }
        // Without IPv6 there is no file.
        let v6 = snmp6().map_or(0, |v6| v6.udp_rcvbuf_errors);
        let v4 = snmp().context("UDP's counters")?;
        Ok(Self {
            at: Instant::now(),
            packets,
            bytes,
            socket_full: v4.udp_rcvbuf_errors + v6,
            times: cpu_times()?,
            softnet: softnet::read()?,
            status: run.map(Run::status).transpose()?,
        })
    }

    fn queues(&self) -> impl Iterator<Item = &Queue> {
        let devices = self.status.iter().flat_map(|status| &status.devices);
        devices.flat_map(|device| &device.queues)
    }

    fn since(&self, before: &Self) -> Turn {
        let seconds = self.at.duration_since(before.at).as_secs_f64();
        let grown = |of: &dyn Fn(&Self) -> u64| of(self).saturating_sub(of(before)) as f64;
        let ours = |r: &Self| r.queues().map(|q| q.dropped() + q.lost()).sum::<u64>();
        let kernels = softnet::since(&before.softnet, &self.softnet);
        let kernels = kernels.values().map(|cpu| cpu.dropped).sum::<u64>();
        let dropped = grown(&ours) + kernels as f64;
        let packets = grown(&|r| r.packets);
        let bytes = grown(&|r| r.bytes);
        let socket_full = grown(&|r| r.socket_full);
        let lost = ((dropped + socket_full) / packets.max(1.0)).min(1.0);
        let waits = self.queues().flat_map(|q| &q.backlogs);
        Turn {
            packets: packets / seconds,
            bytes: bytes * (1.0 - lost) / seconds,
            dropped: dropped / seconds,
            socket_full: socket_full / seconds,
            busy_cpus: busy_shares(&before.times, &self.times, seconds)
                .values()
                .sum(),
            waits_below_us: waits.filter_map(|b| b.waits.p99_below_us).max(),
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

impl Trial {
    /// Of turns that are steered each second time.
    fn of(turns: &[Turn], time: Duration) -> Result<Self> {
        let medians = |first: usize| {
            let turns = || turns.iter().skip(first).step_by(2);
            let of = |value: fn(&Turn) -> f64| median(turns().map(value).collect());
            Turn {
                packets: of(|t| t.packets),
                bytes: of(|t| t.bytes),
                dropped: of(|t| t.dropped),
                socket_full: of(|t| t.socket_full),
                busy_cpus: of(|t| t.busy_cpus),
                waits_below_us: turns().filter_map(|t| t.waits_below_us).max(),
            }
        };
        let ratio = |three: &[Turn]| three[1].bytes / ((three[0].bytes + three[2].bytes) / 2.0);
        let mut ratios: Vec<f64> = turns.windows(3).step_by(2).map(ratio).collect();
        if ratios.iter().any(|ratio| !ratio.is_finite()) {
            bail!("nothing was received: try again while the host has its usual load");
        }
        ratios.sort_by(f64::total_cmp);
        Ok(Self {
            turn_seconds: time.as_secs_f64(),
            steered: medians(1),
            unsteered: medians(0),
            ratio: median(ratios.clone()),
            ratios,
        })
    }

    /// In words; ends with a newline.
    pub(super) fn render(&self) -> String {
        let mut table = table([
            "",
            "packets/s",
            "delivered, Mbit/s",
            "dropped/s",
            "at full sockets/s",
            "busy CPUs",
            "waits 99 % <",
        ]);
        for (name, turn) in [("not steered", &self.unsteered), ("steered", &self.steered)] {
            table.add_row([
                name.to_owned(),
                count(turn.packets),
                format!("{:.1}", turn.bytes * 8.0 / 1e6),
                count(turn.dropped),
                count(turn.socket_full),
                format!("{:.2}", turn.busy_cpus),
                turn.waits_below_us.map_or_else(|| "-".to_owned(), time),
            ]);
        }
        let [lowest, highest] =
            [self.ratios.first(), self.ratios.last()].map(|r| r.unwrap_or(&1.0));
        let verdict = if self.ratio >= DIFFERS && *lowest > 1.0 {
            "yes: steering helps"
        } else if self.ratio * DIFFERS <= 1.0 && *highest < 1.0 {
            "no: steering harms"
        } else {
            "no: steering makes no clear difference"
        };
        let mut out = format!("{}\n\n", table.trim_fmt());
        let _ = writeln!(
            out,
            "{verdict}. It delivered {:.2} times as much ({lowest:.2} to {highest:.2}; {} turns of {:.1} s \
             with it, {} without).",
            self.ratio,
            TURNS / 2,
            self.turn_seconds,
            TURNS / 2 + 1
        );
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Turns with these bytes per second.
    fn turns(bytes: [u32; TURNS as usize]) -> Vec<Turn> {
        let turn = |bytes| Turn {
            bytes: f64::from(bytes),
            packets: 1.0,
            ..Turn::default()
        };
        bytes.map(turn).to_vec()
    }

    fn words(bytes: [u32; TURNS as usize]) -> String {
        let trial = Trial::of(&turns(bytes), Duration::from_secs(1)).unwrap();
        trial.render().lines().last().unwrap().to_owned()
    }

    #[test]
    fn a_steered_turn_is_compared_with_its_neighbours() {
        // The load grows meanwhile.
        let grows = [10, 22, 12, 26, 14, 30, 16, 34, 18];
        let trial = Trial::of(&turns(grows), Duration::from_secs(1)).unwrap();
        assert_eq!(trial.ratios, [2.0; 4]);
        assert!(words(grows).starts_with("yes: steering helps. It delivered 2.00 times"));
    }

    #[test]
    fn harm_and_doubt_are_told() {
        let harms = words([100, 80, 100, 70, 100, 90, 100, 80, 100]);
        assert_eq!(
            harms,
            "no: steering harms. It delivered 0.80 times as much (0.70 to 0.90; 4 turns of 1.0 s with it, \
             5 without)."
        );
        let differs = words([100, 120, 100, 90, 100, 120, 100, 110, 100]);
        assert!(
            differs.starts_with("no: steering makes no clear difference"),
            "{differs}"
        );
    }

    #[test]
    fn without_traffic_there_is_no_answer() {
        assert!(Trial::of(&turns([0; TURNS as usize]), Duration::from_secs(1)).is_err());
    }
}
