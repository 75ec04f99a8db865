// SPDX-License-Identifier: MIT OR Apache-2.0
//! Facts about the host, and handles to change it.

pub mod auto;
pub mod caps;
pub mod carrier;
pub mod channels;
pub mod coalesce;
pub mod cpu_times;
pub mod cpuidle;
pub mod cpumask;
pub mod device;
mod elsewhere;
pub mod ethtool;
pub mod gain;
pub mod guardian;
mod ifreq;
pub mod irq;
pub mod kthread;
pub mod loopback;
mod loss;
pub mod lower;
pub mod netdev;
mod netlink;
pub mod netns;
pub mod objection;
pub mod offloads;
pub mod peer;
pub mod polling;
pub mod rings;
pub mod rss;
pub mod sched;
pub mod setting;
pub mod softnet;
pub mod tc;
pub mod topology;
pub mod tun;
pub mod wait;
pub mod xdp;
