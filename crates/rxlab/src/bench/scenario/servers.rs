// SPDX-License-Identifier: MIT OR Apache-2.0
//! `servers`: programs that others have written, in usual configurations, measured by the clients that
//! their users measure them with.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use indexmap::IndexMap;

use crate::bench::experiment::{
    CasePlan, Condition, Effort, Experiment, Gro, Napi, Plan, Values, detail, fit, headline,
};
use crate::bench::programs::said::{NR_CLIENTS, Said};
use crate::bench::programs::{Client, Server, Service};
use crate::bench::report::document::{Better, Metric};
use crate::bench::scenario::closed_loop::MODES;
use crate::bench::setup::mode::{Active, Cpus, Way};
use crate::bench::setup::testbed::Testbed;
use crate::bench::setup::traffic::SETTLING;
use crate::bench::setup::watch::Seen;
use crate::lab::nic::Nic;
use crate::lab::switches::{Scheduled, Switches};
use crate::lab::xdp::Xdp;

/// Limit on the start of a client. An emulated machine takes seconds.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Above this busy share, the client's CPU is the limit.
const SATURATED: f64 = 0.97;

/// Remark for the reader of the figures.
pub(super) const NOTE: &str = "Rates, latencies and losses are what dnsperf and wrk say, from their start to \
     their end; wrk's losses are requests that failed. nsd has a socket for each worker (SO_REUSEPORT), nginx \
     one for all; both may run on all CPUs of the host. With four CPUs or more, half of them are the \
     clients', and where one of those is busy all the time, there is no figure. With fewer, the client is a \
     program of the host, on any CPU, and the queue is polled in softirq on the CPU that sends.";

/// A server, and how many workers it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) service: Service,
    /// The host's CPUs for one worker.
    pub(super) cpus_each: u32,
}

/// In the order of a round.
pub(super) const CASES: [Case; 6] = [
    of(Service::DnsUdp, 1),
    of(Service::DnsUdp, 2),
    of(Service::DnsTcp, 1),
    of(Service::Http, 1),
    of(Service::Http, 2),
    of(Service::HttpOnce, 1),
];

pub(super) const fn of(service: Service, cpus_each: u32) -> Case {
    Case { service, cpus_each }
}

impl Case {
    fn workers(self, testbed: &Testbed) -> u32 {
        (testbed.masks().all.len() as u32 / self.cpus_each).max(1)
    }

    /// Its name on this host.
    pub(super) fn name(self, testbed: &Testbed) -> String {
        let workers = self.workers(testbed);
        let plural = if workers > 1 { "s" } else { "" };
        let shared = match testbed.masks().apart() {
            true => "",
            false => ", the client on the host",
        };
        format!("{}, {workers} worker{plural}{shared}", self.service)
    }
}

/// A lab with a server, which runs until another one is wanted.
pub(super) struct Servers {
    pub(super) testbed: Testbed,
    running: Option<(Case, Server)>,
    /// The program with which the tester's device polls what the host sends, if it has CPUs of its own.
    _polled: Option<Xdp>,
}

/// One measurement.
pub(super) struct Sample {
    pub(super) said: Said,
    pub(super) seen: Seen,
    scheduled: Scheduled,
    counted: Values,
}

impl Servers {
    /// Prepares the lab.
    ///
    /// # Errors
    /// The host does not allow it, or has a single CPU; [`Unfit`](crate::bench::experiment::Unfit) where a
    /// program is missing.
    pub(super) fn new(condition: Condition) -> Result<Self> {
        [Service::DnsUdp, Service::Http]
            .into_iter()
            .try_for_each(Service::find)?;
        let testbed = Testbed::with_programs(condition)?;
        let polled = testbed
            .masks()
            .apart()
            .then(|| Xdp::pass(&testbed.link.tester));
        testbed.link.tester.netns.many_ports()?;
        Ok(Self {
            testbed,
            running: None,
            _polled: polled.transpose()?,
        })
    }

    /// The ways to compare. Where the client is a program of the host no CPU polls alone, so that there are no
    /// others.
    pub(super) fn ways(&self) -> Vec<Way> {
        let masks = self.testbed.masks();
        let mut ways = masks.ways(&MODES);
        ways.retain(|way| masks.apart() || way.cpus != Cpus::Others);
        ways
    }

