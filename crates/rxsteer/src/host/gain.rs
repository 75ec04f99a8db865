// SPDX-License-Identifier: MIT OR Apache-2.0
//! Devices where steering has nothing to win: the hardware has spread the packets already.

use super::cpumask::CpuMask;
use super::topology::Topology;

/// The share of its time, in percent, above which a CPU is loaded by softirqs: the NIC spreads
/// flows by hash, and steering can relieve a CPU that got too many.
const LOADED: u64 = 25;

/// Interrupts of all queues from which on their shares tell how packets are spread.
const ENOUGH: u64 = 1000;

/// A receive queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Queue {
    /// The CPU that receives its packets, if known.
    pub interrupt_cpu: Option<u32>,
    /// Its interrupts since boot, if known.
    pub nr_interrupts: Option<u64>,
    /// The CPUs to which its packets may be steered.
    pub cpus: CpuMask,
}

impl Topology {
    /// Says that steering wins nothing on `device`: each CPU of the queues' masks receives packets
    /// of a queue itself, and none has much to do in softirqs (since boot). `None` if steering may
    /// win something, if the CPU of an interrupt is unknown, or if one queue has had most of the interrupts: a
    /// device does not use all of its queues, or its hash does not tell flows apart.
    pub fn nothing_to_gain(&self, device: &str, queues: &[Queue]) -> Option<String> {
        let interrupts: Option<CpuMask> = queues.iter().map(|queue| queue.interrupt_cpu).collect();
        let interrupts = interrupts?;
        let cpus: CpuMask = queues.iter().flat_map(|queue| queue.cpus.iter()).collect();
        if cpus.is_empty() || !cpus.without(&interrupts).is_empty() || in_one_queue(queues) {
            return None;
        }
        let shares = interrupts.iter().map(|cpu| self.softirq_percent(cpu));
        let most = shares.collect::<Option<Vec<_>>>()?.into_iter().max()?;
        (most < LOADED).then(|| {
            format!(
                "nothing is to be won by steering {device}: its {} receive queues are spread over \
                 all CPUs of the mask ({cpus}) already, which have spent {most} % of their time in \
                 softirqs at most; leave it unsteered",
                queues.len()
            )
        })
    }

    /// The share of its time, in percent, that a CPU has spent in softirqs since boot.
    fn softirq_percent(&self, cpu: u32) -> Option<u64> {
        // user nice system idle iowait irq softirq steal; what follows is part of user and nice.
        const SOFTIRQ: usize = 6;
        let stat = self.read("proc/stat")?;
        let name = format!("cpu{cpu} ");
        let times: Vec<u64> = stat
            .lines()
            .find_map(|line| line.strip_prefix(&name))?
            .split_whitespace()
            .take(SOFTIRQ + 2)
            .map_while(|ticks| ticks.parse().ok())
            .collect();
        let whole: u64 = times.iter().sum();
        Some(times.get(SOFTIRQ)? * 100 / whole.max(1))
    }
}

/// Whether one of several queues has had three quarters of the interrupts.
fn in_one_queue(queues: &[Queue]) -> bool {
    let counts = queues.iter().map(|queue| queue.nr_interrupts.unwrap_or(0));
    let (sum, most) = (counts.clone().sum::<u64>(), counts.max().unwrap_or(0));
    queues.len() > 1 && sum >= ENOUGH && most >= sum - sum / 4
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::topology::tests::Fixture;

    /// Four CPUs with these percentages of softirqs.
    fn host(softirqs: [u64; 4]) -> Fixture {
        let line = |(cpu, softirq): (usize, u64)| {
            format!("cpu{cpu} 10 0 20 {} 0 0 {softirq} 0 10 0\n", 70 - softirq)
        };
        let cpus: String = (0..).zip(softirqs).map(line).collect();
        Fixture::new("0-3").file("proc/stat", &format!("cpu  40 0 80 9 0 0 9 0 40 0\n{cpus}"))
    }

    fn queue(interrupt_cpu: impl Into<Option<u32>>, cpus: &str) -> Queue {
        Queue {
            interrupt_cpu: interrupt_cpu.into(),
            nr_interrupts: None,
            cpus: CpuMask::parse_list(cpus).unwrap(),
        }
    }

    fn said(softirqs: [u64; 4], queues: &[Queue]) -> Option<String> {
        host(softirqs).topology().nothing_to_gain("eth0", queues)
    }

    /// As `auto` selects masks: without the interrupt's CPU.
    fn spread() -> [Queue; 4] {
        [
            queue(0, "1-3"),
            queue(1, "0,2-3"),
            queue(2, "0-1,3"),
            queue(3, "0-2"),
        ]
    }

    #[test]
    fn queues_spread_over_all_cpus_leave_nothing_to_win() {
        assert_eq!(
            said([1, 2, 12, 3], &spread()).unwrap(),
            "nothing is to be won by steering eth0: its 4 receive queues are spread over all CPUs \
             of the mask (0-3) already, which have spent 12 % of their time in softirqs at most; \
             leave it unsteered"
        );
        // More queues than CPUs.
        let queues = [0, 1, 0].map(|cpu| queue(cpu, "0-1"));
        assert!(said([0; 4], &queues).is_some());
    }

    #[test]
    fn elsewhere_nothing_is_said() {
        let idle = [0; 4];
        // One queue for several CPUs, and several queues on one.
        assert_eq!(said(idle, &[queue(0, "0-3")]), None);
        assert_eq!(said(idle, &[0, 0, 1, 1].map(|cpu| queue(cpu, "0-3"))), None);
        // CPUs of the mask that receive nothing.
        let mut wider = spread();
        wider[0].cpus = CpuMask::parse_list("1-4").unwrap();
        assert_eq!(said(idle, &wider), None);
        // An unknown interrupt.
        let mut unknown = spread();
        unknown[2].interrupt_cpu = None;
        assert_eq!(said(idle, &unknown), None);
        assert_eq!(said(idle, &[]), None);
    }

    #[test]
    fn a_cpu_with_many_softirqs_may_be_relieved() {
        assert!(said([1, 24, 2, 3], &spread()).is_some());
        assert_eq!(said([1, 25, 2, 3], &spread()), None);
        // Without the times nothing is known.
        let topology = Fixture::new("0-3").topology_kept();
        assert_eq!(topology.1.nothing_to_gain("eth0", &spread()), None);
    }

    #[test]
    fn packets_in_one_queue_are_not_spread() {
        let counted = |counts: [u64; 4]| {
            let mut queues = spread();
            for (queue, nr) in queues.iter_mut().zip(counts) {
                queue.nr_interrupts = Some(nr);
            }
            said([1, 2, 12, 3], &queues)
        };
        assert_eq!(counted([9000, 1000, 1000, 1000]), None);
        assert!(counted([5000, 1000, 1000, 1000]).is_some());
        // Too few to tell.
        assert!(counted([900, 0, 0, 0]).is_some());
    }

    #[test]
    fn this_host_has_times() {
        let topology = Topology::host();
        let cpu = topology.online().unwrap().first().unwrap();
        assert!(topology.softirq_percent(cpu).unwrap() <= 100);
    }
}
