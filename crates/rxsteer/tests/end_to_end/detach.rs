// SPDX-License-Identifier: MIT OR Apache-2.0
//! What commands say and do about steering that is pinned, and about what can't be pinned.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::helpers::pinned::{folder, mount_bpffs, mount_bpffs_with};
use crate::helpers::process::*;
use crate::helpers::user::{self, mount_run};
use anyhow::{Context, Result, ensure};
use libbpf_rs::{MapHandle, MapType};
use nix::mount::{MsFlags, mount, umount};
use nix::sys::signal::Signal;
use rxlab::in_lab;
use rxlab::lab::link::LinkConfig;
use rxlab::lab::resident::Resident;
use rxlab::testing::testbed::*;
use rxsteer::host::bpffs::Folder;
use rxsteer::host::ethtool::TX_VLAN;
use rxsteer::host::lock;
use rxsteer::host::privileges::NEEDED;
use serde_json::Value;
use tempfile::TempDir;

const OWN: &str = "/sys/fs/bpf/own";

fn testbed() -> Result<Testbed> {
    let bed = Testbed::new(&LinkConfig::default())?;
    mount_bpffs(&bed.link.dut.netns)?;
    Ok(bed)
}

/// Pins steering in a folder, and ends without it.
fn pinned_by_one_that_ended(bed: &Testbed, pin: &str) -> Result<()> {
    let dut = &bed.link.dut;
    let rxsteer = Rxsteer::steering(&dut.netns, &roomy(&dut.name, &[pin]))?;
    ensure!(rxsteer.stop(Signal::SIGTERM)?.code == Some(0));
    ensure!(attached(bed)?.is_some(), "steering goes on");
    Ok(())
}

/// A command's output and its errors; whether it succeeded.
fn says(bed: &Testbed, args: &[&str]) -> Result<(String, String, bool)> {
    let output = rxsteer(&bed.link.dut.netns, args)?;
    let [said, errors] = [output.stdout, output.stderr].map(String::from_utf8);
    Ok((said?, errors?, output.status.success()))
}

fn status_as_json(bed: &Testbed) -> Result<Value> {
    let (said, errors, succeeded) = says(bed, &["status", "--json"])?;
    ensure!(succeeded, "{errors}");
    let schema = include_str!("../../../../docs/manual/status.schema.json");
    let schema = jsonschema::draft202012::new(&serde_json::from_str(schema)?)?;
    let status = serde_json::from_str(&said)?;
    ensure!(schema.is_valid(&status), "{status}");
    Ok(status)
}

/// A configuration that this namespace alone sees.
fn configure(bed: &Testbed, text: &str) -> Result<()> {
    bed.link.dut.netns.run(|| {
        let none = None::<&str>;
        mount(Some("etc"), "/etc", Some("tmpfs"), MsFlags::empty(), none)?;
        fs::create_dir("/etc/rxsteer")?;
        Ok(fs::write("/etc/rxsteer/rxsteer.toml", text)?)
    })
}

#[test]
fn status_shows_what_is_pinned() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    let dut = &bed.link.dut;
    let none = || -> Result<()> {
        let (_, errors, succeeded) = says(&bed, &["status"])?;
        ensure!(
            !succeeded && errors.contains("no rxsteer is running"),
            "{errors}"
        );
        Ok(())
    };
    none()?;
    // Whole seconds are told.
    let before = SystemTime::now() - Duration::from_secs(1);
    let running = Rxsteer::steering(&dut.netns, &roomy(&dut.name, &["--pin"]))?;
    let status = status_as_json(&bed)?;
    ensure!(status["pinned"] == Value::Array(Vec::new()), "{status}");
    ensure!(status["pid"] == running.child.id(), "{status}");
    running.stop(Signal::SIGKILL)?;
    let after = SystemTime::now();

    let status = status_as_json(&bed)?;
    ensure!(status["pid"].is_null(), "{status}");
    let pinned = &status["pinned"][0];
    ensure!(pinned["version"] == env!("CARGO_PKG_VERSION"), "{status}");
    ensure!(pinned["devices"][0]["device"] == *dut.name, "{status}");
    let since = pinned["devices"][0]["since"].as_str().context("a time")?;
    let time = humantime::parse_rfc3339(since)?;
    ensure!(before <= time && time <= after, "{since}");
    let (said, _, succeeded) = says(&bed, &["status"])?;
    let folder = pinned["folder"].as_str().context("a folder")?;
    let ways = [
        "`rxsteer run --pin` takes it over",
        "`rxsteer detach` ends it",
    ];
    let facts = ["steering goes on", folder, &dut.name, since];
    for part in facts.iter().chain(&ways) {
        ensure!(succeeded && said.contains(part), "no {part:?}: {said}");
    }
    // A start that goes on with it does not change the time.
    pinned_by_one_that_ended(&bed, "--pin")?;
    let status = status_as_json(&bed)?;
    ensure!(status["pinned"][0] == *pinned, "{status} {pinned}");
    ensure!(says(&bed, &["detach"])?.2);
    none()
}

