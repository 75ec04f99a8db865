// SPDX-License-Identifier: MIT OR Apache-2.0
//! Facts about the measuring machine that influence the figures.

use std::env;
use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Result;
use flate2::bufread::GzDecoder;
use procfs::prelude::*;
use procfs::{ConfigSetting, CpuInfo, KernelCmdline, KernelConfig, Meminfo};
use rxsteer::host::cpumask::CpuMask;
use rxsteer::host::device::Device;
use rxsteer::host::topology::Topology;
use serde::{Deserialize, Serialize};

/// Variable with the emulator and its clock: a guest can't find out the source of its clock.
const EMULATED: &str = "RXSTEER_EMULATED";

/// Facts at the start of the measurement. Unknown facts are empty, None or 0.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Host {
    /// Model of the processor.
    pub cpu: String,
    /// Number of online CPUs.
    pub cpus: u32,
    /// Hardware threads per core.
    pub threads_per_core: u32,
    /// Number of NUMA nodes with CPUs.
    pub numa_nodes: u32,
    /// Caches of CPU 0: `L2 2 MiB, CPU 0` or `L3 32 MiB, CPUs 0-7`.
    pub caches: Vec<String>,
    /// Hypervisor, on a guest.
    pub hypervisor: Option<String>,
    /// Release and build of the kernel.
    pub kernel: String,
    /// Relevant options of the kernel's command line (`mitigations=`, `isolcpus=`, …).
    pub kernel_options: Vec<String>,
    /// Frequency of the tick, Hz.
    pub hz: Option<u32>,
    /// Frequency governor.
    pub governor: Option<String>,
    /// Idle states of CPU 0 with their exit latencies: `C1 2 us`.
    pub idle_states: Vec<String>,
    /// Idle governor.
    pub idle_governor: Option<String>,
    /// Memory, bytes.
    pub memory: u64,
    /// Device under test: `veth, in the lab`, or name, driver, queues and NUMA node.
    pub nic: String,
    /// Emulator: `QEMU 10.0, …`.
    #[serde(default)]
    pub emulated: Option<String>,
}

/// Ratio between an emulator's time and its guest's.
pub struct Stretch {
    rtc: Option<u64>,
    since: Instant,
}

impl Stretch {
    /// Counts from now on.
    pub fn begin() -> Self {
        Self {
            rtc: rtc_seconds(),
            since: Instant::now(),
        }
    }

    /// Seconds of the emulator per second of the machine since [`Self::begin`]; None without a
    /// real-time clock.
    pub fn so_far(&self) -> Option<f64> {
        let seconds = rtc_seconds()?.checked_sub(self.rtc?)?;
        Some(seconds as f64 / self.since.elapsed().as_secs_f64())
    }
}

/// The real-time clock, which an emulator derives from its host's time.
fn rtc_seconds() -> Option<u64> {
    read(Path::new("/sys/class/rtc/rtc0/since_epoch"))?
        .parse()
        .ok()
}

/// Describes a device of this host for [`Host::nic`].
///
/// # Errors
/// When there is no such device.
pub fn nic(name: &str) -> Result<String> {
    let device = Device::open(name)?;
    let node = fs::read_to_string(format!("/sys/class/net/{name}/device/numa_node"));
    // -1: no NUMA node.
    let node = node.ok().and_then(|node| node.trim().parse::<u32>().ok());
    let node = node.map_or(String::new(), |node| format!(", NUMA node {node}"));
    let queues = device.rx_queues;
    Ok(format!(
        "{name}, {}, {queues} receive queues{node}",
        device.driver
    ))
}

/// Kernel options that influence receive performance. A name with a final dot matches all
/// parameters of that module.
const OPTIONS: [&str; 46] = [
    "amd_iommu",
    "amd_pstate",
    "bpf_jit.",
    "clocksource",
    "cpufreq.",
    "cpuidle.",
    "cpuidle_haltpoll.",
    "default_hugepagesz",
    "haltpoll.",
    "highres",
    "hugepages",
    "idle",
    "intel_idle.",
    "intel_iommu",
    "intel_pstate",
    "iommu",
    "iommu.",
    "irqaffinity",
    "isolcpus",
    "kpti",
    "l1tf",
    "maxcpus",
    "mds",
    "mitigations",
    "nohlt",
    "nohz",
    "nohz_full",
    "nopti",
    "nosmt",
    "nospectre_v1",
    "nospectre_v2",
    "nr_cpus",
    "numa_balancing",
    "preempt",
    "processor.",
    "pti",
    "rcu_nocbs",
    "retbleed",
    "skew_tick",
    "spec_store_bypass_disable",
    "spectre_v2",
    "swiotlb",
    "threadirqs",
    "transparent_hugepage",
    "tsc",
    "tsx",
];

