// SPDX-License-Identifier: MIT OR Apache-2.0
//! `run --prepare`: what it changes at the other end of a veth, and that nothing of it stays.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::net::UdpSocket;
use std::os::unix::fs::chown;
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::helpers::process::{Rxsteer, rxsteer};
use crate::helpers::transfer::transfer;
use crate::helpers::user::mount_run;
use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rxlab::in_lab;
use rxlab::lab::ethtool::Offload;
use rxlab::lab::link::{Link, LinkConfig};
use rxlab::lab::netns::Netns;
use rxlab::lab::resident::Resident;
use rxlab::testing::testbed::{OTHER_CPU, POLLING_CPU, until};
use rxsteer::api::client;
use rxsteer::host::ethtool::{Features, RX_VLAN, TX_CHECKSUM, TX_VLAN};
use rxsteer::host::lock::FOLDER;
use rxsteer::host::offloads;

/// A veth pair with the offloads with which it was created.
struct Pair {
    link: Link,
    before: [Features; 2],
    /// A process at the other end; by it rxsteer finds the namespace.
    container: Option<Resident>,
}

impl Pair {
    fn new() -> Result<Self> {
        let (tester, dut) = (Netns::new("tester")?, Netns::new("dut")?);
        let link = Link::new(&tester, &dut, &LinkConfig::default())?;
        link.tester.ethtool.set_features(TX_VLAN, true)?;
        link.tester.ethtool.set(Offload::TxChecksum, true)?;
        link.dut.ethtool.set_features(RX_VLAN, true)?;
        let mut pair = Self {
            link,
            before: Default::default(),
            container: Some(Resident::start(&tester)?),
        };
        pair.before = pair.features()?;
        let sends = &pair.before[1];
        // What rxsteer has to turn off is on.
        ensure!(sends.on(TX_VLAN) == TX_VLAN, "{sends:?}");
        ensure!(sends.on(TX_CHECKSUM).len() == 2, "{sends:?}");
        Ok(pair)
    }

    fn features(&self) -> Result<[Features; 2]> {
        let (dut, tester) = (&self.link.dut, &self.link.tester);
        Ok([dut.ethtool.features()?, tester.ethtool.features()?])
    }

    fn is_as_before(&self) -> Result<bool> {
        Ok(self.features()? == self.before)
    }

    fn steer(&self, args: &[&str]) -> Result<Rxsteer> {
        let dut = &self.link.dut;
        let args = [&[&dut.name, "--mode=auto", "--rps-cpus=0-1"], args].concat();
        Rxsteer::steering(&dut.netns, &args)
    }

    fn transfer(&self) -> Result<()> {
        let (dut, tester) = (&self.link.dut, &self.link.tester);
        transfer(&tester.netns, &dut.netns, dut.ipv4)
    }
}

fn mode(rxsteer: &Rxsteer) -> Result<String> {
    Ok(rxsteer.status()?.devices[0].mode.clone())
}

/// The child process that puts back has no end of the pipe that ends busy polling.
#[test]
fn a_rule_for_sockets_does_not_keep_it_from_stopping() -> Result<()> {
    in_lab!();
    let pair = Pair::new()?;
    let file = tempfile::NamedTempFile::new()?;
    let device = &pair.link.dut.name;
    let rule = "[[busy_poll]]\ncomm = \"rxsteer-none\"\nusecs = 50\n";
    fs::write(file.path(), format!("devices = [{device:?}]\n{rule}"))?;
    let file = file.path().to_str().context("UTF-8")?;
    let args = ["--prepare", "--mode=auto", "--config", file];
    let rxsteer = Rxsteer::steering(&pair.link.dut.netns, &args)?;
    ensure!(!pair.is_as_before()?);
    let ended = rxsteer.stop(Signal::SIGTERM)?;
    ensure!(ended.code == Some(0), "{ended:?}");
    ensure!(pair.is_as_before()?, "{ended:?}");
    Ok(())
}