#[test]
fn commands_that_ask_a_running_one_say_that_steering_is_pinned() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    let asked: [(&[&str], &str); 7] = [
        (&["flows"], "lists its flows"),
        (&["explain", "0x1"], "explains its flows"),
        (&["explain", "9"], "explains its flows"),
        (&["explain", "pid:1"], "explains its flows"),
        (&["top", "--once"], "shows its rates"),
        (&["set", "--policy=rps"], "nothing has changed"),
        (&["reload"], "its options stay as they are"),
    ];
    // The control: nothing is pinned.
    let all_fail = |pinned: bool, folder: &str| -> Result<()> {
        for (args, so) in asked {
            let (_, errors, succeeded) = says(&bed, args)?;
            ensure!(!succeeded, "{args:?}");
            let parts = [
                "and steering goes on: it is pinned at ",
                so,
                folder,
                "` ends it",
            ];
            for part in parts {
                ensure!(
                    errors.contains(part) == pinned,
                    "{args:?}, {part:?}: {errors}"
                );
            }
            ensure!(
                errors.contains("no rxsteer is running in this network namespace"),
                "{errors}"
            );
            ensure!(errors.contains("start it with") != pinned, "{errors}");
        }
        Ok(())
    };
    all_fail(false, "`rxsteer run --pin")?;
    pinned_by_one_that_ended(&bed, "--pin")?;
    all_fail(true, "`rxsteer run --pin` takes it over")?;
    ensure!(says(&bed, &["detach"])?.2);
    pinned_by_one_that_ended(&bed, &format!("--pin={OWN}"))?;
    configure(&bed, &format!("pin = {OWN:?}"))?;
    all_fail(true, &format!("`rxsteer run --pin={OWN}` takes it over"))?;
    ensure!(says(&bed, &["detach"])?.2);
    all_fail(false, "`rxsteer run --pin")
}

/// Whoever named the folder: the command line of the start, or the configuration.
#[test]
fn a_folder_of_its_own_is_found() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    let pin = format!("--pin={OWN}");
    let ways = [
        format!("`rxsteer run {pin}` takes it over"),
        format!("`rxsteer detach {pin}` ends it"),
    ];
    for is_configured in [false, true] {
        pinned_by_one_that_ended(&bed, &pin)?;
        if is_configured {
            configure(&bed, &format!("pin = {OWN:?}"))?;
        }
        let (said, _, _) = says(&bed, &["status"])?;
        ensure!(ways.iter().all(|way| said.contains(way)), "{said}");
        let (said, errors, succeeded) = says(&bed, &["detach"])?;
        ensure!(succeeded, "{errors}");
        ensure!(
            said.contains("1 device detached") && said.contains(OWN),
            "{said}"
        );
        ensure!(attached(&bed)?.is_none());
    }
    Ok(())
}

/// Folders of one BPF file system belong to several namespaces.
#[test]
fn the_folder_of_another_namespace_is_left_to_it() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    pinned_by_one_that_ended(&bed, &format!("--pin={OWN}"))?;
    let other = Resident::start(&bed.link.tester.netns)?;
    let netns = format!("--net=/proc/{}/ns/net", other.pid());
    let mut detach = bed.link.dut.netns.command("nsenter")?;
    let detached = detach.args([&netns, RXSTEER, "detach"]).output()?;
    ensure!(detached.status.success(), "{detached:?}");
    ensure!(String::from_utf8(detached.stdout)?.contains("nothing is pinned"));
    ensure!(attached(&bed)?.is_some());
    // The control.
    ensure!(says(&bed, &["detach"])?.2 && attached(&bed)?.is_none());
    Ok(())
}

#[test]
fn a_mistake_in_the_configuration_fails_the_detach_that_it_does_not_stop() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    pinned_by_one_that_ended(&bed, "--pin")?;
    configure(&bed, "\npin = {}")?;
    for forced in [&["detach"][..], &["detach", "--force"]] {
        let output = rxsteer(&bed.link.dut.netns, forced)?;
        ensure!(output.status.code() == Some(1), "{output:?}");
        let errors = String::from_utf8(output.stderr)?;
        ensure!(errors.contains("rxsteer.toml:2: pin: "), "{errors}");
        ensure!(
            errors.contains("steering may go on in the folder"),
            "{errors}"
        );
        ensure!(attached(&bed)?.is_none());
    }
    // The control.
    ensure!(says(&bed, &["detach", "--pin=true"])?.2);
    Ok(())
}