impl Host {
    /// This machine.
    pub fn this() -> Self {
        Self {
            emulated: env::var(EMULATED).ok(),
            ..Self::at(Path::new("/"))
        }
    }

    /// A machine with `/sys` and `/proc` below `root`.
    pub fn at(root: &Path) -> Self {
        let cpuinfo = CpuInfo::from_file(root.join("proc/cpuinfo")).ok();
        let cpu0 = root.join("sys/devices/system/cpu/cpu0");
        let cpuidle = root.join("sys/devices/system/cpu/cpuidle");
        let release = read(&root.join("proc/sys/kernel/osrelease"));
        Self {
            cpu: cpuinfo
                .as_ref()
                .and_then(|cpus| cpus.model_name(0))
                .unwrap_or_default()
                .to_owned(),
            cpus: Topology::at(root)
                .online()
                .map_or(0, |cpus| cpus.len() as u32),
            threads_per_core: nr_listed(&cpu0.join("topology/thread_siblings_list")),
            numa_nodes: nr_listed(&root.join("sys/devices/system/node/has_cpu")),
            caches: numbered(&cpu0.join("cache"), "index")
                .iter()
                .filter_map(|index| cache(index))
                .collect(),
            hypervisor: hypervisor(root, cpuinfo.as_ref()),
            kernel: known([release.clone(), read(&root.join("proc/sys/kernel/version"))]),
            kernel_options: options(root),
            hz: hz(root, release.as_deref()),
            governor: read(&cpu0.join("cpufreq/scaling_governor")),
            idle_states: numbered(&cpu0.join("cpuidle"), "state")
                .iter()
                .filter_map(|state| idle_state(state))
                .collect(),
            idle_governor: ["current_governor", "current_governor_ro"]
                .iter()
                .find_map(|file| read(&cpuidle.join(file))),
            memory: Meminfo::from_file(root.join("proc/meminfo")).map_or(0, |m| m.mem_total),
            nic: "veth, in the lab".to_owned(),
            emulated: None,
        }
    }
}

