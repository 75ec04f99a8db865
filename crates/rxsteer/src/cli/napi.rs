// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer napi` as text.

use std::fmt::Write;
use std::os::fd::AsFd;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use comfy_table::Table;

use super::program::{end_with_the_reader, print_answer, stop_signals};
use super::table::{align_left, table};
use crate::daemon::options::device_name;
use crate::host::netdev::{Settings, Threaded};
use crate::host::number::whole;
use crate::napi::{self, settings};
use crate::napi::{DeviceNapis, Napis, no_instances};

/// Options of `rxsteer napi`.
#[derive(Debug, Args)]
pub struct NapiArgs {
    /// Network devices, for example eth0; without, all that have NAPI instances
    #[arg(value_name = "DEVICE", value_parser = device_name)]
    pub devices: Vec<String>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// What to set, until stopped
    #[command(flatten)]
    pub set: Option<NapiSettings>,
}

impl NapiArgs {
    pub(super) fn run(self) -> Result<ExitCode> {
        match self.set {
            Some(set) => {
                let signals = stop_signals()?;
                settings::run(&self.devices, &set.into(), signals.as_fd())?;
            }
            None => {
                end_with_the_reader()?;
                print_answer(self.json, &napi::napis(&self.devices)?, render)?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Settings of all NAPI instances of the devices that are named.
#[derive(Debug, Args)]
#[group(multiple = true, requires = "devices", conflicts_with = "json")]
pub struct NapiSettings {
    /// Keep the interrupt masked until this number of consecutive polls found nothing
    ///
    /// A timer polls in between, so --gro-flush-timeout is required, too.
    #[arg(long, value_name = "POLLS", value_parser = whole(0, i32::MAX as u32, "polls"))]
    pub defer_hard_irqs: Option<u32>,

    /// Time from a poll to the timer's next poll while the interrupt is masked
    #[arg(long, value_name = "NANOSECONDS", value_parser = whole(0, u64::MAX, "nanoseconds"))]
    pub gro_flush_timeout: Option<u64>,

    /// Maximum time for which the interrupt is suspended while an application finds packets by
    /// epoll
    ///
    /// It takes effect if the two options above are set and the epoll instance prefers busy polling
    /// (Linux 6.13).
    #[arg(long, value_name = "NANOSECONDS", value_parser = whole(0, u64::MAX, "nanoseconds"))]
    pub irq_suspend_timeout: Option<u64>,

    /// Poll in a kernel thread instead of softirq; the threads are new and may run on any CPU
    #[arg(long, value_enum)]
    pub threaded: Option<Threaded>,
}

impl From<NapiSettings> for Settings {
    fn from(args: NapiSettings) -> Self {
        Self {
            defer_hard_irqs: args.defer_hard_irqs,
            gro_flush_timeout: args.gro_flush_timeout,
            irq_suspend_timeout: args.irq_suspend_timeout,
            threaded: args.threaded,
        }
    }
}

/// The answer as text; ends with a newline.
pub fn render(napis: &Napis) -> String {
    let mut out = String::new();
    let with_some = || napis.devices.iter().filter(|d| !d.instances.is_empty());
    if with_some().next().is_some() {
        let _ = writeln!(out, "{}", instances_table(with_some()).trim_fmt());
    } else if napis.devices.is_empty() {
        let _ = writeln!(
            out,
            "no device of this network namespace has NAPI instances"
        );
    }
    if let Some(table) = applications_table(napis) {
        let _ = writeln!(out, "\n{}", table.trim_fmt());
    }
    let notes = notes(napis);
    if !notes.is_empty() {
        let _ = writeln!(out, "\n{}", notes.join("\n"));
    }
    out.trim_start_matches('\n').to_owned()
}

fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or("-".to_owned(), |value| value.to_string())
}

fn instances_table<'a>(devices: impl Iterator<Item = &'a DeviceNapis>) -> Table {
    let mut table = table([
        "id",
        "device",
        "queues",
        "interrupt",
        "on CPU",
        "thread",
        "on CPUs",
        "defer-hard-irqs",
        "gro-flush-timeout",
        "irq-suspend-timeout",
        "threaded",
    ]);
    let ns = |timeout: Option<u64>| or_dash(timeout.map(|ns| format!("{ns} ns")));
    for (device, instance) in devices.flat_map(|d| d.instances.iter().map(move |i| (d, i))) {
        let queues: Vec<_> = instance.rx_queues.iter().map(u32::to_string).collect();
        let settings = instance.settings;
        let thread = instance.thread.as_ref();
        table.add_row([
            or_dash(instance.id),
            device.device.clone(),
            or_dash(Some(queues.join(",")).filter(|queues| !queues.is_empty())),
            or_dash(instance.irq),
            or_dash(instance.irq_cpu),
            or_dash(thread.map(|thread| thread.pid)),
            or_dash(thread.and_then(|thread| thread.cpus.as_ref())),
            or_dash(settings.defer_hard_irqs),
            ns(settings.gro_flush_timeout),
            ns(settings.irq_suspend_timeout),
            or_dash(settings.threaded),
        ]);
    }
    table
}

/// `None` if no instance has sockets.
fn applications_table(napis: &Napis) -> Option<Table> {
    let mut table = table(["id", "device", "process", "application", "sockets"]);
    align_left(&mut table, &[1, 3]);
    let known = napis.devices.iter().flat_map(|device| {
        let instances = device.instances.iter();
        instances.map(|i| (i.id, device.device.as_str(), &i.applications))
    });
    let unknown = napis.unknown.iter();
    let unknown = unknown.map(|unknown| (Some(unknown.id), "-", &unknown.applications));
    for (id, device, applications) in known.chain(unknown) {
        for application in applications {
            table.add_row([
                or_dash(id),
                device.to_owned(),
                application.pid.to_string(),
                application.comm.clone(),
                application.sockets.to_string(),
            ]);
        }
    }
    (table.row_iter().count() > 0).then_some(table)
}

/// Unknown facts and the reasons, a line each.
fn notes(napis: &Napis) -> Vec<String> {
    let mut notes = Vec::new();
    for device in &napis.devices {
        let name = &device.device;
        let Some(first) = device.instances.first() else {
            notes.push(no_instances(name, &device.driver));
            continue;
        };
        if first.id.is_none() {
            notes.push(format!(
                "{name}: the kernel does not tell the ids (Linux 6.8 does); a line for each receive \
                 queue"
            ));
        } else if first.rx_queues_by_order {
            notes.push(format!(
                "{name}: the driver does not tell the queues; they are in the order of the ids"
            ));
        } else if device.instances.iter().all(|i| i.rx_queues.is_empty()) {
            notes.push(format!("{name}: the driver does not tell the queues"));
        }
        if !first.device_wide.is_empty() {
            notes.push(format!(
                "{name}: {}: the device's, as the kernel does not tell an instance's (Linux 6.13, \
                 threaded 6.17)",
                first.device_wide.join(", ")
            ));
        }
        if first.settings.irq_suspend_timeout.is_none() {
            notes.push(format!(
                "{name}: the kernel does not tell irq-suspend-timeout (Linux 6.13 does)"
            ));
        }
    }
    if !napis.unknown.is_empty() {
        notes.push("ids without a device: only sockets tell of them".to_owned());
    }
    if napis.not_looked_at > 0 {
        notes.push(format!(
            "the sockets of {} process{} may not be looked at: the kernel asks for the right to trace \
             (CAP_SYS_PTRACE)",
            napis.not_looked_at,
            if napis.not_looked_at == 1 { "" } else { "es" }
        ));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::napi::{Application, Instance, Unknown};

    fn napis(id: Option<u32>, settings: Settings, device_wide: Vec<&'static str>) -> Napis {
        let applications = vec![Application {
            pid: 70,
            comm: "nginx".to_owned(),
            sockets: 12,
        }];
        let instance = Instance {
            id,
            rx_queues: vec![0],
            rx_queues_by_order: id.is_some(),
            irq: Some(38),
            irq_cpu: Some(1),
            thread: None,
            settings,
            device_wide,
            applications: match id {
                Some(_) => applications.clone(),
                None => Vec::new(),
            },
        };
        let device = |device: &str, driver: &str, instances| DeviceNapis {
            device: device.to_owned(),
            driver: driver.to_owned(),
            instances,
        };
        Napis {
            devices: vec![
                device("eth0", "virtio_net", vec![instance]),
                device("veth0", "veth", Vec::new()),
            ],
            unknown: match id {
                Some(_) => Vec::new(),
                None => vec![Unknown {
                    id: 8193,
                    applications,
                }],
            },
            not_looked_at: 0,
        }
    }

    const WIDE: Settings = Settings {
        defer_hard_irqs: Some(2),
        gro_flush_timeout: Some(200_000),
        irq_suspend_timeout: None,
        threaded: Some(Threaded::Off),
    };

    #[test]
    fn as_text() {
        let settings = Settings {
            irq_suspend_timeout: Some(0),
            ..WIDE
        };
        assert_eq!(
            render(&napis(Some(8193), settings, Vec::new())),
            "   id  device  queues  interrupt  on CPU  thread  on CPUs  defer-hard-irqs  gro-flush-timeout  \
             irq-suspend-timeout  threaded
 8193    eth0       0         38       1       -        -                2          200000 ns                 \
             0 ns       off

   id  device  process  application  sockets
 8193  eth0         70  nginx             12

eth0: the driver does not tell the queues; they are in the order of the ids
veth0 has no NAPI instances; `ethtool -K veth0 gro on` gives it some, which packets bypass unless its other end segments TCP (`ethtool -K PEER tso off` there)
"
        );
    }

    #[test]
    fn what_older_kernels_do_not_tell() {
        let text = render(&napis(None, WIDE, vec!["defer-hard-irqs", "threaded"]));
        for part in [
            "does not tell the ids (Linux 6.8 does)",
            "eth0: defer-hard-irqs, threaded: the device's",
            "does not tell irq-suspend-timeout",
            " 8193  -            70  nginx             12",
            "ids without a device",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
