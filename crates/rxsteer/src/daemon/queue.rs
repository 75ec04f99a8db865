// SPDX-License-Identifier: MIT OR Apache-2.0
//! A receive queue at the time of a question, and the wanted locations of its flows.

use crate::api::flows::{Location, Reason};
use crate::datapath::rps_map::{NO_CPU, RpsMap};
use crate::datapath::tables::cpu_mask;
use crate::datapath::{Datapath, load, native};
use crate::types::{backlog, backlog_closed, rps_dev_flow, rx_facts, rx_policy, rx_queue};

const OFFLINE: u64 = backlog_closed::BACKLOG_OFFLINE.0 as u64;

/// A flow's CPUs by the tables. They may be offline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hints {
    /// The CPU where the flow's application was last seen; `None` if unknown, or if flows don't
    /// follow applications.
    pub(crate) application: Option<u32>,
    /// `application` is offline.
    pub(crate) application_offline: bool,
    /// The application polls the queue itself, on any CPU.
    pub(crate) application_polls: bool,
    /// The entry in the `sock_flow_table` says that the application has closed its socket.
    pub(crate) application_closed: bool,
    /// The CPU by the `rps_map`; `None`: INLINE.
    pub(crate) rps: Option<u32>,
    /// `rps` is offline.
    pub(crate) rps_offline: bool,
}

/// A flow's entry in the `sock_flow_table`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SockFlow {
    /// By which sockets know the flow.
    pub(crate) hash: u32,
    /// What the entry holds.
    pub(crate) value: u32,
}

/// See the module's documentation.
pub(crate) struct Queue {
    pub(crate) device: String,
    /// Number within the device.
    pub(crate) number: u32,
    /// Index over all devices.
    pub(crate) index: u32,
    pub(crate) counters: rx_queue,
    map: RpsMap,
    /// By CPU.
    backlogs: Vec<backlog>,
}

impl Queue {
    /// Reads the queue with this index over all devices, and this number within its device.
    pub(crate) fn read(datapath: &Datapath, device: &str, number: u32, index: u32) -> Self {
        let backlogs = (0..datapath.nr_cpus()).map(|cpu| datapath.backlog(index, cpu));
        Self {
            device: device.to_owned(),
            number,
            index,
            counters: datapath.rx_queue(index),
            map: datapath.rps_map(index),
            backlogs: backlogs.collect(),
        }
    }

    /// The CPUs by the tables of the flow with this hash; `sock` is its entry in the
    /// `sock_flow_table`.
    pub(crate) fn hints(&self, hash: u32, sock: SockFlow) -> Hints {
        let application = match self.follows() {
            true => native::sock_flow_location(sock.value, sock.hash, self.cpu_mask()),
            false => NO_CPU,
        };
        let application = Location::from_raw(application);
        let rps = Location::from_raw(native::rps_location_of(self.map.raw(), hash));
        let [application_cpu, rps] = [application, rps].map(|l| l.and_then(Location::cpu));
        Hints {
            application: application_cpu,
            application_offline: self.is_offline(application_cpu),
            application_polls: application == Some(Location::Inline),
            application_closed: sock.value != 0
                && sock.value == native::sock_flow_entry(sock.hash, NO_CPU, self.cpu_mask()),
            rps,
            rps_offline: self.is_offline(rps),
        }
    }

    /// Whether flows follow their applications.
    pub(crate) fn follows(&self) -> bool {
        u32::from(self.counters.policy) & rx_policy::RX_FOLLOW.0 != 0
    }

    fn is_offline(&self, cpu: Option<u32>) -> bool {
        cpu.is_some_and(|cpu| self.backlogs[cpu as usize].closed & OFFLINE != 0)
    }

    fn cpu_mask(&self) -> u32 {
        cpu_mask(self.backlogs.len() as u32)
    }

    /// The flow's wanted location, and the reason. Under a policy that depends on the load: the
    /// last decision, unless its CPU is offline now. Otherwise: the location that the tables give
    /// the next packet. `off`: nothing is steered.
    pub(crate) fn wanted(
        &self,
        flow: &rps_dev_flow,
        sock: SockFlow,
        off: bool,
    ) -> (Location, Reason) {
        let mut facts = rx_facts {
            nr_cpus: self.backlogs.len() as u32,
            cpu_mask: self.cpu_mask(),
            sock_flow: sock.value,
            tunnel: flow.hash ^ sock.hash,
            ..rx_facts::default()
        };
        let polling = self.polls(flow);
        let mut usable =
            |cpu| Location::from_raw(native::rx_usable(&mut facts, &self.backlogs, cpu, polling));

        let hints = self.hints(flow.hash, sock);
        let rps = hints.rps.and_then(|cpu| usable(cpu as u16));
        let decided = usable(flow.wanted);
        let map = self.map.raw();
        let (q, backlogs) = (&self.counters, &self.backlogs);
        let (base, followed) = native::rx_base(&mut facts, q, backlogs, map, flow.hash, polling);
        let base = Location::from_raw(base).unwrap_or(Location::Inline);
        let by_tables = match (followed, rps) {
            (true, _) if hints.application_polls => Reason::BusyPoll,
            (true, _) => Reason::Application,
            (false, Some(_)) => Reason::Rps,
            (false, None) if off => Reason::PolicyOff,
            (false, None) => Reason::Offline,
        };
        let tables = (base, by_tables);
        if !load::decides(q) {
            return tables;
        }
        match (decided, Reason::from_raw(flow.reason)) {
            (None, _) => tables,
            (Some(Location::Inline), _) if hints.application_polls => tables,
            (Some(wanted), Some(reason)) => (wanted, reason),
            (Some(wanted), None) if wanted == base => tables,
            (Some(wanted), None) => (wanted, Reason::Undecided),
        }
    }