/// The log of a start that must be refused.
fn refused(bed: &Testbed, args: &[&str]) -> Result<String> {
    let started = Rxsteer::start(&bed.link.dut.netns, args)?;
    Ok(started.err().context("it is refused")?.log)
}

/// Whether a user without privileges can do this.
fn nobody(bed: &Testbed, script: &str) -> Result<bool> {
    let status = user::nobody(&bed.link.dut.netns, script)?.status()?;
    Ok(status.success())
}

/// A folder with a file that a link in the pins leads to.
fn victim() -> Result<(TempDir, PathBuf)> {
    let victim = tempfile::tempdir()?;
    let file = victim.path().join("precious");
    fs::write(&file, "")?;
    Ok((victim, file))
}

/// Fails if pins lead a command to others' files, or if it does not name the file and a remedy.
fn ensure_refused(bed: &Testbed, precious: &Path, words: &[&str]) -> Result<()> {
    let removes = [&["detach"][..], &["detach", "--force"]];
    for args in removes {
        let (said, errors, succeeded) = says(bed, args)?;
        ensure!(precious.exists(), "{args:?} removed it: {said} {errors}");
        ensure!(!succeeded, "{args:?}: {said}");
        for word in words {
            ensure!(errors.contains(word), "{args:?}, no {word:?}: {errors}");
        }
    }
    let log = refused(bed, &[&bed.link.dut.name, "--pin"])?;
    ensure!(precious.exists(), "`run --pin` removed it: {log}");
    for word in words {
        ensure!(log.contains(word), "no {word:?}: {log}");
    }
    Ok(())
}

#[test]
fn folders_that_a_user_made_are_not_entered() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    mount_bpffs_with(&dut.netns, "mode=1777")?;
    let (victim, precious) = victim()?;
    let pins = folder(&dut.netns)?.display().to_string();
    let link = |generation: &str| {
        let victim = victim.path().display();
        format!("mkdir -p {generation}; ln -s {victim} {generation}/maps")
    };
    ensure!(nobody(&bed, &link(&format!("{pins}/0123456789abcdef")))?);
    let remedy = "chmod 0700 /sys/fs/bpf`";
    ensure_refused(&bed, &precious, &["/sys/fs/bpf ", "mode 1777", remedy])?;
    // Nor does it prevent a start that pins nothing.
    let plain = Rxsteer::steering(&dut.netns, &[&dut.name])?;
    let ended = plain.stop(Signal::SIGTERM)?;
    ensure!(ended.log.contains("mode 1777"), "{ended:?}");

    // The remedy helps against what comes, and the folder that is there is named.
    let chmod = |path: &str, mode| {
        let mode = fs::Permissions::from_mode(mode);
        dut.netns.run(|| Ok(fs::set_permissions(path, mode)?))
    };
    chmod("/sys/fs/bpf", 0o700)?;
    let parent = "/sys/fs/bpf/rxsteer";
    let named = format!("{parent} (owner 65534");
    ensure_refused(&bed, &precious, &[&named, &format!("chown 0:0 {parent}")])?;
    dut.netns.run(|| Ok(fs::remove_dir_all(parent)?))?;
    ensure!(!nobody(&bed, &link(&format!("{pins}/0123456789abcdef")))?);
    pinned_by_one_that_ended(&bed, "--pin")?;
    ensure!(says(&bed, &["detach"])?.2);

    // A link on the way, where others can make them.
    chmod("/sys/fs/bpf", 0o1777)?;
    ensure!(nobody(&bed, "ln -s . /sys/fs/bpf/rxsteer")?);
    ensure_refused(
        &bed,
        &precious,
        &["/sys/fs/bpf/rxsteer is ", "symbolic link"],
    )
}

