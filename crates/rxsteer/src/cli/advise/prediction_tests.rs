// SPDX-License-Identifier: MIT OR Apache-2.0
//! Predictions for invented facts.

use super::*;
use crate::types::{rx_pressure, rx_queue, rx_trial};

/// CPU 0 polls and has no time left; three CPUs are idle; no flow stands out.
fn saturated() -> Facts {
    Facts {
        pollers: vec![Poller {
            cpu: 0,
            packets_per_second: 400_000.0,
            polls: 0.98,
            idle: 0.02,
        }],
        helpers: (1..4).map(|cpu| Helper { cpu, idle: 1.0 }).collect(),
        busiest_flow: Some(0.001),
        merged: 0.0,
        mode: RxMode::Native,
        kernel_rps: false,
    }
}

fn with_poller(packets_per_second: f64, polls: f64, idle: f64) -> Facts {
    let mut facts = saturated();
    facts.pollers[0] = Poller {
        cpu: 0,
        packets_per_second,
        polls,
        idle,
    };
    facts
}

fn gain(facts: &Facts) -> Gain {
    match facts.verdict() {
        Verdict::Gain(gain) | Verdict::Little(gain) => gain,
        other => panic!("{other:?}"),
    }
}

fn near(is: f64, should: f64) -> bool {
    (is / should - 1.0).abs() < 0.02
}

/// The data path's own windows, with all shares of a CPU's time in polls and tasks.
#[test]
fn a_cpu_is_saturated_where_the_policy_finds_it() {
    const WHOLE: u32 = load_unit::LOAD_WHOLE.0;
    let mut found = [0; 2];
    for (polls, busy) in (0..=WHOLE).step_by(32).flat_map(|polls| {
        let busy = (polls..=WHOLE).step_by(32);
        busy.map(move |busy| (polls, busy))
    }) {
        let mut queue = rx_queue::default();
        queue.load.poll_ns = u64::from(polls) << 10;
        native::load_window(
            &mut queue,
            &mut rx_trial::default(),
            0,
            u64::from(WHOLE) << 10,
            busy,
            0,
        );
        let by_policy = queue.load.pressure == rx_pressure::RX_SATURATED.0 as u16;
        let poller = Poller {
            cpu: 0,
            packets_per_second: 1.0,
            polls: share(polls),
            idle: 1.0 - share(busy),
        };
        assert_eq!(poller.is_saturated(), by_policy, "{polls} {busy}");
        found[usize::from(by_policy)] += 1;
    }
    assert!(found.iter().all(|n| *n > 0), "{found:?}");
}

#[test]
fn idle_cpus_take_what_a_saturated_one_can_t() {
    let gain = gain(&saturated());
    // Three CPUs at 2.14 us a packet, and what the polling CPU still processes itself.
    assert!(near(gain.ratio, 3.64), "{gain:?}");
    assert_eq!(gain.limit, Limit::Helpers);
    assert!(saturated().verdict().is_yes());
}

/// Seven idle CPUs: the polling CPU redirects all, at 0.57 us each.
#[test]
fn the_polling_cpu_limits_what_is_redirected() {
    let facts = Facts {
        helpers: (1..8).map(|cpu| Helper { cpu, idle: 1.0 }).collect(),
        ..saturated()
    };
    let gain = gain(&facts);
    assert_eq!(gain.limit, Limit::Poller);
    assert!(near(gain.packets_per_second, 0.98 / 0.57e-6), "{gain:?}");
    // After GRO and the skb, a redirect leaves more there.
    let softirq = Facts {
        mode: RxMode::Softirq,
        ..facts
    };
    assert!(self::gain(&softirq).ratio < gain.ratio);
}

/// The figures of docs/manual/bench.md with two CPUs, from which the costs of a hop are: they
/// can't test the model, but they hold it.
#[test]
fn the_measurements_behind_the_costs() {
    for (unsteered, measured) in [(214_000.0, 406_000.0), (422_000.0, 836_000.0)] {
        let facts = Facts {
            helpers: vec![Helper { cpu: 1, idle: 1.0 }],
            ..with_poller(unsteered, 1.0, 0.0)
        };
        let error = gain(&facts).packets_per_second / measured - 1.0;
        assert!(error.abs() < 0.1, "{measured}: {error}");
    }
}

#[test]
fn applications_need_more_time_for_more_packets() {
    let idle = gain(&saturated()).ratio;
    let mut facts = saturated();
    for helper in &mut facts.helpers {
        helper.idle = 0.5;
    }
    let busy = gain(&facts).ratio;
    assert!(busy > 1.1 && busy < idle, "{busy} {idle}");
}

