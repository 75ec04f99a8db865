// SPDX-License-Identifier: MIT OR Apache-2.0
//! A device, its traffic, and rxsteer between faults.

use std::ops::Range;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::hog::Hog;
use rxlab::lab::link::LinkConfig;
use rxlab::testing::testbed::{OTHER_CPU, POLLING_CPU, Testbed, until};
use rxsteer::api::client;
use rxsteer::api::set::Change;
use rxsteer::api::status::Queue;
use rxsteer::host::setting::Setting;

use super::fault::Fault;
use super::life::{Life, Start};
use super::order::{Reader, overtaken};
use crate::common::mutate::Random;
use crate::helpers::process::sums;

/// Frames that may be under way between the generator's count and rxsteer: a veth's ring of 256, and
/// the generator's bursts of up to 128.
pub const UNDER_WAY: u64 = 512;

/// Policies. Under rps each change of the mask moves flows, so it is the most frequent one.
pub const POLICIES: [&str; 7] = [
    "rps",
    "rps",
    "rps",
    "rfs",
    "rfs+idle",
    "rps+adapt",
    "adaptive",
];

/// Masks for two CPUs.
pub const MASKS: [&str; 3] = ["0", "1", "0-1"];

/// What came of an episode.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    pub packets: u64,
    pub overtaken: u64,
    /// Frames redirected by the rxsteer that runs at the end, since its start.
    pub redirected: u64,
}

/// The queue that the traffic enters.
const QUEUE: u32 = 0;

/// A device that has one of two queues at first.
fn device_config() -> LinkConfig {
    LinkConfig {
        queues: 2,
        ..LinkConfig::default()
    }
}

pub struct World {
    pub random: Random,
    pub life: Option<Life>,
    pub bed: Testbed,
    /// Receive queues of the device now.
    pub queues: u32,
    /// The traffic of an episode.
    pub wire: Option<Generator>,
    /// Access to the online state of [`OTHER_CPU`], where it can be changed.
    pub online: Option<Setting>,
    reader: Reader,
    flows: UdpFlows,
    test: &'static str,
    unguarded: bool,
}

/// Counts at the beginning of an episode.
pub struct Before {
    /// Frames that this rxsteer had received, and not delivered.
    pub received: u64,
    pub missing: u64,
}

/// What an episode's fault did to order and accounts.
#[derive(Default)]
pub struct Struck {
    /// Numbers of packets that are not compared, see [`overtaken`].
    pub breaks: Option<Range<u64>>,
    /// Frames not delivered by an rxsteer that has ended, since its start; `None`: nobody knows.
    pub missing: Option<u64>,
    /// rxsteer was not there all the time.
    pub gap: bool,
    /// Traffic and accounts began again: packets that were overtaken until then, and the new counts.
    pub again: Option<(u64, Before)>,
}

impl Struck {
    /// A fault that changes nothing for packets.
    pub fn harmless() -> Self {
        Self {
            missing: Some(0),
            ..Self::default()
        }
    }
}

impl World {
    /// With rxsteer running. `test` is as in [`Life::start`].
    pub fn new(test: &'static str, seed: u64, unguarded: bool) -> Result<Self> {
        let bed = Testbed::new(&device_config())?;
        // So few that a flow's packets follow each other while frames wait.
        let flows = UdpFlows::to(&bed.link.dut, 16);
        let reader = Reader::start(&bed.link.dut.netns, &flows)?;
        let path = format!("/sys/devices/system/cpu/cpu{OTHER_CPU}/online");
        let mut world = Self {
            random: Random::new(spread(seed)),
            life: None,
            online: Setting::keep(&path).ok(),
            reader,
            flows,
            bed,
            queues: device_config().queues,
            wire: None,
            test,
            unguarded,
        };
        world.set_queues(1)?;
        world.start_with("rps", 64)?;
        Ok(world)
    }

