// SPDX-License-Identifier: MIT OR Apache-2.0
//! Packets that wait at a device, in classes of a queueing discipline.

use std::collections::BTreeMap;

use anyhow::Result;
use rxlab::lab::netns::Netns;
use rxlab::lab::tool::Tool;

const TC: Tool = Tool {
    program: "tc",
    package: "iproute2",
    needs: "these queueing disciplines and filters",
};

/// Lets one byte pass in a second, and one packet before.
const BUCKET: &str = "qdisc add dev DEV root handle 1: tbf rate 8bit burst 264 limit 9999";

/// Runs tc with these arguments, in which DEV is the device.
///
/// # Errors
/// There is no tc, or it fails.
pub fn tc(netns: &Netns, device: &str, args: &str) -> Result<String> {
    let args = args.replace("DEV", device);
    let words: Vec<_> = args.split(' ').collect();
    Ok(String::from_utf8(TC.run(netns, &words, "")?)?)
}

/// A device at which packets wait in 2:, which tc's commands make below 1:1.
pub struct Waiting<'a> {
    netns: &'a Netns,
    device: &'a str,
}

impl<'a> Waiting<'a> {
    /// DEV in the commands is the device. Packets of more than 200 bytes wait for minutes.
    ///
    /// # Errors
    /// There is no tc, or the kernel lacks what the commands make.
    pub fn new(netns: &'a Netns, device: &'a str, commands: &[&str]) -> Result<Self> {
        let waiting = Self { netns, device };
        let mut all = [BUCKET].iter().chain(commands);
        all.try_for_each(|command| tc(netns, device, command).map(drop))?;
        Ok(waiting)
    }

    /// The packets that wait in each class of 2:.
    pub fn in_classes(&self) -> Result<BTreeMap<u32, u32>> {
        let (mut class, mut classes) = (None, BTreeMap::new());
        for line in tc(self.netns, self.device, "-statistics class show dev DEV")?.lines() {
            match line.split_whitespace().collect::<Vec<_>>()[..] {
                ["class", _, id, ..] => class = id.strip_prefix("2:"),
                ["backlog", _, packets, ..] => {
                    if let Some(class) = class {
                        let packets = packets.trim_end_matches('p').parse()?;
                        classes.insert(u32::from_str_radix(class, 16)?, packets);
                    }
                }
                _ => {}
            }
        }
        Ok(classes)
    }
}
