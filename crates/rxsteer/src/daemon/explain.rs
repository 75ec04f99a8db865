// SPDX-License-Identifier: MIT OR Apache-2.0
//! Answers to `rxsteer explain`: the facts about flows, from the tables.

use std::cmp::Reverse;

use anyhow::{Result, ensure};

use super::queue::{self, Hints, Queue};
use super::reader::Reader;
use crate::api::explain::{
    Application, Decision, Drops, Explanation, Explanations, Name, Other, Question, Seen, Unknown,
    Wait,
};
use crate::api::flows::{Entry, LIMIT_MAX, Location, Query};
use crate::api::status;
use crate::datapath::Backlogged;
use crate::datapath::flow::{Flow, FlowHash};
use crate::datapath::hash::Hash;
use crate::datapath::load::{self, Load};
use crate::datapath::native;
use crate::datapath::policy::Base;
use crate::datapath::rps_map;
use crate::types::{backlog, rps_dev_flow, rx_queue};

/// Limit of an answer: flows, and queues of each. A line takes about 1 KiB until it is sent.
const LINES_MAX: usize = 40_000;

impl Decision {
    fn of(q: &rx_queue, flow: &rps_dev_flow) -> Option<Self> {
        load::decides(q).then(|| Self {
            load: Load::of(q),
            window_packets: flow.load,
            changed_windows_ago: q.load.window.wrapping_sub(flow.changed),
        })
    }
}

impl From<&status::Queue> for Drops {
    fn from(q: &status::Queue) -> Self {
        Self {
            full: q.sums.dropped,
            shed: q.sums.shed,
            limited: q.sums.limited,
        }
    }
}

/// Facts about a flow with a wanted location that is not its location.
#[derive(Clone, Debug, Default)]
struct Standing {
    last_qtail: u64,
    /// INLINE: all packets of the polls up to this number have been delivered.
    polls_delivered: u64,
    /// At a CPU: count of frames known to be delivered.
    head: u64,
    /// At a CPU: count of frames dequeued.
    gone: u64,
    /// At a CPU: all frames that ever entered the backlog are known to be delivered.
    drained: bool,
    /// At a CPU: name of the thread that delivers.
    thread: Option<String>,
    /// The backlog for the wanted CPU exists.
    wanted_exists: bool,
    /// The backlog for the wanted CPU has been requested.
    wanted_asked: bool,
}

/// The event that a flow waits for before it moves to its wanted location (`rx_steer()` in
/// bpf/core/steer.h), as far as can be determined between two packets.
fn wait(at: Location, wanted: Location, s: Standing) -> Option<Wait> {
    if at == wanted {
        return None;
    }
    let new_backlog = match wanted {
        Location::Cpu(cpu) if !s.wanted_exists => Some(Wait::NewBacklog {
            cpu,
            asked: s.wanted_asked,
        }),
        _ => None,
    };
    let delivered = Some(new_backlog.clone().unwrap_or(Wait::Packet));
    let Location::Cpu(cpu) = at else {
        // A flow without a backlog stays INLINE with each packet, so it always has a last poll.
        return match s.polls_delivered >= s.last_qtail {
            true => delivered,
            false => Some(new_backlog.unwrap_or(Wait::Poll)),
        };
    };
    if s.drained || s.head >= s.last_qtail {
        return delivered;
    }
    let thread = s.thread;
    Some(match s.last_qtail.saturating_sub(s.gone) {
        0 => Wait::Delivery { cpu, thread },
        frames => Wait::Backlog {
            cpu,
            frames,
            thread,
        },
    })
}

