// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the settings of NAPI instances amount to.

use serde::Serialize;

use crate::host::device::Device;
use crate::host::netdev::{Settings, Threaded};
use crate::host::shell::quoted;
use crate::napi::{self, Instance};

/// The effect of settings.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Advice {
    /// Ids of the instances with these settings; empty if all have them.
    pub ids: Vec<u32>,
    /// Description of the effect.
    pub what: String,
}

/// Effects of the settings of a device's instances.
pub(super) fn of_napi(device: &Device, instances: &[Instance]) -> Vec<Advice> {
    let what = match device.napis {
        _ if !device.up => return Vec::new(),
        _ if !instances.is_empty() => {
            let ids = Vec::new();
            let bypass = device.bypasses_napi().map(|what| Advice { ids, what });
            let settings = advice(&device.name, instances);
            return bypass.into_iter().chain(settings).collect();
        }
        Some(_) => format!(
            "{}: no application can poll it",
            napi::no_instances(&device.name, &device.driver)
        ),
        None => "the kernel does not tell whether there are instances (Linux 6.8 does)".to_owned(),
    };
    vec![Advice {
        ids: Vec::new(),
        what,
    }]
}

/// Effects of a device's settings, each once.
fn advice(device: &str, instances: &[Instance]) -> Vec<Advice> {
    let mut advice: Vec<Advice> = Vec::new();
    for instance in instances {
        for what in amounts_to(device, &instance.settings) {
            match advice.iter_mut().find(|known| known.what == what) {
                Some(known) => known.ids.extend(instance.id),
                None => advice.push(Advice {
                    ids: instance.id.into_iter().collect(),
                    what,
                }),
            }
        }
    }
    for known in &mut advice {
        if known.ids.len() == instances.len() {
            known.ids.clear();
        }
    }
    advice
}

/// Effects of an instance's settings, by napi_complete_done(), busy_poll_stop() and
/// napi_suspend_irqs() in net/core/dev.c, and Documentation/networking/napi.rst.
fn amounts_to(device: &str, s: &Settings) -> Vec<String> {
    let polls = s.defer_hard_irqs.unwrap_or(0);
    let timer = s.gro_flush_timeout.unwrap_or(0);
    let set = |options: &str| format!("`rxsteer napi {} {options}`", quoted(device));
    let mut words = vec![match (polls, timer) {
        (0, 0) => format!(
            "interrupts are not deferred, which is the default. Only `rxsteer poll --prefer` needs \
             that; {} defers them",
            set("--defer-hard-irqs 2 --gro-flush-timeout 200000")
        ),
        (polls, 0) => format!(
            "the interrupt is meant to stay masked for {polls} polls that find nothing, but no timer \
             polls: it has no effect; {} sets one",
            set("--gro-flush-timeout 200000")
        ),
        (0, timer) => format!(
            "GRO may hold packets for {} although interrupts come, and `rxsteer poll --prefer` has \
             no effect; {} defers them",
            us(timer),
            set("--defer-hard-irqs 2")
        ),
        (polls, timer) => format!(
            "the interrupt stays masked until {polls} polls in a row found nothing, and a timer \
             polls every {}: a packet that nobody polls for waits so long at most. Applications \
             that prefer busy polling are not interrupted",
            us(timer)
        ),
    }];
    match s.irq_suspend_timeout {
        None | Some(0) => {}
        Some(suspend) if polls > 0 && timer > 0 => words.push(format!(
            "the interrupt is suspended for {} at most while an epoll instance that prefers busy \
             polling finds packets",
            us(suspend)
        )),
        Some(_) => words.push(
            "irq-suspend-timeout has no effect without defer-hard-irqs and gro-flush-timeout"
                .to_owned(),
        ),
    }
    match s.threaded {
        Some(Threaded::On) => words.push(
            "a kernel thread polls, which may run on any CPU where it is not bound: packets are \
             received where it runs"
                .to_owned(),
        ),
        Some(Threaded::BusyPoll) => words.push(
            "a kernel thread polls without a pause: an application finds its queue taken, and does \
             not poll it"
                .to_owned(),
        ),
        Some(Threaded::Off) | None => {}
    }
    words
}

/// Nanoseconds as text.
fn us(ns: u64) -> String {
    format!("{} us", ns as f64 / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instance(id: u32, settings: Settings) -> Instance {
        Instance {
            id: Some(id),
            rx_queues: Vec::new(),
            rx_queues_by_order: false,
            irq: None,
            irq_cpu: None,
            thread: None,
            settings,
            device_wide: Vec::new(),
            applications: Vec::new(),
        }
    }

    #[test]
    fn settings_amount_to_something_only_together() {
        let settings = |polls, timer, suspend| Settings {
            defer_hard_irqs: Some(polls),
            gro_flush_timeout: Some(timer),
            irq_suspend_timeout: Some(suspend),
            threaded: None,
        };
        let mut said = std::collections::HashSet::new();
        for (settings, words) in [
            (
                settings(0, 0, 0),
                &["interrupts are not deferred, which is the default"][..],
            ),
            (settings(2, 0, 0), &["no timer polls: it has no effect"]),
            (
                settings(0, 200_000, 0),
                &["GRO may hold packets for 200 us"],
            ),
            (
                settings(2, 200_500, 0),
                &["until 2 polls in a row found nothing, and a timer polls every 200.5 us"],
            ),
            (
                settings(2, 200_000, 20_000_000),
                &["are not interrupted", "suspended for 20000 us at most"],
            ),
            (
                settings(0, 0, 20_000_000),
                &[
                    "needs that; `rxsteer napi eth0",
                    "irq-suspend-timeout has no effect",
                ],
            ),
            (
                Settings {
                    threaded: Some(Threaded::On),
                    ..Settings::default()
                },
                &[
                    "interrupts are not deferred",
                    "a kernel thread polls, which",
                ],
            ),
        ] {
            let amount = amounts_to("eth0", &settings);
            assert_eq!(amount.len(), words.len(), "{amount:?}");
            for (amount, words) in amount.iter().zip(words) {
                assert!(amount.contains(words), "not {words:?}: {amount}");
            }
            said.insert(amount);
        }
        assert_eq!(said.len(), 7);
    }

    #[test]
    fn what_instances_have_in_common_is_said_once() {
        let deferred = Settings {
            defer_hard_irqs: Some(2),
            gro_flush_timeout: Some(1000),
            ..Settings::default()
        };
        let ids = |instances: &[Instance]| -> Vec<_> {
            advice("eth0", instances)
                .into_iter()
                .map(|a| a.ids)
                .collect()
        };
        let alike = [1, 2].map(|id| instance(id, deferred));
        assert_eq!(ids(&alike), [Vec::<u32>::new()]);
        let other = [instance(1, deferred), instance(2, Settings::default())];
        assert_eq!(ids(&other), [[1], [2]]);
    }
}
