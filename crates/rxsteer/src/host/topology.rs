// SPDX-License-Identifier: MIT OR Apache-2.0
//! CPUs, and the caches, cores, nodes and packages that they share.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::host::cpumask::CpuMask;

/// The CPUs of a host, read from `/sys` and `/proc`.
#[derive(Clone, Debug)]
pub struct Topology {
    root: PathBuf,
}

impl Topology {
    /// The topology of this host.
    pub fn host() -> Self {
        Self::at("/")
    }

    /// The topology of a host with `/sys` and `/proc` below `root`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Online CPUs.
    pub fn online(&self) -> Result<CpuMask> {
        self.cpu_list("online")
    }

    /// CPUs that can ever come online: those for which the kernel reserved room.
    pub fn possible(&self) -> Result<CpuMask> {
        self.cpu_list("possible")
    }

    /// Number of CPU ids, from 0 on: one more than the highest of a possible CPU. There are fewer
    /// CPUs if their ids have gaps.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn nr_cpu_ids(&self) -> Result<u32> {
        let highest = self.possible()?.iter().last();
        Ok(1 + highest.context("the kernel names no possible CPU")?)
    }

    /// CPUs that are plugged in.
    pub fn present(&self) -> Result<CpuMask> {
        self.cpu_list("present")
    }

    /// Online CPUs without those of `isolcpus=` and `nohz_full=`.
    pub fn housekeeping(&self) -> Result<CpuMask> {
        let mut cpus = self.online()?;
        for file in ["isolated", "nohz_full"] {
            if let Some(set) = self.optional_cpu_list(file)? {
                cpus = cpus.without(&set);
            }
        }
        Ok(cpus)
    }

    /// The CPUs that share the last-level cache of `cpu`, itself included; `None` if unknown (an
    /// offline CPU, or a guest without cache information).
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

    /// The speed of `cpu`, of 1024, which is that of the host's fastest CPU. Kernels that don't
    /// report it have CPUs of one speed.
    pub fn capacity(&self, cpu: u32) -> u16 {
        let file = format!("sys/devices/system/cpu/cpu{cpu}/cpu_capacity");
        let reported = self.read(&file).and_then(|text| text.parse().ok());
        reported.filter(|&capacity| capacity > 0).unwrap_or(1024)
    }

    /// The order in which to look for an idle CPU for the packets of a consumer on `cpu`: at most
    /// `most` online CPUs of `among`, without `cpu`. Valid until a CPU goes online or offline.
    ///
    /// CPUs that share its last-level cache come first, then those of its NUMA node, then those of
    /// its package, then the rest. A level that the kernel doesn't report is skipped. Within a
    /// level the order starts after `cpu` and wraps, so that neighbouring CPUs don't all try the
    /// same CPU first; hyperthreads of its core, which the consumer slows, come last.
    pub fn nearest(&self, cpu: u32, among: &CpuMask, most: usize) -> Vec<u32> {
        let near = [
            self.cache_siblings(cpu),
            self.node(cpu),
            self.sharing(cpu, "package"),
        ];
        let hyperthreads = self.sharing(cpu, "core").unwrap_or_default();
        // An offline CPU would look idle.
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

    /// Online CPUs of the NUMA node of `cpu`; `None` without nodes, or if `cpu` is offline.
    pub(super) fn node(&self, cpu: u32) -> Option<CpuMask> {
        fs::read_dir(self.path("sys/devices/system/node"))
            .ok()?
            .flatten()
            .filter_map(|node| read_trimmed(&node.path().join("cpulist")))
            .filter_map(|list| CpuMask::parse_list(&list).ok())
            .find(|cpus| cpus.contains(cpu))
    }

    /// Online CPUs on the core of `cpu`, itself included; only `cpu` if the kernel doesn't tell.
    pub fn core(&self, cpu: u32) -> CpuMask {
        let alone = || CpuMask::from_iter([cpu]);
        self.sharing(cpu, "core").unwrap_or_else(alone)
    }

    /// Online CPUs in the `core` or `package` of `cpu`; `None` if `cpu` is offline.
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

    /// A CPU list that some kernels lack. An unset `nohz_full` is missing, empty or `(null)`,
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

    /// A host's `/sys` and `/proc` in a temporary folder.
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

        /// CPUs 0-3 share one L3, CPUs 4-7 another; each CPU has its own L1.
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

        /// `of`: `core` (hyperthreads) or `package`.
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
    fn cpu_ids_may_have_gaps() {
        let ids = |possible| {
            let fixture = Fixture::new("0").file("sys/devices/system/cpu/possible", possible);
            fixture.topology().nr_cpu_ids().unwrap()
        };
        assert_eq!(ids("0-3"), 4);
        assert_eq!(ids("0-3,8-11"), 12);
        assert_eq!(ids("3"), 4);
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
        // Only CPUs of the set, with or without the consumer's, and at most that many.
        let among = CpuMask::parse_list("0-1,4,6-7").unwrap();
        let topology = fixture.topology();
        assert_eq!(topology.nearest(5, &among, 9), [6, 7, 4, 0, 1]);
        assert_eq!(topology.nearest(4, &among, 3), [6, 7, 0]);
        assert!(topology.nearest(4, &among, 0).is_empty());
    }

    #[test]
    fn after_the_cache_comes_the_node_and_then_the_package() {
        // CPUs 2 and 3 share a cache in node 0, which is half of a package.
        let fixture = Fixture::new("0-7")
            .node(0, "0-3")
            .node(1, "4-5")
            .node(2, "6-7")
            .node(3, "")
            .cache(3, 3, 3, "Unified", "2-3")
            .share("package", "0-3,6-7");
        assert_eq!(nearest(&fixture, 3), [2, 0, 1, 6, 7, 4, 5]);
        // Without cache information, the node is the nearest level.
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
        // Cache information of other CPUs says nothing about this one.
        let fixture = fixture.cache(0, 3, 3, "Unified", "0-3");
        assert_eq!(nearest(&fixture, 6), [7, 0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn a_small_cpu_has_less_capacity() {
        let capacity = |cpu| format!("sys/devices/system/cpu/cpu{cpu}/cpu_capacity");
        let fixture = Fixture::new("0-2")
            .file(&capacity(0), "446")
            .file(&capacity(1), "0");
        let capacities = [0, 1, 2].map(|cpu| fixture.topology().capacity(cpu));
        assert_eq!(capacities, [446, 1024, 1024]);
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
    }
}
