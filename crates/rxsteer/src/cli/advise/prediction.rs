// SPDX-License-Identifier: MIT OR Apache-2.0
//! The gain of steering, predicted from what was seen without it. Plain arithmetic on facts; the
//! manual (docs/manual/advise.md) has the model in words, and its error in measurements.

use serde::Serialize;

use crate::datapath::native;
use crate::host::device::RxMode;
use crate::types::load_unit;

/// Rate below which there is no traffic to judge, packets/s.
pub(super) const LITTLE_TRAFFIC: f64 = 10.0;

/// A polling CPU is saturated if no more of its time than this is left, and polls take [`by_polls`] of
/// it or more: the limits at which the policy `+adapt` lets flows leave (`bpf/core/load.h`).
fn left() -> f64 {
    1.0 - share(native::load_saturated())
}

fn by_polls() -> f64 {
    share(native::load_saturated_by())
}

/// A share of the data path, 0 to 1.
fn share(of_whole: u32) -> f64 {
    f64::from(of_whole) / f64::from(load_unit::LOAD_WHOLE.0)
}

/// A flow with this share of the packets is nearly everything.
const ONE_FLOW: f64 = 0.9;

/// Idle time of all other CPUs together, in CPUs, below which none has time.
const NO_TIME: f64 = 0.1;

/// A gain below this is within the error of the prediction.
const LEAST_GAIN: f64 = 1.1;

/// What a redirect costs. The figures are of `rxlab bench` (docs/bench.md, docs/manual/bench.md).
#[derive(Clone, Copy, Debug, PartialEq)]
struct Hop {
    /// What a redirected packet still costs the polling CPU, s.
    poll: f64,
    /// What a redirected packet costs all CPUs together beyond its cost without a redirect, s.
    more: f64,
}

impl Hop {
    /// Native mode: `forward` on eight CPUs reaches 1.77 M packets/s with one polling CPU, 0.57 us
    /// each; `firewall` on two CPUs takes 4.67 us of CPU time per packet unsteered, and 4.93 us
    /// steered. Softirq mode: 1.49 us on the polling CPU, of which 0.47 us are the program and the way
    /// from tc to the other CPU.
    fn of(mode: RxMode) -> Self {
        match mode {
            RxMode::Native => Self {
                poll: 0.57e-6,
                more: 0.26e-6,
            },
            RxMode::Softirq => Self {
                poll: 1.49e-6,
                more: 0.47e-6,
            },
        }
    }

    /// The cost on the CPU that gets a packet, of a packet that costs `stack` in its poll, s.
    fn target(self, stack: f64) -> f64 {
        /// A target builds the skb at least.
        const LEAST: f64 = 0.1e-6;
        (stack + self.more - self.poll).max(LEAST)
    }
}

/// A CPU that polls queues.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Poller {
    /// CPU number.
    pub cpu: u32,
    /// Packets that it received, per second.
    pub packets_per_second: f64,
    /// Share of its time in polls, 0 to 1.
    pub polls: f64,
    /// Share of its time left, 0 to 1.
    pub idle: f64,
}

impl Poller {
    fn is_saturated(&self) -> bool {
        self.idle <= left() && self.polls >= by_polls()
    }
}

/// A CPU to which packets could be steered.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Helper {
    /// CPU number.
    pub cpu: u32,
    /// Share of its time left, 0 to 1.
    pub idle: f64,
}

/// What was seen without steering.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// CPUs that poll the devices' queues.
    pub pollers: Vec<Poller>,
    /// CPUs to which packets could be steered; saturated polling CPUs among them don't help.
    pub helpers: Vec<Helper>,
    /// Share of the busiest flow, 0 to 1; `None` if flows were not counted.
    pub busiest_flow: Option<f64>,
    /// Share of the flows that GRO merges, which stay where they are, 0 to 1.
    pub merged: f64,
    /// The mode in which the devices would be steered.
    pub mode: RxMode,
    /// Kernel RPS is on for one of the devices.
    pub kernel_rps: bool,
}

/// What limits the rate with steering.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// The polling CPU, which still receives and redirects each packet.
    Poller,
    /// The time of the other CPUs.
    Helpers,
    /// The CPU that has the busiest flow.
    Flow,
    /// The polling CPU, where the flows that GRO merges stay.
    Merged,
}

