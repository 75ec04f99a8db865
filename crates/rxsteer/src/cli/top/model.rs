// SPDX-License-Identifier: MIT OR Apache-2.0
//! What two samples of a running rxsteer say: rates between them, in frames or events per second, and
//! the state at the later one.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::AddAssign;
use std::time::Instant;

use super::flows::{self, FlowRow};
use crate::api::flows::Flows;
use crate::api::status::{Backlog, Device, Queue, Status, Terms};
use crate::datapath::waits::Waits;
use crate::host::cpumask::CpuMask;

/// The answers of a running rxsteer at one time.
#[derive(Clone, Debug)]
pub struct Sample {
    /// When it was asked.
    pub at: Instant,
    /// Its counters.
    pub status: Status,
    /// Its flows.
    pub flows: Flows,
}

/// Rates per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Frames received.
    pub received: f64,
    /// Of these, frames processed in the poll that received them.
    pub inline: f64,
    /// Frames redirected to other CPUs.
    pub redirected: f64,
    /// Frames dropped in XDP, for any cause.
    pub dropped: f64,
    /// Frames redirected, and lost in the kernel or by the driver.
    pub lost: f64,
    /// Changes of location of flows.
    pub moves: f64,
}

impl AddAssign for Rates {
    fn add_assign(&mut self, b: Self) {
        self.received += b.received;
        self.inline += b.inline;
        self.redirected += b.redirected;
        self.dropped += b.dropped;
        self.lost += b.lost;
        self.moves += b.moves;
    }
}

/// A queue's backlog for a CPU.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cell {
    /// Frames redirected into it, per second.
    pub redirected: f64,
    /// Frames for it that were dropped in XDP, per second.
    pub dropped: f64,
    /// Frames in it.
    pub queued: u64,
    /// Frames wait there without progress.
    pub stalled: bool,
    /// How long frames have waited in it, in the interval.
    pub waits: Waits,
}

impl AddAssign<&Self> for Cell {
    fn add_assign(&mut self, b: &Self) {
        self.redirected += b.redirected;
        self.dropped += b.dropped;
        self.queued += b.queued;
        self.stalled |= b.stalled;
        self.waits += &b.waits;
    }
}

/// A receive queue.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// `DEVICE:QUEUE`.
    pub name: String,
    /// What it received, and what became of it.
    pub rates: Rates,
    /// Frames in its backlogs.
    pub queued: u64,
    /// Its backlogs, by CPU.
    pub cells: BTreeMap<u32, Cell>,
}

/// What is shown.
#[derive(Clone, Debug, PartialEq)]
pub struct View {
    /// The policy in effect.
    pub policy: String,
    /// The devices that were asked for, with their modes.
    pub devices: Vec<String>,
    /// Backlogs that exist, and that may exist.
    pub nr_backlogs: [usize; 2],
    /// Length of the interval of all rates, s.
    pub seconds: f64,
    /// Sums over the queues.
    pub rates: Rates,
    /// Frames in all backlogs.
    pub queued: u64,
    /// The queues of the devices that were asked for.
    pub rows: Vec<Row>,
    /// CPUs that have a backlog of one of these queues, or may get one; in order.
    pub cpus: Vec<u32>,
    /// Sums over the queues, by CPU.
    pub totals: BTreeMap<u32, Cell>,
    /// What stands in the way of steering, in sentences.
    pub warnings: Vec<String>,
    /// The flows of the later sample.
    pub flows: Vec<FlowRow>,
    /// Number of flows of which these are some.
    pub nr_flows: usize,
}

/// Difference of a counter.
fn increase(before: u64, now: u64) -> f64 {
    now.saturating_sub(before) as f64
}

fn cell(before: Option<&Backlog>, now: &Backlog, seconds: f64) -> Cell {
    let none = Backlog::default();
    let Backlog {
        terms: before,
        waits,
        ..
    } = before.unwrap_or(&none);
    let terms = &now.terms;
    let dropped = |t: &Terms| t.dropped + t.shed + t.limited;
    Cell {
        redirected: increase(before.redirected, terms.redirected) / seconds,
        dropped: increase(dropped(before), dropped(terms)) / seconds,
        queued: terms.queued,
        stalled: now.stalled,
        waits: now.waits.since(waits),
    }
}

fn row(device: &str, before: Option<&Queue>, now: &Queue, seconds: f64) -> Row {
    // Counters start again at zero when steering starts anew.
    let none = Queue::default();
    let before = before
        .filter(|before| before.received <= now.received)
        .unwrap_or(&none);
    let cell = |now: &Backlog| {
        let same = before.backlogs.iter().find(|b| b.cpu == now.cpu);
        (now.cpu, cell(same, now, seconds))
    };
    let rate = |of: fn(&Queue) -> u64| increase(of(before), of(now)) / seconds;
    Row {
        name: format!("{device}:{}", now.queue),
        rates: Rates {
            received: rate(|q| q.received),
            inline: rate(|q| q.inline),
            redirected: rate(|q| q.sums.redirected),
            dropped: rate(Queue::dropped),
            lost: rate(Queue::lost),
            moves: rate(|q| q.moves),
        },
        queued: now.sums.queued,
        cells: now.backlogs.iter().map(cell).collect(),
    }
}

