// SPDX-License-Identifier: MIT OR Apache-2.0
//! What dist/ brings to hosts fits together: packages, unit, container. `make deb`, `make service` and `make
//! image` install it.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

const RXSTEER: &str = env!("CARGO_BIN_EXE_rxsteer");
const UNIT: &str = include_str!("../../../../dist/rxsteer.service");
const MANIFEST: &str = include_str!("../../../../dist/kubernetes/daemonset.yaml");
const CONTAINERFILE: &str = include_str!("../../../../dist/Containerfile");
const INSTALL: &str = include_str!("../../../../scripts/install.sh");

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The files that install.sh puts into its PREFIX, /usr here, for a program; man pages as a pattern.
fn installed(program: &str, script: &str) -> BTreeSet<String> {
    let mut files = BTreeSet::new();
    let commands = script.lines().map(str::trim).filter(|line| {
        let silent = !line.starts_with(['#', 'e']); // comments and echo
        silent && !line.starts_with("install -d ") && !line.starts_with("share=")
    });
    for word in commands.flat_map(|line| line.split('"')) {
        let folders = [("$prefix/", "usr/"), ("$share/", "usr/share/")];
        let below = |(from, to): &(&str, &str)| Some(format!("{to}{}", word.strip_prefix(from)?));
        let Some(path) = folders.iter().find_map(below) else {
            continue;
        };
        let path = match path.strip_suffix("/man8") {
            Some(folder) => format!("{folder}/man8/$program*.8"),
            None => path,
        };
        // The configuration is that of rxsteer.
        if path.contains("$program") || program == "rxsteer" {
            files.insert(path.replace("$program", program));
        }
    }
    files
}

/// The files that Debian's package takes from there.
fn packaged(program: &str) -> Result<BTreeSet<String>> {
    let list = root().join(format!("dist/debian/{program}.install"));
    let text = fs::read_to_string(list)?;
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let first = |line: &str| line.split(' ').next().map(str::to_owned);
    Ok(lines.filter_map(first).collect())
}

#[test]
fn packages_have_what_is_installed() -> Result<()> {
    for program in ["rxsteer", "rxlab"] {
        let (installed, packaged) = (installed(program, INSTALL), packaged(program)?);
        ensure!(installed == packaged, "{installed:#?} {packaged:#?}");
        ensure!(packaged.contains(&format!("usr/bin/{program}")));
        // The control: one more file is noticed.
        let more = format!("{INSTALL}\ninstall -D new \"$share/new/$program\"\n");
        ensure!(self::installed(program, &more).len() == packaged.len() + 1);
    }
    ensure!(UNIT.contains("\nExecStart=/usr/bin/rxsteer run\n"));
    Ok(())
}

/// Names of capabilities, sorted.
fn names<'a>(words: impl Iterator<Item = &'a str>) -> BTreeSet<&'a str> {
    words.map(|name| name.trim().trim_matches('"')).collect()
}

/// Those that the manifest adds, after it has dropped all.
fn added(manifest: &str) -> Result<BTreeSet<&str>> {
    ensure!(manifest.contains("drop: [\"ALL\"]\n"));
    let (_, list) = manifest.split_once("add: [").context("adds none")?;
    let (list, _) = list.split_once(']').context("no end")?;
    Ok(names(list.split(',')))
}

#[test]
fn the_container_has_the_units_capabilities() -> Result<()> {
    let setting = |line: &'static str| line.strip_prefix("CapabilityBoundingSet=");
    let unit = UNIT.lines().find_map(setting).context("no capabilities")?;
    let unit = names(unit.split(' ').filter_map(|name| name.strip_prefix("CAP_")));
    ensure!(!unit.is_empty() && added(MANIFEST)? == unit, "{unit:?}");
    // The control.
    ensure!(added(&MANIFEST.replace("\"BPF\"", "\"SYS_MODULE\""))? != unit);
    Ok(())
}

/// The memory that the manifest asks for, and its limit, MiB.
fn memory(manifest: &str) -> Result<(u32, u32)> {
    let of = |section: &str| {
        let (_, text) = manifest.split_once(section).context("no such section")?;
        let (_, text) = text.split_once("memory: ").context("no memory")?;
        let (size, _) = text.split_once("Mi\n").context("not in Mi")?;
        Ok::<_, anyhow::Error>(size.parse()?)
    };
    Ok((of("requests:\n")?, of("limits:\n")?))
}

