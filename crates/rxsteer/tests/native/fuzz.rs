// SPDX-License-Identifier: MIT OR Apache-2.0
//! A run of `fuzz/flow.c` with a fixed seed, and the fixtures as corpus.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::common::mutate::frames;
use crate::fixture;

/// Takes about ten seconds.
const RUNS: u64 = 200_000;

/// Of `RXSTEER_FRAMES`: the sanitizers take a hundred times as long for each.
const FRAMES_PER_RUN: u64 = 100;

#[test]
fn the_parser_survives_a_short_fuzz() {
    let clang = std::env::var_os("CLANG").unwrap_or_else(|| "clang".into());
    let folder = tempfile::tempdir().unwrap();
    let (target, corpus) = (folder.path().join("flow"), folder.path().join("corpus"));
    // alignment is not checked: the data path loads words from any address
    let flags = [
        "-g",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fsanitize=fuzzer,address,undefined",
        "-fno-sanitize=alignment",
        "-fno-sanitize-recover=all",
        concat!("-I", env!("CARGO_MANIFEST_DIR"), "/bpf"),
        "-o",
    ];
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/flow.c");
    let has_fuzzer = || {
        let probe = folder.path().join("probe.c");
        fs::write(
            &probe,
            "int LLVMFuzzerTestOneInput(const char *d, long n) { return !d && n; }\n",
        )
        .unwrap();
        Command::new(&clang)
            .args(flags)
            .arg(&target)
            .arg(probe)
            .output()
    };
    match has_fuzzer() {
        Ok(built) if built.status.success() => {}
        _ => {
            return rxlab::testing::not_run(
                "fuzz flow.h",
                "clang has no libFuzzer with ASan and UBSan",
            );
        }
    }
    let built = Command::new(&clang)
        .args(flags)
        .arg(&target)
        .arg(&source)
        .output()
        .unwrap();
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );

    fs::create_dir(&corpus).unwrap();
    for (number, fixture) in fixture::all().iter().enumerate() {
        // the leading four bytes: tunnels; cut at half; linear up to three quarters; no jumbo
        let mut seed = vec![fixture.tunnels as u8, 0x80, 0xc0, 0];
        seed.extend(&fixture.packet);
        fs::write(corpus.join(format!("{number:03}")), seed).unwrap();
    }
    let runs = frames(RUNS * FRAMES_PER_RUN) / FRAMES_PER_RUN;
    let run = Command::new(&target)
        .current_dir(folder.path())
        .args([
            "-seed=1",
            "-max_len=9220",
            "-timeout=10",
            "-print_final_stats=1",
        ])
        .arg(format!("-runs={runs}"))
        .arg(&corpus)
        .output()
        .unwrap();
    let log = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{log}");
    assert!(log.contains(&format!("Done {runs} runs")), "{log}");
}
