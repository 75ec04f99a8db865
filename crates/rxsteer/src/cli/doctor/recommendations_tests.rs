// SPDX-License-Identifier: MIT OR Apache-2.0
//! Recommendations for invented facts.

use super::*;

fn mask(cpus: &str) -> CpuMask {
    CpuMask::parse_list(cpus).unwrap()
}

/// Four CPUs, and nothing to change.
fn host() -> HostFacts {
    HostFacts {
        kernel: [6, 12, 0],
        cpus: mask("0-3"),
        max_backlog: Some(1000),
        idle: Some(IdleState {
            name: "C1".into(),
            latency: 2,
        }),
        ..HostFacts::default()
    }
}

/// A card with four queues on four CPUs, and nothing to change.
fn card() -> DeviceFacts {
    let poller = |queue: u32| Poller {
        queue,
        irq: Some(40 + queue),
        thread: None,
        cpu: Some(queue),
    };
    DeviceFacts {
        name: "eth0".into(),
        has_napi: true,
        rx_queues: 4,
        channels: Some(Channels {
            max_rx: 0,
            max_combined: 8,
            rx: 0,
            combined: 4,
        }),
        rss: Some((0..4).collect()),
        pollers: (0..4).map(poller).collect(),
        node: Some(mask("0-3")),
        flow_cnts: vec![0; 4],
        rings: Some(RxRings {
            max: 4096,
            now: 512,
        }),
        rx_usecs: Some(50),
        ..DeviceFacts::default()
    }
}

/// The only recommendation: its subject and command.
fn only(host: &HostFacts, device: DeviceFacts) -> (Subject, String) {
    let all = recommendations(host, &[device]);
    let [one] = &all[..] else {
        panic!("not one: {all:?}");
    };
    (one.subject, one.command.clone())
}

fn none(host: &HostFacts, device: DeviceFacts) {
    assert_eq!(recommendations(host, &[device]), []);
}

/// The control for all tests below: the same card without the fault.
#[test]
fn a_good_card_needs_nothing() {
    none(&host(), card());
}

#[test]
fn unused_queues() {
    let with = |combined, max_combined| DeviceFacts {
        channels: Some(Channels {
            combined,
            max_combined,
            ..Channels::default()
        }),
        ..card()
    };
    let command = |device| only(&host(), device).1;
    assert_eq!(command(with(1, 8)), "ethtool -L eth0 combined 4");
    assert_eq!(command(with(1, 2)), "ethtool -L eth0 combined 2");
    // No more queues than CPUs.
    none(&host(), with(4, 64));
    let rx = DeviceFacts {
        channels: Some(Channels {
            rx: 1,
            max_rx: 2,
            ..Channels::default()
        }),
        ..card()
    };
    assert_eq!(command(rx.clone()), "ethtool -L eth0 rx 2");
    // Without NAPI queues are not polled.
    let has_napi = false;
    none(&host(), DeviceFacts { has_napi, ..rx });
}

#[test]
fn queues_without_flows() {
    let device = DeviceFacts {
        rss: Some([0, 1].into()),
        ..card()
    };
    let expected = (Subject::Rss, "ethtool -X eth0 equal 4".to_owned());
    assert_eq!(only(&host(), device), expected);
}

#[test]
fn several_queues_on_one_cpu() {
    let mut device = card();
    for queue in [1, 2] {
        device.pollers[queue].cpu = Some(0);
    }
    let (subject, command) = only(&host(), device.clone());
    assert_eq!(subject, Subject::Interrupts);
    assert_eq!(
        command,
        "echo 1 > /proc/irq/41/smp_affinity_list && echo 2 > /proc/irq/42/smp_affinity_list"
    );
    device.pollers[1].thread = Some(77);
    device.pollers[2].cpu = Some(2);
    assert_eq!(only(&host(), device.clone()).1, "taskset -cp 1 77");
    // There is no other CPU.
    let two = HostFacts {
        cpus: mask("0,2-3"),
        ..host()
    };
    device.channels = None;
    none(&two, device);
}

#[test]
fn interrupts_far_from_the_device() {
    let device = DeviceFacts {
        node: Some(mask("2-3")),
        ..card()
    };
    let (subject, command) = only(&host(), device);
    assert_eq!(subject, Subject::Numa);
    assert_eq!(
        command,
        "echo 2 > /proc/irq/40/smp_affinity_list && echo 3 > /proc/irq/41/smp_affinity_list"
    );
}

#[test]
fn irqbalance_matters_for_devices_with_interrupts() {
    let balanced = HostFacts {
        irqbalance: true,
        ..host()
    };
    let expected = (Subject::Irqbalance, "systemctl stop irqbalance".to_owned());
    assert_eq!(only(&balanced, card()), expected);
    let pollers = Vec::new();
    none(&balanced, DeviceFacts { pollers, ..card() });
}

#[test]
fn kernel_rps_is_switched_off_by_file() {
    let device = DeviceFacts {
        kernel_rps: vec!["rx-0/rps_cpus".into(), "rx-1/rps_flow_cnt".into()],
        ..card()
    };
    let (subject, command) = only(&host(), device);
    assert_eq!(subject, Subject::KernelRps);
    assert_eq!(
        command,
        "for f in /sys/class/net/eth0/queues/rx-0/rps_cpus \
         /sys/class/net/eth0/queues/rx-1/rps_flow_cnt; do echo 0 > \"$f\"; done"
    );
}