    /// The CPU that polls the queue, as of the last packet processed INLINE. If the flow is in the
    /// backlog for that CPU, another CPU has received the flow since.
    fn polls(&self, flow: &rps_dev_flow) -> u32 {
        const UNKNOWN: u32 = u32::MAX;
        let polling = load::polling_cpu(&self.counters);
        let at = Location::from_raw(flow.location).and_then(Location::cpu);
        polling.filter(|cpu| at != Some(*cpu)).unwrap_or(UNKNOWN)
    }
}

/// Whether the slot has a flow.
pub(crate) fn in_use(queue: &rx_queue, flow: &rps_dev_flow) -> bool {
    flow.epoch != 0 && flow.epoch == queue.epoch
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::datapath::policy::Policy;
    use crate::datapath::rps_map::INLINE;
    use crate::types::rx_reason;

    const NR_CPUS: u32 = 6;
    const HASH: u32 = 0x1234_5678;

    /// A queue, the content of its tables for a flow, and the flow.
    #[derive(Clone, Debug)]
    struct World {
        policy: Policy,
        application: u16,
        rps: Option<u32>,
        closed: Vec<u32>,
        polling: Option<u16>,
        at: u16,
        wanted: u16,
        reason: rx_reason,
    }

    impl World {
        fn queue(&self) -> Queue {
            let closed = |cpu: u32| backlog {
                closed: self.closed.contains(&cpu).into(),
                ..Default::default()
            };
            Queue {
                device: String::new(),
                number: 0,
                index: 0,
                counters: rx_queue {
                    policy: self.policy.bits(),
                    poll: self.polling.map_or(0, |cpu| native::poll_stamp(cpu, 7)),
                    ..Default::default()
                },
                map: RpsMap::inline().spread_over(self.rps.as_slice()),
                backlogs: (0..NR_CPUS).map(closed).collect(),
            }
        }

        fn sock_flow(&self) -> u32 {
            match self.application {
                NO_CPU => 0,
                location => native::sock_flow_entry(HASH, location, cpu_mask(NR_CPUS)),
            }
        }

        fn flow(&self) -> rps_dev_flow {
            rps_dev_flow {
                hash: HASH,
                location: self.at,
                wanted: self.wanted,
                reason: self.reason.0 as u8,
                ..Default::default()
            }
        }

        fn wanted(&self) -> (Location, Reason) {
            let off = self.policy == Policy::OFF;
            let sock = SockFlow {
                hash: HASH,
                value: self.sock_flow(),
            };
            self.queue().wanted(&self.flow(), sock, off)
        }
    }

    /// Policy rfs: the application is on CPU 3, the CPU by RPS is 1, CPU 0 polls.
    fn rfs() -> World {
        World {
            policy: Policy::RFS,
            application: 3,
            rps: Some(1),
            closed: Vec::new(),
            polling: Some(0),
            at: INLINE,
            wanted: INLINE,
            reason: rx_reason::RX_TABLES,
        }
    }

    #[test]
    fn a_flow_wants_its_application_then_rps_then_to_stay() {
        use Location::{Cpu, Inline};
        let offline = |closed: &[u32]| World {
            closed: closed.to_vec(),
            ..rfs()
        };
        let unknown = World {
            application: NO_CPU,
            ..rfs()
        };
        let polls = |world: &World, polling, at| World {
            polling: Some(polling),
            at,
            ..world.clone()
        };
        let busy_polls = World {
            application: INLINE,
            ..rfs()
        };
        let off = World {
            policy: Policy::OFF,
            rps: None,
            ..rfs()
        };
        for (world, wanted, reason) in [
            (rfs(), Cpu(3), Reason::Application),
            (polls(&rfs(), 0, 3), Cpu(3), Reason::Application),
            // There is no hop to the CPU that polls.
            (polls(&rfs(), 3, 1), Inline, Reason::Application),
            (polls(&rfs(), 3, INLINE), Inline, Reason::Application),
            (polls(&offline(&[3]), 3, 1), Inline, Reason::Application),
            (polls(&unknown, 1, INLINE), Inline, Reason::Rps),
            // The flow is in the backlog for that CPU: another CPU polls now.
            (polls(&rfs(), 3, 3), Cpu(3), Reason::Application),
            (offline(&[3]), Cpu(1), Reason::Rps),
            (unknown.clone(), Cpu(1), Reason::Rps),
            (offline(&[1, 3]), Inline, Reason::Offline),
            (off, Inline, Reason::PolicyOff),
            (polls(&busy_polls, 0, 1), Inline, Reason::BusyPoll),
            (busy_polls, Inline, Reason::BusyPoll),
            (
                World {
                    polling: None,
                    ..rfs()
                },
                Cpu(3),
                Reason::Application,
            ),
        ] {
            assert_eq!(world.wanted(), (wanted, reason), "{world:?}");
        }
    }

    #[test]
    fn what_was_decided_holds_while_its_cpu_is_online() {
        use Location::{Cpu, Inline};
        let decided = |wanted, reason, closed: &[u32]| World {
            policy: Policy::ADAPTIVE,
            closed: closed.to_vec(),
            wanted,
            reason,
            ..rfs()
        };
        for (wanted, reason, closed, expected) in [
            (INLINE, rx_reason::RX_ROOM, &[][..], (Inline, Reason::Room)),
            (3, rx_reason::RX_CONSUMER, &[], (Cpu(3), Reason::Consumer)),
            (2, rx_reason::RX_IDLE_CPU, &[], (Cpu(2), Reason::IdleCpu)),
            (
                2,
                rx_reason::RX_IDLE_CPU,
                &[2],
                (Cpu(3), Reason::Application),
            ),
            (0, rx_reason::RX_SPREAD, &[], (Inline, Reason::Spread)),
            // By the tables alone, which may have changed since.
            (3, rx_reason::RX_TABLES, &[], (Cpu(3), Reason::Application)),
            (1, rx_reason::RX_TABLES, &[], (Cpu(1), Reason::Undecided)),
            (
                INLINE,
                rx_reason::RX_TABLES,
                &[],
                (Inline, Reason::Undecided),
            ),
            (
                3,
                rx_reason::NR_RX_REASONS,
                &[],
                (Cpu(3), Reason::Application),
            ),
        ] {
            let world = decided(wanted, reason, closed);
            assert_eq!(world.wanted(), expected, "{world:?}");
        }
    }

    fn location() -> impl Strategy<Value = u16> {
        prop_oneof![0..NR_CPUS as u16, Just(INLINE)]
    }

    fn world() -> impl Strategy<Value = World> {
        let policies = ["rfs", "rps", "rfs+idle", "rps+adapt", "adaptive"];
        let policies = policies.map(|text| text.parse().unwrap());
        let reasons = 0..rx_reason::NR_RX_REASONS.0;
        (
            prop::sample::select(policies.to_vec()),
            prop_oneof![location(), Just(NO_CPU)],
            prop::option::of(0..NR_CPUS),
            prop::collection::vec(0..NR_CPUS, 0..3),
            0..NR_CPUS as u16,
            location(),
            location(),
            reasons.prop_map(rx_reason),
        )
            .prop_map(
                |(policy, application, rps, closed, polling, at, wanted, reason)| World {
                    policy,
                    application,
                    rps,
                    closed,
                    polling: Some(polling),
                    at,
                    wanted,
                    reason,
                },
            )
    }

    /// The flow's location at its next packet by `rx_wanted()`, or by `rx_base()` if the policy
    /// does not depend on the load. `None` if that depends on a new decision by load.
    fn next(world: &World) -> Option<Location> {
        let mut queue = world.queue();
        let mut flow = world.flow();
        let mut facts = rx_facts {
            nr_cpus: NR_CPUS,
            cpu_mask: cpu_mask(NR_CPUS),
            sock_flow: world.sock_flow(),
            ..Default::default()
        };
        let cpu = u32::from(world.polling?);
        let (q, map) = (&mut queue.counters, queue.map.raw());
        let (base, _) = native::rx_base(&mut facts, q, &queue.backlogs, map, HASH, cpu);
        if !load::decides(q) {
            return Location::from_raw(base);
        }
        flow.base = base;
        if native::rx_usable(&mut facts, &queue.backlogs, flow.wanted, cpu) == NO_CPU {
            return None;
        }
        let b = &mut queue.backlogs;
        let wanted = native::rx_wanted(&mut facts, q, b, map, &mut flow, cpu);
        Location::from_raw(wanted)
    }

    proptest! {
        #[test]
        fn a_flow_is_said_to_want_what_the_kernel_side_wants(world in world()) {
            prop_assume!(Some(world.at) != world.polling);
            if let Some(next) = next(&world) {
                prop_assert_eq!(world.wanted().0, next);
            }
        }
    }

    /// The control: a world in which the decision and the tables differ, and one in which the CPU
    /// is offline.
    #[test]
    fn the_kernel_side_is_asked() {
        let decided = World {
            policy: Policy::ADAPTIVE,
            wanted: 2,
            reason: rx_reason::RX_IDLE_CPU,
            ..rfs()
        };
        assert_eq!(next(&decided), Some(Location::Cpu(2)));
        assert_eq!(next(&rfs()), Some(Location::Cpu(3)));
        let offline = World {
            closed: vec![3],
            ..rfs()
        };
        assert_eq!(next(&offline), Some(Location::Cpu(1)));
    }
}
