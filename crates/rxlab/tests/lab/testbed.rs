// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parts of `make many` and `make guest` that run before the emulator. Needs no root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result};

/// Root of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn bash(script: &str) -> Result<Output> {
    let mut bash = Command::new("bash");
    let bash = bash.args(["-euc", script]).current_dir(root());
    bash.output().context("running bash")
}

#[test]
fn a_machine_that_cannot_be_is_refused_before_anything_is_installed() -> Result<()> {
    let report = tempfile::tempdir()?;
    let page = report.path().join("many.json");
    for (arguments, why) in [
        ("--cpus 1", "--cpus 1: choose 2 to 32."),
        ("--cpus 33", "--cpus 33: choose 2 to 32."),
        ("--cpus many", "--cpus many: choose 2 to 32."),
        ("--cpus 8 --sockets 3", "by which 8 CPUs can be divided"),
        ("--report many.txt", "a name that ends with .json"),
        ("--cpus", "usage: testbed.sh"),
    ] {
        let run = bash(&format!(
            "scripts/testbed.sh --report {} {arguments}",
            page.display()
        ))?;
        let said = String::from_utf8_lossy(&run.stderr);
        assert_eq!(run.status.code(), Some(2), "{arguments}: {said}");
        assert!(said.contains(why), "{arguments}: {said}");
        assert!(!page.exists(), "{arguments}");
    }
    Ok(())
}

/// The list of sources of another suite differs from the machine's own in the suite only.
#[test]
fn other_suites_come_from_where_the_machines_own_do() -> Result<()> {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    if !release.lines().any(|line| line == "ID=debian") {
        rxlab::testing::not_run(
            "other_suites_come_from_where_the_machines_own_do",
            "this is not Debian",
        );
        return Ok(());
    }
    let sources = |suites: &str| -> Result<String> {
        let run = bash(&format!(
            ". scripts/cargo.sh; . scripts/debian.sh; debian_sources '{suites}'"
        ))?;
        assert!(run.status.success(), "{run:?}");
        Ok(String::from_utf8(run.stdout)?)
    };
    let field = |text: &str, name: &str| {
        let mut lines = text.lines();
        let line = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.map(|value| value.trim().to_owned())
    };
    let own = bash(
        "cat /etc/apt/sources.list /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list 2>&1 || true",
    )?;
    let own = String::from_utf8_lossy(&own.stdout).into_owned();
    let (later, other) = (sources("trixie sid")?, sources("forky")?);
    assert_eq!(field(&later, "Suites").as_deref(), Some("trixie sid"));
    assert_eq!(field(&later, "Types").as_deref(), Some("deb deb-src"));
    let host = field(&later, "URIs").context("no URIs")?;
    assert!(own.contains(&host), "{host} is not one of the machine's");
    // Control: nothing but the suites differs.
    assert_ne!(later, other);
    assert_eq!(later.replace("trixie sid", "forky"), other);
    Ok(())
}

/// The patch's functions exist, and are called where the patch says.
#[test]
fn the_patch_calls_what_the_emulators_file_has() -> Result<()> {
    let read =
        |file: &str| fs::read_to_string(root().join("testbed").join(file)).context("testbed/");
    let (patch, header, source) = (
        read("qemu.patch")?,
        read("counted-time.h")?,
        read("counted-time.c")?,
    );
    let called: Vec<&str> = patch
        .lines()
        .filter(|line| line.starts_with('+'))
        .flat_map(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_'))
        .filter(|word| word.starts_with("counted_time_"))
        .collect();
    assert!(called.len() >= 8, "{called:?}");
    for name in called {
        for text in [&header, &source] {
            assert!(text.contains(&format!("{name}(")), "{name}");
        }
    }
    Ok(())
}

/// Tables that `make guest` and `make many PROFILE=1` print.
#[test]
fn tables_say_what_guests_told() -> Result<()> {
    let profile = bash(
        "printf '%s\\t%s\\t%s\\t%s\\n' \
             '30 ' 000 'rxlab' '[k] states_equal' \
             '50 ' 000 'swapper' '[k] pv_native_safe_halt' \
             '20 ' 000 'swapper' '[k] handle_softirqs' \
             '10 ' 000 'sink' '[k] handle_softirqs' \
             '10 ' 000 'sink' '[.] receive' | awk -f scripts/profile.awk",
    )?;
    assert!(profile.status.success(), "{profile:?}");
    assert_eq!(
        String::from_utf8(profile.stdout)?,
        "\nCPU 0, not idle in 40 of 90 samples\n   75.0 %  handle_softirqs\n   25.0 %  receive\n"
    );
    let told = tempfile::tempdir()?;
    let table = |lines: &str| {
        fs::write(told.path().join("6.1"), lines)?;
        let table = root().join("scripts/guest-table.awk").canonicalize()?;
        bash(&format!(
            "cd {} && awk -v files='steer rfs' -f {} 6.1",
            told.path().display(),
            table.display()
        ))
    };
    let good = table(
        "all\tsteer::a\tstarted\t0\t\nall\tsteer::a\tpassed\t1\t\nall\trfs::b\tpassed\t1\t\n",
    )?;
    assert!(good.status.success(), "{good:?}");
    let said = String::from_utf8(good.stdout)?;
    assert!(said.contains("| rfs | 1 passed |"), "{said}");
    // Control: the guest ended during a test, and a file was not reached.
    for missing in ["all\trfs::b\tstarted\t0\t\n", ""] {
        let bad = table(&format!("all\tsteer::a\tpassed\t1\t\n{missing}"))?;
        assert_eq!(bad.status.code(), Some(1), "{bad:?}");
        let said = String::from_utf8(bad.stdout)?;
        assert!(said.contains("| rfs | NOT RUN |"), "{said}");
    }
    Ok(())
}