impl Reader<'_> {
    /// Answers a question.
    ///
    /// # Errors
    /// When the maps can't be read, or question or answer is too long.
    pub fn explain(&self, question: &Question) -> Result<Explanations> {
        question.check().map_err(anyhow::Error::msg)?;
        let limit = question.limit.min(LIMIT_MAX);
        let mut hashed = Vec::new();
        let mut in_tables = 0;
        if !question.local_ports.is_empty() {
            let query = Query {
                local_ports: question.local_ports.clone(),
                limit,
                ..Query::default()
            };
            let found = self.flows(&query)?;
            in_tables = found.total;
            hashed.extend(found.flows.iter().map(|entry| (entry.hash.0, entry.flow)));
        }
        let (in_tunnels, secret) = (self.in_tunnels()?, &self.datapath.config().secret);
        for name in &question.names {
            let flow = match name {
                Name::Hash(hash) => {
                    hashed.push((hash.0, None));
                    continue;
                }
                Name::Flow(flow) => flow.known_by(self.datapath.config().hash == Hash::Symmetric),
            };
            let same = in_tunnels.iter().filter(|e| e.flow == Some(flow));
            let mut hashes: Vec<_> = same.map(|e| e.hash.0).collect();
            if hashes.is_empty() {
                hashes.push(native::flow_hash(&flow.key(), secret));
            }
            hashed.extend(hashes.into_iter().map(|hash| (hash, Some(flow))));
        }
        hashed.sort_by_key(|(hash, _)| *hash);
        hashed.dedup_by_key(|(hash, _)| *hash);
        let in_tables_too = hashed.iter().filter(|(hash, flow)| {
            let of_port = flow.is_some_and(|flow| flow.has_port(&question.local_ports));
            of_port && self.packets(*hash).is_some()
        });
        let total = in_tables + hashed.len() - in_tables_too.count();
        hashed.sort_by_cached_key(|(hash, _)| Reverse(self.packets(*hash)));
        hashed.truncate(limit);
        Ok(Explanations {
            flows: self.explain_all(&hashed, &question.unconnected)?,
            total,
            devices: self.devices.values().map(|d| (*d).to_owned()).collect(),
            policy: self.policy,
            device_hash: self.datapath.config().hash == Hash::Device,
            not_followed: self.unseen.to_vec(),
        })
    }

    fn explain_all(
        &self,
        hashed: &[(u32, Option<Flow>)],
        unconnected: &[u16],
    ) -> Result<Vec<Explanation>> {
        let mut lines = 0;
        let explained = hashed.iter().map(|(hash, flow)| {
            let explained = self.explain_one(*hash, *flow, unconnected)?;
            lines += 1 + explained.seen.len() + explained.others.len();
            ensure!(
                lines <= LINES_MAX,
                "the answer has more than {LINES_MAX} lines, of each flow one for each queue: ask \
                 about fewer flows (--limit)"
            );
            Ok(explained)
        });
        explained.collect()
    }

    /// The used slots where a flow with this hash may be, with what they hold.
    fn used_slots(&self, hash: u32) -> impl Iterator<Item = (u32, rps_dev_flow)> {
        let slots = self.slots(hash).into_iter().map(|slot| {
            let flow = self.datapath.tables().dev_flows().get(slot);
            (slot, flow)
        });
        slots.filter(|(slot, flow)| queue::in_use(&self.queue_of(*slot, flow).counters, flow))
    }

    /// Packets of a flow on all queues; `None` if no queue knows it.
    fn packets(&self, hash: u32) -> Option<u64> {
        let own = self.used_slots(hash).filter(|(_, flow)| flow.hash == hash);
        let packets = own.map(|(_, flow)| u64::from(flow.nr_packets));
        packets.reduce(|sum, packets| sum + packets)
    }

    /// The flows of the tables, if their packets may be in tunnels: by an inner flow's name alone its slots
    /// can't be found.
    fn in_tunnels(&self) -> Result<Vec<Entry>> {
        if self.datapath.config().tunnels == 0 {
            return Ok(Vec::new());
        }
        let all = Query {
            limit: LIMIT_MAX,
            ..Query::default()
        };
        Ok(self.flows(&all)?.flows)
    }

    fn explain_one(
        &self,
        hash: u32,
        mut flow: Option<Flow>,
        unconnected: &[u16],
    ) -> Result<Explanation> {
        let tables = self.datapath.tables();
        let (mut seen, mut others) = (Vec::new(), Vec::new());
        let secret = &self.datapath.config().secret;
        let known = flow.map_or(hash, |flow| native::flow_hash(&flow.key(), secret));
        let mut sock_flow = self.sock_flow_of(known);
        for (slot, dev_flow) in self.used_slots(hash) {
            let queue = self.queue_of(slot, &dev_flow);
            let name = self.name(slot, dev_flow.hash);
            if dev_flow.hash == hash {
                flow = flow.or(name);
                sock_flow = self.sock_flow(slot, &dev_flow);
                seen.push(self.seen(queue, slot, &dev_flow)?);
            } else {
                others.push(Other {
                    device: self.device_of(queue, slot).to_owned(),
                    queue: queue.number,
                    slot: slot % tables.flow_cnt(),
                    owner: name.map_or(Name::Hash(FlowHash(dev_flow.hash)), Name::Flow),
                });
            }
        }
        let hints = match self.queues.first() {
            Some(queue) => queue.hints(hash, sock_flow),
            None => Hints::default(),
        };
        let unknown = match hints.application {
            Some(_) => None,
            None if hints.application_polls => None,
            None => Some(self.unknown(flow.as_ref(), hints, sock_flow.value, unconnected)),
        };
        Ok(Explanation {
            flow,
            hash: FlowHash(hash),
            inline_port: flow.is_some_and(|flow| {
                native::flow_has_port(&flow.key(), &self.datapath.config().inline_ports)
            }),
            application: Application {
                cpu: hints.application,
                offline: hints.application_offline,
                polls: hints.application_polls,
                unknown,
                entry: sock_flow.hash & tables.sock_flow_mask(),
                entries: tables.sock_flow_mask() + 1,
                value: FlowHash(sock_flow.value),
            },
            seen,
            others,
        })
    }

    /// Why the CPU of a flow's application is unknown. `value` is the flow's entry in the
    /// `sock_flow_table`.
    fn unknown(
        &self,
        flow: Option<&Flow>,
        hints: Hints,
        value: u32,
        unconnected: &[u16],
    ) -> Unknown {
        let config = self.datapath.config();
        let follows = self.queues.first().is_some_and(Queue::follows);
        let port = flow.and_then(Flow::local_port);
        match self.policy {
            policy if policy.base == Base::Off => Unknown::PolicyOff,
            policy if !policy.follows() && config.hash == Hash::Device => Unknown::DeviceHash,
            policy if !policy.follows() && config.hash == Hash::Symmetric => Unknown::SymmetricHash,
            policy if !policy.follows() => Unknown::PolicyRps,
            _ if !config.can_follow() => Unknown::NoTable,
            _ if !follows => Unknown::Unsupported,
            _ if flow.is_some_and(|flow| is_tunnel(flow, config.tunnels)) => Unknown::Tunnel,
            _ if flow.is_some() && port.is_none() => Unknown::NoPorts,
            _ if hints.application_closed => Unknown::Closed,
            _ if value != 0 => Unknown::EntryTaken,
            _ if port.is_some_and(|port| unconnected.contains(&port)) => Unknown::Unconnected,
            _ => Unknown::NotSeen,
        }
    }

    fn seen(&self, queue: &Queue, slot: u32, flow: &rps_dev_flow) -> Result<Seen> {
        let entry = self.entry(queue, slot, flow)?;
        let hints = queue.hints(flow.hash, self.sock_flow(slot, flow));
        let slots = self.datapath.tables().flow_cnt();
        let standing = self.standing(queue, flow, &entry)?;
        Ok(Seen {
            softirq: self.is_shared(queue.index),
            rps_slot: rps_map::slot_of(flow.hash) as u32,
            rps_slots: rps_map::SLOTS as u32,
            rps: hints.rps.map_or(Location::Inline, Location::Cpu),
            rps_offline: hints.rps_offline,
            slot: slot % slots,
            slots,
            waits: wait(entry.location, entry.wanted, standing),
            decision: Decision::of(&queue.counters, flow),
            queue_dropped: match entry.dropped {
                0 => None,
                _ => Some(self.drops(queue)),
            },
            entry,
        })
    }

    fn drops(&self, queue: &Queue) -> Drops {
        let no_mask = String::new();
        let q = status::Queue::read(self.datapath, queue.index, queue.number, no_mask);
        Drops::from(&q)
    }

    fn standing(&self, queue: &Queue, flow: &rps_dev_flow, entry: &Entry) -> Result<Standing> {
        let backlogs = self.datapath.backlogs();
        let thread = |location| match location {
            Location::Cpu(cpu) => backlogs.thread(queue.index, cpu),
            Location::Inline => Ok(None),
        };
        let backlog = |location| match location {
            Location::Cpu(cpu) => self.datapath.backlog(queue.index, cpu),
            Location::Inline => backlog::default(),
        };
        let (at, to) = (backlog(entry.location), backlog(entry.wanted));
        let shared = self.is_shared(queue.index);
        Ok(Standing {
            last_qtail: flow.last_qtail,
            polls_delivered: queue.counters.polls_delivered,
            head: at.head.max(at.head_asleep),
            gone: at.dequeued,
            drained: match entry.location {
                Location::Cpu(cpu) => self.datapath.drained(queue.index, cpu)?,
                Location::Inline => false,
            },
            thread: thread(entry.location)?,
            // Softnet backlogs are always there.
            wanted_exists: shared || thread(entry.wanted)?.is_some(),
            wanted_asked: to.wanted != 0,
        })
    }
}

