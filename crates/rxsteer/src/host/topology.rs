// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which CPUs there are, which of them share a cache, and where a queue's interrupt lands.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

use crate::host::cpumask::CpuMask;

/// The CPUs of a host, read from its `/sys` and `/proc`.
#[derive(Clone, Debug)]
pub struct Topology {
    root: PathBuf,
}

/// What the `auto` mask was built around.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind", content = "cpu")]
pub enum Anchor {
    /// The CPU that the queue's interrupt, or its NAPI thread, runs on.
    Interrupt(u32),
    /// That CPU is not known, or not fixed: the caches around this one stand in for it.
    Assumed(u32),
    /// The caches around this CPU are not known: every CPU counts as near.
    Everywhere(u32),
}

impl fmt::Display for Anchor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Interrupt(cpu) => {
                write!(
                    f,
                    "CPUs sharing a cache with CPU {cpu}, where the interrupt lands"
                )
            }
            Self::Assumed(cpu) => write!(
                f,
                "CPUs sharing a cache with CPU {cpu}; where the interrupt lands is not known"
            ),
            Self::Everywhere(cpu) => {
                write!(
                    f,
                    "all CPUs: the kernel does not say what shares a cache with CPU {cpu}"
                )
            }
        }
    }
}

/// The mask that `auto` stands for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AutoMask {
    pub cpus: CpuMask,
    pub anchor: Anchor,
}

impl Topology {
    /// This host.
    pub fn host() -> Self {
        Self::at("/")
    }

    /// The host whose `/sys` and `/proc` are below `root`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// CPUs that are running.
    pub fn online(&self) -> Result<CpuMask> {
        self.cpu_list("online")
    }

    /// CPUs that could ever run: as many as the kernel made room for.
    pub fn possible(&self) -> Result<CpuMask> {
        self.cpu_list("possible")
    }

    /// CPUs that are plugged in.
    pub fn present(&self) -> Result<CpuMask> {
        self.cpu_list("present")
    }

    /// Online CPUs that are left to the system: neither `isolcpus=` nor `nohz_full=`.
    pub fn housekeeping(&self) -> Result<CpuMask> {
        let mut cpus = self.online()?;
        for file in ["isolated", "nohz_full"] {
            if let Some(set) = self.optional_cpu_list(file)? {
                cpus = cpus.without(&set);
            }
        }
        Ok(cpus)
    }

    /// CPUs, `cpu` included, that share its last-level cache; `None` where the kernel does not
    /// say (an offline CPU, a guest without cache information).
    pub fn cache_siblings(&self, cpu: u32) -> Option<CpuMask> {
        let cache = self.path(&format!("sys/devices/system/cpu/cpu{cpu}/cache"));
        fs::read_dir(cache)
            .ok()?
            .flatten()
            .filter_map(|index| {
                let read = |name| read_trimmed(&index.path().join(name));
                if read("type")? == "Instruction" {
                    return None;
                }
                let level: u32 = read("level")?.parse().ok()?;
                let cpus = CpuMask::parse_list(&read("shared_cpu_list")?).ok()?;
                cpus.contains(cpu).then_some((level, cpus))
            })
            .max_by_key(|(level, _)| *level)
            .map(|(_, cpus)| cpus)
    }

    /// The online CPUs of `among`, without `cpu` itself, in the order in which to look for an idle
    /// one for the packets of a consumer on `cpu`; at most `most`. It holds until a CPU comes or
    /// goes.
    ///
    /// First those that share its last-level cache, then its NUMA node, then its package, then the
    /// rest; what the kernel does not say tells none apart. Within each, it begins at the number
    /// after `cpu` and wraps, so that neighbours do not all look at the same CPU first. Threads of
    /// its core come last there: one beside a busy consumer is a poorer choice than an idle core.
    pub fn nearest(&self, cpu: u32, among: &CpuMask, most: usize) -> Vec<u32> {
        let near = [
            self.cache_siblings(cpu),
            self.node(cpu),
            self.sharing(cpu, "package"),
        ];
        let hyperthreads = self.sharing(cpu, "core").unwrap_or_default();
        // An offline CPU would pass for idle.
        let online = self.online().unwrap_or_else(|_| among.clone());
        let mut cpus: Vec<u32> = among.intersect(&online).iter().collect();
        cpus.retain(|&c| c != cpu);
        cpus.sort_by_cached_key(|&c| {
            let far = near
                .each_ref()
                .map(|set| set.as_ref().is_some_and(|set| !set.contains(c)));
            (far, hyperthreads.contains(c), c < cpu, c)
        });
        cpus.truncate(most);
        cpus
    }

