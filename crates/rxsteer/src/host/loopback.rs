// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether packets of the loopback device find their way without the route that they bring. A
//! redirect drops that route (skb_scrub_packet() in net/core/skbuff.c), and the stack then examines
//! their addresses as those of any packet (fib_validate_source() in net/ipv4/fib_frontend.c).

use std::fs;

/// Settings of the device that have to be 1.
const NEEDED: [&str; 2] = ["accept_local", "route_localnet"];

/// The settings of IPv4 on which it depends. The kernel takes the larger value of those for the device
/// and for all devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Routing {
    needed: [bool; 2],
    /// rp_filter is 1, strict: only the device to which a route leads is right for an address.
    pub strict: bool,
}

impl Routing {
    /// Reads the settings of the caller's network namespace for a loopback device.
    pub fn of(device: &str) -> Self {
        let value = |setting: &str| {
            let values = [device, "all"].map(|device| path(device, setting));
            let values =
                values.map(|path| fs::read_to_string(path).ok()?.trim().parse::<u32>().ok());
            values.into_iter().flatten().max().unwrap_or(0)
        };
        Self {
            needed: NEEDED.map(|setting| value(setting) > 0),
            strict: value("rp_filter") == 1,
        }
    }

    /// The same once [`to_set`](Self::to_set) is set.
    pub fn prepared(self) -> Self {
        Self {
            needed: [true; 2],
            ..self
        }
    }

    /// The files that have to be set to 1.
    pub fn to_set(self, device: &str) -> Vec<String> {
        let missing = NEEDED.iter().zip(self.needed).filter(|(_, set)| !set);
        missing.map(|(setting, _)| path(device, setting)).collect()
    }

    /// Whether the stack takes such packets.
    pub fn is_possible(self) -> bool {
        self.needed == [true; 2] && !self.strict
    }
}

fn path(device: &str, setting: &str) -> String {
    format!("/proc/sys/net/ipv4/conf/{device}/{setting}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_prepared() {
        let routing = |needed, strict| Routing { needed, strict };
        let plain = routing([false, true], false);
        assert_eq!(
            plain.to_set("lo"),
            ["/proc/sys/net/ipv4/conf/lo/accept_local"]
        );
        assert!(!plain.is_possible() && plain.prepared().is_possible());
        assert!(!routing([true; 2], true).prepared().is_possible());
    }
}
