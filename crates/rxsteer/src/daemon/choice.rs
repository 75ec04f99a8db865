// SPDX-License-Identifier: MIT OR Apache-2.0
//! The mode of each device under `--mode auto`, where both are possible: native mode moves frames,
//! and is the faster one for small packets; skb mode moves what GRO has merged, and is the faster
//! one for TCP in bulk (docs/policy.md). A start anew changes the mode.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tracing::info;

use super::chosen::Chosen;
use super::options::{Mode, Options, RpsCpus};
use super::plan::{Named, QueueMask, Steered};
use crate::datapath::Datapath;
use crate::datapath::load::WHOLE;
use crate::host::device::{Received, RxMode};
use crate::host::tc;

/// Rate in frames per second, and share of a CPU's time that polls take, below which the mode does
/// not matter.
const BUSY: f64 = 20_000.0;
const POLLS: f64 = 0.125;

/// Mean size of a frame in bytes from which on it is bulk: full segments and some without data.
const BULK: f64 = 1000.0;

/// Mean size in bytes below which it is not. In between the mode stays.
const SMALL: f64 = 500.0;

/// Share of TCP among the packets of all flows; the same for it.
pub(crate) const MOSTLY: f64 = 0.75;
const HARDLY: f64 = 0.5;

/// Looks in a row at which the traffic has to ask for another mode. Those between them that find
/// little traffic do not count.
const LASTING: u32 = 5;

/// Time over which rates are measured, at least.
const MEASURED: Duration = Duration::from_millis(900);

/// Traffic of a device since the last look.
#[derive(Clone, Copy, Debug)]
struct Traffic {
    /// Frames per second.
    rate: f64,
    /// Bytes per frame.
    size: f64,
    /// Of all packets of flows, from 0 to 1.
    tcp: f64,
}

impl Traffic {
    /// The mode that this traffic asks for; `None`: the present one will do.
    fn asks_for(&self) -> Option<RxMode> {
        if self.size >= BULK && self.tcp >= MOSTLY {
            Some(RxMode::Skb)
        } else if self.size < SMALL || self.tcp < HARDLY {
            Some(RxMode::Native)
        } else {
            None
        }
    }
}

/// The flow of a slot.
struct Flow {
    hash: u32,
    packets: u32,
}

/// A device at the last look.
struct Seen {
    received: Received,
    at: Instant,
    /// At the last look that found the device busy.
    flows: BTreeMap<u32, Flow>,
    /// Looks in a row at which its traffic has asked for the other mode.
    asks: u32,
}

/// See the module's documentation.
pub(super) struct Choice {
    /// Under `--mode auto`.
    is_free: bool,
    /// By name.
    pub(super) chosen: BTreeMap<String, Chosen>,
    /// By interface index.
    seen: BTreeMap<u32, Seen>,
}

impl Choice {
    pub(super) fn new(options: &Options) -> Self {
        Self {
            is_free: options.mode == Mode::Auto && !options.dry_run,
            chosen: options.chosen.clone(),
            seen: BTreeMap::new(),
        }
    }

    /// Looks at the traffic of the devices; returns whether one is to have another mode, by a start
    /// anew. To be called once a second.
    pub(super) fn look(
        &mut self,
        datapath: &Datapath,
        devices: &[Steered],
        masks: &[QueueMask],
    ) -> bool {
        let now = Instant::now();
        let mut changed = false;
        let devices = if self.is_free { devices } else { &[] };
        for steered in devices {
            let (device, mode) = (&steered.device, steered.mode);
            // Elsewhere there is one possible mode.
            let chosen = self.chosen.get(&device.name).copied();
            let both = mode == RxMode::Native || chosen.is_some_and(|c| c.mode == mode);
            if !both || steered.named == Named::Pattern {
                continue;
            }
            let Some(traffic) = self.traffic(datapath, steered, now) else {
                continue;
            };
            let seen = self.seen.get_mut(&device.ifindex).expect("just looked at");
            let asked = traffic.asks_for().filter(|asked| *asked != mode);
            seen.asks = asked.map_or(0, |_| seen.asks + 1);
            let lasting = seen.asks >= LASTING;
            let soon = chosen.is_some_and(|chosen| now < chosen.after);
            let Some(asked) = asked.filter(|_| lasting && !soon) else {
                continue;
            };
            if wish_of(steered, masks).is_none() || !is_possible(steered, asked) {
                continue;
            }
            let name = &device.name;
            info!(
                device = %name,
                "{name} receives {:.0} frames/s of {:.0} bytes, {:.0} % of its packets TCP: steered in \
                 {asked} mode from now on",
                traffic.rate,
                traffic.size,
                100.0 * traffic.tcp
            );
            let next = Chosen::next(asked, chosen, now);
            self.chosen.insert(name.clone(), next);
            changed = true;
        }
        changed
    }

