// SPDX-License-Identifier: MIT OR Apache-2.0
//! Steering that goes on without its process, is taken over, and is ended by `rxsteer detach`.

use std::collections::BTreeSet;
use std::fs;
use std::process::Stdio;
use std::time::Duration;

use crate::helpers::pinned::{
    backlogs, files, folder, generations, goes_on, map, mount_bpffs, pin_again, redirected,
};
use crate::helpers::process::*;
use crate::helpers::threads::{cpumaps, kthreads};
use anyhow::{Context, Result, ensure};
use libbpf_rs::{MapCore, MapFlags, MapHandle, Program};
use nix::sys::signal::Signal;
use rxlab::bench::setup::mode::Active;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::hog::Hog;
use rxlab::lab::link::LinkConfig;
use rxlab::lab::witness::Witness;
use rxlab::testing::short_or_long;
use rxlab::testing::testbed::*;
use rxsteer::daemon::options::{Options, Pin};
use rxsteer::host::bpffs;
use rxsteer::types::backlog_closed;

/// So few that several packets of each are queued at a time.
const NR_FLOWS: u32 = 16;

/// A link whose receiving end has a BPF file system.
fn testbed() -> Result<Testbed> {
    let bed = Testbed::new(&LinkConfig::default())?;
    mount_bpffs(&bed.link.dut.netns)?;
    Ok(bed)
}

/// Sends flows into the link at a rate that is never lost.
fn traffic(bed: &Testbed, flows: &UdpFlows) -> Result<Generator> {
    let paced = GeneratorConfig::lossless(Frames::Udp(flows.clone()), None).at(20_000);
    Generator::start(&bed.link, 0, &paced)
}

/// `rxsteer run --pin` with these options besides.
fn pinning(bed: &Testbed, args: &[&str]) -> Result<Rxsteer> {
    let dut = &bed.link.dut;
    let args = [&["--pin", "--rps-cpus=1", "--policy=rps"], args].concat();
    Rxsteer::steering(&dut.netns, &roomy(&dut.name, &args))
}