/// The device with this name, and the device that has its queues; without a name all devices.
pub fn devices<'a>(status: &'a Status, name: Option<&str>) -> Vec<&'a Device> {
    let named = status
        .devices
        .iter()
        .filter(|d| Some(&d.device[..]) == name);
    let accounts: BTreeSet<_> = named.filter_map(|d| d.queues_of.as_deref()).collect();
    let asked =
        |d: &&Device| name.is_none_or(|name| d.device == name) || accounts.contains(&d.device[..]);
    status.devices.iter().filter(asked).collect()
}

fn warnings(status: &Status, devices: &[&Device]) -> Vec<String> {
    let mut warnings = Vec::new();
    if status.dry_run {
        warnings.push("dry run: nothing is moved".to_owned());
    }
    for device in devices {
        let reasons = device.unsteered.iter();
        warnings.extend(reasons.map(|why| format!("{}: {why}", device.device)));
        for q in &device.queues {
            let stalled = q.backlogs.iter().filter(|b| b.stalled);
            warnings.extend(stalled.map(|b| {
                format!(
                    "{}:{}: the backlog for CPU {} is stalled: new flows go elsewhere (see the log)",
                    device.device, q.queue, b.cpu
                )
            }));
        }
    }
    if status.refused_backlogs > 0 {
        warnings.push(format!(
            "{} backlogs exist, the most that may exist: flows that want {} others stay inline",
            status.nr_backlogs, status.refused_backlogs
        ));
    }
    warnings
}

impl View {
    /// The view of a device, or of all of them. `None` if the samples are of different processes, or
    /// of one time.
    pub fn between(before: &Sample, now: &Sample, device: Option<&str>) -> Option<Self> {
        let seconds = now.at.checked_duration_since(before.at)?.as_secs_f64();
        if before.status.pid != now.status.pid || seconds == 0.0 {
            return None;
        }
        let devices = devices(&now.status, device);
        let mut rows = Vec::new();
        let mut cpus = BTreeSet::new();
        for Device { device, queues, .. } in &devices {
            let same = before.status.devices.iter().find(|d| d.device == *device);
            for queue in queues {
                let earlier = same.and_then(|d| d.queues.iter().find(|q| q.queue == queue.queue));
                rows.push(row(device, earlier, queue, seconds));
                let mask: CpuMask = queue.rps_cpus.parse().unwrap_or_default();
                cpus.extend(mask.iter());
                cpus.extend(queue.backlogs.iter().map(|b| b.cpu));
            }
        }
        let mut rates = Rates::default();
        let mut totals = BTreeMap::<u32, Cell>::new();
        for row in &rows {
            rates += row.rates;
            for (cpu, cell) in &row.cells {
                *totals.entry(*cpu).or_default() += cell;
            }
        }
        let mode = |d: &&Device| format!("{} {}", d.device, d.mode);
        Some(Self {
            policy: now.status.policy.clone(),
            devices: devices.iter().map(mode).collect(),
            nr_backlogs: [now.status.nr_backlogs, now.status.most_backlogs],
            seconds,
            rates,
            queued: rows.iter().map(|row| row.queued).sum(),
            rows,
            cpus: cpus.into_iter().collect(),
            totals,
            warnings: warnings(&now.status, &devices),
            flows: flows::rows(&before.flows, &now.flows, seconds),
            nr_flows: now.flows.total,
        })
    }
}

#[cfg(test)]
pub mod tests {
    use std::time::Duration;

    use super::*;
    use crate::cli::flows::tests::entry;
    use crate::datapath::waits::BUCKETS;

    /// A queue that has received and redirected these numbers of frames, to CPU 3.
    pub fn queue(queue: u32, received: u64, redirected: u64) -> Queue {
        let terms = Terms {
            redirected,
            queued: 12,
            dropped: 5,
            ..Terms::default()
        };
        Queue {
            queue,
            rps_cpus: "1,3".to_owned(),
            received,
            inline: received - redirected - 5,
            sums: terms.clone(),
            moves: 4,
            backlogs: vec![Backlog {
                cpu: 3,
                terms,
                ..Backlog::default()
            }],
            ..Queue::default()
        }
    }

    pub fn device(name: &str, queues: Vec<Queue>) -> Device {
        Device {
            device: name.to_owned(),
            ifindex: 2,
            mode: "native".to_owned(),
            foreign: 0,
            unsteered: Vec::new(),
            queues,
            queues_of: None,
            shares_queues: false,
        }
    }

    /// A sample, some time after `start`.
    pub fn sample(start: Instant, seconds: u64, devices: Vec<Device>, packets: u32) -> Sample {
        let flow = crate::api::flows::Entry { packets, ..entry() };
        Sample {
            at: start + Duration::from_secs(seconds),
            status: Status {
                pid: 7,
                policy: "adaptive".to_owned(),
                devices,
                ..Status::default()
            },
            flows: Flows {
                flows: vec![flow],
                total: 9,
                slots: 4096,
            },
        }
    }

