// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer advise` in words.

use std::fmt::Write;

use serde::Serialize;

use super::prediction::{Gain, LITTLE_TRAFFIC, Limit, Verdict};
use super::tunnels::Kind;
use super::watch::{FlowsSeen, Seen, Watched};
use crate::cli::table::table;
use crate::host::cpumask::CpuMask;
use crate::host::shell::{quoted, zero_queue_files};

/// The answer of `rxsteer advise`.
#[derive(Debug, Serialize)]
pub struct Advice {
    /// What was seen.
    #[serde(flatten)]
    pub seen: Seen,
    /// The flows inside of tunnels; null if not examined.
    pub inside: Option<FlowsSeen>,
    /// The verdict, with its figures.
    pub verdict: Verdict,
    /// Predicted rate over the present one; 1 where steering gains nothing.
    pub ratio: f64,
    /// What to run if steering helps.
    pub command: Option<String>,
    /// The verdict in words.
    pub sentence: String,
}

/// A number of packets.
pub(super) fn count(n: f64) -> String {
    match n {
        n if n < 9_999.5 => format!("{n:.0}"),
        n if n < 999_500.0 => format!("{:.0} k", n / 1e3),
        n => format!("{:.2} M", n / 1e6),
    }
}

/// A share as a percentage.
fn percent(share: f64) -> String {
    match 100.0 * share {
        p if p > 0.0 && p < 1.0 => format!("{p:.1} %"),
        p => format!("{p:.0} %"),
    }
}

/// The verdict, beginning with `yes`, `no` or `no answer`.
pub(super) fn sentence(seen: &Seen, inside: Option<&FlowsSeen>, verdict: &Verdict) -> String {
    match verdict {
        Verdict::Gain(gain) => format!("yes: {}. {}", more(seen, gain), limit(seen, gain.limit)),
        Verdict::NoTraffic => no_traffic(seen),
        Verdict::Room(poller) => format!(
            "no: CPU {}, which receives, has {} of its time left; steering would add a hop and gain \
             nothing",
            poller.cpu,
            percent(poller.idle)
        ),
        Verdict::NotReceiving(poller) => format!(
            "no: CPU {}, which receives, has no time left, but receiving takes only {} of it. Move \
             its other work to other CPUs (`taskset`), or the interrupt",
            poller.cpu,
            percent(poller.polls)
        ),
        Verdict::NoTime { cpus: 0, .. } => {
            "no: the polling CPU has no time left, and there is no other CPU to steer to".to_owned()
        }
        Verdict::NoTime { cpus, idle } => format!(
            "no: the polling CPU has no time left, but neither has any other: of the time of {cpus} \
             CPU{} {} is left",
            if *cpus == 1 { "" } else { "s" },
            percent(*idle)
        ),
        Verdict::KernelRps { cpu, idle } => format!(
            "no answer: kernel RPS moves packets already, and CPU {cpu} has {} of its time left. What \
             the packets cost without it can't be seen; switch it off and run this again: {}",
            percent(*idle),
            switch_off(seen)
        ),
        Verdict::OneFlow { share } => one_flow(seen, inside, *share),
        Verdict::DearHop { packet, hop } => format!(
            "no: a packet takes {:.2} us of the polling CPU, and a redirect alone takes {:.2} us",
            packet * 1e6,
            hop * 1e6
        ),
        Verdict::Little(gain) => format!(
            "no: {}, which is within the error of this prediction. {}",
            more(seen, gain),
            limit(seen, gain.limit)
        ),
    }
}

fn no_traffic(seen: &Seen) -> String {
    let packets = |watched: &Watched| watched.packets_per_second * seen.seconds;
    let packets: f64 = seen.devices.iter().map(packets).sum();
    let many = match packets.round() {
        0.0 => "no packet".to_owned(),
        1.0 => "one packet".to_owned(),
        n => format!("{} packets", count(n)),
    };
    let devices = seen.devices.iter().map(|watched| &watched.device[..]);
    format!(
        "no answer: {many} came to {} in {} s, and a judgement takes {LITTLE_TRAFFIC:.0} packets/s at \
         least. Run this again under the load that matters: `rxsteer advise {}`",
        names(seen),
        (seen.seconds * 10.0).round() / 10.0,
        devices.map(quoted).collect::<Vec<_>>().join(" ")
    )
}

