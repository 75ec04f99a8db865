// SPDX-License-Identifier: MIT OR Apache-2.0
//! The answer of `rxsteer status` in Prometheus' text format. A metric is a field of that answer; its
//! HELP is the field's description in the JSON schema, and so its documentation comment.
//!
//! The number of series is bounded: it depends on the queues, the backlogs that have been used and
//! the devices that were named, not on flows, nor on devices that come and go.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::LazyLock;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, prometheus_text};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::{MetricType, info::Info};
use prometheus_client::registry::Registry;
use schemars::JsonSchema;

use crate::api::status::{Backlog, Device, Queue, Status, Terms};
use crate::datapath::load::{Load, Pressure};
use crate::datapath::waits::{Waits, bound_us};

/// The label `device` of the queues that devices in softirq mode share. The name of the device that has
/// their account in `rxsteer status` would change whenever this device goes. No device can have a
/// name with a colon (`dev_valid_name()` in net/core/dev.c).
const SHARED: &str = "softirq:all";

/// The metrics as text. Those without a series have HELP and TYPE.
///
/// # Errors
/// When a name is not text.
pub fn text(status: Status) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("rxsteer");
    registry.register_collector(Box::new(Exposition(status)));
    let mut text = String::new();
    prometheus_text::encode(&mut text, &registry)?;
    Ok(text)
}

