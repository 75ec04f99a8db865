// SPDX-License-Identifier: MIT OR Apache-2.0
//! Options that contradict each other on any host: a start refuses them, and `rxsteer check` does so
//! before, in files.

use std::collections::BTreeSet;

use anyhow::{Result, bail, ensure};

use super::following::can_follow;
use super::mistakes::Mistakes;
use super::options::{Mode, Options};
use super::patterns::{Patterns, is_pattern};
use super::plan::{inline_ports, named_twice, which_device};
use crate::datapath::INLINE_PORTS;
use crate::datapath::hash::Hash;
use crate::host::sched::Class;

/// See the module's documentation.
#[derive(Debug, PartialEq, Eq)]
pub struct Contradiction {
    /// The options by their long names, and `devices`.
    pub keys: Vec<&'static str>,
    /// Why they can't be together, with what to change.
    pub why: String,
}

/// Fails if these options contradict each other.
///
/// # Errors
/// With each reason and what to change, a line each.
pub(super) fn none_in(options: &Options) -> Result<(), Mistakes> {
    Mistakes::none_in(contradictions(options).into_iter().map(|found| found.why))
}

/// The contradictions in these options.
pub fn contradictions(options: &Options) -> Vec<Contradiction> {
    let mut found = with_pin(options);
    let mut add = |keys: &[&'static str], outcome: Result<()>| {
        found.extend(outcome.err().map(|e| Contradiction {
            keys: keys.to_vec(),
            why: format!("{e:#}"),
        }));
    };
    add(&["devices", "mode"], Patterns::of(options).map(|_| ()));
    add(&["devices"], each_device_once(options));
    add(&["queue", "devices"], queues_have_devices(options));
    add(&["inline-ports"], inline_ports(options).map(|_| ()));
    add(&["inline-ports", "hash"], ports_are_looked_at(options));
    add(
        &["hash", "policy", "follow-nat"],
        sockets_can_be_followed(options),
    );
    add(&["hash", "mode"], devices_hash_is_there(options));
    found
}

/// What stands against `--pin`.
fn with_pin(options: &Options) -> Vec<Contradiction> {
    if options.pin.is_none() {
        return Vec::new();
    }
    let softirq = "softirq mode ends with its process: with --pin, name devices that native mode can \
               steer, or leave --pin";
    let patterns = options.devices.iter().any(|name| is_pattern(name));
    let all = [
        (
            options.dry_run,
            "dry-run",
            "--dry-run steers nothing that could go on: leave --pin",
        ),
        (
            options.prepare,
            "prepare",
            "--prepare puts settings back at the end, and pinned steering needs them: change them \
             for good (`rxsteer doctor` names them), or leave --pin",
        ),
        (
            options.follow_nat,
            "follow-nat",
            "--follow-nat has programs at tc ingress, which are not pinned: leave it or --pin",
        ),
        (
            options.hash == Hash::Device,
            "hash",
            "--hash device binds the program to its device, which can't be pinned safely: leave it \
             or --pin",
        ),
        (
            options.backlog_sched == Class::Fifo,
            "backlog-sched",
            "--backlog-sched fifo needs a process that keeps the threads' budget: take another class, \
             or leave --pin",
        ),
        (options.mode == Mode::Softirq, "mode", softirq),
        (patterns, "devices", softirq),
    ];
    let stand = all.into_iter().filter(|(stands, ..)| *stands);
    let contradiction = |(_, key, why): (_, _, &str)| Contradiction {
        keys: vec![key, "pin"],
        why: why.to_owned(),
    };
    stand.map(contradiction).collect()
}

fn each_device_once(options: &Options) -> Result<()> {
    let mut names = BTreeSet::new();
    match options.devices.iter().find(|name| !names.insert(*name)) {
        Some(name) => bail!(named_twice(name)),
        None => Ok(()),
    }
}

/// The default ports are for the other hashes.
fn ports_are_looked_at(options: &Options) -> Result<()> {
    let ports = &options.inline_ports;
    ensure!(
        options.hash != Hash::Device
            || *ports == INLINE_PORTS
            || ports.iter().all(|port| *port == 0),
        "--inline-ports has no effect with --hash device, which does not look at ports: leave one of \
         them"
    );
    Ok(())
}

/// Of several devices, `--queue` names one. A pattern may match none.
fn queues_have_devices(options: &Options) -> Result<()> {
    let mut named = options.queues.iter().filter_map(|q| q.device.as_deref());
    if let Some(pattern) = named.find(|name| is_pattern(name)) {
        bail!("{pattern} stands for several devices: name the one that the queue belongs to");
    }
    let names = options.devices.iter().filter(|name| !is_pattern(name));
    let names: Vec<&str> = names.map(String::as_str).collect();
    match options.queues.iter().any(|queue| queue.device.is_none()) && names.len() > 1 {
        true => bail!(which_device(&names)),
        false => Ok(()),
    }
}

