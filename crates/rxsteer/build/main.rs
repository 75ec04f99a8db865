// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compiles the BPF objects into skeletons, and the pure C once more for the host.

mod skeleton;

use anyhow::{Context, Result};

fn main() -> Result<()> {
    for object in [
        "rx", "skb", "carrier", "hash", "trace", "socket", "poll", "types",
    ] {
        skeleton::skeleton(&format!("bpf/{object}.bpf.c"), &["bpf"])?;
    }
    cc::Build::new()
        .file("bpf/native/native.c")
        .include("bpf")
        .warnings(true)
        .extra_warnings(true)
        .flag("-Werror")
        .try_compile("rxsteer_native")
        .context("bpf/native/native.c does not build")
}