    /// The device's traffic since the last look; `None` if none can be told yet.
    fn traffic(&mut self, datapath: &Datapath, steered: &Steered, now: Instant) -> Option<Traffic> {
        let received = steered.device.received().ok()?;
        let seen = self.seen.entry(steered.device.ifindex).or_insert(Seen {
            received,
            at: now,
            flows: BTreeMap::new(),
            asks: 0,
        });
        let seconds = (now - seen.at).as_secs_f64();
        if seconds < MEASURED.as_secs_f64() {
            return None;
        }
        let frames = received.frames.wrapping_sub(seen.received.frames) as f64;
        let bytes = received.bytes.wrapping_sub(seen.received.bytes) as f64;
        (seen.received, seen.at) = (received, now);
        let size = bytes / frames.max(1.0);
        let busy = frames >= BUSY * seconds && is_busy(datapath, steered);
        if !busy {
            return None;
        }
        // Reading the flows of many queues takes some ms: natively, small frames ask for nothing.
        let flows = match steered.mode == RxMode::Skb || size >= BULK {
            true => packets(datapath, steered),
            false => BTreeMap::new(),
        };
        let before = std::mem::replace(&mut seen.flows, flows);
        if before.is_empty() || seen.flows.is_empty() {
            seen.asks = 0;
            return None;
        }
        Some(Traffic {
            rate: frames / seconds,
            size,
            tcp: tcp_share(datapath, steered, &before, &seen.flows)?,
        })
    }
}

/// Whether the mode for this device is another one after a start anew.
pub(super) fn changes(steered: &Steered, chosen: &BTreeMap<String, Chosen>) -> bool {
    let chosen = chosen.get(&steered.device.name);
    chosen.is_some_and(|chosen| chosen.mode != steered.mode)
}

/// Whether the device can be steered in that mode, and gains by it.
fn is_possible(steered: &Steered, mode: RxMode) -> bool {
    let merges = || steered.device.merges().unwrap_or(false);
    let gains = mode != RxMode::Skb || (tc::is_possible() && merges());
    gains && steered.unobstructed_in(mode).is_ok()
}

/// The CPUs of all the device's queues; `None` if they differ: the queues of the other mode are
/// others.
pub(super) fn wish_of(steered: &Steered, masks: &[QueueMask]) -> Option<RpsCpus> {
    let mut wishes = steered.queues().map(|queue| masks[queue as usize].wish());
    let first = wishes.next()?;
    wishes.all(|wish| wish == first).then_some(first)
}

/// Whether a CPU that polls one of the device's queues needs [`POLLS`] of its time for it, as far as
/// polls are timed: by policies that depend on the load, and for the flow limit.
fn is_busy(datapath: &Datapath, steered: &Steered) -> bool {
    let busy = |queue| {
        let load = datapath.rx_queue(queue).load;
        load.window == 0 || f64::from(load.poll_share) >= POLLS * f64::from(WHOLE)
    };
    steered.queues().any(busy)
}

/// The packets of each of the device's flows, by slot.
fn packets(datapath: &Datapath, steered: &Steered) -> BTreeMap<u32, Flow> {
    let tables = datapath.tables();
    let nr_tables = match steered.mode {
        RxMode::Skb => 1,
        _ => steered.device.rx_queues,
    };
    let first = steered.first_queue * tables.flow_cnt();
    let slots = first..first + nr_tables * tables.flow_cnt();
    let used = tables.dev_flows().range(slots).filter(|(_, f)| f.epoch > 0);
    used.map(|(slot, flow)| {
        let (hash, packets) = (flow.hash, flow.nr_packets);
        (slot, Flow { hash, packets })
    })
    .collect()
}

/// Share of TCP among the packets of the device's flows since `before`; `None` without any.
fn tcp_share(
    datapath: &Datapath,
    steered: &Steered,
    before: &BTreeMap<u32, Flow>,
    now: &BTreeMap<u32, Flow>,
) -> Option<f64> {
    let (mut all, mut tcp) = (0.0, 0.0);
    for (&slot, flow) in now {
        let same = before.get(&slot).filter(|known| known.hash == flow.hash);
        let since = same.map_or(0, |known| known.packets);
        let name = datapath.tables().flow_name(slot);
        if name.ifindex != steered.device.ifindex {
            continue;
        }
        let packets = f64::from(flow.packets.wrapping_sub(since));
        all += packets;
        if name.key.proto == libc::IPPROTO_TCP as u32 {
            tcp += packets;
        }
    }
    (all > 0.0).then(|| tcp / all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BULK_TCP: Traffic = Traffic {
        rate: 100_000.0,
        size: 1448.0,
        tcp: 1.0,
    };

    #[test]
    fn bulk_tcp_alone_asks_for_skb_mode() {
        assert_eq!(BULK_TCP.asks_for(), Some(RxMode::Skb));
        let quic = Traffic {
            tcp: 0.1,
            ..BULK_TCP
        };
        assert_eq!(quic.asks_for(), Some(RxMode::Native));
        let requests = Traffic {
            size: 80.0,
            ..BULK_TCP
        };
        assert_eq!(requests.asks_for(), Some(RxMode::Native));
        let mixed = Traffic {
            size: 700.0,
            ..BULK_TCP
        };
        assert_eq!(mixed.asks_for(), None);
    }
}