fn sockets_can_be_followed(options: &Options) -> Result<()> {
    match options.follow_nat || options.policy.follows() {
        true => can_follow(options.hash, options.follow_nat),
        false => Ok(()),
    }
}

/// The kernel's RPS asks only about packets that come without a hash.
fn devices_hash_is_there(options: &Options) -> Result<()> {
    let softirq =
        options.mode == Mode::Softirq || options.devices.iter().any(|name| is_pattern(name));
    ensure!(
        options.hash != Hash::Device || !softirq,
        "softirq mode, also that of patterns, turns the device's hash off: leave `--hash device`, or use `--mode \
         native` and no pattern"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::options::{Pin, QueueCpus, RpsCpus};
    use crate::datapath::policy::Policy;

    fn keys(options: &Options) -> Vec<Vec<&'static str>> {
        let found = contradictions(options).into_iter();
        found.map(|found| found.keys).collect()
    }

    #[test]
    fn what_a_start_refuses_on_any_host() {
        let plain = || Options::new(["eth0"]);
        let pinned = || Options {
            pin: Some(Pin::Default),
            ..plain()
        };
        let queue = || QueueCpus {
            device: None,
            queue: 0,
            cpus: RpsCpus::Auto,
        };
        let symmetric = || Options {
            hash: Hash::Symmetric,
            policy: Policy::RFS,
            ..plain()
        };
        // The controls: each lacks one of the two.
        for options in [
            plain(),
            pinned(),
            Options {
                prepare: true,
                ..plain()
            },
            Options {
                queues: vec![queue()],
                ..plain()
            },
            Options::new(["eth0", "eth1", "veth*"]),
            Options {
                queues: vec![QueueCpus {
                    device: Some("eth0".to_owned()),
                    ..queue()
                }],
                ..Options::new(["eth*"])
            },
            Options {
                policy: Policy::RPS,
                ..symmetric()
            },
            Options {
                follow_nat: true,
                ..symmetric()
            },
            Options {
                hash: Hash::Device,
                mode: Mode::Native,
                policy: Policy::RPS,
                ..plain()
            },
        ] {
            assert_eq!(keys(&options), [[""; 0]; 0], "{options:?}");
        }
        for (options, expected) in [
            (
                Options {
                    prepare: true,
                    ..pinned()
                },
                &["prepare", "pin"][..],
            ),
            (
                Options {
                    mode: Mode::Softirq,
                    ..pinned()
                },
                &["mode", "pin"],
            ),
            (
                Options {
                    follow_nat: true,
                    ..pinned()
                },
                &["follow-nat", "pin"],
            ),
            (
                Options {
                    mode: Mode::Native,
                    ..Options::new(["veth*"])
                },
                &["devices", "mode"],
            ),
            (Options::new(["eth0", "eth0"]), &["devices"]),
            (
                Options {
                    queues: vec![queue()],
                    ..Options::new(["eth0", "eth1"])
                },
                &["queue", "devices"],
            ),
            (
                Options {
                    queues: vec![QueueCpus {
                        device: Some("eth*".to_owned()),
                        ..queue()
                    }],
                    ..Options::new(["eth*"])
                },
                &["queue", "devices"],
            ),
            (
                Options {
                    inline_ports: (1..=17).collect(),
                    ..plain()
                },
                &["inline-ports"],
            ),
            (
                Options {
                    hash: Hash::Device,
                    policy: Policy::RPS,
                    inline_ports: vec![53],
                    ..plain()
                },
                &["inline-ports", "hash"],
            ),
            (symmetric(), &["hash", "policy", "follow-nat"]),
            (
                Options {
                    hash: Hash::Device,
                    follow_nat: true,
                    mode: Mode::Native,
                    ..plain()
                },
                &["hash", "policy", "follow-nat"],
            ),
            (
                Options {
                    hash: Hash::Device,
                    policy: Policy::RPS,
                    mode: Mode::Softirq,
                    ..plain()
                },
                &["hash", "mode"],
            ),
        ] {
            assert_eq!(keys(&options), [expected], "{options:?}");
        }
        let both = Options {
            prepare: true,
            dry_run: true,
            ..pinned()
        };
        assert_eq!(keys(&both).len(), 2);
        assert_eq!(none_in(&both).unwrap_err().to_string().lines().count(), 2);
    }
}
