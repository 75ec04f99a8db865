// SPDX-License-Identifier: MIT OR Apache-2.0
//! The NAPI poll: from a frame's arrival to the stack, or to a bulk queue.

use rxsteer::datapath::native;
use rxsteer::types::{rx_trial, rx_verdict};

use super::gro::{Kind, Packet};
use super::path::Path;
use super::shape::*;

impl Path {
    pub(super) fn receive(&mut self, flow: usize, kind: Kind) {
        let cpu = self.polling.unwrap_or(self.interrupt);
        // The limit in docs/order.md: a queue with a new NAPI instance.
        let owed = |c: &Cpu| c.owed;
        if self.polling.is_none()
            && (self.cpus[cpu as usize].owed || self.napi_is_new() && self.cpus.iter().any(owed))
        {
            return;
        }
        self.polling = Some(cpu);
        self.numbers[flow] += 1;
        let packet = Packet {
            flow,
            life: self.daemon.life,
            number: self.numbers[flow],
            kind,
        };
        if !self.daemon.attached {
            return self.pass_inline(packet);
        }
        let hash = self.shape.hashes[flow];
        let slot = self.slot(flow);
        self.find_facts(cpu, hash);
        self.facts.segment = (kind == Kind::Merge).into();
        if self.shape.fault == Some(Fault::Unflushed) {
            for b in self.backlogs.iter_mut().filter(|b| b.leaving != 0) {
                b.leaving = u64::MAX;
            }
        }
        let verdict = native::rx_steer(
            &mut self.facts,
            &mut self.q,
            &mut self.backlogs,
            &self.map,
            &mut self.table[slot],
            hash,
            cpu,
        );
        self.cpus[cpu as usize].asked |= self.facts.poll_asked != 0;
        self.reasons |= 1 << self.table[slot].reason;
        if self.shape.fault == Some(Fault::PollEnds) {
            self.cpus[cpu as usize].nr_polls += 1;
        }
        match verdict {
            rx_verdict::RX_PASS => self.pass_inline(packet),
            rx_verdict::RX_REDIRECTED => {
                let to = self.table[slot].location;
                if self.shape.fault == Some(Fault::QtailBefore) {
                    self.table[slot].last_qtail -= 1;
                }
                self.enqueue(to.into(), packet);
            }
            _ => self.nr_gone += 1,
        }
    }

    fn pass_inline(&mut self, packet: Packet) {
        self.driver.push(packet);
        if self.driver.len() >= self.shape.driver_batch {
            self.pass();
        }
    }

    /// `xdp_do_redirect()`, if the driver comes to it
    fn enqueue(&mut self, to: u32, packet: Packet) {
        // Before a thread's first batch nothing proves that it is blocked (docs/order.md).
        if self.vanish > 0 && self.backlogs[to as usize].kthread != 0 {
            self.vanish -= 1;
            self.vanished[to as usize] += 1;
            self.nr_gone += 1;
            return;
        }
        if self.bulk[to as usize].len() == BULK {
            self.flush_bulk(to);
        }
        self.bulk[to as usize].push(packet);
    }

    fn find_facts(&mut self, cpu: u32, hash: u32) {
        let has_entry = |(t, e): (usize, &Option<Entry>)| u64::from(e.is_some()) << t;
        self.facts.entries = self.entries.iter().enumerate().map(has_entry).sum();
        self.find_threads();
        self.facts.nr_polls = self.cpus[cpu as usize].nr_polls;
        self.facts.sock_flow = *self.sock_flow(hash);
        self.facts.jiffies = self.jiffies as u32;
        let empty = match self.shape.fault {
            Some(Fault::NapiGroEmpty) => true,
            Some(Fault::NapiGroHolds) => false,
            // Memory that was freed, empty as it was left.
            _ if self.napi_is_new() => true,
            _ => self.gro.is_empty(),
        };
        self.facts.gro_empty = (self.q.napi != 0 && empty).into();
        self.facts.poll_asked = 0;
    }

    fn pass(&mut self) {
        for packet in self.driver.drain(..) {
            self.gro.receive(packet, self.jiffies, &mut self.stack);
        }
    }

    pub(super) fn end_poll(&mut self, end: End) {
        let Some(cpu) = self.polling.take() else {
            return;
        };
        self.pass();
        for to in 0..self.shape.nr_cpus {
            if !self.bulk[to as usize].is_empty() {
                self.flush_bulk(to);
                if let Some(entry) = &mut self.entries[to as usize] {
                    entry.thread.wake();
                }
            }
        }
        for (flushed, b) in self.flushed.iter_mut().zip(&self.backlogs) {
            *flushed = b.tail;
        }
        self.vanish = 0;
        let old = match end {
            End::Complete => Some(false),
            End::CompleteOld => Some(true),
            End::Budget => Some(self.shape.kernel.hz1000),
            End::Busy => None,
        };
        if let Some(old) = old {
            self.gro.flush(old, self.jiffies, &mut self.stack);
        }
        self.gro.pass_up(&mut self.stack);
        self.q.load.nr_polls += 1;
        self.q.load.nr_exhausted += u32::from(matches!(end, End::Budget));
        self.q.load.nr_busy_polls += u32::from(matches!(end, End::Busy));
        self.cpus[cpu as usize].owed = true;
        // Released within the poll's function; else the next poll may precede the tracepoint.
        if matches!(end, End::Budget | End::Busy) {
            self.poll_traced(cpu);
        }
    }

    /// `napi_polled()` in napi.h
    pub(super) fn poll_traced(&mut self, cpu: u32) {
        let cpu = &mut self.cpus[cpu as usize];
        if std::mem::take(&mut cpu.owed) {
            cpu.nr_polls += u64::from(self.daemon.attached);
            let kept = self.shape.fault == Some(Fault::NapiKept) && self.q.napi != 0;
            if std::mem::take(&mut cpu.asked) && self.daemon.attached && !kept {
                self.q.napi = self.daemon.napi;
            }
        }
    }

    /// `queue_polled()` in napi.h, at the end of a window.
    pub(super) fn end_window(&mut self, polls: u32, all: u32) {
        let l = &mut self.q.load;
        let now = l.window_start + WINDOW_NS;
        l.poll_ns = u64::from(polls) * WINDOW_NS / 1024;
        // Trials may have any answer.
        let mut trial = rx_trial {
            stay: u16::from(all % 3 == 1),
            ..rx_trial::default()
        };
        native::load_window(&mut self.q, &mut trial, 0, now, all, 0);
        self.pressures |= 1 << self.q.load.pressure;
    }
}
