// SPDX-License-Identifier: MIT OR Apache-2.0
//! The CPU mask that `auto` selects for a receive queue.

use std::fmt;

use anyhow::Result;

use super::cpumask::CpuMask;
use super::topology::Topology;

/// The core of the interrupt's CPU is left out only if the mask then has this number of CPUs: with
/// fewer there would be nothing to choose from.
const OTHERS: usize = 2;

/// The mask selected by `auto`, and how it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AutoMask {
    pub cpus: CpuMask,
    /// The CPU of the queue's interrupt or NAPI thread or, if that is unknown, the lowest
    /// housekeeping CPU.
    pub center: u32,
    /// `center` is the CPU of the interrupt or the thread.
    pub known: bool,
    /// What the CPUs have in common with `center`.
    pub near: Near,
    /// CPUs left out because they are on the core of the interrupt.
    pub left_out: CpuMask,
}

/// The nearest level of a CPU that includes another core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Near {
    /// The last-level cache, within the NUMA node.
    Cache,
    /// The NUMA node: cores share no cache, or the kernel does not tell.
    Node,
    /// Every CPU: the kernel reports neither.
    Everywhere,
}

impl fmt::Display for AutoMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let center = self.center;
        match self.near {
            Near::Cache => write!(f, "CPUs sharing a cache with CPU {center}"),
            Near::Node => write!(f, "CPUs of the NUMA node of CPU {center}"),
            Near::Everywhere => write!(
                f,
                "all CPUs: the kernel does not say what is near CPU {center}"
            ),
        }?;
        f.write_str(match self.known {
            true => ", where the interrupt lands",
            false => "; where the interrupt lands is not known",
        })?;
        match self.left_out.is_empty() {
            true => Ok(()),
            false => write!(f, ", without CPUs {}, the interrupt's core", self.left_out),
        }
    }
}

impl AutoMask {
    /// The mask that replaces this one, now that the interrupt lands on `interrupt_cpu`; `None` if
    /// nothing has changed. A mask stays while that CPU is unknown, and if no CPU would be left.
    ///
    /// # Errors
    /// When `/sys` can't be read.
    pub fn follow(&self, topology: &Topology, interrupt_cpu: Option<u32>) -> Result<Option<Self>> {
        if interrupt_cpu.is_none() {
            return Ok(None);
        }
        let now = topology.auto_mask(interrupt_cpu)?;
        Ok((now != *self && !now.cpus.is_empty()).then_some(now))
    }
}

impl Topology {
    /// The mask selected by `auto`: housekeeping CPUs that share the last-level cache and the NUMA
    /// node of `interrupt_cpu` or, without it, of the lowest housekeeping CPU. The interrupt's core
    /// (the CPU and its hyperthreads, which the interrupt slows) is left out if two CPUs remain.
    /// The mask may be empty.
    ///
    /// # Errors
    /// When `/sys` can't be read.
    pub fn auto_mask(&self, interrupt_cpu: Option<u32>) -> Result<AutoMask> {
        let housekeeping = self.housekeeping()?;
        let center = interrupt_cpu.or(housekeeping.first()).unwrap_or(0);
        let core = self.core(center);
        let (near, level) = self.near(center, &core, &housekeeping);
        let usable = near.intersect(&housekeeping);
        let others = usable.without(&core);
        let apart = interrupt_cpu.is_some() && others.len() >= OTHERS;
        let cpus = if apart { others } else { usable.clone() };
        Ok(AutoMask {
            left_out: usable.without(&cpus),
            cpus,
            center,
            known: interrupt_cpu.is_some(),
            near: level,
        })
    }