    /// Starts rxsteer, with any options. The number of backlogs may allow none.
    pub fn start(&mut self) -> Result<()> {
        let policy = *self.random.of(&POLICIES);
        let backlogs = *self.random.of(&[0, 1, 64, 64, 64, 64]);
        self.start_with(policy, backlogs)
    }

    fn start_with(&mut self, policy: &str, backlogs: usize) -> Result<()> {
        let start = Start {
            device: self.bed.link.dut.name.clone(),
            policy: policy.to_owned(),
            rps_cpus: (*self.random.of(&MASKS)).to_owned(),
            backlogs,
            unguarded: self.unguarded,
        };
        self.life = Some(Life::start(&self.bed.link.dut.netns, self.test, &start)?);
        Ok(())
    }

    pub fn life(&self) -> Result<&Life> {
        self.life.as_ref().context("rxsteer runs")
    }

    /// Lets frames wait for a CPU, and changes the mask and the application's CPU meanwhile.
    pub fn storm(&mut self, steps: usize) -> Result<()> {
        for _ in 0..steps {
            let cpu = self.random.below(2) as u32;
            let hog = self.is_online(OTHER_CPU).then(|| Hog::new(OTHER_CPU));
            let hog = hog.transpose()?;
            sleep(Duration::from_millis(4));
            // An offline CPU can't be moved to.
            let _ = self.reader.move_to(cpu);
            self.set_mask()?;
            sleep(Duration::from_millis(self.random.below(3) as u64));
            drop(hog);
            sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn set_mask(&mut self) -> Result<()> {
        // A mask needs a CPU that is online.
        let masks = match self.is_online(OTHER_CPU) {
            true => &MASKS[..],
            false => &MASKS[..1],
        };
        let mask = *self.random.of(masks);
        let dut = &self.bed.link.dut;
        let change = Change::rps_cpus(&dut.name, None, mask);
        dut.netns.run(|| client::set(change)).map(drop)
    }

    pub fn is_online(&self, cpu: u32) -> bool {
        use rxsteer::host::topology::Topology;
        let online = Topology::host().online();
        cpu == POLLING_CPU || online.is_ok_and(|online| online.contains(cpu))
    }

    /// A fault under traffic. Afterwards, without traffic, all accounts close.
    pub fn episode(&mut self, fault: Fault) -> Result<Outcome> {
        let before = self.before()?;
        self.send()?;
        let steps = 3 + self.random.below(8);
        self.storm(steps)?;
        let struck = fault.strike(self)?;
        self.storm(steps)?;
        let report = self.wire.take().context("frames are sent")?.stop()?;
        let (overtaken_before, before) = struck.again.unwrap_or((0, before));
        let accepted = report.sent - report.lost;
        let queues = self.at_rest()?;
        let received: u64 = queues.iter().map(|q| q.received).sum();
        let missing: u64 = queues.iter().map(missing).sum();
        if !struck.gap {
            let received = received - before.received;
            ensure!(
                received == accepted,
                "rxsteer has received {received} frames of {accepted}: {queues:?}"
            );
        }
        let missing = struck.missing.map(|old| old + missing - before.missing);
        self.arrivals(accepted, missing)?;
        let arrivals = self.reader.take()?;
        Ok(Outcome {
            packets: arrivals.len() as u64,
            overtaken: overtaken_before + overtaken(&arrivals, struck.breaks.as_slice()),
            redirected: sums(&queues).redirected,
        })
    }

    /// Starts the traffic, at a random rate.
    pub fn send(&mut self) -> Result<()> {
        let rate = 30_000 + self.random.below(40_000) as u64;
        let frames = Frames::Udp(self.flows.clone());
        let paced = GeneratorConfig::lossless(frames, None).at(rate);
        self.wire = Some(Generator::start(&self.bed.link, QUEUE, &paced)?);
        Ok(())
    }

    /// Frames sent since [`Self::send`].
    pub fn sent(&self) -> u64 {
        self.wire.as_ref().map_or(0, Generator::sent)
    }

    /// Changes the number of receive queues, as `ethtool -L`. The driver makes them anew.
    pub fn set_queues(&mut self, queues: u32) -> Result<()> {
        let (tester, dut) = (&self.bed.link.tester.ethtool, &self.bed.link.dut.ethtool);
        self.queues = queues;
        // A veth's end has no more receive queues than its peer has transmit queues.
        if queues == 1 {
            tester.set_channels(2, 1)?;
        }
        dut.set_channels(queues, 2)?;
        tester.set_channels(2, queues)
    }

    /// Makes the device again after it was deleted.
    pub fn make_device(&mut self) -> Result<()> {
        let config = device_config();
        self.queues = config.queues;
        self.bed.make_again(&config)
    }

    /// Ends the traffic of a device that has lost frames, or is gone. Returns the number of
    /// packets that were overtaken.
    pub fn end_traffic(&mut self) -> Result<u64> {
        if let Some(wire) = self.wire.take() {
            // It fails where it has lost its device, or waits for frames that the device has lost.
            let _ = wire.stop();
        }
        let mut last = u64::MAX;
        until("nothing arrives any more", || {
            let now = self.reader.arrived()?;
            let rests = last == now;
            last = now;
            sleep(Duration::from_millis(20));
            Ok(rests.then_some(()))
        })?;
        Ok(overtaken(&self.reader.take()?, &[]))
    }

    pub fn before(&self) -> Result<Before> {
        let queues = self.life()?.queues()?;
        Ok(Before {
            received: queues.iter().map(|q| q.received).sum(),
            missing: queues.iter().map(missing).sum(),
        })
    }

    /// The queues once nothing waits. Fails unless both of their sums close.
    fn at_rest(&self) -> Result<Vec<Queue>> {
        let mut last = None;
        let queues = until("no frame waits, and none comes", || {
            let now = self.life()?.queues()?;
            let received: u64 = now.iter().map(|q| q.received).sum();
            let came = last.replace(received) != Some(received);
            let rests = !came && now.iter().all(|q| q.sums.queued == 0);
            sleep(Duration::from_millis(2));
            Ok(rests.then_some(now))
        })
        .with_context(|| format!("{:?}", self.life().and_then(Life::queues)))?;
        for queue in &queues {
            let why = queue.imbalance();
            ensure!(
                why.is_none(),
                "the account does not close: {why:?}, {queue:?}"
            );
        }
        Ok(queues)
    }

    /// Waits until all of so many frames have arrived that are not missing, and no more.
    fn arrivals(&self, accepted: u64, missing: Option<u64>) -> Result<()> {
        let mut last = u64::MAX;
        let arrived = until("all frames have arrived", || {
            let now = self.reader.arrived()?;
            let rests = match missing {
                Some(missing) => now + missing >= accepted,
                // The number that will arrive is unknown.
                None => now == last,
            };
            last = now;
            sleep(Duration::from_millis(20));
            Ok(rests.then_some(now))
        })
        .with_context(|| format!("{last} of {accepted} without {missing:?}"))?;
        let all = arrived + missing.unwrap_or(0);
        ensure!(
            all <= accepted && (missing.is_none() || all == accepted),
            "{arrived} frames arrived of {accepted} without {missing:?}"
        );
        Ok(())
    }

    /// The end of rxsteer; everything else ends with this value.
    pub fn end(&mut self) -> Result<()> {
        let life = self.life.take().context("rxsteer runs")?;
        life.stop().map(drop)
    }
}

/// Seeds that are close together begin with similar numbers.
pub fn spread(seed: u64) -> u64 {
    (seed.wrapping_add(1)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Frames that were not delivered.
fn missing(queue: &Queue) -> u64 {
    queue.dropped() + queue.sums.lost + queue.sums.vanished
}