    /// Conditions of a scenario's figures.
    pub(super) fn conditions(&self, conditions: &[Condition]) -> IndexMap<String, String> {
        let mut map = self.testbed.conditions(conditions);
        if !self.testbed.masks().apart() {
            map.insert(
                "queue".to_owned(),
                "polled in softirq, on the CPU that sends".to_owned(),
            );
            map.insert(
                "generators".to_owned(),
                "programs of the host, on all CPUs".to_owned(),
            );
        }
        map
    }

    /// Starts the server of a case, unless it runs.
    fn serve(&mut self, case: Case) -> Result<()> {
        if self.running.as_ref().is_none_or(|(runs, _)| *runs != case) {
            // The next one may have the same address.
            self.running = None;
            let dut = &self.testbed.link.dut;
            let address = SocketAddr::new(IpAddr::V4(dut.ipv4), 0);
            let cpus = &self.testbed.masks().all;
            let workers = case.workers(&self.testbed);
            let server = case.service.serve(&dut.netns, cpus, address, workers)?;
            self.running = Some((case, server));
        }
        Ok(())
    }

    /// Starts the client of the server that runs, and the device by which it gets the answers; returns once it
    /// asks.
    fn ask(&self, pace: Option<f64>) -> Result<(Client, Option<Nic>)> {
        let (_, server) = self.running.as_ref().context("no server runs")?;
        let masks = self.testbed.masks();
        let senders = self.testbed.senders();
        let far_end = masks
            .apart()
            .then(|| self.testbed.far_end(&senders)?.before_others());
        let far_end = far_end.transpose()?;
        // Without CPUs of its own it is a program of the host, as the server is.
        let cpus = match masks.apart() {
            true => senders.into_iter().collect(),
            false => masks.all.clone(),
        };
        let before = self.received()?;
        let client = server.ask(&self.testbed.link.tester.netns, &cpus, pace)?;
        let start = Instant::now();
        while self.received()? < before + u64::from(NR_CLIENTS) {
            fit!(
                start.elapsed() < TIMEOUT,
                "the client does not ask after {TIMEOUT:?}"
            );
            sleep(Duration::from_millis(1));
        }
        Ok((client, far_end))
    }

    /// Packets that the host has received.
    fn received(&self) -> Result<u64> {
        let dut = &self.testbed.link.dut;
        let path = format!("/sys/class/net/{}/statistics/rx_packets", dut.name);
        let text = dut.netns.run(|| Ok(fs::read_to_string(&path)?))?;
        Ok(text.trim().parse()?)
    }

    /// Runs `look` while the client of a case asks, without steering and without an XDP program.
    ///
    /// # Errors
    /// When the lab failed, and those of `look`.
    pub(super) fn while_asked<T>(
        &mut self,
        case: Case,
        look: impl FnOnce(&Testbed) -> Result<T>,
    ) -> Result<T> {
        self.serve(case)?;
        let (client, _far_end) = self.ask(None)?;
        sleep(SETTLING);
        let looked = look(&self.testbed)?;
        client.stop()?;
        Ok(looked)
    }

    /// Measures a case under a way to steer; the client asks `pace` times a second, or as often as it is
    /// answered.
    ///
    /// # Errors
    /// When the lab failed; [`Unfit`](crate::bench::experiment::Unfit) when the way was not in effect, or the
    /// client was the limit.
    pub(super) fn measure(
        &mut self,
        case: Case,
        way: Way,
        seconds: f64,
        pace: Option<f64>,
    ) -> Result<Sample> {
        self.serve(case)?;
        let testbed = &self.testbed;
        let active = testbed.start(way)?;
        let masks = testbed.masks();
        let (client, _far_end) = self.ask(pace)?;
        let switches = Switches::of(&masks.all)?;
        let (before, watch) = (switches.read()?, testbed.watch()?);
        sleep(Duration::from_secs_f64(seconds));
        let seen = watch.end()?;
        let scheduled = switches.read()?.since(before);
        let said = client.stop()?;
        fit!(
            pace.is_some() || !masks.apart() || seen.busiest_generator < SATURATED,
            "a CPU of the client was busy for {:.0} % of the time: that is what was measured",
            100.0 * seen.busiest_generator
        );
        testbed.verify(&active, way, &seen, NR_CLIENTS)?;
        let counted = active.counted()?;
        active.stop()?;
        Ok(Sample {
            said,
            seen,
            scheduled,
            counted,
        })
    }
}