/// What can be said of a device without traffic.
fn without_traffic(watched: &Watched, nr_cpus: usize) -> String {
    let name = &watched.device;
    let queues = watched.rx_queues;
    let of = match watched.most_queues {
        Some(most) if most > queues => {
            let word = quoted(name);
            format!(" of {most} (`ethtool -L {word} combined {most}` sets all up)")
        }
        _ => String::new(),
    };
    let spread: &str = match queues as usize >= nr_cpus {
        true => "the device itself can spread flows over all of them",
        false => &format!("without steering its packets come to at most {queues} of them"),
    };
    let rps = match watched.kernel_rps.first() {
        Some(file) => format!("kernel RPS is on ({file}), which `rxsteer run` refuses"),
        None => "kernel RPS is off".to_owned(),
    };
    format!(
        "{name}: {queues} receive queue{}{of} for {nr_cpus} CPUs: {spread}; {rps}",
        if queues == 1 { "" } else { "s" }
    )
}

fn names(seen: &Seen) -> String {
    let names = seen.devices.iter().map(|watched| &watched.device[..]);
    names.collect::<Vec<_>>().join(", ")
}

fn more(seen: &Seen, gain: &Gain) -> String {
    let now: f64 = seen.pollers.iter().map(|p| p.packets_per_second).sum();
    format!(
        "with steering about {:.1} times as many packets, {}/s instead of {}/s, if so many come",
        gain.ratio,
        count(gain.packets_per_second),
        count(now)
    )
}

fn limit(seen: &Seen, limit: Limit) -> String {
    match limit {
        Limit::Poller => {
            "The polling CPU is then the limit: it still receives and redirects each packet"
                .to_owned()
        }
        Limit::Helpers => {
            let cpus = seen.helpers.iter().map(|helper| helper.cpu);
            let cpus: CpuMask = cpus.collect();
            format!("The time of CPUs {cpus} is then the limit")
        }
        Limit::Flow => "The CPU of the busiest flow is then the limit".to_owned(),
        Limit::Merged => {
            "The polling CPU is then the limit: flows that GRO merges stay there. `--mode softirq` moves \
             what GRO has merged"
                .to_owned()
        }
    }
}

fn one_flow(seen: &Seen, inside: Option<&FlowsSeen>, share: f64) -> String {
    let mut text = format!(
        "no: one flow has {} of the packets, and a flow is processed on one CPU at a time",
        percent(share)
    );
    let flows = inside.or(seen.flows.as_ref());
    match flows.and_then(|flows| flows.busiest_tunnel) {
        Some(kind @ (Kind::Esp | Kind::Wireguard)) => {
            let several = match kind {
                Kind::Esp => "several security associations would be several flows",
                _ => "several peers would be several flows",
            };
            let _ = write!(
                text,
                ". It is a tunnel ({}), encrypted: what is in it can't be seen; {several}",
                kind.name()
            );
        }
        Some(kind) => {
            let _ = write!(
                text,
                ". It is a tunnel ({}), and what is in it is one flow as well",
                kind.name()
            );
        }
        None => {}
    }
    text
}

/// The command that switches kernel RPS off.
fn switch_off(seen: &Seen) -> String {
    let of_device = |watched: &Watched| zero_queue_files(&watched.device, &watched.kernel_rps);
    let on = seen
        .devices
        .iter()
        .filter(|watched| !watched.kernel_rps.is_empty());
    format!("`{}`", on.map(of_device).collect::<Vec<_>>().join("; "))
}

/// The answer as text; ends with a newline.
pub(super) fn render(advice: &Advice) -> String {
    let seen = &advice.seen;
    let mut out = String::new();
    for watched in &seen.devices {
        let _ = writeln!(out, "{}", device(watched));
    }
    for line in facts(advice) {
        let _ = writeln!(out, "{line}");
    }
    if advice.verdict == Verdict::NoTraffic {
        for watched in &seen.devices {
            let _ = writeln!(out, "{}", without_traffic(watched, seen.cpus.len()));
        }
    }
    let _ = writeln!(out, "\n{}\n", cpus(seen));
    let _ = writeln!(out, "{}", advice.sentence);
    if let Some(command) = &advice.command {
        let _ = writeln!(out, "\n  {command}");
    }
    out
}