/// The rate with steering.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Gain {
    /// Packets per second of all polling CPUs, if so many come.
    pub packets_per_second: f64,
    /// That rate over the rate without steering.
    pub ratio: f64,
    /// What limits it.
    pub limit: Limit,
}

/// The answer to "would steering help?".
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "reason", rename_all = "kebab-case")]
pub enum Verdict {
    /// Yes.
    Gain(Gain),
    /// Hardly any packet came.
    NoTraffic,
    /// The busiest polling CPU has time left.
    Room(Poller),
    /// The busiest polling CPU has no time left, and receiving is not why.
    NotReceiving(Poller),
    /// No other CPU has time.
    NoTime {
        /// Number of other CPUs.
        cpus: usize,
        /// Their mean idle share.
        idle: f64,
    },
    /// Kernel RPS moves packets already, and a CPU has no time left: what the packets would cost
    /// without it is not known.
    KernelRps {
        /// The CPU with the least time left.
        cpu: u32,
        /// Its idle share.
        idle: f64,
    },
    /// One flow has nearly everything.
    OneFlow {
        /// Its share of the packets.
        share: f64,
    },
    /// A redirect alone costs the polling CPU as much as a packet.
    DearHop {
        /// Cost of a packet now, s.
        packet: f64,
        /// Cost of a redirected packet on the polling CPU, s.
        hop: f64,
    },
    /// The gain is within the error of the prediction.
    Little(Gain),
}

impl Verdict {
    /// Whether steering would help.
    pub fn is_yes(&self) -> bool {
        matches!(self, Self::Gain(_))
    }

    /// The predicted rate with steering over that without: 1 where steering gains nothing.
    pub fn ratio(&self) -> f64 {
        match self {
            Self::Gain(gain) | Self::Little(gain) => gain.ratio,
            _ => 1.0,
        }
    }
}

impl Facts {
    /// The verdict. The reasons are tried in this order: traffic, the polling CPU, the other CPUs,
    /// the flows, the cost of a hop, the gain.
    pub fn verdict(&self) -> Verdict {
        let rate: f64 = self.pollers.iter().map(|p| p.packets_per_second).sum();
        let least_idle = |a: &&Poller, b: &&Poller| a.idle.total_cmp(&b.idle);
        let receiving = self.pollers.iter().filter(|p| p.packets_per_second > 0.0);
        let Some(busiest) = receiving.min_by(least_idle) else {
            return Verdict::NoTraffic;
        };
        if rate < LITTLE_TRAFFIC {
            return Verdict::NoTraffic;
        }
        if self.kernel_rps {
            let helpers = self.helpers.iter().map(|helper| (helper.cpu, helper.idle));
            let cpus = helpers.chain([(busiest.cpu, busiest.idle)]);
            return match cpus.min_by(|a, b| a.1.total_cmp(&b.1)) {
                Some((cpu, idle)) if idle < left() => Verdict::KernelRps { cpu, idle },
                _ => Verdict::Room(*busiest),
            };
        }
        let is_saturated = |p: &&Poller| p.is_saturated();
        let saturated: Vec<&Poller> = self.pollers.iter().filter(is_saturated).collect();
        if saturated.is_empty() {
            return match busiest.idle >= left() {
                true => Verdict::Room(*busiest),
                false => Verdict::NotReceiving(*busiest),
            };
        }
        let is_saturated = |helper: &&Helper| saturated.iter().any(|p| p.cpu == helper.cpu);
        let helpers = self.helpers.iter().filter(|h| !is_saturated(h));
        let helpers: Vec<&Helper> = helpers.collect();
        let idle: f64 = helpers.iter().map(|helper| helper.idle).sum();
        if idle < NO_TIME {
            let cpus = helpers.len();
            let idle = idle / cpus.max(1) as f64;
            return Verdict::NoTime { cpus, idle };
        }
        let share = self.busiest_flow.unwrap_or(0.0);
        if share >= ONE_FLOW {
            return Verdict::OneFlow { share };
        }
        let packet = |p: &&Poller| p.polls / p.packets_per_second;
        let packet = saturated.iter().map(packet).fold(0.0, f64::max);
        let hop = Hop::of(self.mode).poll;
        if hop >= packet {
            return Verdict::DearHop { packet, hop };
        }
        let gain = self.gain(&saturated, &helpers, rate);
        match gain.ratio >= LEAST_GAIN {
            true => Verdict::Gain(gain),
            false => Verdict::Little(gain),
        }
    }