    /// Samples of 8 to 16 us and of 16 to 33 ms.
    fn buckets(short: u64, long: u64) -> [u64; BUCKETS] {
        let mut buckets = [0; BUCKETS];
        (buckets[3], buckets[14]) = (short, long);
        buckets
    }

    fn view(before: &Sample, now: &Sample) -> View {
        View::between(before, now, None).expect("two samples of one process")
    }

    #[test]
    fn rates_are_differences_by_time() {
        let start = Instant::now();
        let mut earlier = queue(0, 1000, 900);
        earlier.backlogs[0].waits = Waits::new(buckets(90, 0), 0);
        let before = sample(start, 0, vec![device("eth0", vec![earlier])], 10);
        let mut later = queue(0, 5000, 4500);
        later.moves = 10;
        later.sums.shed = 20;
        later.backlogs[0].terms.shed = 20;
        later.backlogs[0].waits = Waits::new(buckets(100, 2), 0);
        let now = sample(start, 2, vec![device("eth0", vec![later])], 30);
        let view = view(&before, &now);
        assert_eq!(view.seconds, 2.0);
        let expected = Rates {
            received: 2000.0,
            inline: 200.0,
            redirected: 1800.0,
            dropped: 10.0,
            lost: 0.0,
            moves: 3.0,
        };
        assert_eq!(view.rates, expected);
        let cell = Cell {
            redirected: 1800.0,
            dropped: 10.0,
            queued: 12,
            stalled: false,
            waits: Waits::new(buckets(10, 2), 0),
        };
        let row = Row {
            name: "eth0:0".to_owned(),
            rates: expected,
            queued: 12,
            cells: [(3, cell.clone())].into(),
        };
        assert_eq!(view.rows, [row]);
        assert_eq!(view.totals, [(3, cell)].into());
        // CPU 1 may get a backlog.
        assert_eq!(view.cpus, [1, 3]);
        assert_eq!(view.flows[0].rate, Some(10.0));
        assert_eq!((view.nr_flows, view.queued), (9, 12));
        assert!(view.warnings.is_empty());
    }

    #[test]
    fn counters_that_start_again_count_from_zero() {
        let start = Instant::now();
        let before = sample(
            start,
            0,
            vec![device("eth0", vec![queue(0, 1000, 900)])],
            10,
        );
        let anew = vec![queue(0, 110, 100), queue(1, 210, 200)];
        let now = sample(start, 1, vec![device("eth0", anew)], 10);
        let view = view(&before, &now);
        let received: Vec<f64> = view.rows.iter().map(|row| row.rates.received).collect();
        assert_eq!(received, [110.0, 210.0]);
        assert_eq!(view.totals[&3].redirected, 300.0);
    }

    #[test]
    fn there_are_no_rates_between_two_processes() {
        let start = Instant::now();
        let before = sample(start, 0, vec![device("eth0", vec![queue(0, 100, 90)])], 10);
        let mut now = sample(start, 1, vec![device("eth0", vec![queue(0, 100, 90)])], 10);
        // The control.
        assert!(View::between(&before, &now, None).is_some());
        assert_eq!(View::between(&before, &before, None), None);
        assert_eq!(View::between(&now, &before, None), None);
        now.status.pid = 8;
        assert_eq!(View::between(&before, &now, None), None);
    }

    #[test]
    fn a_device_is_shown_with_the_queues_that_have_its_packets() {
        let start = Instant::now();
        let shares = |name: &str| Device {
            queues_of: Some("tun0".to_owned()),
            ..device(name, Vec::new())
        };
        let devices = vec![
            device("eth0", vec![queue(0, 100, 90)]),
            device("tun0", vec![queue(0, 100, 90)]),
            shares("tun1"),
        ];
        let both = [0, 1].map(|at| sample(start, at, devices.clone(), 10));
        for (name, rows) in [
            (None, &["eth0:0", "tun0:0"][..]),
            (Some("eth0"), &["eth0:0"]),
            (Some("tun0"), &["tun0:0"]),
            (Some("tun1"), &["tun0:0"]),
        ] {
            let view = View::between(&both[0], &both[1], name).expect("a view");
            let names: Vec<&str> = view.rows.iter().map(|row| &row.name[..]).collect();
            assert_eq!(names, rows, "{name:?}");
        }
    }

    #[test]
    fn warnings_name_device_and_cpu() {
        let start = Instant::now();
        let mut eth0 = device("eth0", vec![queue(2, 100, 90)]);
        eth0.unsteered.push("kernel RPS is on".to_owned());
        eth0.queues[0].backlogs[0].stalled = true;
        let before = sample(start, 0, vec![eth0.clone()], 10);
        let mut now = sample(start, 1, vec![eth0], 10);
        now.status.refused_backlogs = 3;
        let warnings = view(&before, &now).warnings;
        assert_eq!(warnings[0], "eth0: kernel RPS is on");
        assert!(warnings[1].starts_with("eth0:2: the backlog for CPU 3 is stalled"));
        assert!(warnings[2].contains("flows that want 3 others"));
        assert_eq!(warnings.len(), 3);
    }
}