fn device(watched: &Watched) -> String {
    let how = match (&watched.dry_run, &watched.not_counted) {
        (Some(mode), _) => format!("counted by a dry run in {mode} mode"),
        (None, Some(why)) => format!("read from /proc and /sys alone ({why})"),
        (None, None) => "read from /proc and /sys alone".to_owned(),
    };
    let dropped = match watched.drops_per_second > 0.0 {
        true => format!(", {} dropped/s", count(watched.drops_per_second)),
        false => String::new(),
    };
    format!(
        "{} ({} receive queue{}): {} packets/s{dropped}; {how}",
        watched.device,
        watched.rx_queues,
        if watched.rx_queues == 1 { "" } else { "s" },
        count(watched.packets_per_second)
    )
}

/// What else was seen, a line each.
fn facts(advice: &Advice) -> Vec<String> {
    let seen = &advice.seen;
    let mut lines = Vec::new();
    for poller in &seen.pollers {
        lines.push(format!(
            "CPU {} polls: {} packets/s take {} of its time, {} is left",
            poller.cpu,
            count(poller.packets_per_second),
            percent(poller.polls),
            percent(poller.idle)
        ));
    }
    match &seen.flows {
        Some(flows) if flows.number > 0 => lines.push(flows_line("", flows)),
        Some(_) => {}
        None => lines.push("the flows were not counted: one flow may have all packets".to_owned()),
    }
    let flows = advice.inside.as_ref().or(seen.flows.as_ref());
    if let Some(flows) = flows.filter(|f| f.merged_share > 0.0) {
        lines.push(format!(
            "flows that GRO merges have {} of the packets, and stay on the CPU that polls",
            percent(flows.merged_share)
        ));
    }
    if let Some(flows) = seen.flows.as_ref().filter(|f| !f.tunnels.is_empty()) {
        let kinds = flows.tunnels.iter();
        let kinds = kinds.map(|(kind, share)| format!("{} {}", kind.name(), percent(*share)));
        lines.push(format!(
            "tunnels have of the packets: {}",
            kinds.collect::<Vec<_>>().join(", ")
        ));
    }
    if let Some(inside) = &advice.inside {
        lines.push(flows_line("inside of the tunnels: ", inside));
    }
    if seen.devices.iter().any(|d| !d.kernel_rps.is_empty()) {
        let interrupts = seen.cpus.iter().map(|cpu| cpu.rps_interrupts_per_second);
        lines.push(format!(
            "kernel RPS is on, with {} interrupts/s to other CPUs",
            count(interrupts.sum())
        ));
    }
    lines
}

fn flows_line(place: &str, flows: &FlowsSeen) -> String {
    let name = match &flows.busiest {
        Some(name) => format!(" ({name})"),
        None => String::new(),
    };
    format!(
        "{place}{} flow{}, of which the busiest{name} has {} of the packets",
        flows.number,
        if flows.number == 1 { "" } else { "s" },
        percent(flows.busiest_share)
    )
}

