// SPDX-License-Identifier: MIT OR Apache-2.0
//! GRO (net/core/gro.c): packets held for merging, and packets to deliver.

use std::collections::VecDeque;

/// Limit of packets held in a hash bucket (`MAX_GRO_SKBS`). All flows share one bucket here.
const MAX_HELD: usize = 8;

/// Packets on `rx_list` that are delivered together (`net.core.gro_normal_batch`).
const NORMAL_BATCH: usize = 8;

/// A packet of a flow, numbered in the order of arrival.
#[derive(Clone, Copy, Debug)]
pub struct Packet {
    /// Index of the flow.
    pub flow: usize,
    /// Number of times that the daemon had been killed before.
    pub life: usize,
    /// From 1.
    pub number: u64,
    /// What GRO makes of it.
    pub kind: Kind,
}

/// How GRO treats a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Held, or merged with a held packet of the flow.
    Merge,
    /// As [`Kind::Merge`]; the merged packet is then delivered (TCP's PSH).
    Push,
    /// Not merged: delivered after held packets of the flow.
    Normal,
}

/// The network stack: counts packets delivered, and those out of order. Order is kept among packets
/// of one life of the daemon.
#[derive(Clone, Debug, Default)]
pub struct Stack {
    latest: Vec<Vec<u64>>,
    /// Packets delivered after a later one of their flow.
    pub nr_overtaken: u64,
    /// Packets delivered.
    pub nr_delivered: u64,
}

impl Stack {
    fn deliver(&mut self, packet: Packet) {
        if self.latest.len() <= packet.life {
            self.latest.resize(packet.life + 1, Vec::new());
        }
        let flows = &mut self.latest[packet.life];
        if flows.len() <= packet.flow {
            flows.resize(packet.flow + 1, 0);
        }
        let latest = &mut flows[packet.flow];
        self.nr_overtaken += u64::from(packet.number < *latest);
        *latest = packet.number.max(*latest);
        self.nr_delivered += 1;
    }
}

#[derive(Clone, Debug)]
struct Held {
    packets: Vec<Packet>,
    age: u64,
}

/// The GRO state of a NAPI or of a cpumap thread.
#[derive(Clone, Debug, Default)]
pub struct Gro {
    held: VecDeque<Held>,
    rx_list: Vec<Packet>,
}

impl Gro {
    /// Packets held.
    pub fn len(&self) -> usize {
        self.rx_list.len() + self.held.iter().map(|h| h.packets.len()).sum::<usize>()
    }

    /// Whether no packet is held (`gro.bitmask` and `gro.rx_count`).
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Drops all packets held; returns their number.
    pub fn drop_all(&mut self) -> usize {
        let held = self.len();
        *self = Self::default();
        held
    }

    /// `gro_receive_skb()`
    pub fn receive(&mut self, packet: Packet, jiffies: u64, stack: &mut Stack) {
        let same = |h: &Held| h.packets[0].flow == packet.flow;
        let held = self.held.iter().position(same);
        match (packet.kind, held) {
            (Kind::Merge, Some(i)) => self.held[i].packets.push(packet),
            (Kind::Merge, None) => {
                if self.held.len() >= MAX_HELD {
                    self.complete(0, stack);
                }
                self.held.push_back(Held {
                    packets: vec![packet],
                    age: jiffies,
                });
            }
            (Kind::Push, Some(i)) => {
                self.held[i].packets.push(packet);
                self.complete(i, stack);
            }
            (Kind::Normal, Some(i)) => {
                self.complete(i, stack);
                self.normal(&[packet], stack);
            }
            (Kind::Push | Kind::Normal, None) => self.normal(&[packet], stack),
        }
    }

    /// `gro_flush()`; with `old`, only packets held since an earlier jiffy.
    pub fn flush(&mut self, old: bool, jiffies: u64, stack: &mut Stack) {
        while let Some(oldest) = self.held.front()
            && !(old && oldest.age == jiffies)
        {
            self.complete(0, stack);
        }
    }

    /// `gro_normal_list()`
    pub fn pass_up(&mut self, stack: &mut Stack) {
        for packet in self.rx_list.drain(..) {
            stack.deliver(packet);
        }
    }

    fn complete(&mut self, i: usize, stack: &mut Stack) {
        let held = self.held.remove(i).expect("within the list");
        self.normal(&held.packets, stack);
    }

    fn normal(&mut self, packets: &[Packet], stack: &mut Stack) {
        self.rx_list.extend(packets);
        if self.rx_list.len() >= NORMAL_BATCH {
            self.pass_up(stack);
        }
    }
}