    /// The mask that `auto` stands for: housekeeping CPUs that share a last-level cache with
    /// `interrupt_cpu`, or with the lowest housekeeping CPU when that one isn't known.
    ///
    /// Fails only where `/sys` can't be read. The set is empty only when no CPU of that cache is a
    /// housekeeping CPU.
    pub fn auto_mask(&self, interrupt_cpu: Option<u32>) -> Result<AutoMask> {
        let housekeeping = self.housekeeping()?;
        let center = interrupt_cpu.or(housekeeping.first()).unwrap_or(0);
        let (near, anchor) = match (self.cache_siblings(center), interrupt_cpu) {
            (Some(near), Some(cpu)) => (near, Anchor::Interrupt(cpu)),
            (Some(near), None) => (near, Anchor::Assumed(center)),
            (None, _) => (housekeeping.clone(), Anchor::Everywhere(center)),
        };
        Ok(AutoMask {
            cpus: near.intersect(&housekeeping),
            anchor,
        })
    }

    /// Online CPUs of the NUMA node of `cpu`; `None` without nodes, or when `cpu` is offline.
    fn node(&self, cpu: u32) -> Option<CpuMask> {
        fs::read_dir(self.path("sys/devices/system/node"))
            .ok()?
            .flatten()
            .filter_map(|node| read_trimmed(&node.path().join("cpulist")))
            .filter_map(|list| CpuMask::parse_list(&list).ok())
            .find(|cpus| cpus.contains(cpu))
    }

    /// Online CPUs, `cpu` included, that are threads of its core; itself where the kernel does not say.
    pub fn core(&self, cpu: u32) -> CpuMask {
        let alone = || CpuMask::from_iter([cpu]);
        self.sharing(cpu, "core").unwrap_or_else(alone)
    }

    /// Online CPUs, `cpu` included, of its `core` or `package`; `None` when it is offline.
    pub(super) fn sharing(&self, cpu: u32, what: &str) -> Option<CpuMask> {
        let list = self.read(&format!(
            "sys/devices/system/cpu/cpu{cpu}/topology/{what}_cpus_list"
        ))?;
        CpuMask::parse_list(&list).ok()
    }

    pub(super) fn cpu_list(&self, file: &str) -> Result<CpuMask> {
        let path = self.path(&format!("sys/devices/system/cpu/{file}"));
        let text = fs::read_to_string(&path)
            .with_context(|| format!("{}: is /sys mounted?", path.display()))?;
        CpuMask::parse_list(&text).with_context(|| path.display().to_string())
    }

    /// A CPU list that not every kernel has. An unset `nohz_full` is missing, empty or `(null)`,
    /// depending on the kernel.
    pub(super) fn optional_cpu_list(&self, file: &str) -> Result<Option<CpuMask>> {
        match self.read(&format!("sys/devices/system/cpu/{file}")) {
            Some(text) if text != "(null)" => self.cpu_list(file).map(Some),
            _ => Ok(None),
        }
    }

    pub(super) fn path(&self, relative: &str) -> PathBuf {
        self.root.join(relative)
    }

    pub(super) fn read(&self, relative: &str) -> Option<String> {
        read_trimmed(&self.path(relative))
    }
}