#[test]
fn a_prepared_veth_is_steered_in_native_mode() -> Result<()> {
    in_lab!();
    let pair = Pair::new()?;
    let rxsteer = pair.steer(&["--prepare"])?;
    ensure!(mode(&rxsteer)? == "native");
    let [_, sends] = pair.features()?;
    ensure!(sends.on(&[TX_VLAN, TX_CHECKSUM].concat()).is_empty());
    // By chance sender and receiver have one CPU.
    until("packets are redirected", || {
        pair.transfer()?;
        Ok((rxsteer.sums()?.redirected > 0).then_some(()))
    })?;
    let ended = rxsteer.stop(Signal::SIGTERM)?;
    ensure!(ended.code == Some(0), "{ended:?}");
    ensure!(pair.is_as_before()?, "{ended:?}");
    let log = |words: String| ended.log.find(&words);
    let name = &pair.link.tester.name;
    for feature in [TX_VLAN[0], TX_VLAN[1], TX_CHECKSUM[0], "tx-checksum-sctp"] {
        let off = log(format!("{name} (the other end): {feature} on -> off"));
        let on = log(format!("{name} (the other end): {feature} off -> on"));
        ensure!(off.is_some() && off < on, "{feature}: {ended:?}");
    }
    // The last one is the first.
    ensure!(
        log(format!("{} off -> on", TX_CHECKSUM[0])) < log(format!("{} off -> on", TX_VLAN[0])),
        "{ended:?}"
    );
    pair.transfer()
}

#[test]
fn without_preparation_nothing_is_changed() -> Result<()> {
    in_lab!();
    let pair = Pair::new()?;
    let rxsteer = pair.steer(&[])?;
    ensure!(mode(&rxsteer)? == "softirq" && pair.is_as_before()?);
    let log = rxsteer.stop(Signal::SIGTERM)?.log;
    let first = log.lines().next().unwrap_or_default();
    ensure!(first.contains("is steered in softirq mode"), "{log}");
    // What would be changed is named, and the device is looked at as it would be steered.
    let rxsteer = pair.steer(&["--prepare", "--dry-run"])?;
    ensure!(mode(&rxsteer)? == "native");
    let names = [TX_VLAN, TX_CHECKSUM].concat();
    ensure!(pair.features()?[1].on(&names) == pair.before[1].on(&names));
    pair.transfer()?;
    let log = rxsteer.stop(Signal::SIGTERM)?.log;
    ensure!(pair.is_as_before()?);
    ensure!(log.contains("would set: "), "{log}");
    ensure!(log.contains("tx-vlan-hw-insert on -> off"), "{log}");
    Ok(())
}

/// A start that is going to be refused changes nothing before, also at other devices.
#[test]
fn a_start_that_fails_changes_nothing() -> Result<()> {
    in_lab!();
    let pair = Pair::new()?;
    let dut = &pair.link.dut;
    for (args, why) in [
        (&["--rps-cpus=7777"][..], "none of the CPUs 7777"),
        (&["--queue=5=0"], "no receive queue 5"),
        (&["lo", "--mode=native"], "lo is the loopback device"),
    ] {
        let args = [&[&dut.name[..], "--prepare"], args].concat();
        let ended = Rxsteer::start(&dut.netns, &args)?;
        let ended = ended.err().context("it starts")?;
        ensure!(ended.log.contains(why), "{ended:?}");
        ensure!(ended.log.lines().count() == 1, "{ended:?}");
        ensure!(pair.is_as_before()?, "{ended:?}");
    }
    Ok(())
}

#[test]
fn nothing_stays_after_a_kill() -> Result<()> {
    in_lab!();
    let pair = Pair::new()?;
    let rxsteer = pair.steer(&["--prepare"])?;
    ensure!(mode(&rxsteer)? == "native" && !pair.is_as_before()?);
    rxsteer.stop(Signal::SIGKILL)?;
    until("all is as before", || {
        Ok(pair.is_as_before()?.then_some(()))
    })?;
    // The next one waits until all is put back, and finds the offloads on.
    let mut rxsteer = pair.steer(&["--prepare"])?;
    ensure!(mode(&rxsteer)? == "native");
    rxsteer.signal(Signal::SIGKILL)?;
    rxsteer.child.wait()?;
    let next = pair.steer(&[])?;
    ensure!(mode(&next)? == "softirq" && pair.is_as_before()?);
    next.stop(Signal::SIGTERM)?;
    Ok(())
}