    /// The CPUs of the nearest level that includes a CPU outside of `core`, the core of `center`.
    fn near(&self, center: u32, core: &CpuMask, all: &CpuMask) -> (CpuMask, Near) {
        let node = self.node(center);
        let within = |cpus: CpuMask| match &node {
            Some(node) => cpus.intersect(node),
            None => cpus,
        };
        [
            (self.cache_siblings(center).map(within), Near::Cache),
            (node.clone(), Near::Node),
        ]
        .into_iter()
        .filter_map(|(cpus, level)| Some((cpus?, level)))
        .find(|(cpus, _)| !cpus.without(core).is_empty())
        .unwrap_or_else(|| (all.clone(), Near::Everywhere))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::topology::tests::Fixture;

    fn auto(fixture: &Fixture, interrupt: Option<u32>) -> (String, Near) {
        let auto = fixture.topology().auto_mask(interrupt).unwrap();
        (auto.cpus.to_string(), auto.near)
    }

    fn cpus(fixture: &Fixture, interrupt: Option<u32>) -> String {
        auto(fixture, interrupt).0
    }

    /// Pairs of hyperthreads, as Linux numbers them on x86: CPU n and CPU n + 4.
    fn hyperthreads(fixture: Fixture) -> Fixture {
        let pairs = ["0,4", "1,5", "2,6", "3,7"];
        pairs.iter().fold(fixture, |f, pair| f.share("core", pair))
    }

    /// Eight CPUs below one cache.
    fn one_cache() -> Fixture {
        (0..8).fold(Fixture::new("0-7"), |fixture, cpu| {
            fixture.cache(cpu, 3, 3, "Unified", "0-7")
        })
    }

    #[test]
    fn auto_stays_within_the_interrupts_cache() {
        let fixture = Fixture::two_caches("0-7");
        assert_eq!(auto(&fixture, Some(5)), ("4,6-7".into(), Near::Cache));
        assert_eq!(auto(&fixture, Some(0)), ("1-3".into(), Near::Cache));
        // An assumed CPU is not known to have interrupts.
        assert_eq!(auto(&fixture, None), ("0-3".into(), Near::Cache));
    }

    #[test]
    fn the_interrupts_hyperthreads_are_left_out() {
        let fixture = hyperthreads(one_cache());
        assert_eq!(cpus(&fixture, Some(1)), "0,2-4,6-7");
        assert_eq!(cpus(&fixture, Some(5)), "0,2-4,6-7");
        // Control: without hyperthreads only the CPU itself is left out.
        assert_eq!(cpus(&one_cache(), Some(1)), "0,2-7");
        // Two cores with two hyperthreads each: the other core.
        let fixture = ["0,2", "1,3"].iter().fold(
            (0..4).fold(Fixture::new("0-3"), |f, cpu| {
                f.cache(cpu, 3, 3, "Unified", "0-3")
            }),
            |f, pair| f.share("core", pair),
        );
        assert_eq!(cpus(&fixture, Some(0)), "1,3");
    }

    #[test]
    fn small_hosts_keep_the_interrupts_cpu() {
        let two = || {
            (0..2).fold(Fixture::new("0-1"), |f, cpu| {
                f.cache(cpu, 3, 3, "Unified", "0-1")
            })
        };
        assert_eq!(cpus(&two(), Some(0)), "0-1");
        assert_eq!(cpus(&two().share("core", "0-1"), Some(0)), "0-1");
        // Control: a third CPU makes the difference.
        let three = (0..3).fold(Fixture::new("0-2"), |f, cpu| {
            f.cache(cpu, 3, 3, "Unified", "0-2")
        });
        assert_eq!(cpus(&three, Some(0)), "1-2");
    }

    #[test]
    fn auto_stays_within_the_interrupts_node() {
        // One cache for two nodes.
        let fixture = one_cache().node(0, "0-3").node(1, "4-7");
        assert_eq!(auto(&fixture, Some(5)), ("4,6-7".into(), Near::Cache));
        // Control: the same host without nodes.
        assert_eq!(cpus(&one_cache(), Some(5)), "0-4,6-7");
    }

    #[test]
    fn cores_without_a_common_cache_are_near_by_node() {
        let pairs = ["0-1", "2-3", "4-5", "6-7"];
        let private = |fixture: Fixture| {
            pairs.iter().fold(fixture, |fixture, pair| {
                let list = CpuMask::parse_list(pair).unwrap();
                let fixture = fixture.share("core", pair);
                list.iter()
                    .fold(fixture, |f, cpu| f.cache(cpu, 2, 2, "Unified", pair))
            })
        };
        let fixture = private(Fixture::new("0-7")).node(0, "0-3").node(1, "4-7");
        assert_eq!(auto(&fixture, Some(0)), ("2-3".into(), Near::Node));
        assert_eq!(auto(&fixture, Some(7)), ("4-5".into(), Near::Node));
        // Control: without nodes, all other cores.
        let fixture = private(Fixture::new("0-7"));
        assert_eq!(auto(&fixture, Some(0)), ("2-7".into(), Near::Everywhere));
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
        // One other core is no choice.
        assert_eq!(auto(&fixture, Some(4)), ("4-5".into(), Near::Cache));
        assert_eq!(auto(&fixture, None), ("2-3".into(), Near::Cache));
        // The cache is that of the interrupt's CPU, even if that CPU is isolated.
        assert_eq!(auto(&fixture, Some(1)), ("2-3".into(), Near::Cache));
    }

    #[test]
    fn auto_is_empty_if_all_near_cpus_are_isolated() {
        let fixture = Fixture::two_caches("0-7").file("sys/devices/system/cpu/isolated", "0-3");
        assert_eq!(cpus(&fixture, Some(1)), "");
    }

    #[test]
    fn auto_leaves_offline_cpus_out() {
        let fixture = Fixture::two_caches("0-4,6-7");
        assert_eq!(cpus(&fixture, Some(4)), "6-7");
    }

    #[test]
    fn without_cache_information_every_cpu_is_near() {
        let fixture = Fixture::new("0-5").file("sys/devices/system/cpu/isolated", "5");
        let all = |cpus: &str| (cpus.to_owned(), Near::Everywhere);
        assert_eq!(auto(&fixture, Some(2)), all("0-1,3-4"));
        assert_eq!(auto(&fixture, None), all("0-4"));
        // Those of the node, if the kernel reports nodes.
        let fixture = fixture.node(0, "0-2").node(1, "3-5");
        assert_eq!(auto(&fixture, Some(2)), ("0-1".into(), Near::Node));
    }

    #[test]
    fn the_mask_follows_the_interrupt() {
        let fixture = Fixture::two_caches("0-7").file("sys/devices/system/cpu/nohz_full", "0-3");
        let topology = fixture.topology();
        let mask = topology.auto_mask(Some(4)).unwrap();
        let follow = |cpu| mask.follow(&topology, cpu).unwrap();
        assert_eq!(mask.cpus.to_string(), "5-7");
        assert_eq!(follow(Some(6)).unwrap().cpus.to_string(), "4-5,7");
        // Controls: the interrupt has not moved, is unknown, or is where no CPU may be used.
        assert_eq!(follow(Some(4)), None);
        assert_eq!(follow(None), None);
        assert_eq!(follow(Some(2)), None);
        // A CPU came online.
        let fixture = Fixture::two_caches("4-6");
        let mask = fixture.topology().auto_mask(Some(4)).unwrap();
        let fixture = fixture.file("sys/devices/system/cpu/online", "4-7");
        let now = mask.follow(&fixture.topology(), Some(4)).unwrap();
        assert_eq!(now.unwrap().cpus.to_string(), "5-7");
    }

    #[test]
    fn the_choice_is_explained() {
        let fixture = hyperthreads(one_cache());
        let words = |interrupt| fixture.topology().auto_mask(interrupt).unwrap().to_string();
        assert_eq!(
            words(Some(1)),
            "CPUs sharing a cache with CPU 1, where the interrupt lands, without CPUs 1,5, the \
             interrupt's core"
        );
        assert_eq!(
            words(None),
            "CPUs sharing a cache with CPU 0; where the interrupt lands is not known"
        );
    }

    #[test]
    fn this_host_has_a_mask() {
        let topology = Topology::host();
        let auto = topology.auto_mask(None).unwrap();
        assert_eq!(auto.cpus.intersect(&topology.online().unwrap()), auto.cpus);
    }
}
