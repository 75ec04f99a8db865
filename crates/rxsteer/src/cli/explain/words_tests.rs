// SPDX-License-Identifier: MIT OR Apache-2.0
//! The text for each state of a flow.

use super::*;
use crate::api::explain::{Decision, Drops, Name, Other};
use crate::cli::flows;
use crate::datapath::flow::FlowHash;
use crate::datapath::load::Load;

const UNKNOWN: [Unknown; 11] = [
    Unknown::PolicyOff,
    Unknown::PolicyRps,
    Unknown::NoTable,
    Unknown::Unsupported,
    Unknown::DeviceHash,
    Unknown::NoPorts,
    Unknown::Tunnel,
    Unknown::EntryTaken,
    Unknown::Closed,
    Unknown::Unconnected,
    Unknown::NotSeen,
];

/// A flow that is at its application, on CPU 3; CPU 0 polls.
fn seen() -> Seen {
    Seen {
        entry: flows::tests::entry(),
        softirq: false,
        rps_slot: 5,
        rps_slots: 1024,
        rps: Location::Cpu(1),
        rps_offline: false,
        slot: 21,
        slots: 4096,
        waits: None,
        decision: None,
        queue_dropped: None,
    }
}

fn explanation(seen: Seen) -> Explanation {
    Explanation {
        flow: seen.entry.flow,
        hash: seen.entry.hash,
        inline_port: false,
        application: Application {
            cpu: Some(3),
            offline: false,
            polls: false,
            unknown: None,
            entry: 8,
            entries: 32768,
            value: FlowHash(0x1234_5604),
        },
        seen: vec![seen],
        others: Vec::new(),
    }
}

fn text(explanation: Explanation) -> String {
    text_under(Policy::RFS, explanation)
}

fn text_under(policy: Policy, explanation: Explanation) -> String {
    render(&Answer {
        target: "port:9".to_owned(),
        notes: Vec::new(),
        explanations: Explanations {
            flows: vec![explanation],
            total: 1,
            devices: vec!["eth0".to_owned()],
            policy,
            device_hash: false,
            not_followed: vec!["unconnected UDP sockets are not followed".to_owned()],
        },
    })
}

fn says(explanation: Explanation, what: &[&str]) {
    let text = text(explanation);
    for what in what {
        assert!(text.contains(what), "not {what:?} in\n{text}");
    }
}

#[test]
fn a_flow_at_its_application() {
    assert_eq!(
        text(explanation(seen())),
        "udp/192.0.2.1:1024/9 (hash 0x12345678)
  application: it last took or sent data of this flow on CPU 3.
  eth0 queue 2:
    Its last packet, 12 ms ago, was processed on CPU 3, by the thread of the queue's backlog there.
    It wants to be there: its application is on that CPU.
    17 packets; moved 1 time.
    dev_flow_table slot 21 of 4096; rps_map slot 5 of 1024: CPU 1
  sock_flow_table entry 8 of 32768: 0x12345604, CPU 3
"
    );
}

#[test]
fn softirq_mode_has_no_threads() {
    let waits = |thread: Option<&str>| {
        let thread = thread.map(str::to_owned);
        let frames = 3;
        [
            None,
            Some(Wait::Backlog {
                cpu: 3,
                frames,
                thread: thread.clone(),
            }),
            Some(Wait::Delivery { cpu: 3, thread }),
        ]
    };
    let text_of = |softirq, waits| {
        text(explanation(Seen {
            softirq,
            waits,
            ..seen()
        }))
    };
    for waits in waits(None) {
        let text = text_of(true, waits);
        assert!(
            text.contains("softnet backlog") && !text.contains("thread"),
            "{text}"
        );
    }
    // The control: native mode has.
    for waits in waits(Some("cpumap/3/map:9")) {
        let text = text_of(false, waits);
        assert!(
            !text.contains("softnet") && text.contains("thread"),
            "{text}"
        );
    }
}

#[test]
fn each_wish_has_its_reason() {
    let wish = |wanted, reason, application_cpu| {
        let mut seen = seen();
        seen.entry.location = Location::Cpu(7);
        (seen.entry.wanted, seen.entry.reason) = (wanted, reason);
        seen.entry.application_cpu = application_cpu;
        explanation(seen)
    };
    let inline = "It wants to be processed where it is received (INLINE): ";
    for (wanted, reason, cpu, why) in [
        (
            Location::Cpu(3),
            Reason::Application,
            Some(3),
            "CPU 3: its application is on that CPU.",
        ),
        (
            Location::Inline,
            Reason::Application,
            Some(0),
            "its application is on CPU 0, which also polls the queue.",
        ),
        (
            Location::Cpu(1),
            Reason::Rps,
            None,
            "its hash chooses that CPU.",
        ),
        (
            Location::Inline,
            Reason::Rps,
            None,
            "its hash chooses CPU 0, which also polls the queue.",
        ),
        (
            Location::Cpu(1),
            Reason::Rps,
            Some(3),
            "its application's CPU 3 takes no flows (it is not among --rps-cpus, or its backlog is stalled), \
             and its hash chooses that CPU.",
        ),
        (
            Location::Inline,
            Reason::PolicyOff,
            None,
            "policy off steers nothing.",
        ),
        (
            Location::Inline,
            Reason::Offline,
            None,
            "every CPU that it could want is offline or stalled.",
        ),
    ] {
        says(wish(wanted, reason, cpu), &[why]);
        if wanted == Location::Inline {
            says(wish(wanted, reason, cpu), &[inline]);
        }
    }
    let mut offline = wish(Location::Cpu(1), Reason::Rps, Some(3));
    offline.seen[0].entry.application_offline = true;
    says(
        offline,
        &["its application's CPU 3 is offline, and its hash chooses that CPU."],
    );
    let mut unpolled = seen();
    unpolled.entry.location = Location::Inline;
    unpolled.entry.polling_cpu = None;
    says(
        explanation(unpolled),
        &["where it was received (INLINE).\n"],
    );
}