/// What a killed rxsteer has left is said, and put back by the next one, whatever its options.
#[test]
fn nothing_stays_after_all_are_killed_and_a_start() -> Result<()> {
    in_lab!();
    let pair = Pair::new()?;
    let ask = |command: &str| {
        let output = rxsteer(&pair.link.dut.netns, &[command])?;
        let text = [output.stdout, output.stderr].concat();
        anyhow::Ok(String::from_utf8(text)?)
    };
    let left = "tx-vlan-hw-insert; ";
    for command in ["doctor", "status"] {
        let said = ask(command)?;
        ensure!(!said.contains(left), "{said}");
    }
    for prepared in [&[][..], &["--prepare"]] {
        pair.steer(&["--prepare"])?.kill_with_children()?;
        // The control: nobody has put anything back.
        ensure!(!pair.is_as_before()?);
        for command in ["doctor", "status"] {
            let said = ask(command)?;
            ensure!(said.contains(left), "{said}");
        }
        let rxsteer = pair.steer(prepared)?;
        ensure!(prepared.is_empty() == pair.is_as_before()?);
        let ended = rxsteer.stop(Signal::SIGTERM)?;
        ensure!(ended.log.contains(left), "{ended:?}");
        ensure!(pair.is_as_before()?, "{ended:?}");
        for command in ["doctor", "status"] {
            let said = ask(command)?;
            ensure!(!said.contains(left), "{said}");
        }
    }
    Ok(())
}

/// A record of another boot is removed, and nothing is changed by it. Nor by a user's file.
#[test]
fn a_record_of_another_boot_is_removed() -> Result<()> {
    in_lab!();
    let pair = Pair::new()?;
    let records = || {
        let found = fs::read_dir(FOLDER)?.map(|entry| Ok(entry?.path()));
        let found = found.collect::<std::io::Result<Vec<_>>>()?;
        let name = pair.link.tester.name.as_str();
        let ours = found.into_iter().filter(|path| {
            path.is_file() && fs::read_to_string(path).is_ok_and(|text| text.contains(name))
        });
        anyhow::Ok(ours.collect::<Vec<_>>())
    };
    pair.steer(&["--prepare"])?.kill_with_children()?;
    let record = records()?.pop().context("no record")?;
    let text = fs::read_to_string(&record)?;
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    fs::write(&record, text.replace(boot.trim(), "another"))?;
    pair.steer(&[])?.stop(Signal::SIGTERM)?;
    ensure!(records()?.is_empty() && !pair.is_as_before()?);
    // A user's, as if the folder had once been open to all.
    fs::write(&record, &text)?;
    chown(&record, Some(65534), None)?;
    pair.steer(&[])?.stop(Signal::SIGTERM)?;
    ensure!(records()? == [record.clone()] && !pair.is_as_before()?);
    // The control: root's is followed.
    chown(&record, Some(0), None)?;
    pair.steer(&[])?.stop(Signal::SIGTERM)?;
    ensure!(records()?.is_empty() && pair.is_as_before()?);
    Ok(())
}

/// A user's change while rxsteer runs is left alone, and said.
#[test]
fn changes_of_others_stay() -> Result<()> {
    in_lab!();
    let pair = Pair::new()?;
    let rxsteer = pair.steer(&["--prepare"])?;
    let sends = &pair.link.tester.ethtool;
    sends.set_features(&[TX_CHECKSUM[0]], true)?;
    let ended = rxsteer.stop(Signal::SIGTERM)?;
    ensure!(ended.code == Some(0) && pair.is_as_before()?, "{ended:?}");
    let said = |feature: &str| {
        let words = format!("{feature} is on already: another program has turned it on");
        ended.log.contains(&words)
    };
    ensure!(said(TX_CHECKSUM[0]) && !said(TX_VLAN[0]), "{ended:?}");
    Ok(())
}

