// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compiles the BPF objects into skeletons, and the pure C once more for the host.

mod skeleton;

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

use anyhow::{Context, Result};

/// Every file below a folder, sorted.
fn sources(folder: &str) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        match path.is_dir() {
            true => files.extend(sources(&path.to_string_lossy())?),
            false => files.push(path),
        }
    }
    files.sort();
    Ok(files)
}

/// Tells the crate a number that these files have in common with equal files alone. Another compiler
/// may give them another number: pinned steering is then replaced instead of adopted.
fn fingerprint(variable: &str, files: &[PathBuf]) -> Result<()> {
    let mut hasher = DefaultHasher::new();
    for file in files {
        fs::read(file)?.hash(&mut hasher);
    }
    println!("cargo:rustc-env={variable}={:016x}", hasher.finish());
    Ok(())
}

fn main() -> Result<()> {
    for object in [
        "rx",
        "dissector",
        "hops",
        "hash",
        "trace",
        "socket",
        "poll",
        "types",
    ] {
        skeleton::skeleton(&format!("bpf/{object}.bpf.c"), &["bpf"])?;
    }
    fingerprint("RXSTEER_BPF_PROGRAMS", &sources("bpf")?)?;
    fingerprint(
        "RXSTEER_BPF_LAYOUT",
        &["bpf/types.h".into(), "bpf/maps.h".into()],
    )?;
    cc::Build::new()
        .file("bpf/native/native.c")
        .include("bpf")
        .warnings(true)
        .extra_warnings(true)
        .flag("-Werror")
        .try_compile("rxsteer_native")
        .context("bpf/native/native.c does not build")
}