fn load() -> Load {
    Load {
        polling_cpu: Some(0),
        pressure: Pressure::Saturated,
        busy_percent: 97,
        polls_percent: 61,
    }
}

/// A flow with a location decided by the load.
fn decided(wanted: Location, reason: Reason, base: Option<u32>) -> Seen {
    let mut seen = seen();
    seen.entry.location = Location::Inline;
    (seen.entry.wanted, seen.entry.reason) = (wanted, reason);
    seen.entry.base = base.map(Location::Cpu);
    seen.decision = Some(Decision {
        load: Some(load()),
        window_packets: 3,
        changed_windows_ago: 5,
    });
    seen
}

#[test]
fn each_decision_has_its_reason() {
    use Location::{Cpu, Inline};
    let mut said = std::collections::BTreeSet::new();
    for (wanted, reason, base, why) in [
        (
            Inline,
            Reason::Undecided,
            None,
            "It wants to be there: it did so at its last packet, and the load decides",
        ),
        (
            Inline,
            Reason::Room,
            None,
            "The last decision was to leave it there: CPU 0, which polled the queue, had room.",
        ),
        (
            Inline,
            Reason::Unhelpful,
            None,
            "no more was delivered when the flows of its queue moved; that is tried again.",
        ),
        (
            Inline,
            Reason::NoGain,
            Some(3),
            "no other CPU could take it: CPU 3, its application's, and the CPUs of its queue had no \
             room.",
        ),
        (
            Inline,
            Reason::NoGain,
            Some(1),
            "no other CPU could take it: CPU 1, its hash's choice, and the CPUs",
        ),
        (
            Inline,
            Reason::NoGain,
            None,
            "The last decision was to leave it there: no other CPU of its queue had room.",
        ),
        (
            Cpu(3),
            Reason::Consumer,
            Some(3),
            "The last decision was to move it to CPU 3: its application was there, and that CPU had \
             room.",
        ),
        (
            Cpu(1),
            Reason::Spread,
            Some(1),
            "The last decision was to move it to CPU 1: that CPU of its queue had room.",
        ),
        (
            Cpu(2),
            Reason::IdleCpu,
            Some(3),
            "The last decision was to move it to CPU 2: that CPU was idle, and is near CPU 3, its \
             application's, which was busy.",
        ),
        (
            Inline,
            Reason::Stay,
            Some(3),
            "CPU 0, which polled the queue, had no room for more flows, but kept those it had.",
        ),
        (
            Inline,
            Reason::Merged,
            Some(3),
            "The last decision was to leave it there: GRO merges its segments there",
        ),
        (
            Cpu(3),
            Reason::Stay,
            Some(3),
            "another CPU would have gained it nothing.",
        ),
    ] {
        let text = text_under(Policy::ADAPTIVE, explanation(decided(wanted, reason, base)));
        assert!(text.contains(why), "not {why:?} in\n{text}");
        said.insert(why);
    }
    assert_eq!(said.len(), 12);
}

#[test]
fn the_load_has_its_figures() {
    for (pressure, words) in [
        (Pressure::Relaxed, "has room for all flows of the queue"),
        (
            Pressure::Kept,
            "keeps all flows of the queue, since moving them did not help",
        ),
        (Pressure::Full, "has no room for more flows"),
        (Pressure::Saturated, "is saturated"),
        (
            Pressure::Polled,
            "runs an application that polls for its own packets",
        ),
    ] {
        let mut seen = decided(Location::Inline, Reason::Stay, None);
        let decision = seen.decision.as_mut().unwrap();
        decision.load = Some(Load { pressure, ..load() });
        let line = format!(
            "\n    Now CPU 0, which polls the queue, {words}: busy 97 % of the time, 61 % in its \
             polls.\n"
        );
        says(explanation(seen), &[&line]);
    }
    let mut early = decided(Location::Inline, Reason::Undecided, None);
    early.decision.as_mut().unwrap().load = None;
    for seen in [early, seen()] {
        assert!(!text(explanation(seen)).contains("Now CPU"));
    }
}

