// SPDX-License-Identifier: MIT OR Apache-2.0
//! The answer of `rxsteer doctor` as text.

use std::fmt::Write;

use super::diagnosis::{Diagnosis, Host};
use crate::host::device::RxMode;
use crate::host::shell::quoted;

/// The answer as text; ends with a newline.
pub fn render(diagnosis: &Diagnosis) -> String {
    let mut out = String::new();
    let host = &diagnosis.host;
    let _ = match host.missing.is_empty() {
        true => writeln!(
            out,
            "this host (Linux {}) has all that steering needs",
            host.release
        ),
        false => writeln!(
            out,
            "this host (Linux {}) can't steer; it lacks",
            host.release
        ),
    };
    for missing in &host.missing {
        let _ = writeln!(out, "  {}: {}", missing.what, missing.how_to_get);
    }
    for line in busy_polling(host).iter().chain(&host.not_put_back) {
        let _ = writeln!(out, "{line}");
    }
    for device in &diagnosis.devices {
        let _ = writeln!(
            out,
            "\n{} ({}{} receive queue{}) {}",
            device.device,
            match device.driver.as_str() {
                "" => String::new(),
                driver => format!("{driver}, "),
            },
            device.rx_queues,
            if device.rx_queues == 1 { "" } else { "s" },
            match device.mode {
                _ if device.steered_by.is_some() => format!(
                    "is steered by {}",
                    device.steered_by.as_deref().unwrap_or_default()
                ),
                Some(mode) => format!("can be steered, in {mode} mode"),
                None => "can't be steered as it is".to_owned(),
            }
        );
        // The chosen mode's objections only; without one, those of all modes.
        let either = match device.mode {
            Some(RxMode::Native) => device.native.iter().collect(),
            Some(RxMode::Softirq) => device.softirq.iter().collect(),
            None => {
                let mut all = Vec::new();
                let modes = [&device.native, &device.softirq];
                for objection in modes.into_iter().flatten() {
                    if !all.contains(&objection) {
                        all.push(objection);
                    }
                }
                all
            }
        };
        for objection in either {
            let weight = if objection.fatal { "" } else { "a warning: " };
            let _ = writeln!(out, "  {weight}{objection}");
        }
        if device.mode == Some(RxMode::Softirq) && device.steered_by.is_none() {
            let against = device.native.iter().filter(|o| !device.softirq.contains(o));
            let against: Vec<_> = against.collect();
            for objection in &against {
                let _ = writeln!(out, "  against native mode: {objection}");
            }
            if against.is_empty() {
                let _ = writeln!(
                    out,
                    "  `--mode native` is possible, and better for routers, floods and servers of small \
                     datagrams: `rxsteer advise {}` estimates what it gains",
                    quoted(&device.device)
                );
            }
        }
        if let Some(words) = &device.nothing_to_gain {
            let _ = writeln!(out, "  {words}");
        }
        for advice in &device.napi {
            let ids: Vec<_> = advice.ids.iter().map(u32::to_string).collect();
            let whose = match ids.is_empty() {
                true => String::new(),
                false => format!(" {}", ids.join(", ")),
            };
            let _ = writeln!(out, "  NAPI{whose}: {}", advice.what);
        }
    }
    if !diagnosis.recommendations.is_empty() {
        let _ = writeln!(out, "\nwhat would help, in the order of gain");
    }
    for (number, advised) in (1..).zip(&diagnosis.recommendations) {
        let device = match &advised.device {
            Some(device) => format!("{device}: "),
            None => String::new(),
        };
        let _ = writeln!(out, "  {number}. {device}{}", advised.reason);
        let _ = writeln!(out, "     {}", advised.command);
    }
    out
}

fn busy_polling(host: &Host) -> Vec<String> {
    if !host.busy_polling {
        let no = "this kernel has no busy polling: it was built without CONFIG_NET_RX_BUSY_POLL";
        return vec![no.to_owned()];
    }
    let mut lines = vec!["this kernel has busy polling (`rxsteer poll`)".to_owned()];
    if !host.epoll_params {
        lines.push(
            "epoll instances poll only for the whole host (`rxsteer poll --host-wide`): their own \
             parameters need Linux 6.9"
                .to_owned(),
        );
    }
    if let Some(usecs) = host.busy_poll_usecs.filter(|usecs| *usecs > 0) {
        lines.push(format!(
            "net.core.busy_poll is {usecs}: poll(), select() and all epoll instances of this host \
             poll for {usecs} us"
        ));
    }
    lines
}