#[test]
fn a_polling_cpu_with_time_left_needs_no_help() {
    let verdict = with_poller(100_000.0, 0.38, 0.62).verdict();
    assert!(matches!(verdict, Verdict::Room(p) if p.idle == 0.62));
    assert_eq!((verdict.is_yes(), verdict.ratio()), (false, 1.0));
    // The limits of the policy: the control on either side.
    assert!(matches!(
        with_poller(1e5, 0.8, 0.126).verdict(),
        Verdict::Room(_)
    ));
    assert!(with_poller(1e5, 0.8, 0.124).verdict().is_yes());
}

#[test]
fn other_work_on_the_polling_cpu_is_no_reason() {
    assert!(matches!(
        with_poller(1e5, 0.1, 0.0).verdict(),
        Verdict::NotReceiving(_)
    ));
}

#[test]
fn one_flow_stays_on_one_cpu() {
    let one = Facts {
        busiest_flow: Some(0.97),
        ..saturated()
    };
    assert_eq!(one.verdict(), Verdict::OneFlow { share: 0.97 });
    // A flow with half of the packets limits the gain.
    let half = Facts {
        busiest_flow: Some(0.5),
        ..saturated()
    };
    let gain = gain(&half);
    assert_eq!(gain.limit, Limit::Flow);
    assert!(gain.ratio < 2.5, "{gain:?}");
    // Uncounted flows are no reason.
    let unknown = Facts {
        busiest_flow: None,
        ..saturated()
    };
    assert!(unknown.verdict().is_yes());
}

#[test]
fn flows_that_gro_merges_stay() {
    let with = |merged| {
        gain(&Facts {
            merged,
            ..saturated()
        })
    };
    // The polling CPU keeps more packets than these anyway.
    assert_eq!(with(0.05), with(0.0));
    // 0.6 of the packets at 2.45 us, the others at 0.57 us.
    let most = with(0.6);
    assert_eq!(most.limit, Limit::Merged);
    let each = 0.6 * 2.45e-6 + 0.4 * 0.57e-6;
    assert!(near(most.packets_per_second, 0.98 / each), "{most:?}");
    let all = with(1.0);
    assert_eq!((all.limit, near(all.ratio, 1.0)), (Limit::Merged, true));
    // Others beside them still need the time of the other CPUs.
    let busy = Facts {
        merged: 0.2,
        helpers: vec![Helper { cpu: 1, idle: 0.2 }],
        ..saturated()
    };
    assert_eq!(gain(&busy).limit, Limit::Helpers);
}

#[test]
fn cpus_without_time_can_t_help() {
    let busy = |idle| Facts {
        helpers: vec![Helper { cpu: 1, idle }],
        ..saturated()
    };
    assert!(matches!(
        busy(0.03).verdict(),
        Verdict::NoTime { cpus: 1, .. }
    ));
    assert!(busy(0.9).verdict().is_yes());
    let alone = Facts {
        helpers: Vec::new(),
        ..saturated()
    };
    assert!(matches!(alone.verdict(), Verdict::NoTime { cpus: 0, .. }));
}

#[test]
fn a_small_gain_is_none() {
    let facts = Facts {
        helpers: vec![Helper { cpu: 1, idle: 0.11 }],
        ..saturated()
    };
    let verdict = facts.verdict();
    assert!(matches!(verdict, Verdict::Little(_)), "{verdict:?}");
    assert!(!verdict.is_yes() && verdict.ratio() >= 1.0);
}

/// An XDP program that drops, for example, costs less than a redirect.
#[test]
fn cheap_packets_are_not_worth_a_hop() {
    assert!(matches!(
        with_poller(3e6, 1.0, 0.0).verdict(),
        Verdict::DearHop { .. }
    ));
}

#[test]
fn without_packets_nothing_is_said() {
    assert_eq!(with_poller(0.0, 0.0, 1.0).verdict(), Verdict::NoTraffic);
    assert_eq!(with_poller(9.0, 0.0, 1.0).verdict(), Verdict::NoTraffic);
    let none = Facts {
        pollers: Vec::new(),
        ..saturated()
    };
    assert_eq!(none.verdict(), Verdict::NoTraffic);
}

#[test]
fn under_kernel_rps_only_room_is_an_answer() {
    let on = |idle| {
        let mut facts = with_poller(1e5, 0.5, 0.5);
        facts.kernel_rps = true;
        facts.helpers[0].idle = idle;
        facts.verdict()
    };
    assert!(matches!(on(0.5), Verdict::Room(_)));
    assert_eq!(on(0.01), Verdict::KernelRps { cpu: 1, idle: 0.01 });
}

/// Of two polling CPUs one is saturated: its packets alone become more, and the other one's room
/// is no objection.
#[test]
fn one_of_several_polling_cpus_is_relieved() {
    let mut facts = saturated();
    facts.pollers.push(Poller {
        cpu: 5,
        packets_per_second: 400_000.0,
        polls: 0.5,
        idle: 0.5,
    });
    let both = gain(&facts);
    let one = gain(&saturated());
    assert!(both.ratio > 1.1 && both.ratio < one.ratio);
}
