// SPDX-License-Identifier: MIT OR Apache-2.0
//! `advise`: what `rxsteer advise` predicts of a load without steering, against the rate of the same
//! load with steering.

use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;
use indexmap::IndexMap;
use rxsteer::cli::advise::advise;
use rxsteer::cli::advise::asked::Asked;
use rxsteer::daemon::options::{self, RpsCpus};

use crate::bench::experiment::{
    CasePlan, Condition, Effort, Experiment, Gro, Napi, Plan, Unfit, Values, detail, fit, headline,
};
use crate::bench::report::document::Better;
use crate::bench::scenario::flood::{Application, NR_FLOWS, Sample, Sockets};
use crate::bench::scenario::forward;
use crate::bench::scenario::servers::{self, Servers};
use crate::bench::setup::mode::{Mode, Way};
use crate::bench::setup::router::{Router, Ruleset};
use crate::bench::setup::testbed::Testbed;
use crate::bench::setup::traffic::{Destination, SETTLING, Sending, Traffic, check};
use crate::lab::frame::{Frames, UdpFlows};

/// Rate of the light load, packets/s.
const LIGHT: u64 = 20_000;

/// A load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Load {
    /// More packets of many flows than one CPU can process.
    Flood,
    /// The same of one flow.
    OneFlow,
    /// [`LIGHT`].
    Light,
    /// More packets than a router with a long list of rules can forward on one CPU.
    Firewall,
    /// A server that others have written, and its client.
    Server(servers::Case),
}

impl Load {
    /// Those of the lab's own.
    const OWN: [Self; 4] = [Self::Flood, Self::OneFlow, Self::Light, Self::Firewall];

    fn name(self, servers: Option<&Servers>) -> String {
        let own = match self {
            Self::Flood => "flood of 64 flows",
            Self::OneFlow => "flood of one flow",
            Self::Light => "light load",
            Self::Firewall => "router with 150 rules",
            Self::Server(case) => {
                return servers.map_or_else(String::new, |servers| case.name(&servers.testbed));
            }
        };
        own.to_owned()
    }

    fn rate(self) -> Option<u64> {
        (self == Self::Light).then_some(LIGHT)
    }

    fn sockets(self) -> Sockets {
        match self {
            Self::OneFlow => Sockets::Server,
            _ => Sockets::Connected,
        }
    }
}

/// A load without steering, with the prediction, and with steering.
pub struct Advise {
    conditions: Vec<Condition>,
    testbed: Testbed,
    /// `Err`: why there is no router.
    router: Result<(Testbed, Router), String>,
    /// `Err`: why there are no servers.
    servers: Result<Servers, String>,
    loads: Vec<Load>,
    seconds: f64,
}

impl Advise {
    /// Prepares the lab.
    ///
    /// # Errors
    /// The host does not allow it, or has a single CPU.
    pub fn new(effort: &Effort) -> Result<Self> {
        let conditions = effort.conditions(&[Napi::Thread], &[Gro::On]);
        let testbed = Testbed::new(conditions[0])?;
        let behind = Testbed::new(conditions[0])?;
        let router = match Router::new(behind.device(), Ruleset::Blocklist) {
            Ok(router) => Ok((behind, router)),
            Err(e) if e.is::<Unfit>() => Err(format!("{e:#}")),
            Err(e) => return Err(e),
        };
        // As in their own scenario.
        let interrupt = Condition {
            napi: Napi::Interrupt,
            ..conditions[0]
        };
        let servers = match Servers::new(interrupt) {
            Ok(servers) => Ok(servers),
            Err(e) if e.is::<Unfit>() => Err(format!("{e:#}")),
            Err(e) => return Err(e),
        };
        let able = |load: &Load| *load != Load::Firewall || router.is_ok();
        let mut loads: Vec<_> = Load::OWN.into_iter().filter(able).collect();
        if servers.is_ok() {
            loads.extend(servers::CASES.map(Load::Server));
        }
        Ok(Self {
            conditions: conditions[..1].to_vec(),
            loads,
            testbed,
            router,
            servers,
            seconds: effort.seconds,
        })
    }

    /// The rate that arrives under a way to steer, packets/s or answers/s.
    fn rate(&mut self, load: Load, way: Way) -> Result<f64> {
        if let (Load::Server(case), Ok(servers)) = (load, &mut self.servers) {
            return Ok(servers.measure(case, way, self.seconds, None)?.said.rate);
        }
        if let (Load::Firewall, Ok((testbed, router))) = (load, &self.router) {
            let sample = forward::measure(testbed, router, way, self.seconds)?;
            return Ok(sample.traffic.delivered_pps());
        }
        let testbed = &self.testbed;
        let active = testbed.start(way)?;
        let application = Application::start(testbed, load.sockets())?;
        let frames = self.frames(load);
        let seconds = self.seconds;
        let traffic = match load.rate() {
            None => Sample::take(testbed, &active, way, &application, &frames, seconds)
                .map(|sample| sample.traffic),
            rate => {
                let watch = testbed.watch()?;
                Traffic::send(testbed, &application, &frames, rate, seconds).and_then(|traffic| {
                    check(testbed, &active, way, &traffic, &watch.end()?)?;
                    Ok(traffic)
                })
            }
        };
        // Stop also after an error: the next measurement binds the same address.
        application.stop()?;
        let traffic = traffic?;
        active.stop()?;
        Ok(traffic.delivered_pps())
    }