fn read_trimmed(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_string())
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    use super::*;

    /// A host made of files.
    pub(in crate::host) struct Fixture {
        dir: TempDir,
    }

    impl Fixture {
        pub(in crate::host) fn new(online: &str) -> Self {
            let fixture = Self {
                dir: tempfile::tempdir().unwrap(),
            };
            fixture
                .file("sys/devices/system/cpu/online", online)
                .file("sys/devices/system/cpu/possible", "0-7")
                .file("sys/devices/system/cpu/present", "0-7")
                .file("sys/devices/system/cpu/isolated", "")
        }

        pub(in crate::host) fn file(self, path: &str, text: &str) -> Self {
            let path = self.dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
            self
        }

        pub(in crate::host) fn link(self, path: &str, target: &str) -> Self {
            let path = self.dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            symlink(target, path).unwrap();
            self
        }

        pub(in crate::host) fn cache(
            self,
            cpu: u32,
            index: u32,
            level: u32,
            kind: &str,
            cpus: &str,
        ) -> Self {
            let dir = format!("sys/devices/system/cpu/cpu{cpu}/cache/index{index}");
            self.file(&format!("{dir}/level"), &level.to_string())
                .file(&format!("{dir}/type"), kind)
                .file(&format!("{dir}/shared_cpu_list"), cpus)
        }

        /// CPUs 0-3 share one L3, CPUs 4-7 another; the L1s are each CPU's own.
        pub(in crate::host) fn two_caches(online: &str) -> Self {
            (0..8).fold(Self::new(online), |fixture, cpu| {
                let l3 = if cpu < 4 { "0-3" } else { "4-7" };
                fixture
                    .cache(cpu, 0, 1, "Data", &cpu.to_string())
                    .cache(cpu, 1, 1, "Instruction", &cpu.to_string())
                    .cache(cpu, 3, 3, "Unified", l3)
            })
        }

        pub(in crate::host) fn node(self, node: u32, cpus: &str) -> Self {
            self.file(&format!("sys/devices/system/node/node{node}/cpulist"), cpus)
        }

        /// `of` is `core` (hyperthreads) or `package`.
        pub(in crate::host) fn share(self, of: &str, cpus: &str) -> Self {
            let list = CpuMask::parse_list(cpus).unwrap();
            list.iter().fold(self, |fixture, cpu| {
                let dir = format!("sys/devices/system/cpu/cpu{cpu}/topology");
                fixture.file(&format!("{dir}/{of}_cpus_list"), cpus)
            })
        }

        pub(in crate::host) fn topology(&self) -> Topology {
            Topology::at(self.dir.path())
        }
    }

    fn nearest(fixture: &Fixture, cpu: u32) -> Vec<u32> {
        let all = CpuMask::parse_list("0-7").unwrap();
        fixture.topology().nearest(cpu, &all, usize::MAX)
    }

    fn auto(fixture: &Fixture, interrupt: Option<u32>) -> (String, Anchor) {
        let auto = fixture.topology().auto_mask(interrupt).unwrap();
        (auto.cpus.to_string(), auto.anchor)
    }

    #[test]
    fn lists_of_cpus() {
        let fixture = Fixture::new("0-2,4");
        let topology = fixture.topology();
        assert_eq!(topology.online().unwrap().to_string(), "0-2,4");
        assert_eq!(topology.possible().unwrap().to_string(), "0-7");
        assert_eq!(topology.present().unwrap().to_string(), "0-7");
        let error = Topology::at("/nonexistent").online().unwrap_err();
        assert!(
            format!("{error:#}").contains("is /sys mounted?"),
            "{error:#}"
        );
    }

    #[test]
    fn auto_stays_within_the_interrupts_cache() {
        let fixture = Fixture::two_caches("0-7");
        assert_eq!(
            auto(&fixture, Some(5)),
            ("4-7".into(), Anchor::Interrupt(5))
        );
        assert_eq!(
            auto(&fixture, Some(0)),
            ("0-3".into(), Anchor::Interrupt(0))
        );
        assert_eq!(auto(&fixture, None), ("0-3".into(), Anchor::Assumed(0)));
    }

    #[test]
    fn auto_leaves_isolated_cpus_alone() {
        let fixture = Fixture::two_caches("0-7")
            .file("sys/devices/system/cpu/isolated", "0-1")
            .file("sys/devices/system/cpu/nohz_full", "6-7");
        assert_eq!(
            fixture.topology().housekeeping().unwrap().to_string(),
            "2-5"
        );
        assert_eq!(
            auto(&fixture, Some(4)),
            ("4-5".into(), Anchor::Interrupt(4))
        );
        assert_eq!(auto(&fixture, None), ("2-3".into(), Anchor::Assumed(2)));
        // An interrupt on an isolated CPU still says which cache the packets are in.
        assert_eq!(
            auto(&fixture, Some(1)),
            ("2-3".into(), Anchor::Interrupt(1))
        );
    }

    #[test]
    fn an_unset_nohz_full_isolates_nothing() {
        let fixture = Fixture::new("0-3").file("sys/devices/system/cpu/nohz_full", "  (null)");
        assert_eq!(
            fixture.topology().housekeeping().unwrap().to_string(),
            "0-3"
        );
    }

    #[test]
    fn auto_leaves_offline_cpus_out() {
        let fixture = Fixture::two_caches("0-4,6");
        assert_eq!(
            auto(&fixture, Some(4)),
            ("4,6".into(), Anchor::Interrupt(4))
        );
    }

    #[test]
    fn without_cache_information_every_cpu_is_near() {
        let fixture = Fixture::new("0-5").file("sys/devices/system/cpu/isolated", "5");
        assert_eq!(
            auto(&fixture, Some(2)),
            ("0-4".into(), Anchor::Everywhere(2))
        );
        assert_eq!(auto(&fixture, None), ("0-4".into(), Anchor::Everywhere(0)));
    }

    #[test]
    fn an_instruction_cache_is_no_last_level_cache() {
        let fixture =
            Fixture::new("0-3")
                .cache(0, 0, 1, "Data", "0-1")
                .cache(0, 1, 2, "Instruction", "0-3");
        assert_eq!(
            fixture.topology().cache_siblings(0).unwrap().to_string(),
            "0-1"
        );
    }

    #[test]
    fn the_nearest_cpus_share_the_cache() {
        let fixture = Fixture::two_caches("0-7");
        assert_eq!(nearest(&fixture, 2), [3, 0, 1, 4, 5, 6, 7]);
        assert_eq!(nearest(&fixture, 5), [6, 7, 4, 0, 1, 2, 3]);
        // Only CPUs of the set, whether or not the consumer's is one of them, and not too many.
        let among = CpuMask::parse_list("0-1,4,6-7").unwrap();
        let topology = fixture.topology();
        assert_eq!(topology.nearest(5, &among, 9), [6, 7, 4, 0, 1]);
        assert_eq!(topology.nearest(4, &among, 3), [6, 7, 0]);
        assert!(topology.nearest(4, &among, 0).is_empty());
    }

    #[test]
    fn after_the_cache_comes_the_node_and_then_the_package() {
        // CPUs 2 and 3 are a cache of node 0, which is half of a package.
        let fixture = Fixture::new("0-7")
            .node(0, "0-3")
            .node(1, "4-5")
            .node(2, "6-7")
            .node(3, "")
            .cache(3, 3, 3, "Unified", "2-3")
            .share("package", "0-3,6-7");
        assert_eq!(nearest(&fixture, 3), [2, 0, 1, 6, 7, 4, 5]);
        // Without a word about its caches, the node says what is near.
        assert_eq!(nearest(&fixture, 6), [7, 0, 1, 2, 3, 4, 5]);
        assert_eq!(nearest(&fixture, 4), [5, 6, 7, 0, 1, 2, 3]);
    }

    #[test]
    fn a_hyperthread_of_the_consumer_is_the_last_of_its_level() {
        let pairs = ["0-1", "2-3", "4-5", "6-7"];
        let fixture = pairs
            .iter()
            .fold(Fixture::two_caches("0-7"), |f, pair| f.share("core", pair));
        assert_eq!(nearest(&fixture, 0), [2, 3, 1, 4, 5, 6, 7]);
        assert_eq!(nearest(&fixture, 7), [4, 5, 6, 0, 1, 2, 3]);
    }

    #[test]
    fn without_cache_information_the_next_numbers_are_nearest() {
        let fixture = Fixture::new("0-7");
        assert_eq!(nearest(&fixture, 0), [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(nearest(&fixture, 6), [7, 0, 1, 2, 3, 4, 5]);
        // Caches of others say nothing about this CPU.
        let fixture = fixture.cache(0, 3, 3, "Unified", "0-3");
        assert_eq!(nearest(&fixture, 6), [7, 0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn an_offline_cpu_is_not_near() {
        let fixture = Fixture::two_caches("0-2,5-7");
        assert_eq!(nearest(&fixture, 2), [0, 1, 5, 6, 7]);
        assert_eq!(nearest(&fixture, 7), [5, 6, 0, 1, 2]);
    }

    impl Fixture {
        pub(in crate::host) fn topology_kept(self) -> (Self, Topology) {
            let topology = self.topology();
            (self, topology)
        }
    }

    #[test]
    fn this_host_can_be_read() {
        let topology = Topology::host();
        let online = topology.online().unwrap();
        assert!(!online.is_empty());
        assert_eq!(online.intersect(&topology.possible().unwrap()), online);
        let auto = topology.auto_mask(None).unwrap();
        assert_eq!(auto.cpus.intersect(&online), auto.cpus);
    }
}