/// No path leads to the other end: nothing is changed, not even here.
#[test]
fn an_end_out_of_reach_is_left_alone() -> Result<()> {
    in_lab!();
    let mut pair = Pair::new()?;
    pair.container = None;
    let rxsteer = pair.steer(&["--prepare"])?;
    ensure!(mode(&rxsteer)? == "softirq" && pair.is_as_before()?);
    let log = rxsteer.stop(Signal::SIGTERM)?.log;
    ensure!(log.contains("--prepare changes nothing"), "{log}");
    Ok(())
}

/// A driver that takes no program: here the other end has more transmit queues than this one has
/// receive queues. No mode but native needs one.
#[test]
fn a_device_that_refuses_the_program_is_steered_in_softirq_mode() -> Result<()> {
    in_lab!();
    let (tester, dut) = (Netns::new("tester")?, Netns::new("dut")?);
    let config = LinkConfig {
        queues: 2,
        ..LinkConfig::default()
    };
    let link = Link::new(&tester, &dut, &config)?;
    let _container = Resident::start(&tester)?;
    let steered = |args: &[&str]| {
        let args = [&[&link.dut.name[..], "--rps-cpus=0-1"], args].concat();
        Rxsteer::start(&dut, &args)
    };
    // The control: with as many, it takes one.
    let rxsteer = steered(&["--mode=native"])?.map_err(|e| anyhow::anyhow!("{e:?}"))?;
    ensure!(rxsteer.stop(Signal::SIGTERM)?.code == Some(0));
    link.dut.ethtool.set_channels(1, 2)?;
    let Err(refused) = steered(&["--mode=native"])? else {
        anyhow::bail!("the driver takes the program");
    };
    ensure!(refused.log.contains("--mode softirq"), "{refused:?}");
    let rxsteer = steered(&["--mode=auto"])?.map_err(|e| anyhow::anyhow!("{e:?}"))?;
    ensure!(mode(&rxsteer)? == "softirq");
    transfer(&tester, &dut, link.dut.ipv4)?;
    ensure!(rxsteer.stop(Signal::SIGTERM)?.code == Some(0));
    Ok(())
}

/// `rxsteer run`, and its log as it comes.
fn waiting(pair: &Pair) -> Result<(Child, impl Iterator<Item = String>)> {
    let dut = &pair.link.dut;
    let mut command = Rxsteer::command(&dut.netns, &[&dut.name, "--mode=auto"])?;
    let mut child = command.stderr(Stdio::piped()).spawn()?;
    let log = BufReader::new(child.stderr.take().context("it is piped")?);
    let mut log = log.lines().map_while(Result::ok);
    let told = log.find(|line| line.contains("waiting at most 10 s"));
    let told = told.context("it does not wait")?;
    let why = format!("another rxsteer has changed {}", dut.name);
    ensure!(told.contains(&why), "{told}");
    Ok((child, log))
}