    /// The rate of all polling CPUs when flows leave the saturated ones, which share the others'
    /// time equally.
    fn gain(&self, saturated: &[&Poller], helpers: &[&Helper], rate: f64) -> Gain {
        let part = 1.0 / saturated.len() as f64;
        // What the other CPUs do now is taken for the packets' (their applications), and grows with
        // them: its cost per packet.
        let busy: f64 = helpers.iter().map(|helper| 1.0 - helper.idle).sum();
        let application = busy / rate;
        let time = helpers.len() as f64 * part;
        let gains = saturated.iter().map(|poller| {
            let stack = poller.polls / poller.packets_per_second;
            let (reached, limit) = best(
                poller.polls + poller.idle,
                time,
                [stack, Hop::of(self.mode).poll],
                [application, Hop::of(self.mode).target(stack) + application],
                self.merged,
            );
            let flow = self.flow_limit(poller, stack);
            let alone = (poller.polls + poller.idle) / stack;
            match flow < reached {
                true => (poller, flow / alone, Limit::Flow),
                false => (poller, reached / alone, limit),
            }
        });
        let gains: Vec<_> = gains.collect();
        let more = |(poller, ratio, _): &(&&Poller, f64, Limit)| {
            poller.packets_per_second * (ratio.max(1.0) - 1.0)
        };
        let more: f64 = gains.iter().map(more).sum();
        let least = gains.iter().min_by(|a, b| a.1.total_cmp(&b.1));
        Gain {
            packets_per_second: rate + more,
            ratio: (rate + more) / rate,
            limit: least.map_or(Limit::Helpers, |(_, _, limit)| *limit),
        }
    }

    /// The rate at which the busiest flow fills a CPU, which may be the polling one.
    fn flow_limit(&self, poller: &Poller, stack: f64) -> f64 {
        let here = (poller.polls + poller.idle) / stack;
        let there = 1.0 / Hop::of(self.mode).target(stack);
        match self.busiest_flow {
            Some(share) if share > 0.0 => here.max(there) / share,
            _ => f64::INFINITY,
        }
    }
}

/// The highest rate of packets that stay plus packets that leave. Costs are in s, `here` on the
/// polling CPU, which has `here_has` of its time for them, and `there` on the others, which have
/// `there_has`; each is of a packet that stays and of one that leaves. A linear program of two
/// variables: its best is at one of the corners. At least the share `merged` of the packets stays.
fn best(
    here_has: f64,
    there_has: f64,
    here: [f64; 2],
    there: [f64; 2],
    merged: f64,
) -> (f64, Limit) {
    let room = |has: f64, cost: f64| {
        if cost > 0.0 {
            has / cost
        } else {
            f64::INFINITY
        }
    };
    let at_most = |i: usize| room(here_has, here[i]).min(room(there_has, there[i]));
    let corners = [(at_most(0), 0.0), (0.0, at_most(1))];
    let determinant = here[0] * there[1] - here[1] * there[0];
    let crossing = (determinant != 0.0).then(|| {
        (
            (here_has * there[1] - here[1] * there_has) / determinant,
            (here[0] * there_has - here_has * there[0]) / determinant,
        )
    });
    let crossing = crossing.filter(|(stay, leave)| *stay >= 0.0 && *leave >= 0.0);
    let corners = corners.into_iter().chain(crossing);
    let rate = |(stay, leave): &(f64, f64)| stay + leave;
    let best = corners.max_by(|a, b| rate(a).total_cmp(&rate(b)));
    let (stay, leave) = best.unwrap_or_default();
    if stay < merged * (stay + leave) {
        let mean = |cost: [f64; 2]| merged * cost[0] + (1.0 - merged) * cost[1];
        let (here, there) = (room(here_has, mean(here)), room(there_has, mean(there)));
        return match here <= there {
            true => (here, Limit::Merged),
            false => (there, Limit::Helpers),
        };
    }
    let used = there[0] * stay + there[1] * leave;
    let limit = match used > 0.999 * there_has {
        true => Limit::Helpers,
        false => Limit::Poller,
    };
    (stay + leave, limit)
}

#[cfg(test)]
#[path = "prediction_tests.rs"]
mod tests;
