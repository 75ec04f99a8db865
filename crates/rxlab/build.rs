// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compiles the lab's BPF programs, which parse packets as rxsteer does.

#[path = "../rxsteer/build/skeleton.rs"]
mod skeleton;

fn main() -> anyhow::Result<()> {
    skeleton::skeleton("bpf/probe.bpf.c", &["../rxsteer/bpf"])?;
    skeleton::skeleton("bpf/lab.bpf.c", &["../rxsteer/bpf"])
}
