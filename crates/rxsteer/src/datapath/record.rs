// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is written about pinned steering: by it a later start decides whether it can adopt the
//! pinned programs. A BPF file system holds no text, so it is the value of a map.

use anyhow::{Context, Result, ensure};
use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType};
use serde::{Deserialize, Serialize};

use super::config::{Config, DeviceConfig};
use super::shared::constants_of_device;
use super::tables::Sizes;
use super::value::{bytes_of, read};
use crate::host::bpffs::Folder;
use crate::host::netns;
use crate::types::rx_config;

/// Changes when other versions can no longer return pinned flows to INLINE: names of pins, and the
/// programs in bpf/trace.bpf.c that user space calls for it.
const FORMAT: u32 = 1;

/// See the module's documentation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Record {
    format: u32,
    version: String,
    /// Of the sources of all BPF programs.
    programs: String,
    /// Of those that define the maps.
    layout: String,
    /// The network namespace of the devices: its inode.
    netns: u64,
    pub(super) nr_queues: u32,
    pub(super) nr_cpus: u32,
    pub(super) devices: Vec<RecordedDevice>,
}

/// A device, in the order of the queues.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RecordedDevice {
    pub(super) ifindex: u32,
    pub(super) queue_base: u32,
    pub(super) nr_rx_queues: u32,
    /// The bytes of the program's `struct rx_config`.
    constants: Vec<u8>,
}

impl Record {
    /// Of a data path with this configuration.
    pub(super) fn new(
        config: &Config,
        devices: &[DeviceConfig],
        nr_queues: u32,
        nr_cpus: u32,
    ) -> Result<Self> {
        let mut queue_base = 0;
        let devices = devices.iter().map(|device| {
            let sizes = Sizes::of(config);
            let constants = constants_of_device(config, nr_cpus, &sizes, queue_base, device);
            let recorded = RecordedDevice {
                ifindex: device.ifindex,
                queue_base,
                nr_rx_queues: device.nr_rx_queues,
                constants: bytes_of(&constants),
            };
            queue_base += device.nr_rx_queues;
            recorded
        });
        Ok(Self {
            format: FORMAT,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            programs: env!("RXSTEER_BPF_PROGRAMS").to_owned(),
            layout: env!("RXSTEER_BPF_LAYOUT").to_owned(),
            netns: netns::inode()?,
            nr_queues,
            nr_cpus,
            devices: devices.collect(),
        })
    }

    /// Writes it into a new map.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(super) fn map(&self) -> Result<MapHandle> {
        let mut text = serde_json::to_vec(self)?;
        text.resize(text.len().next_multiple_of(8), b' ');
        let opts = libbpf_sys::bpf_map_create_opts {
            sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
            ..Default::default()
        };
        let size = u32::try_from(text.len())?;
        let map = MapHandle::create(MapType::Array, Some("record"), 4, size, 1, &opts)?;
        map.update(&0u32.to_ne_bytes(), &text, MapFlags::ANY)?;
        Ok(map)
    }

    /// Reads a pinned one.
    ///
    /// # Errors
    /// When there is none, or it is of an unknown format.
    pub(super) fn open(folder: &Folder, name: &str) -> Result<Self> {
        let map = folder.way_to_object(name).context("there is no record")?;
        let map = MapHandle::from_pinned_path(map).context("the record is no map")?;
        let text = map.lookup(&0u32.to_ne_bytes(), MapFlags::ANY)?;
        let text = text.context("the record is empty")?;
        #[derive(Deserialize)]
        struct Format {
            format: u32,
            version: String,
        }
        let Format { format, version } =
            serde_json::from_slice(&text).context("the record can't be read")?;
        ensure!(
            format == FORMAT,
            "version {version} has pinned it in format {format}, which this version does not know"
        );
        serde_json::from_slice(&text).context("the record can't be read")
    }

    /// The version that wrote it.
    pub(super) fn version(&self) -> &str {
        &self.version
    }

    /// Whether counters can be read as those of this version.
    pub(super) fn has_this_layout(&self) -> bool {
        self.layout == env!("RXSTEER_BPF_LAYOUT")
    }

    /// Fails unless it belongs to the calling thread's network namespace.
    ///
    /// # Errors
    /// When it does not.
    pub(super) fn is_of_this_netns(&self) -> Result<()> {
        let here = netns::inode()?;
        ensure!(
            self.netns == here,
            "it belongs to another network namespace (inode {}, not {here})",
            self.netns
        );
        Ok(())
    }

    /// The constants of the first device.
    pub(super) fn constants(&self) -> Option<rx_config> {
        self.devices.first().and_then(RecordedDevice::constants)
    }

    /// Why a data path of this record can't continue as that of `other`, in words; `None` if it can.
    /// The secrets of the flow hash may differ.
    pub(super) fn difference(&self, other: &Self) -> Option<String> {
        if self.programs != other.programs {
            return Some(match self.version == other.version {
                true => format!("version {} has other programs now", self.version),
                false => format!(
                    "it is of version {}, this is {}",
                    self.version, other.version
                ),
            });
        }
        if self.nr_cpus != other.nr_cpus {
            return Some("the number of CPUs is another one".to_owned());
        }
        let alike = |a: &RecordedDevice, b: &RecordedDevice| {
            (a.ifindex, a.nr_rx_queues) == (b.ifindex, b.nr_rx_queues)
        };
        let same_devices = self.devices.len() == other.devices.len()
            && self.nr_queues == other.nr_queues
            && self
                .devices
                .iter()
                .zip(&other.devices)
                .all(|(a, b)| alike(a, b));
        if !same_devices {
            return Some("its devices, their order or queues are others".to_owned());
        }
        for (a, b) in self.devices.iter().zip(&other.devices) {
            let (Some(a), Some(b)) = (a.constants(), b.constants()) else {
                return Some("its record has other constants".to_owned());
            };
            let b = rx_config {
                flow_secret: a.flow_secret,
                ..b
            };
            if bytes_of(&a) != bytes_of(&b) {
                return Some(format!("other values of {}", options(&a, &b).join(", ")));
            }
        }
        None
    }
}

impl RecordedDevice {
    fn constants(&self) -> Option<rx_config> {
        let complete = self.constants.len() == size_of::<rx_config>();
        complete.then(|| read(&self.constants)).flatten()
    }
}

/// The options of `rxsteer run` that make these constants differ.
fn options(a: &rx_config, b: &rx_config) -> Vec<&'static str> {
    let options = [
        ("--backlog", a.backlog_limit != b.backlog_limit),
        ("--flow-limit", a.flow_limit != b.flow_limit),
        ("--rps-flow-cnt", a.flow_shift != b.flow_shift),
        (
            "--rps-sock-flow-entries",
            a.sock_flow_mask != b.sock_flow_mask,
        ),
        ("--tunnels or --hash", a.flow_options != b.flow_options),
        ("--inline-ports", a.inline_ports != b.inline_ports),
    ];
    let changed = options.into_iter().filter(|(_, changed)| *changed);
    let names: Vec<_> = changed.map(|(name, _)| name).collect();
    match names.is_empty() {
        true => vec!["constants"],
        false => names,
    }
}