/// A command's standard output; it must succeed.
fn says(bed: &Testbed, args: &[&str]) -> Result<String> {
    let output = rxsteer(&bed.link.dut.netns, args)?;
    ensure!(output.status.success(), "{output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

#[test]
fn steering_goes_on_without_its_process() -> Result<()> {
    in_lab!();
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let bed = testbed()?;
        let flows = UdpFlows::to(&bed.link.dut, 500);
        let sink = bed.receiver_in_order(&flows)?;
        let wire = traffic(&bed, &flows)?;
        let first = pinning(&bed, &[])?;
        redirects(&first)?;
        let threads = kthreads(&cpumaps(first.child.id())?)?;
        let before = first.received()?;
        let ended = first.stop(signal)?;
        let code = (signal == Signal::SIGTERM).then_some(0);
        assert_eq!(ended.code, code, "{ended:?}");
        goes_on(&bed)?;

        // The next start goes on with programs, tables and counters.
        let program = attached(&bed)?.context("a program is attached")?.id;
        let second = pinning(&bed, &[])?;
        assert_eq!(attached(&bed)?.context("attached")?.id, program);
        assert!(second.received()? > before);
        assert_eq!(kthreads(&cpumaps(second.child.id())?)?, threads);
        goes_on(&bed)?;
        let ended = second.stop(Signal::SIGTERM)?;
        assert!(ended.log.contains("goes on: programs"), "{ended:?}");

        let said = says(&bed, &["detach"])?;
        assert!(
            said.contains("1 device detached, every flow in order"),
            "{said}"
        );
        assert_eq!(attached(&bed)?, None);
        let sent = wire.stop()?;
        assert_eq!(sent.lost, 0);
        all_arrive_in_order(sink, sent.sent)?;
        nothing_is_left(&bed)?;
    }
    Ok(())
}

/// No pin and no folder.
fn nothing_is_left(bed: &Testbed) -> Result<()> {
    let netns = &bed.link.dut.netns;
    let folder = folder(netns)?;
    assert_eq!(files(netns, &folder)?, [] as [std::path::PathBuf; 0]);
    let parent = folder.parent().context("a parent")?;
    assert!(netns.run(|| Ok(!parent.exists()))?);
    Ok(())
}

/// Frames that the first device has received, by a running rxsteer, whose accounts close.
fn counted(rxsteer: &Rxsteer) -> Result<u64> {
    let queue = &rxsteer.status()?.devices[0].queues[0];
    Ok(queue.received)
}

/// Each by a new process: half of them go on with programs and tables, half replace them. The application's CPU is so busy that frames are queued all the time.
#[test]
fn upgrades_under_load_lose_and_overtake_nothing() -> Result<()> {
    in_lab!();
    let times = short_or_long(4, 100);
    let bed = testbed()?;
    let flows = UdpFlows::to(&bed.link.dut, NR_FLOWS);
    let sink = bed.receiver_in_order(&flows)?;
    let witness = Witness::new(&bed.link.dut, &Frames::Udp(flows.clone()))?;
    let wire = traffic(&bed, &flows)?;
    let _hog = Hog::partly(OTHER_CPU)?;
    let (mut received, mut adopted, mut replaced) = (0, 0, 0);
    for number in 0..times {
        let limit = format!("--flow-limit={}", number / 2 % 2 * 50);
        let rxsteer = pinning(&bed, &[&limit])?;
        let now = counted(&rxsteer)?;
        assert!(now >= received, "{now} {received}");
        goes_on(&bed)?;
        received = counted(&rxsteer)?;
        let signal = match number % 3 {
            0 => Signal::SIGKILL,
            _ => Signal::SIGTERM,
        };
        let ended = rxsteer.stop(signal)?;
        assert!(!ended.log.contains("overtake"), "{ended:?}");
        adopted += u32::from(ended.log.contains("goes on: programs"));
        replaced += u32::from(ended.log.contains("other values of --flow-limit"));
    }
    assert_eq!(adopted, times / 2);
    assert_eq!(replaced, times - times / 2 - 1);
    let said = says(&bed, &["detach"])?;
    assert!(said.contains("every flow in order"), "{said}");
    let sent = wire.stop()?;
    assert_eq!(sent.lost, 0);
    assert_eq!(witness.reordered(), 0, "reordered: {}", witness.reordered());
    all_arrive_in_order(sink, sent.sent)?;
    eprintln!(
        "{times} upgrades: {} packets, 0 lost, 0 overtaken",
        sent.sent
    );
    nothing_is_left(&bed)
}

/// The control of the test above: upgrades without the rule of order overtake packets.
#[test]
fn upgrades_without_the_rule_of_order_overtake() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    let dut = &bed.link.dut;
    let flows = UdpFlows::to(dut, NR_FLOWS);
    let _sink = bed.receiver_in_order(&flows)?;
    let witness = Witness::new(dut, &Frames::Udp(flows.clone()))?;
    let _wire = traffic(&bed, &flows)?;
    let _hog = Hog::partly(OTHER_CPU)?;
    let mut limit = 0;
    until("a packet is overtaken", || {
        limit = 50 - limit;
        let options = Options {
            pin: Some(Pin::Default),
            unguarded: true,
            flow_limit: limit,
            ..bed.options(&[OTHER_CPU])
        };
        let active = Active::steer(dut, options)?;
        goes_on(&bed)?;
        active.stop()?;
        Ok((witness.reordered() > 0).then_some(()))
    })?;
    says(&bed, &["detach"])?;
    nothing_is_left(&bed)
}