type Labels = Vec<(&'static str, String)>;

/// A metric of `T`. Counters get the suffix `_total` when they are written.
struct Metric<T> {
    name: &'static str,
    help: Cow<'static, str>,
    value: Value<T>,
}

enum Value<T> {
    Counter(fn(&T) -> u64),
    Gauge(fn(&T) -> u64),
    /// Written as a ratio.
    Percent(fn(&T) -> u32),
}

impl<T: JsonSchema> Metric<T> {
    fn new(name: &'static str, field: &str, value: Value<T>) -> Self {
        Self {
            name,
            help: described::<T>(field).into(),
            value,
        }
    }
}

/// The counters that are named like their fields.
macro_rules! counters {
    ($of:ty as $prefix:literal in $unit:literal: $($field:ident),+) => {
        [$(Metric::<$of>::new(
            concat!($prefix, "_", stringify!($field), "_", $unit),
            stringify!($field),
            Value::Counter(|of| of.$field),
        )),+]
    };
}

static PROCESS: LazyLock<[Metric<Status>; 6]> = LazyLock::new(|| {
    [
        Metric::new("dry_run", "dry_run", Value::Gauge(|s| s.dry_run.into())),
        Metric::new(
            "backlog_limit_frames",
            "backlog_limit",
            Value::Gauge(|s| s.backlog_limit.into()),
        ),
        Metric::new(
            "socket_full_packets",
            "socket_full",
            Value::Counter(|s| s.socket_full),
        ),
        Metric::new(
            "backlogs",
            "nr_backlogs",
            Value::Gauge(|s| s.nr_backlogs as u64),
        ),
        Metric::new(
            "backlogs_max",
            "most_backlogs",
            Value::Gauge(|s| s.most_backlogs as u64),
        ),
        Metric::new(
            "backlogs_refused",
            "refused_backlogs",
            Value::Gauge(|s| s.refused_backlogs as u64),
        ),
    ]
});

static DEVICE: LazyLock<[Metric<Device>; 1]> = LazyLock::new(|| {
    [Metric::new(
        "device_foreign_frames",
        "foreign",
        Value::Counter(|d| d.foreign),
    )]
});

static QUEUE: LazyLock<Vec<Metric<Queue>>> = LazyLock::new(|| {
    let frames = counters!(Queue as "queue" in "frames":
        received, inline, no_flow_truncated, no_flow_unknown, inline_ports, rx_hash, held);
    let moves = Metric::new("queue_moves", "moves", Value::Counter(|q: &Queue| q.moves));
    frames.into_iter().chain([moves]).collect()
});

static BACKLOG: LazyLock<Vec<Metric<Terms>>> = LazyLock::new(|| {
    let frames = counters!(Terms as "backlog" in "frames":
        redirected, dropped, shed, limited, delivered, lost, vanished, would_redirect);
    let queued = Value::Gauge(|terms: &Terms| terms.queued);
    let queued = Metric::new("backlog_queued_frames", "queued", queued);
    frames.into_iter().chain([queued]).collect()
});

static STALLED: LazyLock<[Metric<Backlog>; 1]> = LazyLock::new(|| {
    [Metric::new(
        "backlog_stalled",
        "stalled",
        Value::Gauge(|b| b.stalled.into()),
    )]
});

static LOAD: [Metric<Load>; 2] = [
    // The fields are in percent.
    Metric {
        name: "queue_busy_ratio",
        help: Cow::Borrowed("Share of the polling CPU's time in which it was not idle."),
        value: Value::Percent(|load| load.busy_percent),
    },
    Metric {
        name: "queue_polls_ratio",
        help: Cow::Borrowed("Share of the polling CPU's time in polls."),
        value: Value::Percent(|load| load.polls_percent),
    },
];

/// The documentation comment of a field.
fn described<T: JsonSchema>(field: &str) -> String {
    let schema = schemars::schema_for!(T);
    let text = schema.pointer(&format!("/properties/{field}/description"));
    let text = text.and_then(|text| text.as_str());
    let text = text.expect("the answer's fields have documentation comments");
    text.replace('\n', " ")
}

#[derive(Debug)]
struct Exposition(Status);

impl Collector for Exposition {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let out = &mut encoder;
        let Self(status) = self;
        info(
            out,
            "build",
            "Version of the running rxsteer.",
            "version",
            &status.version,
        )?;
        let help = described::<Status>("policy");
        info(out, "policy", &help, "policy", &status.policy)?;
        encode(out, &*PROCESS, &[(Labels::new(), status)])?;
        let help = "Devices by mode; none: gone or refused.";
        gauges(out, "devices", help, modes(&status.devices))?;
        let help =
            "Reasons why packets are not steered as they should be (`rxsteer status` has them).";
        gauges(out, "device_warnings", help, warnings(&status.devices))?;
        let own = |device: &&Device| !device.shares_queues && !device.queues.is_empty();
        let devices = status.devices.iter().filter(own);
        let devices: Vec<_> = devices.map(|d| (vec![device_label(d)], d)).collect();
        encode(out, &*DEVICE, &devices)?;
        let queues: Vec<_> = status.devices.iter().flat_map(queues).collect();
        encode(out, &QUEUE, &queues)?;
        let backlogs = queues.iter().flat_map(|(labels, q)| {
            let label = |cpu: u32| [&labels[..], &[("cpu", cpu.to_string())]].concat();
            q.backlogs.iter().map(move |b| (label(b.cpu), b))
        });
        let backlogs: Vec<_> = backlogs.collect();
        let terms = backlogs
            .iter()
            .map(|(labels, b)| (labels.clone(), &b.terms));
        encode(out, &BACKLOG, &terms.collect::<Vec<_>>())?;
        encode(out, &*STALLED, &backlogs)?;
        waits(out, &status.devices)?;
        let loads = queues.into_iter();
        let loads = loads.filter_map(|(labels, q)| Some((labels, q.load.as_ref()?)));
        let loads: Vec<_> = loads.collect();
        encode(out, &LOAD, &loads)?;
        let help = described::<Load>("polling_cpu");
        gauges(out, "queue_polling_cpu", &help, polling_cpus(&loads))?;
        let help = "Whether the polling CPU has room: 1 for the present state.";
        gauges(out, "queue_pressure", help, pressures(&loads))
    }
}

