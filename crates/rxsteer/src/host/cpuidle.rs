// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long a CPU takes to wake up from its deepest idle state.

use std::fs;

use super::topology::Topology;

/// An idle state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdleState {
    /// The driver's name, as `C6`.
    pub name: String,
    /// Exit latency, us.
    pub latency: u32,
}

impl Topology {
    /// The enabled idle state of `cpu` with the longest exit latency; `None` without cpuidle, as in
    /// most guests.
    pub fn deepest_idle(&self, cpu: u32) -> Option<IdleState> {
        let folder = format!("sys/devices/system/cpu/cpu{cpu}/cpuidle");
        let states = fs::read_dir(self.path(&folder)).ok()?.flatten();
        let states = states.filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let read = |file: &str| self.read(&format!("{folder}/{name}/{file}"));
            (read("disable")? == "0").then_some(IdleState {
                name: read("name")?,
                latency: read("latency")?.parse().ok()?,
            })
        });
        states.max_by_key(|state| state.latency)
    }
}

#[cfg(test)]
mod tests {
    use crate::host::topology::tests::Fixture;

    #[test]
    fn disabled_states_do_not_count() {
        let folder = "sys/devices/system/cpu/cpu0/cpuidle";
        let state = |fixture: Fixture, nr: u32, name: &str, latency: &str, disable: &str| {
            fixture
                .file(&format!("{folder}/state{nr}/name"), name)
                .file(&format!("{folder}/state{nr}/latency"), latency)
                .file(&format!("{folder}/state{nr}/disable"), disable)
        };
        let fixture = state(Fixture::new("0"), 0, "POLL", "0", "0");
        let fixture = state(fixture, 1, "C1", "2", "0");
        let deepest = |fixture: &Fixture| fixture.topology().deepest_idle(0).map(|s| s.latency);
        let with = |disable| {
            state(
                state(Fixture::new("0"), 1, "C1", "2", "0"),
                2,
                "C6",
                "133",
                disable,
            )
        };
        assert_eq!(deepest(&fixture), Some(2));
        assert_eq!(deepest(&with("0")), Some(133));
        assert_eq!(deepest(&with("1")), Some(2));
        assert_eq!(deepest(&Fixture::new("0")), None);
    }
}