impl Sample {
    /// Metrics of [`Self::values`].
    pub(super) fn metrics() -> IndexMap<String, Metric> {
        use Better::{Higher, Lower, Neither};
        let percent = "% of all CPUs";
        let mut metrics = IndexMap::from([
            headline("answers_per_s", "Answers", "1/s", Higher),
            headline("latency_us_p99", "Latency, 99th percentile", "us", Lower),
            headline("demand_us", "Service demand", "us of CPU per answer", Lower),
            detail("latency_us_p50", "Latency, median", "us", Lower),
            detail("latency_us_p999", "Latency, 99.9th percentile", "us", Lower),
            detail("lost", "Requests lost", "1", Neither),
            detail("lost_at_sockets", "Datagrams lost at sockets", "1", Neither),
            detail("switches_per_answer", "Context switches", "1/answer", Lower),
            detail("user_percent", "Programs", percent, Neither),
            detail(
                "system_percent",
                "System calls, kernel threads",
                percent,
                Neither,
            ),
            detail("softirq_percent", "Softirq", percent, Neither),
            detail("cpu_percent", "CPU", percent, Neither),
            detail("client_percent", "Busiest CPU of the client", "%", Neither),
        ]);
        metrics.extend(Active::metrics());
        metrics
    }

    pub(super) fn values(&self) -> Values {
        let Self {
            said,
            seen,
            scheduled,
            counted,
        } = self;
        // The client's time is a little longer than that of the host's counters.
        let answers = said.rate * seen.seconds;
        let lost_at_sockets = ["RcvbufErrors", "Udp6RcvbufErrors"].map(|name| seen.udp.get(name));
        let lost_at_sockets: u64 = lost_at_sockets.into_iter().flatten().sum();
        let [user, system, softirq] = seen.kinds;
        let mut values = vec![
            ("answers_per_s", said.rate),
            ("latency_us_p99", said.us[1]),
            ("demand_us", seen.busy * 1e6 / answers),
            ("latency_us_p50", said.us[0]),
            ("latency_us_p999", said.us[2]),
            ("lost", said.lost as f64),
            ("lost_at_sockets", lost_at_sockets as f64),
            ("switches_per_answer", scheduled.switches as f64 / answers),
            ("user_percent", 100.0 * user),
            ("system_percent", 100.0 * system),
            ("softirq_percent", 100.0 * softirq),
            ("cpu_percent", 100.0 * seen.busy_share),
            ("client_percent", 100.0 * seen.busiest_generator),
        ];
        values.extend(counted);
        values
    }
}

/// The values for which a plan has metrics; transactions of the lab's own client are answers.
pub(super) fn as_answers(values: Values, metrics: &IndexMap<String, Metric>) -> Values {
    let renamed = values.into_iter().map(|(name, value)| match name {
        "tps" => ("answers_per_s", value),
        name => (name, value),
    });
    renamed
        .filter(|(name, _)| metrics.contains_key(*name))
        .collect()
}

/// See the module's documentation.
pub struct Scenario {
    conditions: Vec<Condition>,
    servers: Vec<Servers>,
    ways: Vec<Way>,
    seconds: f64,
}

impl Scenario {
    /// Prepares the lab.
    ///
    /// # Errors
    /// The host does not allow it, or has a single CPU.
    pub fn new(effort: &Effort) -> Result<Self> {
        let conditions = effort.conditions(&[Napi::Interrupt], &[Gro::On]);
        let servers = conditions.iter().map(|c| Servers::new(*c));
        let servers = servers.collect::<Result<Vec<_>>>()?;
        Ok(Self {
            ways: servers[0].ways(),
            conditions,
            servers,
            seconds: effort.seconds,
        })
    }
}

impl Experiment for Scenario {
    fn plan(&self) -> Plan {
        let testbed = &self.servers[0].testbed;
        let cases = self.conditions.iter().flat_map(|condition| {
            CASES.iter().map(|case| CasePlan {
                case: condition.case(&case.name(testbed), &self.conditions),
                modes: self.ways.iter().map(Way::to_string).collect(),
            })
        });
        Plan {
            scenario: "servers",
            question: "How many requests do nsd and nginx answer, how long does one take, and what does it \
                       cost?",
            metrics: Sample::metrics(),
            cases: cases.collect(),
            conditions: self.servers[0].conditions(&self.conditions),
            notes: vec![NOTE.to_owned()],
            seconds_each: self.seconds + 0.8,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let servers = &mut self.servers[case / CASES.len()];
        let (case, way) = (CASES[case % CASES.len()], self.ways[mode]);
        Ok(servers.measure(case, way, self.seconds, None)?.values())
    }
}