/// Trimmed text of a file; None if absent or empty.
fn read(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// Joins the known parts.
fn known<const N: usize>(parts: [Option<String>; N]) -> String {
    parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

/// Number of entries in a list such as `0-3,8`; 0 if unreadable.
fn nr_listed(path: &Path) -> u32 {
    let list = read(path).and_then(|list| CpuMask::parse_list(&list).ok());
    list.map_or(0, |list| list.len() as u32)
}

/// Entries `name0`, `name1`, … of a directory, in order.
fn numbered(dir: &Path, name: &str) -> Vec<PathBuf> {
    (0..)
        .map(|n| dir.join(format!("{name}{n}")))
        .take_while(|path| path.exists())
        .collect()
}

fn cache(index: &Path) -> Option<String> {
    let read = |file| read(&index.join(file));
    let kind = match read("type")?.as_str() {
        "Data" => "d",
        "Instruction" => "i",
        _ => "",
    };
    let kib: u64 = read("size")?.strip_suffix('K')?.parse().ok()?;
    let cpus = read("shared_cpu_list")?;
    let s = if cpus.parse::<u32>().is_ok() { "" } else { "s" };
    Some(format!(
        "L{}{kind} {}, CPU{s} {cpus}",
        read("level")?,
        binary(kib << 10)
    ))
}

/// Formats bytes in the largest unit with a value of at least 1.
pub fn binary(bytes: u64) -> String {
    let power = (bytes.max(1).ilog2() / 10).min(4);
    let value = bytes as f64 / f64::from(power * 10).exp2();
    let unit = ["B", "KiB", "MiB", "GiB", "TiB"][power as usize];
    match value {
        v if v < 10.0 && v.fract() >= 0.05 => format!("{v:.1} {unit}"),
        v => format!("{v:.0} {unit}"),
    }
}

/// Hypervisor of a guest, with vendor and product where known.
fn hypervisor(root: &Path, cpuinfo: Option<&CpuInfo>) -> Option<String> {
    let guest = cpuinfo
        .and_then(|cpus| cpus.flags(0))
        .is_some_and(|flags| flags.contains(&"hypervisor"));
    let kind = read(&root.join("sys/hypervisor/type")).or_else(|| clock_of(root).filter(|_| guest));
    if !guest && kind.is_none() {
        return None;
    }
    let dmi = |file| read(&root.join("sys/class/dmi/id").join(file));
    let named = known([kind, dmi("sys_vendor"), dmi("product_name")]);
    Some(if named.is_empty() {
        "one that tells no name".to_owned()
    } else {
        named
    })
}

/// Hypervisor by the available clock sources.
fn clock_of(root: &Path) -> Option<String> {
    let clocks = "sys/devices/system/clocksource/clocksource0/available_clocksource";
    let clocks = read(&root.join(clocks))?;
    clocks.split(' ').find_map(|clock| {
        Some(match clock {
            "kvm-clock" => "KVM".to_owned(),
            "xen" => "Xen".to_owned(),
            hyperv if hyperv.starts_with("hyperv") => "Hyper-V".to_owned(),
            _ => return None,
        })
    })
}

fn options(root: &Path) -> Vec<String> {
    let Ok(KernelCmdline(mut options)) = KernelCmdline::from_file(root.join("proc/cmdline")) else {
        return Vec::new();
    };
    options.retain(|option| {
        let name = option.split('=').next().unwrap_or_default();
        OPTIONS.iter().any(|known| match known.strip_suffix('.') {
            Some(_) => name.starts_with(known),
            None => name == *known,
        })
    });
    options
}

/// CONFIG_HZ from /proc/config.gz or from the distribution's file in /boot; there is no other
/// source.
fn hz(root: &Path, release: Option<&str>) -> Option<u32> {
    let open = |path: String| Some(BufReader::new(File::open(root.join(path)).ok()?));
    let config = match open("proc/config.gz".to_owned()) {
        Some(config) => KernelConfig::from_read(GzDecoder::new(config)),
        None => KernelConfig::from_read(open(format!("boot/config-{}", release?))?),
    };
    match config.ok()?.0.get("CONFIG_HZ")? {
        ConfigSetting::Value(hz) => hz.parse().ok(),
        _ => None,
    }
}

fn idle_state(state: &Path) -> Option<String> {
    let read = |file| read(&state.join(file));
    let off = if read("disable").is_some_and(|off| off != "0") {
        ", disabled"
    } else {
        ""
    };
    Some(format!("{} {} us{off}", read("name")?, read("latency")?))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use tempfile::TempDir;

    use super::*;

    const CPU: &str = "sys/devices/system/cpu";

    /// The fields that every kernel has.
    const MEMINFO: &str = "MemTotal: 24683656 kB\nMemFree: 1 kB\nBuffers: 1 kB\nCached: 1 kB\n\
        SwapCached: 0 kB\nActive: 1 kB\nInactive: 1 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n\
        Dirty: 0 kB\nWriteback: 0 kB\nMapped: 1 kB\nSlab: 1 kB\nCommitted_AS: 1 kB\n\
        VmallocTotal: 1 kB\nVmallocUsed: 1 kB\nVmallocChunk: 0 kB\n";

    fn host(files: &[(&str, &str)]) -> (TempDir, Host) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            write(&root, path, text.as_bytes());
        }
        let host = Host::at(root.path());
        (root, host)
    }

    fn write(root: &TempDir, path: &str, bytes: &[u8]) {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    fn cpuinfo(flags: &str) -> String {
        let cpu = |n| {
            format!(
                "processor\t: {n}\nmodel name\t: Some CPU @ 2.60GHz\nflags\t\t: fpu {flags}\n\n"
            )
        };
        cpu(0) + &cpu(1)
    }

    #[test]
    fn a_server() {
        let under = |file: &str| format!("{CPU}/{file}");
        let cpuinfo = cpuinfo("aes");
        let files = [
            ("proc/cpuinfo", cpuinfo.as_str()),
            ("proc/meminfo", MEMINFO),
            ("proc/sys/kernel/osrelease", "6.12.1\n"),
            ("proc/sys/kernel/version", "#1 SMP PREEMPT_DYNAMIC\n"),
            (
                "proc/cmdline",
                "root=/dev/sda1 isolcpus=2-7 intel_idle.max_cstate=1 quiet idle=poll idlefoo\n",
            ),
            ("sys/devices/system/node/has_cpu", "0-1\n"),
            // Neither the vendor of the machine nor a hypervisor's clock makes it a guest.
            ("sys/class/dmi/id/sys_vendor", "Some Vendor\n"),
            (
                "sys/devices/system/clocksource/clocksource0/available_clocksource",
                "tsc xen \n",
            ),
            (&under("online"), "0-15\n"),
            (&under("cpu0/topology/thread_siblings_list"), "0,8\n"),
            (&under("cpu0/cpufreq/scaling_governor"), "performance\n"),
            (&under("cpu0/cache/index0/level"), "1\n"),
            (&under("cpu0/cache/index0/type"), "Data\n"),
            (&under("cpu0/cache/index0/size"), "48K\n"),
            (&under("cpu0/cache/index0/shared_cpu_list"), "0\n"),
            (&under("cpu0/cache/index1/level"), "3\n"),
            (&under("cpu0/cache/index1/type"), "Unified\n"),
            (&under("cpu0/cache/index1/size"), "36608K\n"),
            (&under("cpu0/cache/index1/shared_cpu_list"), "0-15\n"),
            (&under("cpu0/cpuidle/state0/name"), "POLL\n"),
            (&under("cpu0/cpuidle/state0/latency"), "0\n"),
            (&under("cpu0/cpuidle/state0/disable"), "0\n"),
            (&under("cpu0/cpuidle/state1/name"), "C6\n"),
            (&under("cpu0/cpuidle/state1/latency"), "133\n"),
            (&under("cpu0/cpuidle/state1/disable"), "1\n"),
            (&under("cpuidle/current_governor_ro"), "menu\n"),
            ("boot/config-6.12.1", "CONFIG_HZ_1000=y\nCONFIG_HZ=1000\n"),
            ("boot/config-6.1.0", "CONFIG_HZ=250\n"),
        ];
        let (root, host) = host(&files);
        assert_eq!(host.cpu, "Some CPU @ 2.60GHz");
        assert_eq!(
            (host.cpus, host.threads_per_core, host.numa_nodes),
            (16, 2, 2)
        );
        assert_eq!(host.caches, ["L1d 48 KiB, CPU 0", "L3 36 MiB, CPUs 0-15"]);
        assert_eq!(host.hypervisor, None);
        assert_eq!(host.kernel, "6.12.1 #1 SMP PREEMPT_DYNAMIC");
        assert_eq!(
            host.kernel_options,
            ["isolcpus=2-7", "intel_idle.max_cstate=1", "idle=poll"]
        );
        assert_eq!(host.hz, Some(1000));
        assert_eq!(host.governor.as_deref(), Some("performance"));
        assert_eq!(host.idle_states, ["POLL 0 us", "C6 133 us, disabled"]);
        assert_eq!(host.idle_governor.as_deref(), Some("menu"));
        assert_eq!(host.memory, 24_683_656 << 10);

        // The running kernel's configuration takes precedence.
        let mut gz = GzEncoder::new(Vec::new(), Compression::fast());
        gz.write_all(b"# CONFIG_HZ_100 is not set\nCONFIG_HZ=300\n")
            .unwrap();
        write(&root, "proc/config.gz", &gz.finish().unwrap());
        assert_eq!(Host::at(root.path()).hz, Some(300));
    }

    #[test]
    fn a_guest_and_its_hypervisor() {
        let cpuinfo = cpuinfo("hypervisor");
        let mut files = vec![("proc/cpuinfo", cpuinfo.as_str())];
        let named = |files: &[_]| host(files).1.hypervisor.unwrap();
        assert_eq!(named(&files), "one that tells no name");
        files.push((
            "sys/devices/system/clocksource/clocksource0/available_clocksource",
            "tsc kvm-clock acpi_pm \n",
        ));
        assert_eq!(named(&files), "KVM");
        files.push(("sys/class/dmi/id/sys_vendor", "Some Vendor\n"));
        assert_eq!(named(&files), "KVM Some Vendor");
    }

    #[test]
    fn a_machine_that_tells_nothing() {
        let (_root, host) = host(&[]);
        let nothing = Host {
            nic: host.nic.clone(),
            ..Host::default()
        };
        assert_eq!(format!("{host:?}"), format!("{nothing:?}"));
    }
}