fn cpus(seen: &Seen) -> String {
    let mut table = table([
        "CPU",
        "user",
        "system",
        "softirq",
        "idle",
        "packets/s",
        "squeezed/s",
        "dropped/s",
    ]);
    for cpu in &seen.cpus {
        table.add_row([
            cpu.cpu.to_string(),
            percent(cpu.user),
            percent(cpu.system),
            percent(cpu.softirq),
            percent(cpu.idle),
            count(cpu.packets_per_second),
            count(cpu.squeezes_per_second),
            count(cpu.drops_per_second),
        ]);
    }
    table.trim_fmt()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::cli::advise::prediction::{Helper, Poller};
    use crate::cli::advise::watch::Cpu;
    use crate::host::device::RxMode;

    const POLLER: Poller = Poller {
        cpu: 4,
        packets_per_second: 412_345.0,
        polls: 0.9,
        idle: 0.02,
    };

    fn seen() -> Seen {
        let cpu = |cpu| Cpu {
            cpu,
            user: 0.1,
            system: 0.05,
            softirq: 0.004,
            idle: 0.8,
            packets_per_second: 1_234_567.0,
            squeezes_per_second: 12.0,
            drops_per_second: 0.0,
            rps_interrupts_per_second: 70.0,
        };
        Seen {
            seconds: 10.0,
            cpus: vec![cpu(4), cpu(5)],
            devices: vec![Watched {
                device: "eth0".to_owned(),
                rx_queues: 1,
                most_queues: Some(4),
                dry_run: Some("native".to_owned()),
                not_counted: None,
                packets_per_second: 412_345.0,
                drops_per_second: 17.0,
                kernel_rps: Vec::new(),
            }],
            pollers: vec![POLLER],
            helpers: [5, 6].map(|cpu| Helper { cpu, idle: 0.9 }).into(),
            flows: Some(FlowsSeen {
                number: 900,
                busiest: Some("udp/192.0.2.1:1024/9".to_owned()),
                busiest_share: 0.002,
                busiest_tunnel: None,
                merged_share: 0.4,
                tunnels: BTreeMap::new(),
            }),
            mode: RxMode::Native,
        }
    }

    #[test]
    fn each_verdict_has_its_sentence() {
        let gain = Gain {
            packets_per_second: 1_402_000.0,
            ratio: 3.4,
            limit: Limit::Helpers,
        };
        for (verdict, words) in [
            (
                Verdict::Gain(gain),
                "yes: with steering about 3.4 times as many packets, 1.40 M/s instead of 412 k/s, if \
                 so many come. The time of CPUs 5-6 is then the limit",
            ),
            (
                Verdict::NoTraffic,
                "no answer: 4.12 M packets came to eth0 in 10 s, and a judgement takes 10 packets/s at \
                 least. Run this again under the load that matters: `rxsteer advise eth0`",
            ),
            (
                Verdict::Room(Poller {
                    idle: 0.62,
                    ..POLLER
                }),
                "no: CPU 4, which receives, has 62 % of its time left; steering would add a hop and \
                 gain nothing",
            ),
            (
                Verdict::NotReceiving(Poller {
                    polls: 0.12,
                    ..POLLER
                }),
                "no: CPU 4, which receives, has no time left, but receiving takes only 12 % of it.",
            ),
            (
                Verdict::NoTime {
                    cpus: 3,
                    idle: 0.02,
                },
                "no: the polling CPU has no time left, but neither has any other: of the time of 3 \
                 CPUs 2 % is left",
            ),
            (
                Verdict::NoTime { cpus: 0, idle: 0.0 },
                "there is no other CPU to steer to",
            ),
            (
                Verdict::OneFlow { share: 0.97 },
                "no: one flow has 97 % of the packets, and a flow is processed on one CPU at a time",
            ),
            (
                Verdict::DearHop {
                    packet: 0.4e-6,
                    hop: 0.57e-6,
                },
                "no: a packet takes 0.40 us of the polling CPU, and a redirect alone takes 0.57 us",
            ),
            (
                Verdict::Little(Gain {
                    ratio: 1.04,
                    limit: Limit::Poller,
                    ..gain
                }),
                "which is within the error of this prediction. The polling CPU is then the limit",
            ),
            (
                Verdict::Little(Gain {
                    limit: Limit::Merged,
                    ..gain
                }),
                "The polling CPU is then the limit: flows that GRO merges stay there. `--mode softirq` \
                 moves what GRO has merged",
            ),
        ] {
            let text = sentence(&seen(), None, &verdict);
            assert!(text.contains(words), "not {words:?} in {text}");
            assert_eq!(text.starts_with("yes"), verdict.is_yes());
        }
    }

    #[test]
    fn a_tunnel_that_is_the_only_flow_is_named() {
        let with = |kind| {
            let mut seen = seen();
            seen.flows.as_mut().unwrap().busiest_tunnel = Some(kind);
            sentence(&seen, None, &Verdict::OneFlow { share: 1.0 })
        };
        assert!(with(Kind::Esp).contains("several security associations would be several flows"));
        assert!(with(Kind::Wireguard).contains("several peers would be several flows"));
        assert!(with(Kind::Vxlan).contains("(VXLAN), and what is in it is one flow as well"));
    }

    #[test]
    fn kernel_rps_is_named_with_the_way_to_switch_it_off() {
        let mut seen = seen();
        seen.devices[0].kernel_rps = vec!["rx-0/rps_cpus".to_owned()];
        let text = sentence(&seen, None, &Verdict::KernelRps { cpu: 5, idle: 0.01 });
        let command =
            "`for f in /sys/class/net/eth0/queues/rx-0/rps_cpus; do echo 0 > \"$f\"; done`";
        assert!(
            text.starts_with("no answer") && text.ends_with(command),
            "{text}"
        );
    }

    #[test]
    fn without_traffic_what_is_known_is_said() {
        let quiet = |packets: f64| {
            let mut seen = seen();
            seen.devices[0].packets_per_second = packets / seen.seconds;
            seen
        };
        let many = |packets| sentence(&quiet(packets), None, &Verdict::NoTraffic);
        assert!(many(0.0).starts_with("no answer: no packet came to eth0 in 10 s"));
        assert!(many(1.0).starts_with("no answer: one packet came "));
        assert!(many(37.0).starts_with("no answer: 37 packets came "));
        let advice = |seen: Seen, verdict| {
            render(&Advice {
                sentence: sentence(&seen, None, &verdict),
                seen,
                inside: None,
                verdict,
                ratio: 1.0,
                command: None,
            })
        };
        let line = "\neth0: 1 receive queue of 4 (`ethtool -L eth0 combined 4` sets all up) for 2 CPUs: \
                    without steering its packets come to at most 1 of them; kernel RPS is off\n";
        let text = advice(quiet(0.0), Verdict::NoTraffic);
        assert!(text.contains(line), "{text}");
        let mut other = quiet(0.0);
        let device = &mut other.devices[0];
        (device.rx_queues, device.most_queues) = (2, Some(2));
        device.kernel_rps = vec!["rx-0/rps_cpus".to_owned()];
        let line = "\neth0: 2 receive queues for 2 CPUs: the device itself can spread flows over all of \
                    them; kernel RPS is on (rx-0/rps_cpus), which `rxsteer run` refuses\n";
        let text = advice(other, Verdict::NoTraffic);
        assert!(text.contains(line), "{text}");
        // The control: with traffic the verdict says more.
        let text = advice(seen(), Verdict::OneFlow { share: 1.0 });
        assert!(!text.contains("for 2 CPUs"), "{text}");
    }

    #[test]
    fn the_facts_stand_before_the_verdict() {
        let mut seen = seen();
        let outside = seen.flows.as_mut().unwrap();
        outside.tunnels = BTreeMap::from([(Kind::Vxlan, 0.95)]);
        let advice = Advice {
            inside: seen.flows.clone(),
            verdict: Verdict::OneFlow { share: 1.0 },
            ratio: 1.0,
            command: Some("rxsteer run eth0 --tunnels vxlan".to_owned()),
            sentence: "yes: because".to_owned(),
            seen,
        };
        assert_eq!(
            render(&advice),
            "\
eth0 (1 receive queue): 412 k packets/s, 17 dropped/s; counted by a dry run in native mode
CPU 4 polls: 412 k packets/s take 90 % of its time, 2 % is left
900 flows, of which the busiest (udp/192.0.2.1:1024/9) has 0.2 % of the packets
flows that GRO merges have 40 % of the packets, and stay on the CPU that polls
tunnels have of the packets: VXLAN 95 %
inside of the tunnels: 900 flows, of which the busiest (udp/192.0.2.1:1024/9) has 0.2 % of the packets

 CPU  user  system  softirq  idle  packets/s  squeezed/s  dropped/s
   4  10 %     5 %    0.4 %  80 %     1.23 M          12          0
   5  10 %     5 %    0.4 %  80 %     1.23 M          12          0

yes: because

  rxsteer run eth0 --tunnels vxlan
"
        );
    }
}