#[test]
fn only_pins_are_removed() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    let dut = &bed.link.dut;
    let (victim, precious) = victim()?;
    let folder = folder(&dut.netns)?;
    type Make<'a> = &'a dyn Fn(&Path) -> Result<()>;
    let make = |path: &str, what: Make<'_>| -> Result<String> {
        let path = folder.join(path);
        dut.netns.run(|| {
            let _ = fs::remove_dir_all(&folder);
            fs::create_dir_all(path.parent().context("a folder")?)?;
            Ok(())
        })?;
        what(&path)?;
        Ok(path.display().to_string())
    };
    let in_netns = |f: &(dyn Fn() -> Result<()> + Sync)| dut.netns.run(f);
    let link = |path: &Path| in_netns(&|| Ok(symlink(victim.path(), path)?));
    let link_to_file = |path: &Path| in_netns(&|| Ok(symlink(&precious, path)?));
    let map = |path: &Path| {
        in_netns(&|| {
            let opts = libbpf_sys::bpf_map_create_opts {
                sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
                ..Default::default()
            };
            let map = MapHandle::create(MapType::Array, Some("foreign"), 4, 4, 1, &opts)?;
            Folder::make(path.parent().context("a folder")?)?.pin("foreign", map.as_fd())
        })
    };
    let inside = "0123456789abcdef";
    let foreign: [(&str, Make<'_>, &str); 6] = [
        ("maps", &link, "symbolic link"),
        ("maps/backlogs", &link_to_file, "no BPF object"),
        ("record", &link_to_file, "no BPF object"),
        ("xdp/foreign", &map, "which rxsteer has not pinned"),
        ("foreign", &map, "which rxsteer has not pinned"),
        ("maps/foreign/x", &link_to_file, "no BPF object"),
    ];
    for (name, make_it, why) in foreign {
        let path = make(&format!("{inside}/{name}"), make_it)?;
        let named = path.strip_suffix("/x").unwrap_or(&path);
        ensure_refused(&bed, &precious, &[named, why])?;
        ensure!(
            dut.netns
                .run(|| Ok(Path::new(&path).symlink_metadata().is_ok()))?
        );
    }
    // The control: without them these are leftovers.
    let path = make(&format!("{inside}/maps/foreign"), &map)?;
    let (said, errors, succeeded) = says(&bed, &["detach"])?;
    ensure!(
        succeeded && said.contains("removed what was left"),
        "{errors}"
    );
    ensure!(dut.netns.run(|| Ok(!Path::new(&path).exists()))?);
    Ok(())
}

/// It waits for the lock with those that it needs, as `run` has them.
#[test]
fn detach_gives_capabilities_back() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    let netns = &bed.link.dut.netns;
    mount_run(netns)?;
    let lock = netns.run(|| lock::take("sockets", "is this test"))?;
    let mut child = netns.command(RXSTEER)?.arg("detach").spawn()?;
    let needed = NEEDED.iter().map(|c| 1_u64 << c.index()).sum::<u64>();
    let status = format!("/proc/{}/status", child.id());
    let effective = || -> Result<u64> {
        let status = fs::read_to_string(&status)?;
        let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        Ok(u64::from_str_radix(line.context("no CapEff")?.trim(), 16)?)
    };
    until("only what it needs is left", || {
        Ok((effective()? == needed).then_some(()))
    })?;
    drop(lock);
    ensure!(child.wait()?.success());
    Ok(())
}

/// A container's BPF file system, for example, is not seen: the program is.
#[test]
fn nothing_is_steered_twice() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    let name = bed.link.dut.name.as_str();
    pinned_by_one_that_ended(&bed, "--pin")?;
    mount_bpffs(&bed.link.dut.netns)?;
    for mode in ["--mode=auto", "--mode=native", "--mode=softirq"] {
        let log = refused(&bed, &[name, mode])?;
        for word in ["it is pinned", "rxsteer detach", "--pin=FOLDER"] {
            ensure!(log.contains(word), "{mode}: {log}");
        }
    }
    // The control: the same device without the program.
    bed.link.dut.netns.run(|| Ok(umount("/sys/fs/bpf")?))?;
    ensure!(says(&bed, &["detach"])?.2);
    Rxsteer::steering(&bed.link.dut.netns, &[name, "--mode=softirq"])?.stop(Signal::SIGTERM)?;
    Ok(())
}

#[test]
fn remedies_are_possible_with_pin() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    let (dut, tester) = (&bed.link.dut, &bed.link.tester);
    // By it the other end is found, whose tags native mode would lose.
    let _far = Resident::start(&tester.netns)?;
    tester.ethtool.set_features(TX_VLAN, true)?;
    let name = &dut.name[..];
    let by_hand = format!("ethtool -K {} txvlan off", tester.name);
    for mode in ["--mode=auto", "--mode=native"] {
        let log = refused(&bed, &[name, "--pin", mode])?;
        ensure!(log.contains(&by_hand), "{log}");
        for impossible in ["--prepare", "--mode softirq"] {
            ensure!(!log.contains(impossible), "{log}");
        }
    }
    // The control: without --pin that is a remedy.
    let log = refused(&bed, &[name, "--mode=native"])?;
    ensure!(log.contains("--prepare") && log.contains(&by_hand), "{log}");
    let log = refused(&bed, &["lo", "--pin"])?;
    ensure!(log.contains("which --pin excludes: leave --pin"), "{log}");
    // The remedy is one.
    tester.ethtool.set_features(TX_VLAN, false)?;
    pinned_by_one_that_ended(&bed, "--pin")?;
    ensure!(says(&bed, &["detach"])?.2);
    Ok(())
}