#[test]
fn offloads_that_save_work() {
    let gro_off = DeviceFacts {
        gro_off: true,
        ..card()
    };
    assert_eq!(only(&host(), gro_off).1, "ethtool -K eth0 gro on");
    let rx_checksum_off = DeviceFacts {
        rx_checksum_off: true,
        ..card()
    };
    assert_eq!(only(&host(), rx_checksum_off).1, "ethtool -K eth0 rx on");
}

#[test]
fn a_small_ring_matters_if_it_overflowed() {
    let device = DeviceFacts {
        missed: 5,
        ..card()
    };
    let expected = (Subject::Ring, "ethtool -G eth0 rx 4096".to_owned());
    assert_eq!(only(&host(), device.clone()), expected);
    let rings = Some(RxRings {
        max: 4096,
        now: 4096,
    });
    none(&host(), DeviceFacts { rings, ..device });
}

#[test]
fn full_backlogs_get_more_room_once() {
    let dropped = |limit| HostFacts {
        backlog_drops: 7,
        max_backlog: Some(limit),
        ..host()
    };
    let command = "sysctl -w net.core.netdev_max_backlog=4000".to_owned();
    assert_eq!(only(&dropped(1000), card()), (Subject::Backlog, command));
    none(&dropped(4000), card());
}

#[test]
fn polling_needs_quick_interrupts_and_idle_states() {
    let polls = HostFacts {
        busy_poll_usecs: 50,
        ..host()
    };
    none(&polls, card());
    let slow = DeviceFacts {
        rx_usecs: Some(100),
        ..card()
    };
    let expected = (Subject::Coalesce, "ethtool -C eth0 rx-usecs 50".to_owned());
    assert_eq!(only(&polls, slow.clone()), expected);
    none(&host(), slow);
    let idle = Some(IdleState {
        name: "C6".into(),
        latency: 133,
    });
    let deep = HostFacts {
        idle: idle.clone(),
        ..polls
    };
    let command = "cpupower idle-set --disable-by-latency 20".to_owned();
    assert_eq!(only(&deep, card()), (Subject::IdleStates, command));
    none(&HostFacts { idle, ..host() }, card());
}

#[test]
fn faults_of_kernels_by_version() {
    let tables = DeviceFacts {
        flow_cnts: vec![0, 4096, 0, 8192],
        accelerated_rfs: true,
        ..card()
    };
    let bound = DeviceFacts {
        bound_program: true,
        ..card()
    };
    let on = |kernel| HostFacts { kernel, ..host() };
    let command =
        "for f in /sys/class/net/eth0/queues/rx-*/rps_flow_cnt; do echo 8192 > \"$f\"; done";
    for kernel in [[6, 18, 0], [6, 18, 15], [6, 19, 0], [6, 19, 5]] {
        let expected = (Subject::KernelFault, command.to_owned());
        assert_eq!(only(&on(kernel), tables.clone()), expected);
    }
    for kernel in [[6, 17, 9], [6, 18, 16], [6, 19, 6], [7, 0, 0], [0, 0, 0]] {
        none(&on(kernel), tables.clone());
    }
    let accelerated_rfs = false;
    let plain = DeviceFacts {
        accelerated_rfs,
        ..tables
    };
    none(&on([6, 18, 0]), plain);
    assert_eq!(
        only(&on([6, 18, 44]), bound.clone()).0,
        Subject::KernelFault
    );
    none(&on([6, 12, 0]), bound);
}

#[test]
fn they_stand_in_the_order_of_gain() {
    let host = HostFacts {
        kernel: [6, 18, 0],
        irqbalance: true,
        busy_poll_usecs: 10,
        backlog_drops: 1,
        idle: Some(IdleState {
            name: "C6".into(),
            latency: 133,
        }),
        ..host()
    };
    let mut device = DeviceFacts {
        channels: Some(Channels {
            combined: 1,
            max_combined: 4,
            ..Channels::default()
        }),
        rss: Some([0].into()),
        node: Some(mask("0-2")),
        kernel_rps: vec!["rx-0/rps_cpus".into()],
        flow_cnts: vec![1, 2],
        accelerated_rfs: true,
        gro_off: true,
        rx_checksum_off: true,
        missed: 1,
        ..card()
    };
    device.pollers[1].cpu = Some(0);
    let subjects = recommendations(&host, &[device]);
    let subjects: Vec<Subject> = subjects.into_iter().map(|r| r.subject).collect();
    assert_eq!(
        subjects,
        [
            Subject::KernelFault,
            Subject::Channels,
            Subject::Rss,
            Subject::Interrupts,
            Subject::Numa,
            Subject::Irqbalance,
            Subject::KernelRps,
            Subject::Gro,
            Subject::RxChecksum,
            Subject::Ring,
            Subject::Backlog,
            Subject::Coalesce,
            Subject::IdleStates
        ]
    );
}
