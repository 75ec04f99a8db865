// SPDX-License-Identifier: MIT OR Apache-2.0
//! What both crates' build scripts do: compile a BPF object into a skeleton.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use libbpf_cargo::SkeletonBuilder;

/// Compiles a `NAME.bpf.c` of the crate that is built, with the headers of these folders, into
/// `NAME.skel.rs`.
///
/// # Errors
/// When clang is missing, or the object does not build: the message is clang's.
pub fn skeleton(source: &str, includes: &[&str]) -> Result<()> {
    let name = source
        .rsplit('/')
        .next()
        .and_then(|file| file.strip_suffix(".bpf.c"));
    let name = name.context("a BPF object's source is called NAME.bpf.c")?;
    println!("cargo:rerun-if-changed=bpf");
    println!("cargo:rerun-if-env-changed=CLANG");
    let mut args: Vec<String> = [
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unused-parameter",
        "-mcpu=v3",
    ]
    .map(String::from)
    .to_vec();
    for include in includes {
        println!("cargo:rerun-if-changed={include}");
        args.push(format!("-I{include}"));
    }
    args.extend(multiarch_include().map(|dir| format!("-I{}", dir.display())));
    let mut builder = SkeletonBuilder::new();
    builder.source(source).clang_args(args);
    if let Some(clang) = env::var_os("CLANG") {
        builder.clang(clang);
    }
    let out = PathBuf::from(env::var("OUT_DIR")?);
    builder
        .build_and_generate(out.join(format!("{name}.skel.rs")))
        .with_context(|| format!("{source} does not build"))
}

/// The multiarch include folder (`/usr/include/x86_64-linux-gnu`), where Debian keeps `asm/`.
fn multiarch_include() -> Option<PathBuf> {
    let arch = env::var("CARGO_CFG_TARGET_ARCH").ok()?;
    let dir = Path::new("/usr/include").join(format!("{arch}-linux-gnu"));
    dir.is_dir().then_some(dir)
}