/// Another process is about to put back what it has changed.
#[test]
fn an_earlier_one_is_waited_for() -> Result<()> {
    in_lab!();
    let pair = Pair::new()?;
    let dut = &pair.link.dut;
    mount_run(&dut.netns)?;
    let lock = || -> Result<File> {
        let lock = dut.netns.run(|| offloads::lock(&dut.name))?;
        lock.context("there is such a device")
    };
    // Its end is the end of the wait.
    let held = lock()?;
    let (mut child, _log) = waiting(&pair)?;
    drop(held);
    until("it steers", || {
        let status = dut.netns.run(client::status);
        Ok(status.is_ok_and(|s| s.pid == child.id()).then_some(()))
    })?;
    let pid = Pid::from_raw(child.id() as i32);
    kill(pid, Signal::SIGTERM)?;
    ensure!(child.wait()?.success());
    // So is a signal.
    let _held = lock()?;
    let (mut child, log) = waiting(&pair)?;
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM)?;
    let log: Vec<_> = log.collect();
    ensure!(
        log.iter().any(|line| line.contains("by a signal")),
        "{log:?}"
    );
    ensure!(child.wait()?.code() == Some(1));
    // And its limit.
    let (mut child, log) = waiting(&pair)?;
    let log: Vec<_> = log.collect();
    ensure!(log.iter().any(|line| line.contains("stop it")), "{log:?}");
    ensure!(child.wait()?.code() == Some(1));
    // Other devices are not locked with it.
    let other = dut.netns.run(|| offloads::lock("lo"))?;
    ensure!(other.is_some());
    Ok(())
}

/// Datagrams that the stack has dropped as corrupt (UDP_MIB_CSUMERRORS).
fn corrupt(netns: &Netns) -> Result<u64> {
    let text = netns.run(|| Ok(fs::read_to_string("/proc/thread-self/net/snmp")?))?;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let [names, values] = [lines.next(), lines.next()].map(Option::unwrap_or_default);
    let mut columns = names.split(' ').zip(values.split(' '));
    let column = columns.find(|(name, _)| *name == "InCsumErrors");
    Ok(column.context(text.clone())?.1.parse()?)
}

#[test]
fn native_mode_is_refused_while_checksums_are_left_open() -> Result<()> {
    in_lab!();
    let mut pair = Pair::new()?;
    let (tester, dut) = (pair.link.tester.netns.clone(), pair.link.dut.netns.clone());
    pair.link.tester.ethtool.set_features(TX_VLAN, false)?;
    let name = pair.link.dut.name.clone();
    // Each datagram goes to another CPU than that of its sender, which polls.
    let args = [
        &name[..],
        "--mode=native",
        "--policy=rps",
        &format!("--rps-cpus={OTHER_CPU}"),
    ];
    let Err(refused) = Rxsteer::start(&dut, &args)? else {
        anyhow::bail!("native mode is accepted");
    };
    for words in [
        "without checksums would be dropped",
        "`--prepare`",
        "tx off`",
    ] {
        ensure!(refused.log.contains(words), "not {words:?}: {refused:?}");
    }
    let to = dut.run(|| Ok(UdpSocket::bind((pair.link.dut.ipv4, 0))?))?;
    let address = to.local_addr()?;
    let send = || {
        let sender = move || {
            let from = UdpSocket::bind("0.0.0.0:0").expect("a port is free");
            from.send_to(b"datagram", address)
                .expect("a route is there");
        };
        tester.spawn(Some(POLLING_CPU), "sender", sender)?.join();
        anyhow::Ok(())
    };
    to.set_read_timeout(Some(Duration::from_secs(20)))?;
    let rxsteer = Rxsteer::steering(&dut, &[&args[..], &["--prepare"]].concat())?;
    until("packets are redirected", || {
        send()?;
        to.recv(&mut [0; 16]).context("a datagram is lost")?;
        Ok((rxsteer.sums()?.redirected >= 100).then_some(()))
    })?;
    ensure!(corrupt(&dut)? == 0);
    ensure!(rxsteer.stop(Signal::SIGTERM)?.code == Some(0));

    // The control: where the other end can't be seen, native mode is steered, and loses them.
    pair.container = None;
    pair.link.dut.ethtool.set_features(RX_VLAN, false)?;
    to.set_nonblocking(true)?;
    let rxsteer = Rxsteer::steering(&dut, &args)?;
    until("redirected packets are dropped", || {
        send()?;
        let _ = to.recv(&mut [0; 16]);
        Ok((corrupt(&dut)? > 0).then_some(()))
    })?;
    let log = rxsteer.stop(Signal::SIGTERM)?.log;
    ensure!(log.contains("WARN what the other end of"), "{log}");
    Ok(())
}
