// SPDX-License-Identifier: MIT OR Apache-2.0
//! VyOS's configuration, as the file config.boot has it or as `set` commands: `offload rps` and `offload
//! rfs` of Ethernet interfaces.

use std::collections::BTreeMap;

use super::found::Found;

/// What the text asks for; `None` if it is no such configuration.
pub(super) fn found(text: &str) -> Option<Found> {
    let mut found = Found {
        from: "a configuration of VyOS".to_owned(),
        ..Found::default()
    };
    let mut is_vyos = false;
    for path in paths(text) {
        let words: Vec<&str> = path.iter().map(String::as_str).collect();
        is_vyos |= words.starts_with(&["interfaces"]);
        let [
            "interfaces",
            "ethernet",
            device,
            "offload",
            what @ ("rps" | "rfs"),
        ] = words[..]
        else {
            continue;
        };
        found.devices.insert(device.to_owned(), BTreeMap::new());
        found.follows |= what == "rfs";
    }
    for device in found.devices.keys() {
        for what in ["rps", "rfs"] {
            let command = format!("delete interfaces ethernet {device} offload {what}");
            found
                .notes
                .push(format!("before rxsteer starts: {command}"));
        }
    }
    is_vyos.then_some(found)
}

/// The nodes of a configuration, each with those above it.
fn paths(text: &str) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    let mut above: Vec<Vec<String>> = Vec::new();
    for line in text.lines() {
        let line = line.trim();
        let words = |text: &str| -> Vec<String> {
            text.split_whitespace()
                .map(|word| word.trim_matches('\'').to_owned())
                .collect()
        };
        if let Some(command) = line.strip_prefix("set ") {
            paths.push(words(command));
        } else if let Some(node) = line.strip_suffix('{') {
            above.push(words(node));
            paths.push(above.concat());
        } else if line == "}" {
            above.pop();
        } else if !line.is_empty() {
            paths.push([above.concat(), words(line)].concat());
        }
    }
    paths
}

#[cfg(test)]
mod tests {
    use super::super::of_text;

    const BOOT: &str = "
interfaces {
    ethernet eth0 {
        address dhcp
        offload {
            gro
            rfs
            rps
        }
    }
    ethernet eth1 {
        offload {
            gro
        }
    }
    loopback lo {
    }
}
system {
    host-name vyos
}
";

    #[test]
    fn offload_lines_are_rps_and_rfs() {
        let set = "set interfaces ethernet eth0 offload rps\nset interfaces ethernet 'eth0' offload rfs\n";
        for text in [BOOT, set] {
            let text = of_text(text).unwrap().configuration();
            assert!(text.contains("devices = [\"eth0\"]\n"), "{text}");
            assert!(text.contains("policy = \"rfs\"\n"), "{text}");
            assert!(
                text.contains("delete interfaces ethernet eth0 offload rps\n"),
                "{text}"
            );
        }
        let rps = of_text(&BOOT.replace("rfs", "tso"))
            .unwrap()
            .configuration();
        assert!(rps.contains("policy = \"rps\"\n"), "{rps}");
        // The control: neither.
        assert!(of_text(&BOOT.replace("rfs", "tso").replace("rps", "gso")).is_err());
    }
}