/// Another control: a stop without `--pin` leaves a gap, in which nothing is redirected.
#[test]
fn without_pins_steering_ends() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    let dut = &bed.link.dut;
    let rxsteer = Rxsteer::steering(&dut.netns, &roomy(&dut.name, &["--rps-cpus=1"]))?;
    rxsteer.stop(Signal::SIGTERM)?;
    assert_eq!(attached(&bed)?, None);
    assert!(redirected(&bed).is_err());
    nothing_is_left(&bed)?;
    let said = says(&bed, &["detach"])?;
    assert!(
        said.contains("nothing is pinned at /sys/fs/bpf/rxsteer/net-"),
        "{said}"
    );
    Ok(())
}

/// Changes the record as if other versions had written it.
fn rewrite(bed: &Testbed, change: impl Fn(String) -> String) -> Result<()> {
    let record = map(&bed.link.dut.netns, "record")?;
    let key = 0u32.to_ne_bytes();
    let text = record.lookup(&key, MapFlags::ANY)?.context("a record")?;
    let mut changed = change(String::from_utf8(text.clone())?)
        .trim_end()
        .to_owned()
        .into_bytes();
    ensure!(
        changed.len() <= text.len() && !text.starts_with(&changed),
        "{changed:?}"
    );
    changed.resize(text.len(), b' ');
    Ok(record.update(&key, &changed, MapFlags::ANY)?)
}

/// A key's text in JSON with another character at its end.
fn other(record: &str, key: &str) -> String {
    let (before, after) = record.split_once(&format!("{key:?}:\"")).expect("the key");
    let (value, after) = after.split_once('"').expect("its end");
    let end = if value.ends_with('8') { "9" } else { "8" };
    format!(
        "{before}{key:?}:\"{}{end}\"{after}",
        &value[..value.len() - 1]
    )
}

#[test]
fn another_version_is_replaced_in_order() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    let flows = UdpFlows::to(&bed.link.dut, 500);
    let sink = bed.receiver_in_order(&flows)?;
    let wire = traffic(&bed, &flows)?;
    let stopped = || {
        let rxsteer = pinning(&bed, &[])?;
        goes_on(&bed)?;
        let received = counted(&rxsteer)?;
        let outside = backlog_closed::BACKLOG_OUTSIDE.0.into();
        // CPU 1 is the mask.
        let closed = backlogs(&bed)?.into_iter().map(|b| b.closed);
        assert_eq!(closed.take(2).collect::<Vec<_>>(), [outside, 0]);
        Ok::<_, anyhow::Error>((received, rxsteer.stop(Signal::SIGTERM)?))
    };
    let (before, _) = stopped()?;
    rewrite(&bed, |record| other(&other(&record, "programs"), "version"))?;
    let (now, ended) = stopped()?;
    assert!(
        ended.log.contains("replaced, since it is of version 0.1.8"),
        "{ended:?}"
    );
    assert!(!ended.log.contains("begin at 0"), "{ended:?}");
    assert!(now > before, "{now} {before}");
    // Its maps have another layout: its own programs return its flows.
    rewrite(&bed, |record| other(&other(&record, "programs"), "layout"))?;
    let (now, ended) = stopped()?;
    assert!(ended.log.contains("begin at 0"), "{ended:?}");
    assert!(now > 0);
    says(&bed, &["detach"])?;
    let sent = wire.stop()?;
    assert_eq!(sent.lost, 0);
    all_arrive_in_order(sink, sent.sent)
}