    fn frames(&self, load: Load) -> Frames {
        let testbed = &self.testbed;
        match load {
            Load::OneFlow => testbed.frames(&UdpFlows::to(testbed.device(), 1)),
            _ => testbed.frames(&load.sockets().flows(testbed)),
        }
    }

    /// The ratio that `rxsteer advise` predicts under the load.
    fn predicted(&mut self, load: Load) -> Result<f64> {
        let time = Duration::from_secs_f64(self.seconds);
        if let (Load::Server(case), Ok(servers)) = (load, &mut self.servers) {
            return servers.while_asked(case, |testbed| ratio(testbed, time));
        }
        if let (Load::Firewall, Ok((testbed, router))) = (load, &self.router) {
            let frames = testbed.frames(&router.flows(testbed.device(), NR_FLOWS));
            return load.predicted(testbed, router, &frames, time);
        }
        let testbed = &self.testbed;
        let application = Application::start(testbed, load.sockets())?;
        let ratio = load.predicted(testbed, &application, &self.frames(load), time);
        application.stop()?;
        ratio
    }
}

impl Load {
    /// The ratio that `rxsteer advise` predicts while it is sent.
    fn predicted(
        self,
        testbed: &Testbed,
        destination: &dyn Destination,
        frames: &Frames,
        time: Duration,
    ) -> Result<f64> {
        let sending = Sending::start(testbed, destination, frames, self.rate())?;
        sleep(SETTLING);
        let ratio = ratio(testbed, time);
        sending.end()?;
        ratio
    }
}

/// The ratio that `rxsteer advise` predicts of what it sees now.
fn ratio(testbed: &Testbed, time: Duration) -> Result<f64> {
    let masks = testbed.masks();
    let cpus = match masks.apart() {
        true => RpsCpus::Mask(masks.auto.clone()),
        false => RpsCpus::Auto,
    };
    let device = testbed.device();
    let advice = device.netns.run(|| {
        let asked = Asked {
            time,
            cpus: &cpus,
            mode: options::Mode::Native,
            attach: true,
            pause: &|time| {
                sleep(time);
                Ok(())
            },
        };
        advise(std::slice::from_ref(&device.name), &asked)
    })?;
    tracing::info!("{}", advice.sentence);
    let watched = &advice.seen.devices[0];
    fit!(
        watched.dry_run.is_some(),
        "there was no dry run: {}",
        watched.not_counted.as_deref().unwrap_or_default()
    );
    Ok(advice.ratio)
}

impl Experiment for Advise {
    fn plan(&self) -> Plan {
        use Better::{Lower, Neither};
        let case = |load: &Load| CasePlan {
            case: load.name(self.servers.as_ref().ok()),
            modes: vec![Mode::Rxsteer.to_string()],
        };
        let mut notes = vec![
            "A measurement is three: the load without steering, the load while `rxsteer advise` \
             watches it, and the load with steering. The predicted ratio is 1 where advise says that \
             steering gains nothing. The error is the predicted ratio over the measured one, less 1, \
             without its sign."
                .to_owned(),
        ];
        if let Err(why) = &self.router {
            notes.push(format!("There is no router: {why}"));
        }
        if let Err(why) = &self.servers {
            notes.push(format!("There are no servers: {why}"));
        }
        Plan {
            scenario: "advise",
            question: "How well does `rxsteer advise` predict what steering gains?",
            metrics: IndexMap::from([
                headline("error", "Error of the prediction", "%", Lower),
                headline("predicted_ratio", "Predicted ratio", "", Neither),
                headline("measured_ratio", "Measured ratio", "", Neither),
                detail(
                    "unsteered_pps",
                    "Delivered, or answered, without steering",
                    "1/s",
                    Neither,
                ),
                detail(
                    "steered_pps",
                    "Delivered, or answered, with steering",
                    "1/s",
                    Neither,
                ),
            ]),
            cases: self.loads.iter().map(case).collect(),
            conditions: self.testbed.conditions(&self.conditions),
            notes,
            seconds_each: 3.0 * (SETTLING.as_secs_f64() + self.seconds) + 1.0,
        }
    }

    fn measure(&mut self, case: usize, _: usize) -> Result<Values> {
        let load = self.loads[case];
        let unsteered = self.rate(load, Way::by_default(Mode::None))?;
        let predicted = self.predicted(load)?;
        let steered = self.rate(load, Way::by_default(Mode::Rxsteer))?;
        let measured = steered / unsteered;
        Ok(vec![
            ("error", 100.0 * (predicted / measured - 1.0).abs()),
            ("predicted_ratio", predicted),
            ("measured_ratio", measured),
            ("unsteered_pps", unsteered),
            ("steered_pps", steered),
        ])
    }
}