#[test]
fn the_container_has_a_limit_of_memory() -> Result<()> {
    const MANUAL: &str = include_str!("../../../../docs/manual/packages.md");
    let (request, limit) = memory(MANIFEST)?;
    assert!(request < limit, "{request} {limit}");
    assert!(MANUAL.contains(&format!("limit of memory, {limit} MiB,")));
    // The control.
    assert!(memory(&MANIFEST.replace("limits:", "")).is_err());
    Ok(())
}

#[test]
fn the_container_is_of_this_version() {
    let version = env!("CARGO_PKG_VERSION");
    assert!(CONTAINERFILE.contains(&format!("\nARG VERSION={version}\n")));
    assert!(MANIFEST.contains(&format!("image: rxsteer:{version}\n")));
}

#[test]
fn the_manifests_configuration_is_valid() -> Result<()> {
    let (_, text) = MANIFEST
        .split_once("  rxsteer.toml: |\n")
        .context("the manifest has no configuration")?;
    let lines = text.lines().map_while(|line| line.strip_prefix("    "));
    let text: String = lines.map(|line| format!("{line}\n")).collect();
    ensure!(text.contains("devices"), "{text}");
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("rxsteer.toml");
    for (text, valid) in [
        (text.clone(), true),
        (text.replace("devices", "devcies"), false),
    ] {
        fs::write(&file, &text)?;
        let check = Command::new(RXSTEER).arg("check").arg(&file).output()?;
        ensure!(check.status.success() == valid, "{text} {check:?}");
    }
    Ok(())
}

/// Of a rxsteer that is removed: whether it has `detach`, and whether it works, also by force.
#[derive(Clone, Copy)]
struct Removed {
    has_detach: bool,
    works: bool,
    works_by_force: bool,
}

/// What the package's script before removal asks of rxsteer, and its message if it prevents the removal.
fn asked(action: &str, rxsteer: Removed) -> Result<(Vec<String>, Option<String>)> {
    let folder = tempfile::tempdir()?;
    let (program, log) = (folder.path().join("rxsteer"), folder.path().join("log"));
    let status = |works| if works { 0 } else { 1 };
    let text = format!(
        "#!/bin/sh\necho \"$*\" >>{}\ncase $* in *--help) exit {};; *--force) exit {};; *) exit {};; esac\n",
        log.display(),
        status(rxsteer.has_detach),
        status(rxsteer.works_by_force),
        status(rxsteer.works),
    );
    fs::write(&program, text)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    let script = root().join("dist/debian/rxsteer.prerm");
    // No other program can be called by its name, such as the one that stops services.
    let script = Command::new("/bin/sh")
        .arg(script)
        .arg(action)
        .env("PATH", folder.path())
        .output()?;
    let log = fs::read_to_string(log).unwrap_or_default();
    let asked = log.lines().map(str::to_owned).collect();
    let why = String::from_utf8(script.stderr)?;
    Ok((asked, (!script.status.success()).then_some(why)))
}

#[test]
fn removal_detaches() -> Result<()> {
    let help = "detach --help";
    let all = Removed {
        has_detach: true,
        works: true,
        works_by_force: true,
    };
    let by_force = Removed {
        works: false,
        ..all
    };
    let none = Removed {
        works_by_force: false,
        ..by_force
    };
    let old = Removed {
        has_detach: false,
        ..none
    };
    let nothing: [&str; 0] = [];
    for (action, rxsteer, expected) in [
        ("remove", all, &[help, "detach"][..]),
        ("remove", by_force, &[help, "detach", "detach --force"]),
        ("remove", old, &[help]),
        ("upgrade", all, &nothing),
    ] {
        let (asked, refused) = asked(action, rxsteer)?;
        ensure!(
            asked == expected && refused.is_none(),
            "{asked:?} {refused:?}"
        );
    }
    // Without the package nothing could end what is still pinned.
    let why = asked("remove", none)?.1.context("it is removed")?;
    ensure!(why.contains("rxsteer is not removed"), "{why}");
    Ok(())
}