#[test]
fn new_sizes_of_tables_are_pinned() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    let flows = UdpFlows::to(&bed.link.dut, 500);
    let sink = bed.receiver_in_order(&flows)?;
    let wire = traffic(&bed, &flows)?;
    let first = pinning(&bed, &[])?;
    goes_on(&bed)?;
    says(
        &bed,
        &[
            "set",
            "--rps-flow-cnt=32768",
            "--rps-sock-flow-entries=1024",
        ],
    )?;
    first.stop(Signal::SIGKILL)?;
    goes_on(&bed)?;
    let sizes = [
        "--rps-flow-cnt=32768",
        "--rps-sock-flow-entries=1024",
        "--policy=rfs",
    ];
    let second = Rxsteer::steering(
        &bed.link.dut.netns,
        &roomy(
            &bed.link.dut.name,
            &[&["--pin", "--rps-cpus=1"], &sizes[..]].concat(),
        ),
    )?;
    goes_on(&bed)?;
    // Programs that watch sockets are pinned too.
    let netns = &bed.link.dut.netns;
    let sockets = |files: Vec<std::path::PathBuf>| {
        let names = files
            .iter()
            .filter(|path| path.parent().is_some_and(|p| p.ends_with("sockets")));
        names.count()
    };
    assert!(sockets(files(netns, &folder(netns)?)?) > 0);
    let ended = second.stop(Signal::SIGTERM)?;
    assert!(ended.log.contains("goes on: programs"), "{ended:?}");
    assert!(sockets(files(netns, &folder(netns)?)?) > 0);
    // Without following, there are none.
    let third = pinning(&bed, &sizes[..2])?;
    assert_eq!(sockets(files(netns, &folder(netns)?)?), 0);
    let ended = third.stop(Signal::SIGTERM)?;
    assert!(ended.log.contains("goes on: programs"), "{ended:?}");
    says(&bed, &["detach"])?;
    let sent = wire.stop()?;
    assert_eq!(sent.lost, 0);
    all_arrive_in_order(sink, sent.sent)
}

#[test]
fn detach_leaves_nothing() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    let netns = &bed.link.dut.netns;
    let flows = UdpFlows::to(&bed.link.dut, 50);
    let wire = traffic(&bed, &flows)?;
    let rxsteer = pinning(&bed, &[])?;
    redirects(&rxsteer)?;
    let refused = crate::helpers::process::rxsteer(netns, &["detach"])?;
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let why = String::from_utf8(refused.stderr)?;
    assert!(
        why.contains("once no rxsteer runs") && why.contains("stop it first"),
        "{why}"
    );
    let cpumaps = cpumaps(rxsteer.child.id())?;
    rxsteer.stop(Signal::SIGTERM)?;
    assert!(!kthreads(&cpumaps)?.is_empty());
    let names = [
        "backlogs",
        "rx_queues",
        "dev_flow_tables",
        "record",
        "cpumaps",
    ];
    let maps = names.map(|name| Ok(map(netns, name)?.info()?.info.id));
    let maps: BTreeSet<u32> = maps.into_iter().collect::<Result<_>>()?;
    let program = attached(&bed)?.context("a program is attached")?.id;
    says(&bed, &["detach"])?;
    assert_eq!(attached(&bed)?, None);
    nothing_is_left(&bed)?;
    until("the kernel has freed everything", || {
        let maps = maps
            .iter()
            .chain(&cpumaps)
            .any(|&id| MapHandle::from_map_id(id).is_ok());
        let rest = maps || Program::fd_from_id(program).is_ok() || !kthreads(&cpumaps)?.is_empty();
        Ok((!rest).then_some(()))
    })?;
    let said = says(&bed, &["detach"])?;
    assert!(said.contains("nothing is pinned"), "{said}");
    drop(wire);
    Ok(())
}

#[test]
fn damaged_and_unknown_pins_are_removed_by_force_alone() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    let dut = &bed.link.dut;
    let damage = |number: u32| match number {
        0 => rewrite(&bed, |record| {
            record.replace("\"format\":1", "\"format\":9")
        }),
        1 => rewrite(&bed, |_| "x".to_owned()),
        _ => dut.netns.run(|| {
            let files = files(&dut.netns, &folder(&dut.netns)?)?;
            let mut files = files.into_iter();
            let program = files.find(|path| path.ends_with("programs/queue_return"));
            Ok(fs::remove_file(program.context("a program")?)?)
        }),
    };
    for number in 0..3 {
        pinning(&bed, &[])?.stop(Signal::SIGTERM)?;
        damage(number)?;
        let started = Rxsteer::start(&dut.netns, &roomy(&dut.name, &["--pin"]))?;
        let ended = started.err().context("it is refused")?;
        assert!(ended.log.contains("rxsteer detach --force"), "{ended:?}");
        let output = rxsteer(&dut.netns, &["detach"])?;
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(attached(&bed)?.is_some());
        let said = says(&bed, &["detach", "--force"])?;
        assert!(said.contains("may overtake"), "{said}");
        assert_eq!(attached(&bed)?, None);
        nothing_is_left(&bed)?;
    }
    Ok(())
}