/// Writes the metrics of these samples.
fn encode<T>(
    out: &mut DescriptorEncoder<'_>,
    metrics: &[Metric<T>],
    samples: &[(Labels, &T)],
) -> fmt::Result {
    for metric in metrics {
        let kind = match metric.value {
            Value::Counter(_) => MetricType::Counter,
            Value::Gauge(_) | Value::Percent(_) => MetricType::Gauge,
        };
        let mut family = out.encode_descriptor(metric.name, &metric.help, None, kind)?;
        for (labels, of) in samples {
            let sample = family.encode_family(labels)?;
            match metric.value {
                Value::Counter(value) => ConstCounter::new(value(of)).encode(sample),
                Value::Gauge(value) => ConstGauge::new(value(of)).encode(sample),
                Value::Percent(percent) => {
                    ConstGauge::new(f64::from(percent(of)) / 100.0).encode(sample)
                }
            }?;
        }
    }
    Ok(())
}

/// Writes gauges that are no field of the status.
fn gauges(
    out: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    samples: impl IntoIterator<Item = (Labels, u64)>,
) -> fmt::Result {
    let mut family = out.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (labels, value) in samples {
        ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

/// Writes a text, as a label of the number 1.
fn info(
    out: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    label: &'static str,
    value: &str,
) -> fmt::Result {
    let info = Info::new(vec![(label, value.to_owned())]);
    info.encode(out.encode_descriptor(name, help, None, info.metric_type())?)
}

/// How long frames have waited, over the queues of a device: fewer series than for each backlog.
fn waits(out: &mut DescriptorEncoder<'_>, devices: &[Device]) -> fmt::Result {
    let mut sums = BTreeMap::<Labels, Waits>::new();
    for device in devices {
        for backlog in device.queues.iter().flat_map(|q| &q.backlogs) {
            let labels = vec![device_label(device), ("cpu", backlog.cpu.to_string())];
            *sums.entry(labels).or_default() += &backlog.waits;
        }
    }
    let help = "Time that frames wait in the backlogs for a CPU, by samples: one frame in 64.";
    let kind = MetricType::Histogram;
    let mut family = out.encode_descriptor("backlog_wait_seconds", help, None, kind)?;
    for (labels, waits) in &sums {
        let buckets = waits.buckets.iter().enumerate().map(|(bucket, number)| {
            let bound = bound_us(bucket).map_or(f64::INFINITY, |us| us as f64 / 1e6);
            (bound, *number)
        });
        family.encode_family(labels)?.encode_histogram::<Labels>(
            waits.sum_ns as f64 / 1e9,
            waits.samples(),
            &buckets.collect::<Vec<_>>(),
            None,
        )?;
    }
    Ok(())
}

fn device_label(device: &Device) -> (&'static str, String) {
    let name = match device.shares_queues {
        true => SHARED,
        false => &device.device,
    };
    ("device", name.to_owned())
}

fn queues(device: &Device) -> impl Iterator<Item = (Labels, &Queue)> {
    let label = |q: &Queue| vec![device_label(device), ("queue", q.queue.to_string())];
    device.queues.iter().map(move |q| (label(q), q))
}

/// How many devices are in each mode.
fn modes(devices: &[Device]) -> BTreeMap<Labels, u64> {
    let mut modes = BTreeMap::new();
    for device in devices {
        let labels = vec![("mode", device.mode.clone())];
        *modes.entry(labels).or_default() += 1;
    }
    modes
}

/// How many warnings there are for each device.
fn warnings(devices: &[Device]) -> BTreeMap<Labels, u64> {
    let mut warnings = BTreeMap::new();
    for device in devices {
        let labels = vec![device_label(device)];
        *warnings.entry(labels).or_default() += device.unsteered.len() as u64;
    }
    warnings
}

fn polling_cpus<'a>(loads: &'a [(Labels, &Load)]) -> impl Iterator<Item = (Labels, u64)> + 'a {
    let known = loads.iter();
    known.filter_map(|(labels, load)| Some((labels.clone(), load.polling_cpu?.into())))
}

fn pressures<'a>(loads: &'a [(Labels, &Load)]) -> impl Iterator<Item = (Labels, u64)> + 'a {
    loads.iter().flat_map(|(labels, load)| {
        Pressure::ALL.map(|state| {
            let labels = [&labels[..], &[("pressure", state.name().to_owned())]].concat();
            (labels, (load.pressure == state).into())
        })
    })
}