#[test]
fn what_a_flow_lost_has_its_reason() {
    let full = Drops {
        full: 40,
        ..Drops::default()
    };
    let both = Drops {
        shed: 2,
        limited: 5,
        ..full.clone()
    };
    for (dropped, of_queue, words) in [
        (
            3,
            full,
            "3 packets of it were dropped before the stack: a backlog was full.",
        ),
        (
            3,
            both,
            "3 packets of it were dropped before the stack: this queue dropped 40, since a backlog \
             was full; 2, since a flow had to leave a backlog and could not yet (shed); 5, since a \
             backlog was half full, and the flow large.",
        ),
    ] {
        let mut seen = seen();
        seen.entry.dropped = dropped;
        seen.queue_dropped = Some(of_queue);
        says(explanation(seen), &[words]);
    }
    assert!(!text(explanation(seen())).contains("dropped"));
}

#[test]
fn policies_without_applications_name_the_one_with() {
    for (policy, words) in [
        (
            "rps",
            "policy rps does not follow applications (`rxsteer set --policy rfs` does).",
        ),
        (
            "rps+adapt",
            "policy rps+adapt does not follow applications (`rxsteer set --policy \
             adaptive` does).",
        ),
    ] {
        let policy = policy.parse().unwrap();
        assert_eq!(why_unknown(Unknown::PolicyRps, policy, &[]), words);
    }
}

#[test]
fn each_wait_has_its_words() {
    let thread = Some("cpumap/3/map:7".to_owned());
    for (wait, words) in [
        (Wait::Packet, "it moves with its next one."),
        (
            Wait::Backlog {
                cpu: 3,
                frames: 42,
                thread: thread.clone(),
            },
            "CPU 3's thread (cpumap/3/map:7) still has 42 packets to process",
        ),
        (
            Wait::Backlog {
                cpu: 3,
                frames: 1,
                thread: None,
            },
            "CPU 3's thread still has 1 packet to process",
        ),
        (
            Wait::Delivery { cpu: 3, thread },
            "CPU 3's thread (cpumap/3/map:7) has dequeued all its packets",
        ),
        (Wait::Poll, "the poll that received its last one has ended"),
        (
            Wait::NewBacklog {
                cpu: 1,
                asked: true,
            },
            "the queue's backlog for CPU 1, a thread there, has been made. It has been asked",
        ),
        (
            Wait::NewBacklog {
                cpu: 1,
                asked: false,
            },
            "no backlog for CPU 1 yet, that is a thread there: its next packet asks",
        ),
    ] {
        for shed in [false, true] {
            let mut seen = seen();
            seen.waits = Some(wait.clone());
            seen.entry.shed = shed;
            let explanation = explanation(seen);
            assert_eq!(text(explanation.clone()).contains("(shed)"), shed);
            says(explanation, &[words]);
        }
    }
}

#[test]
fn each_unknown_application_has_its_reason() {
    let mut all = std::collections::BTreeSet::new();
    for unknown in UNKNOWN {
        let mut explanation = explanation(seen());
        explanation.application.cpu = None;
        explanation.application.unknown = Some(unknown);
        explanation.application.value = FlowHash(0);
        let why = why_unknown(unknown, Policy::RFS, &["sockets are not".to_owned()]);
        assert!(why.len() > 40 && why.ends_with('.'), "{why}");
        let missing = matches!(unknown, Unknown::NotSeen | Unknown::Unconnected);
        assert_eq!(why.ends_with("sockets are not."), missing, "{why}");
        let elsewhere = why_unknown(unknown, Policy::RFS, &[]);
        assert!(!elsewhere.contains("sockets are not."), "{elsewhere}");
        let words = format!("application: not known where: {}", &why[..20]);
        let text = text(explanation.clone());
        assert_eq!(text.contains("It wants"), unknown != Unknown::Closed);
        says(
            explanation,
            &[&words, "sock_flow_table entry 8 of 32768: empty"],
        );
        all.insert(why);
    }
    assert_eq!(all.len(), UNKNOWN.len(), "each its own");
}

#[test]
fn offline_and_overwritten() {
    let mut explanation = explanation(seen());
    explanation.application.offline = true;
    explanation.seen[0].rps_offline = true;
    explanation.others.push(Other {
        device: "eth1".to_owned(),
        queue: 1,
        slot: 9,
        owner: Name::Hash(FlowHash(1)),
    });
    let words = [
        "on CPU 3, which is offline now.",
        "rps_map slot 5 of 1024: CPU 1, offline",
        "eth1 queue 1: slot 9 is now that of 0x00000001",
    ];
    says(explanation.clone(), &words);
    explanation.seen.clear();
    let by_port = Explanation {
        inline_port: true,
        ..explanation.clone()
    };
    says(by_port, &["stay where they are received"]);
    says(
        explanation,
        &["no packet of udp/192.0.2.1:1024/9 is known on eth0; its slot on eth1 queue 1 (9) is"],
    );
}