/// A start that must be refused, with this exit status and these words.
fn refused(bed: &Testbed, code: i32, args: &[&str], words: &[&str]) -> Result<()> {
    let started = Rxsteer::start(&bed.link.dut.netns, args)?;
    let ended = started.err().context("it is refused")?;
    assert_eq!(ended.code, Some(code), "{ended:?}");
    for word in words {
        assert!(ended.log.contains(word), "{word:?}: {ended:?}");
    }
    Ok(())
}

#[test]
fn what_can_not_be_pinned_is_refused() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let name = bed.link.dut.name.as_str();
    let there = bed
        .link
        .dut
        .netns
        .run(|| bpffs::ensure_is_in("/sys/fs/bpf".as_ref()));
    if there.is_err() {
        refused(
            &bed,
            1,
            &[name, "--pin"],
            &["mount -t bpf -o mode=0700 bpf /sys/fs/bpf"],
        )?;
    }
    mount_bpffs(&bed.link.dut.netns)?;
    for (options, word) in [
        (&["--mode=softirq"][..], "softirq mode"),
        (&["--prepare"], "--prepare puts settings back"),
        (&["--dry-run"], "--dry-run steers nothing"),
        (&["--follow-nat"], "--follow-nat"),
        (&["--backlog-sched=fifo"], "--backlog-sched fifo"),
        (&["--hash=device", "--policy=rps"], "--hash device"),
        (&["veth*"], "softirq mode"),
    ] {
        refused(&bed, 2, &[&[name, "--pin"], options].concat(), &[word])?;
    }
    let foreign = "/sys/fs/bpf/foreign";
    bed.link
        .dut
        .netns
        .run(|| Ok(fs::create_dir_all(format!("{foreign}/maps"))?))?;
    let pin = format!("--pin={foreign}");
    refused(
        &bed,
        1,
        &[name, &pin],
        &[
            &format!("{foreign}/maps is "),
            "which rxsteer has not pinned",
        ],
    )?;
    nothing_is_left(&bed)
}

#[test]
fn a_start_without_pin_is_refused() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    let name = bed.link.dut.name.as_str();
    pinning(&bed, &[])?.stop(Signal::SIGTERM)?;
    let ways = ["rxsteer detach", "rxsteer run --pin"];
    refused(&bed, 1, &[name], &ways)?;
    says(&bed, &["detach"])?;
    // Another folder is found, and named in all remedies.
    let elsewhere = "--pin=/sys/fs/bpf/else/where";
    let ended =
        Rxsteer::steering(&bed.link.dut.netns, &[name, elsewhere])?.stop(Signal::SIGTERM)?;
    let ways = [
        &format!("`rxsteer detach {elsewhere}`")[..],
        &format!("`rxsteer run {elsewhere}`"),
    ];
    assert!(ways.iter().all(|way| ended.log.contains(way)), "{ended:?}");
    for mode in ["--mode=native", "--mode=auto", "--mode=softirq"] {
        refused(&bed, 1, &[name, mode], &ways)?;
    }
    refused(&bed, 1, &[name, "--pin"], &ways)?;
    says(&bed, &["detach", elsewhere])?;
    assert_eq!(attached(&bed)?, None);
    Ok(())
}

