// SPDX-License-Identifier: MIT OR Apache-2.0
//! OpenWrt's /etc/config/network, in UCI format: the options `packet_steering` (1: RPS; 2: over all CPUs)
//! and `steering_flows` (RFS, with this number of slots for each queue) of the section `globals`.

use std::collections::BTreeMap;

use super::found::Found;
use crate::host::cpumask::CpuMask;
use crate::host::topology::Topology;

/// What the text asks for; `None` if it is no such file.
pub(super) fn found(text: &str) -> Option<Found> {
    let mut found = Found {
        from: "a network configuration of OpenWrt".to_owned(),
        ..Found::default()
    };
    let (mut is_uci, mut steering) = (false, 0);
    let mut devices = Vec::new();
    for line in text.lines() {
        let words: Vec<_> = line.split_whitespace().map(unquoted).collect();
        match words[..] {
            ["config", _] | ["config", _, _] => is_uci = true,
            ["option", "packet_steering", value] => steering = value.parse().unwrap_or(0),
            ["option", "steering_flows", value] => {
                let slots = value.parse().ok().filter(|slots| *slots > 0);
                found.follows = slots.is_some();
                found.rps_flow_cnt = slots;
            }
            ["option", "device" | "ifname", name] | ["list", "ports" | "ifname", name] => {
                devices.push(name.to_owned());
            }
            _ => {}
        }
    }
    if !is_uci {
        return None;
    }
    // Bridges and aliases are made of devices; loopback has no interrupt.
    let is_device =
        |name: &String| !name.starts_with(['@', '$']) && !name.starts_with("br-") && name != "lo";
    if steering > 0 {
        let cpus = (steering == 2).then(every_cpu).flatten();
        let masks: BTreeMap<u32, CpuMask> = cpus.into_iter().map(|cpus| (0, cpus)).collect();
        let named = devices.into_iter().filter(is_device);
        found.devices = named.map(|name| (name, masks.clone())).collect();
    }
    found.notes.push(
        "before rxsteer starts: uci set network.@globals[0].packet_steering=0; uci commit network"
            .to_owned(),
    );
    Some(found)
}

fn every_cpu() -> Option<CpuMask> {
    Topology::host().possible().ok()
}

fn unquoted(word: &str) -> &str {
    word.trim_matches(['\'', '"'])
}

#[cfg(test)]
mod tests {
    use super::super::of_text;

    const NETWORK: &str = "
config interface 'loopback'
\toption device 'lo'

config globals 'globals'
\toption ula_prefix 'fd00::/48'
\toption packet_steering '1'

config device
\toption name 'br-lan'
\toption type 'bridge'
\tlist ports 'lan1'
\tlist ports 'lan2'

config interface 'lan'
\toption device 'br-lan'

config interface 'wan'
\toption device 'eth1'
";

    #[test]
    fn packet_steering_is_rps() {
        let text = of_text(NETWORK).unwrap().configuration();
        assert!(
            text.contains("devices = [\"eth1\", \"lan1\", \"lan2\"]\n"),
            "{text}"
        );
        assert!(text.contains("policy = \"rps\"\n"), "{text}");
        assert!(!text.contains("rps-cpus ="), "{text}");
        let flows = NETWORK.replace(
            "steering '1'",
            "steering '2'\n\toption steering_flows '128'",
        );
        let text = of_text(&flows).unwrap().configuration();
        assert!(text.contains("policy = \"rfs\"\nrps-cpus = \"0"), "{text}");
        assert!(text.contains("rps-flow-cnt = 128\n"), "{text}");
        // The control: off.
        let off = of_text(&NETWORK.replace("'1'", "'0'")).unwrap_err();
        assert!(off.to_string().contains("nothing to import"), "{off}");
    }

    #[test]
    fn other_files_are_refused() {
        let error = of_text("devices = [\"eth0\"]\n").unwrap_err().to_string();
        assert!(
            error.contains("OpenWrt") && error.contains("VyOS"),
            "{error}"
        );
    }
}
