// SPDX-License-Identifier: MIT OR Apache-2.0
//! `stream`: netperf's TCP_STREAM, to a consumer that polls and works in between, and to one that
//! sleeps.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use indexmap::IndexMap;

use super::bed::{Bed, INTERRUPT_CPU};
use super::mode::{Mode, Way};
use super::watch::Watch;
use super::{
    Better, CasePlan, Condition, Effort, Experiment, Gro, Napi, Plan, Values, detail, fit, headline,
};
use crate::device::XdpMode;
use crate::lab::nic::Nic;
use crate::lab::stream::{Consumer, Stream};
use crate::lab::xdp::Xdp;

/// The consumer that polls works for so long before it looks again.
const WORK: Duration = Duration::from_micros(20);

/// Until the windows are open and the flow has found its CPU.
const WARM_UP: Duration = Duration::from_millis(200);

/// The scenario.
pub struct TcpStream {
    conditions: Vec<Condition>,
    beds: Vec<Bed>,
    ways: Vec<Way>,
    cases: Vec<(usize, Consumer)>,
    seconds: f64,
}

impl TcpStream {
    /// Makes the lab.
    ///
    /// # Errors
    /// When the host does not allow it, or has a single CPU.
    pub fn new(effort: &Effort) -> Result<Self> {
        let conditions = effort.conditions(&[Napi::Interrupt], &[Gro::On]);
        let beds = Bed::under(&conditions)?;
        let modes = [Mode::None, Mode::KernelRps, Mode::KernelRfs, Mode::Rxsteer];
        let consumers = [Consumer::Polls(WORK), Consumer::Blocks];
        Ok(Self {
            ways: beds[0].masks().ways(&modes),
            cases: (0..beds.len())
                .flat_map(|bed| consumers.map(|c| (bed, c)))
                .collect(),
            conditions,
            beds,
            seconds: effort.seconds,
        })
    }
}

impl Experiment for TcpStream {
    fn plan(&self) -> Plan {
        use Better::{Higher, Lower, Neither};
        let cases = self.cases.iter().map(|(bed, consumer)| {
            let name = match consumer {
                Consumer::Polls(_) => "a consumer that polls",
                Consumer::Blocks => "a consumer that sleeps",
            };
            CasePlan {
                case: self.conditions[*bed].case(name, &self.conditions),
                modes: self.ways.iter().map(Way::to_string).collect(),
            }
        });
        let mut conditions = self.beds[0].conditions(&self.conditions);
        conditions.insert("work".to_owned(), format!("{WORK:?} between two looks"));
        Plan {
            scenario: "stream",
            question: "How fast does one TCP connection go, to a consumer that polls and works in \
                       between, and to one that sleeps?",
            metrics: IndexMap::from([
                headline("mbit_per_s", "Throughput", "Mbit/s", Higher),
                headline("demand_us_per_mb", "Service demand", "us of CPU per MB", Lower),
                detail("work_per_s", "Work done in between", "1/s", Higher),
                detail("cpu_percent", "CPU, of all CPUs", "%", Neither),
                detail("retransmitted", "Segments sent again", "1/s", Lower),
            ]),
            cases: cases.collect(),
            conditions,
            notes: vec![
                "The sender is the kernel's TCP on the CPU that polls the queue, without segmentation \
                 offload, since a veth with an XDP program takes frames of the MTU alone: it is a part \
                 of the service demand, and of what limits the throughput. Of the modes that spread by \
                 hash, one flow uses one CPU of the mask, in each measurement another perhaps."
                    .to_owned(),
                "Steering to idle CPUs is not there yet: rxsteer runs as it is, and no mode with it off."
                    .to_owned(),
            ],
            seconds_each: self.seconds + 0.6,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let (bed, consumer) = &self.cases[case];
        let (bed, way) = (&self.beds[*bed], self.ways[mode]);
        let link = &bed.link;
        let active = bed.start(way)?;
        // Acknowledgements are the sender's business, on its CPU.
        let _polled = Xdp::pass(&link.tester, XdpMode::Native)?;
        let _thread = Nic::new(&link.tester, &[INTERRUPT_CPU])?;
        let cpu = bed.masks().others.first().context("another CPU")?;
        let stream = Stream::start(link, INTERRUPT_CPU, cpu, *consumer)?;
        sleep(WARM_UP);
        let sent = Watch::begin(&link.tester.netns)?;
        let watch = Watch::begin(&link.dut.netns)?;
        let before = (stream.read(), stream.worked());
        sleep(Duration::from_secs_f64(self.seconds));
        let bytes = (stream.read() - before.0) as f64;
        let worked = (stream.worked() - before.1) as f64;
        let seen = watch.end()?;
        let sent = sent.end()?;
        stream.stop()?;
        fit!(bytes > 0.0, "nothing came");
        bed.verify(&active, way, &seen, 1)?;
        active.stop()?;
        let again = sent.tcp.get("RetransSegs").copied().unwrap_or(0);
        Ok(vec![
            ("mbit_per_s", bytes * 8.0 / 1e6 / seen.seconds),
            ("demand_us_per_mb", seen.busy * 1e6 / (bytes / 1e6)),
            ("work_per_s", worked / seen.seconds),
            ("cpu_percent", 100.0 * seen.busy_share),
            ("retransmitted", again as f64 / seen.seconds),
        ])
    }
}