#[test]
fn a_device_that_is_made_again_is_steered_anew() -> Result<()> {
    in_lab!();
    let mut bed = testbed()?;
    pinning(&bed, &[])?.stop(Signal::SIGKILL)?;
    bed.link.delete()?;
    bed.make_again(&LinkConfig::default())?;
    let flows = UdpFlows::to(&bed.link.dut, 50);
    let wire = traffic(&bed, &flows)?;
    let second = pinning(&bed, &[])?;
    goes_on(&bed)?;
    // While it runs, too.
    drop(wire);
    bed.link.delete()?;
    bed.make_again(&LinkConfig::default())?;
    let flows = UdpFlows::to(&bed.link.dut, 50);
    let wire = traffic(&bed, &flows)?;
    until("the device is steered again", || {
        Ok(attached(&bed)?.is_some().then_some(()))
    })?;
    goes_on(&bed)?;
    second.stop(Signal::SIGKILL)?;
    goes_on(&bed)?;
    drop(wire);
    says(&bed, &["detach"])?;
    nothing_is_left(&bed)
}

#[test]
fn an_error_ends_pinned_steering() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    let dut = &bed.link.dut;
    let rxsteer = pinning(&bed, &["--on-kernel-rps=stop"])?;
    dut.netns.run(|| {
        let file = format!("/sys/class/net/{}/queues/rx-0/rps_cpus", dut.name);
        Ok(fs::write(file, "1")?)
    })?;
    let ended = rxsteer.ended()?;
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert_eq!(attached(&bed)?, None);
    nothing_is_left(&bed)
}

/// Pins of a generation without links and without a record, or with a record, beside one that steers.
#[test]
fn an_interrupted_take_over_is_completed() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    let dut = &bed.link.dut;
    let flows = UdpFlows::to(dut, 500);
    let sink = bed.receiver_in_order(&flows)?;
    let wire = traffic(&bed, &flows)?;
    for with_record in [false, true] {
        let first = pinning(&bed, &[])?;
        goes_on(&bed)?;
        let received = counted(&first)?;
        first.stop(Signal::SIGKILL)?;
        pin_again(&dut.netns, with_record)?;
        let second = pinning(&bed, &[])?;
        assert!(with_record || counted(&second)? > received);
        goes_on(&bed)?;
        let ended = second.stop(Signal::SIGKILL)?;
        assert!(ended.log.contains("was not completed"), "{ended:?}");
        let folders = generations(&dut.netns)?;
        assert_eq!(folders.len(), 1, "{folders:?}");
    }
    says(&bed, &["detach"])?;
    let sent = wire.stop()?;
    assert_eq!(sent.lost, 0);
    all_arrive_in_order(sink, sent.sent)?;
    nothing_is_left(&bed)
}

/// Starts that go on and starts that replace, each killed after a time by chance.
#[test]
fn a_kill_at_any_time_of_a_take_over_keeps_order() -> Result<()> {
    in_lab!();
    let times = u64::from(short_or_long(4, 100));
    let bed = testbed()?;
    let dut = &bed.link.dut;
    let flows = UdpFlows::to(dut, NR_FLOWS);
    let sink = bed.receiver_in_order(&flows)?;
    pinning(&bed, &[])?.stop(Signal::SIGTERM)?;
    let wire = traffic(&bed, &flows)?;
    for number in 0..times {
        let limit = format!("--flow-limit={}", number % 2 * 50);
        let args = ["--pin", "--rps-cpus=1", "--policy=rps", &limit];
        let mut child = Rxsteer::command(&dut.netns, &roomy(&dut.name, &args))?
            .stderr(Stdio::null())
            .spawn()?;
        std::thread::sleep(Duration::from_millis(number * 2_000 / times));
        child.kill()?;
        child.wait()?;
    }
    let last = pinning(&bed, &[])?;
    goes_on(&bed)?;
    last.stop(Signal::SIGTERM)?;
    says(&bed, &["detach"])?;
    let sent = wire.stop()?;
    assert_eq!(sent.lost, 0);
    all_arrive_in_order(sink, sent.sent)?;
    nothing_is_left(&bed)
}