/// Whether the flow is that of a tunnel that is not parsed.
fn is_tunnel(flow: &Flow, looked_into: u32) -> bool {
    let kind = native::flow_tunnel_of(flow.proto(), flow.local_port().unwrap_or_default());
    kind != 0 && looked_into & kind == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::flow_option;

    #[test]
    fn what_a_flow_waits_for() {
        use Location::{Cpu, Inline};
        // The flow's last frame was frame 100 of CPU 3's backlog; 60 have been dequeued.
        let queued = Standing {
            last_qtail: 100,
            head: 50,
            gone: 60,
            wanted_exists: true,
            ..Standing::default()
        };
        let with = |change: &dyn Fn(&mut Standing)| {
            let mut standing = queued.clone();
            change(&mut standing);
            standing
        };
        let backlog = Wait::Backlog {
            cpu: 3,
            frames: 40,
            thread: None,
        };
        let delivery = Wait::Delivery {
            cpu: 3,
            thread: None,
        };
        let made = |asked| Wait::NewBacklog { cpu: 1, asked };
        for (at, wanted, standing, waits) in [
            (Cpu(3), Cpu(3), queued.clone(), None),
            (Inline, Inline, queued.clone(), None),
            (Cpu(3), Inline, queued.clone(), Some(backlog.clone())),
            (Cpu(3), Cpu(1), queued.clone(), Some(backlog.clone())),
            // The flow has to leave before it can request a backlog.
            (
                Cpu(3),
                Cpu(1),
                with(&|s| s.wanted_exists = false),
                Some(backlog),
            ),
            (Cpu(3), Inline, with(&|s| s.gone = 130), Some(delivery)),
            (Cpu(3), Inline, with(&|s| s.head = 100), Some(Wait::Packet)),
            (
                Cpu(3),
                Inline,
                with(&|s| s.drained = true),
                Some(Wait::Packet),
            ),
            (
                Cpu(3),
                Cpu(1),
                with(&|s| (s.drained, s.wanted_exists) = (true, false)),
                Some(made(false)),
            ),
            (
                Inline,
                Cpu(1),
                with(&|s| s.polls_delivered = 99),
                Some(Wait::Poll),
            ),
            (
                Inline,
                Cpu(1),
                with(&|s| s.polls_delivered = 100),
                Some(Wait::Packet),
            ),
            (
                Inline,
                Cpu(1),
                with(&|s| (s.wanted_exists, s.wanted_asked) = (false, true)),
                Some(made(true)),
            ),
        ] {
            assert_eq!(
                wait(at, wanted, standing.clone()),
                waits,
                "{at} {wanted} {standing:?}"
            );
        }
    }

    #[test]
    fn tunnels_that_are_not_looked_into() {
        let bit = |kind: flow_option| kind.0;
        for (flow, kind) in [
            ("ipencap/192.0.2.1/192.0.2.2", flow_option::FLOW_TUNNEL_IPIP),
            ("ipv6/192.0.2.1/192.0.2.2", flow_option::FLOW_TUNNEL_IPIP),
            ("gre/192.0.2.1/192.0.2.2", flow_option::FLOW_TUNNEL_GRE),
            ("udp/192.0.2.1:1/4789", flow_option::FLOW_TUNNEL_VXLAN),
            ("udp/192.0.2.1:1/8472", flow_option::FLOW_TUNNEL_VXLAN),
            ("udp/192.0.2.1:1/6081", flow_option::FLOW_TUNNEL_GENEVE),
            ("udp/192.0.2.1:1/2152", flow_option::FLOW_TUNNEL_GTPU),
        ] {
            let flow: Flow = flow.parse().unwrap();
            assert!(is_tunnel(&flow, !bit(kind)), "{flow}");
            assert!(!is_tunnel(&flow, bit(kind)), "{flow}");
        }
        for flow in [
            "tcp/192.0.2.1:1/4789",
            "udp/192.0.2.1:4789/1",
            "icmp/192.0.2.1/192.0.2.2",
        ] {
            assert!(!is_tunnel(&flow.parse().unwrap(), 0), "{flow}");
        }
    }
}
