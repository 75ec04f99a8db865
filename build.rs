// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compiles the BPF objects into skeletons, and the pure C once more for the host.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use libbpf_cargo::SkeletonBuilder;

/// The multiarch include folder (`/usr/include/x86_64-linux-gnu`), where Debian keeps `asm/`.
fn multiarch_include() -> Option<PathBuf> {
    let arch = env::var("CARGO_CFG_TARGET_ARCH").ok()?;
    let dir = Path::new("/usr/include").join(format!("{arch}-linux-gnu"));
    dir.is_dir().then_some(dir)
}

fn main() -> Result<()> {
    println!("cargo:rerun-if-changed=bpf");
    println!("cargo:rerun-if-env-changed=CLANG");
    let out = PathBuf::from(env::var("OUT_DIR")?);

    for object in ["rx", "poll", "lab"] {
        let mut args: Vec<String> = [
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-unused-parameter",
            "-mcpu=v3",
        ]
        .map(String::from)
        .to_vec();
        args.extend(multiarch_include().map(|dir| format!("-I{}", dir.display())));
        let mut builder = SkeletonBuilder::new();
        builder
            .source(format!("bpf/{object}.bpf.c"))
            .clang_args(args);
        if let Some(clang) = env::var_os("CLANG") {
            builder.clang(clang);
        }
        builder
            .build_and_generate(out.join(format!("{object}.skel.rs")))
            .with_context(|| format!("bpf/{object}.bpf.c does not build"))?;
    }

    cc::Build::new()
        .file("bpf/native.c")
        .warnings(true)
        .extra_warnings(true)
        .flag("-Werror")
        .try_compile("rxsteer_native")
        .context("bpf/native.c does not build")?;
    Ok(())
}
