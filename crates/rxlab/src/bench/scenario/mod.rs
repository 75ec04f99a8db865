// SPDX-License-Identifier: MIT OR Apache-2.0
//! The scenarios, one file each.

pub mod advise;
pub mod busypoll;
pub mod closed_loop;
pub mod crr;
pub mod decide;
pub mod fairness;
pub mod flood;
pub mod follow;
pub mod forward;
pub mod headroom;
pub mod lossfree;
pub mod mixed;
pub mod nat;
pub mod neighbour;
pub mod ramp;
pub mod record;
pub mod reorder;
pub mod rpc;
pub mod rr;
pub mod servers;
pub mod stream;
pub mod tunnel;
pub mod wakeup;

use anyhow::{Result, ensure};
use clap::ValueEnum;
use indexmap::IndexMap;

use forward::Forward;

use super::experiment::{DeviceKind, Effort, Experiment, Plan, Unfit, Values};
use super::setup::router::Ruleset;

/// What `rxlab bench` can measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Scenario {
    /// Time of one decision, against a program that only passes
    Decide,
    /// What it costs an application that rxsteer notes where it runs
    Record,
    /// How long a flow takes to arrive where its application has gone
    Follow,
    /// More UDP packets than the host can use
    Flood,
    /// From the first packet of a flood until the application gets what it gets in the end
    Ramp,
    /// What a packet costs while the host has time to sleep in between
    Wakeup,
    /// One flooding flow among a thousand modest ones
    Fairness,
    /// One byte to and fro, over one connection and over 500
    Rr,
    /// A connection for each byte to and fro, 100 at once
    Crr,
    /// As rr, to a container behind NAT
    Nat,
    /// Requests that make the server work
    Rpc,
    /// One TCP connection in bulk, to a consumer that polls and to one that sleeps
    Stream,
    /// TCP connections in bulk beside small datagrams
    Mixed,
    /// One connection with reads that poll the device's queue
    Busypoll,
    /// The highest rate without loss, what is left of it at twice that rate and at the most that
    /// can be offered, and the receiving CPU's cost per packet
    Lossfree,
    /// The same of a router with a firewall that tracks connections
    Forward,
    /// The same of a router with a firewall that has 150 rules before the one that matches
    Firewall,
    /// Packets that overtake an earlier one of their flow while masks, applications, interrupts and
    /// CPUs change, against the same without the rule of order
    Reorder,
    /// What `rxsteer advise` predicts, against what steering gains
    Advise,
    /// nsd and nginx, asked by dnsperf and wrk
    Servers,
    /// Requests to a host on whose CPUs other programs compute
    Neighbour,
    /// Latency and cost of requests at rates that leave the host time
    Headroom,
    /// One flow through a tunnel, to the host or a container
    Tunnel,
}

impl Scenario {
    /// Whether a peer host can generate the load. Scenarios that need the in-kernel generator run
    /// in the lab only.
    pub fn takes_peer(self) -> bool {
        match self {
            Self::Rr | Self::Rpc | Self::Stream => true,
            Self::Decide | Self::Record | Self::Follow => false,
            Self::Flood | Self::Fairness | Self::Lossfree | Self::Forward => false,
            Self::Crr | Self::Nat | Self::Firewall | Self::Busypoll | Self::Reorder => false,
            Self::Ramp | Self::Wakeup | Self::Mixed | Self::Advise => false,
            Self::Servers | Self::Neighbour | Self::Headroom | Self::Tunnel => false,
        }
    }

    /// Whether it has frames for this device.
    fn takes(self, device: DeviceKind) -> bool {
        let frames = matches!(
            self,
            Self::Flood | Self::Lossfree | Self::Forward | Self::Firewall
        );
        frames && device.takes_frames()
    }

    /// Prepares the scenario.
    ///
    /// # Errors
    /// When the host does not allow it. A missing requirement of this scenario alone is no error:
    /// the result has nothing to measure, and a note with the reason.
    pub fn prepare(self, effort: &Effort) -> Result<Box<dyn Experiment>> {
        let name = |scenario: &Self| {
            scenario
                .to_possible_value()
                .map(|v| v.get_name().to_owned())
        };
        if effort.on.is_some() {
            let able = Self::value_variants().iter().filter(|s| s.takes_peer());
            ensure!(
                self.takes_peer(),
                "{} runs in the lab alone; on a device: {}",
                name(&self).unwrap_or_default(),
                able.filter_map(name).collect::<Vec<_>>().join(", ")
            );
        }
        let device = effort.device;
        ensure!(
            device == DeviceKind::Nic || self.takes_peer() || self.takes(device),
            "{} can't have this device: leave --device",
            name(&self).unwrap_or_default()
        );
        Ok(match self {
            Self::Decide => Box::new(decide::Decide::new(effort)?),
            Self::Record => Box::new(record::Record::new(effort)?),
            Self::Follow => Box::new(follow::Follow::new(effort)?),
            Self::Flood => Box::new(flood::Flood::new(effort)?),
            Self::Ramp => Box::new(ramp::Ramp::new(effort)?),
            Self::Wakeup => Box::new(wakeup::Wakeup::new(effort)?),
            Self::Fairness => Box::new(fairness::Fairness::new(effort)?),
            Self::Rr => Box::new(rr::Rr::new(effort)?),
            Self::Crr => Box::new(crr::Crr::new(effort)?),
            Self::Nat => possible("nat", nat::Nat::new(effort))?,
            Self::Rpc => Box::new(rpc::Rpc::new(effort)?),
            Self::Stream => Box::new(stream::TcpStream::new(effort)?),
            Self::Mixed => Box::new(mixed::Mixed::new(effort)?),
            Self::Busypoll => Box::new(busypoll::BusyPoll::new(effort)?),
            Self::Lossfree => Box::new(lossfree::Lossfree::new(effort)?),
            Self::Forward => possible("forward", Forward::new(effort, Ruleset::Stateful))?,
            Self::Firewall => possible("firewall", Forward::new(effort, Ruleset::Blocklist))?,
            Self::Reorder => Box::new(reorder::Reorder::new(effort)),
            Self::Advise => Box::new(advise::Advise::new(effort)?),
            Self::Servers => possible("servers", servers::Scenario::new(effort))?,
            Self::Neighbour => possible("neighbour", neighbour::Neighbour::new(effort))?,
            Self::Headroom => possible("headroom", headroom::Headroom::new(effort))?,
            Self::Tunnel => possible("tunnel", tunnel::Scenario::new(effort))?,
        })
    }
}

/// A scenario that this host can't run, with the reason.
struct Impossible {
    scenario: &'static str,
    why: String,
}

impl Experiment for Impossible {
    fn plan(&self) -> Plan {
        Plan {
            scenario: self.scenario,
            question: "Not measured on this host.",
            metrics: IndexMap::new(),
            cases: Vec::new(),
            conditions: IndexMap::new(),
            notes: vec![self.why.clone()],
            seconds_each: 0.0,
        }
    }

    fn measure(&mut self, _: usize, _: usize) -> Result<Values> {
        Err(Unfit(self.why.clone()).into())
    }
}

/// The scenario, or an [`Impossible`] one if the host is [`Unfit`] for it.
fn possible<E: Experiment + 'static>(
    scenario: &'static str,
    made: Result<E>,
) -> Result<Box<dyn Experiment>> {
    match made {
        Ok(experiment) => Ok(Box::new(experiment)),
        Err(error) if error.is::<Unfit>() => Ok(Box::new(Impossible {
            scenario,
            why: format!("{error:#}"),
        })),
        Err(error) => Err(error),
    }
}
