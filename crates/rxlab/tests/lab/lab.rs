// SPDX-License-Identifier: MIT OR Apache-2.0
//! The lab itself must be exact.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, UdpSocket};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use rxlab::lab;
use rxlab::lab::bridge::bridge;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig, GeneratorReport};
use rxlab::lab::link::{Link, LinkConfig};
use rxlab::lab::netns::Netns;
use rxlab::lab::nic::Nic;
use rxlab::lab::receiver::{Receiver, ReceiverConfig};
use rxlab::lab::rtnl::set_up;
use rxlab::lab::xdp::Xdp;
use rxlab::testing::testbed::until;
use rxlab::{in_lab, test_name};
use rxsteer::host::cpumask::CpuMask;

/// No multiple of a batch or burst.
const COUNT: u64 = 5_003;

fn link(config: LinkConfig) -> Result<Link> {
    Link::new(&Netns::new("tester")?, &Netns::new("dut")?, &config)
}

fn online_cpus() -> u32 {
    thread::available_parallelism().unwrap().get() as u32
}

/// A paced generator without loss.
fn exactly(count: u64, flows: UdpFlows) -> GeneratorConfig {
    GeneratorConfig::lossless(Frames::Udp(flows), Some(count)).at(200_000)
}

fn send(link: &Link, cpu: u32, config: &GeneratorConfig) -> Result<GeneratorReport> {
    let report = Generator::start(link, cpu, config)?.wait()?;
    assert_eq!(Some(report.sent), config.count);
    Ok(report)
}

/// Waits while `value` changes, until it is `expected`; returns the last value.
fn settle(expected: u64, value: impl Fn() -> u64) -> u64 {
    let (mut last, mut since) = (value(), Instant::now());
    while last != expected && since.elapsed() < Duration::from_secs(3) {
        thread::sleep(Duration::from_millis(5));
        let now = value();
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    last
}

/// A receiver with room for everything that a test sends, so that timing does not matter.
fn roomy(local: SocketAddr, threads: usize) -> ReceiverConfig {
    ReceiverConfig {
        threads: vec![None; threads],
        rcvbuf: 16 << 20,
        ..ReceiverConfig::new(local)
    }
}

fn every_datagram_arrives(ipv6: bool, checksum: bool) -> Result<()> {
    let link = link(LinkConfig {
        ipv6,
        ..Default::default()
    })?;
    let mut flows = match ipv6 {
        true => UdpFlows::to_ipv6(&link.dut, 1000),
        false => UdpFlows::to(&link.dut, 1000),
    };
    flows.checksum = checksum;
    let pass = Xdp::pass(&link.dut)?;
    let nic = Nic::new(&link.dut, &[0])?;
    let local = SocketAddr::new(flows.daddr, flows.dport);
    let receiver = Receiver::start(&link.dut.netns, &roomy(local, 2))?;

    let report = send(&link, 0, &exactly(COUNT, flows))?;
    assert_eq!(report.lost, 0);
    assert_eq!(settle(COUNT, || receiver.received()), COUNT);
    // Exact: nothing else sends on this link.
    assert_eq!(pass.received(0), COUNT);
    assert!(nic.cpu_ns(0)? > 0);
    let udp = lab::snmp::udp(&link.dut.netns)?;
    let prefix = if ipv6 { "Udp6" } else { "" };
    assert_eq!(udp[&format!("{prefix}InDatagrams")], COUNT);
    assert_eq!(udp[&format!("{prefix}InErrors")], 0);
    let report = receiver.stop()?;
    assert_eq!(report.received.iter().sum::<u64>(), COUNT);
    assert!(report.received.iter().all(|&n| n > 0), "{report:?}");
    assert_eq!(report.dropped, 0);
    Ok(())
}

#[test]
fn every_ipv4_datagram_arrives() -> Result<()> {
    in_lab!();
    every_datagram_arrives(false, true)?;
    every_datagram_arrives(false, false)
}

#[test]
fn every_ipv6_datagram_arrives() -> Result<()> {
    in_lab!();
    every_datagram_arrives(true, true)
}

#[test]
fn flows_are_what_was_asked_for() -> Result<()> {
    in_lab!();
    let link = link(LinkConfig::default())?;
    let flows = UdpFlows {
        nr_saddrs: 4,
        payload_len: 100,
        ..UdpFlows::to(&link.dut, 16)
    };
    let socket = link
        .dut
        .netns
        .run(|| Ok(UdpSocket::bind((flows.daddr, flows.dport))?))?;
    socket.set_read_timeout(Some(Duration::from_secs(3)))?;
    send(&link, 0, &exactly(40, flows.clone()))?;
    let mut sources = BTreeSet::new();
    for seq in 0..40u64 {
        let mut data = [0xff; 200];
        let (len, source) = socket.recv_from(&mut data)?;
        let flow = (seq % 16) as u32;
        let mut expected = [0; 100];
        expected[..8].copy_from_slice(&seq.to_be_bytes());
        expected[8..12].copy_from_slice(&flow.to_be_bytes());
        assert_eq!(&data[..len], &expected, "datagram {seq}");
        assert_eq!(u32::from(source.port()), 1024 + flow / 4);
        sources.insert(source);
    }
    assert_eq!(sources.len(), 16);
    Ok(())
}

#[test]
fn tagged_and_raw_frames_reach_xdp() -> Result<()> {
    in_lab!();
    let link = link(LinkConfig::default())?;
    let pass = Xdp::pass(&link.dut)?;
    let local = SocketAddr::new(link.dut.ipv4.into(), 9);
    let receiver = Receiver::start(&link.dut.netns, &roomy(local, 1))?;
    let tags = [(0x88a8, 100), (0x8100, 200), (0x8100, 300)];
    for n in 1..=tags.len() {
        let flows = UdpFlows {
            tags: tags[..n].to_vec(),
            ..UdpFlows::to(&link.dut, 10)
        };
        send(&link, 0, &exactly(COUNT, flows))?;
        let total = COUNT * n as u64;
        assert_eq!(settle(total, || pass.received(0)), total);
    }
    // EtherType 0x88b5 is for local experiments.
    let mut raw = vec![0; 300];
    raw[..6].copy_from_slice(&link.dut.mac);
    raw[12..14].copy_from_slice(&[0x88, 0xb5]);
    let config = GeneratorConfig {
        frames: Frames::Raw(raw),
        ..exactly(COUNT, UdpFlows::to(&link.dut, 1))
    };
    send(&link, 0, &config)?;
    assert_eq!(settle(COUNT * 4, || pass.received(0)), COUNT * 4);
    // Nothing removes the tags, so the stack must not see a datagram.
    assert_eq!(receiver.stop()?.received, [0]);
    Ok(())
}

#[test]
fn a_generator_per_queue() -> Result<()> {
    in_lab!();
    if online_cpus() < 2 {
        rxlab::testing::not_run("a_generator_per_queue", "this machine has one CPU");
        return Ok(());
    }
    let link = link(LinkConfig {
        queues: 2,
        ..Default::default()
    })?;
    let pass = Xdp::pass(&link.dut)?;
    let _nic = Nic::new(&link.dut, &[1, 0])?;
    let flows = UdpFlows::to(&link.dut, 100);
    let local = SocketAddr::new(flows.daddr, flows.dport);
    let receiver = Receiver::start(&link.dut.netns, &roomy(local, 1))?;
    let counts = [COUNT, COUNT / 2];
    let generators = [0, 1].map(|cpu: u32| {
        let config = exactly(counts[cpu as usize], flows.clone());
        Generator::start(&link, cpu, &config)
    });
    for (generator, count) in generators.into_iter().zip(counts) {
        let report = generator?.wait()?;
        assert_eq!((report.sent, report.lost), (count, 0));
    }
    let total = counts.iter().sum();
    assert_eq!(settle(total, || receiver.received()), total);
    assert_eq!([0, 1].map(|queue| pass.received(queue)), counts);
    Ok(())
}

/// Several threads send shares into one queue, and the results are counted once.
#[test]
fn one_generator_of_several_threads() -> Result<()> {
    in_lab!();
    if online_cpus() < 2 {
        rxlab::testing::not_run(
            "one_generator_of_several_threads",
            "this machine has one CPU",
        );
        return Ok(());
    }
    let link = link(LinkConfig::default())?;
    let pass = Xdp::pass(&link.dut)?;
    let _nic = Nic::new(&link.dut, &[0])?;
    let flows = UdpFlows::to(&link.dut, 100);
    let receiver = ReceiverConfig {
        check_order: true,
        ..roomy(SocketAddr::new(flows.daddr, flows.dport), 1)
    };
    let cpus = CpuMask::from_iter([0, 1]);
    for rate in [Some(20_000), None] {
        let receiver = Receiver::start(&link.dut.netns, &receiver)?;
        let config = GeneratorConfig {
            rate,
            lossless: false,
            ..exactly(COUNT, flows.clone())
        };
        let before = pass.received(0);
        let report = Generator::apart(&link, &cpus, &config)?.wait()?;
        assert_eq!(report.sent, COUNT);
        let accepted = report.sent - report.lost;
        let received = settle(before + accepted, || pass.received(0)) - before;
        assert_eq!(received, accepted);
        if rate.is_some() {
            // With the full rate in each thread, it would take half the time.
            let seconds = report.elapsed_ns as f64 / 1e9;
            assert!(seconds > 0.2, "{seconds} s");
        }
        // Each thread has stamps of its own.
        let reordered = receiver.stop()?.reordered;
        assert_eq!(reordered, 0, "reordered: {reordered}");
    }
    // While sending, both counts include all threads.
    let config = GeneratorConfig {
        count: None,
        rate: None,
        lossless: false,
        ..exactly(COUNT, flows.clone())
    };
    let generator = Generator::apart(&link, &cpus, &config)?;
    thread::sleep(Duration::from_millis(100));
    let during = generator.counts()?;
    let report = generator.stop()?;
    assert!(during.accepted > 0 && during.accepted <= report.sent - report.lost);
    assert!(during.refused <= report.lost, "{during:?} {report:?}");

    let lossless = Generator::apart(&link, &cpus, &exactly(COUNT, flows.clone()));
    assert!(lossless.is_err(), "the ring's room is one generator's");
    let queues = LinkConfig {
        queues: 2,
        id: 1,
        ..Default::default()
    };
    let link = Link::new(&link.tester.netns, &link.dut.netns, &queues)?;
    assert!(
        Generator::apart(&link, &cpus, &config).is_err(),
        "two queues"
    );
    Ok(())
}

#[test]
fn what_the_ring_cannot_take_is_counted() -> Result<()> {
    in_lab!();
    let link = link(LinkConfig::default())?;
    let drop = Xdp::drop(&link.dut)?;
    let _nic = Nic::new(&link.dut, &[0])?;
    let config = GeneratorConfig {
        rate: None,
        lossless: false,
        window: None,
        ..exactly(1_000_003, UdpFlows::to(&link.dut, 1000))
    };
    let report = send(&link, 0, &config)?;
    let accepted = report.sent - report.lost;
    assert_eq!(settle(accepted, || drop.received(0)), accepted);
    // For information: machines differ too much for a limit.
    println!(
        "{:.0} kpps offered, {:.0} kpps accepted by one CPU for both",
        report.sent as f64 * 1e6 / report.elapsed_ns as f64,
        accepted as f64 * 1e6 / report.elapsed_ns as f64
    );
    Ok(())
}

#[test]
fn a_cpumap_delivers_everything_too() -> Result<()> {
    in_lab!();
    let link = link(LinkConfig::default())?;
    let cpus: Vec<u32> = (0..online_cpus().min(2)).collect();
    let cpumap = Xdp::cpumap(&link.dut, &cpus, 16384)?;
    let flows = UdpFlows::to(&link.dut, 1000);
    let local = SocketAddr::new(flows.daddr, flows.dport);
    let receiver = Receiver::start(&link.dut.netns, &roomy(local, 1))?;
    // Fewer frames than the rings hold.
    send(&link, 0, &exactly(COUNT, flows))?;
    assert_eq!(settle(COUNT, || receiver.received()), COUNT);
    assert_eq!(cpumap.received(0), COUNT);
    Ok(())
}

#[test]
fn nonsense_is_refused() -> Result<()> {
    in_lab!();
    let link = link(LinkConfig::default())?;
    let flows = UdpFlows::to(&link.dut, 10);
    let refused = |flows: UdpFlows| {
        let generator = Generator::start(&link, 0, &exactly(10, flows)).and_then(Generator::wait);
        format!("{:#}", generator.expect_err("it was not refused"))
    };
    let short = UdpFlows {
        payload_len: 15,
        ..flows.clone()
    };
    assert!(refused(short).contains("at least 16 bytes"));
    let many = UdpFlows {
        nr_flows: 2_000_000,
        ..flows.clone()
    };
    assert!(refused(many).contains("ports"));
    let long = UdpFlows {
        payload_len: 4096,
        ..flows.clone()
    };
    assert!(refused(long).contains("no frames of 4138 bytes"));
    assert!(Nic::new(&link.dut, &[0, 0]).is_err());
    let _pass = Xdp::pass(&link.dut)?;
    assert!(Xdp::drop(&link.dut).is_err());
    Ok(())
}

#[test]
fn a_child_sees_its_namespace_alone() -> Result<()> {
    in_lab!();
    let link = link(LinkConfig::default())?;
    let netns = &link.dut.netns;
    let script = "readlink /proc/self/ns/net; pwd; cd /sys/class/net; echo *";
    let output = netns.command("sh")?.args(["-c", script]).output()?;
    let expected = format!(
        "net:[{}]\n{}\nlo {}\n",
        netns.inode()?,
        std::env::current_dir()?.display(),
        link.dut.name
    );
    assert_eq!(String::from_utf8(output.stdout)?, expected);
    Ok(())
}

/// Multicast groups that the devices of a namespace have joined, but that of all hosts, whose
/// members send no reports (RFC 3376, 6).
fn reported_groups(netns: &Netns) -> Result<Vec<String>> {
    // In hexadecimal, as the kernel's __be32 is printed.
    const ALL_HOSTS: u32 = u32::from_ne_bytes([224, 0, 0, 1]);
    netns.run(|| {
        let groups = fs::read_to_string("/proc/thread-self/net/igmp")?;
        // Lines of groups are indented, those of devices are not.
        let groups = groups.lines().filter(|line| line.starts_with('\t'));
        let groups = groups.filter_map(|line| line.split_whitespace().next());
        let all_hosts = format!("{ALL_HOSTS:08X}");
        let reported = groups.filter(|group| **group != all_hosts);
        Ok(reported.map(str::to_owned).collect())
    })
}

/// Its port can't forward before the other end of the link is up.
#[test]
fn a_bridge_forwards_from_the_start() -> Result<()> {
    in_lab!();
    let Link { tester, dut, .. } = &link(LinkConfig::default())?;
    let up = |up| tester.netns.run(|| set_up(&tester.name, up));
    let file = |name| {
        let path = format!("/sys/class/net/{}/{name}", dut.name);
        dut.netns.run(|| Ok(fs::read_to_string(&path).ok()))
    };
    let state = || file("brport/state");
    up(false)?;
    until("down", || {
        Ok(file("operstate")?.filter(|state| state == "down\n"))
    })?;
    thread::scope(|scope| {
        let made = scope.spawn(|| {
            bridge(&dut.netns, &[dut])?;
            state()
        });
        // The control: a port that does not forward.
        assert_eq!(until("the port", state)?.trim(), "0");
        up(true)?;
        let state = made.join().expect("no panic")?;
        assert_eq!(state.as_deref(), Some("3\n"), "BR_STATE_FORWARDING");
        Ok(())
    })
}

#[test]
fn a_bridge_reports_no_groups() -> Result<()> {
    in_lab!();
    let link = link(LinkConfig::default())?;
    let dut = &link.dut.netns;
    bridge(dut, &[&link.dut])?;
    assert_eq!(reported_groups(dut)?, [""; 0]);
    // Control: as the kernel makes a bridge by default.
    dut.run(|| {
        Ok(fs::write(
            "/sys/class/net/bridge/bridge/multicast_snooping",
            "1",
        )?)
    })?;
    assert_eq!(reported_groups(dut)?.len(), 1);
    Ok(())
}

/// NAPI threads of all labs on this host, which exist as long as their devices.
fn napi_threads(device: &str) -> usize {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let names = processes.map(|p| fs::read_to_string(p.path().join("comm")).unwrap_or_default());
    names
        .filter(|name| name.starts_with(&format!("napi/{device}-")))
        .count()
}

/// Threads on the host in a network namespace.
fn members(inode: u64) -> usize {
    let link = format!("net:[{inode}]");
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let threads = processes
        .flat_map(|p| fs::read_dir(p.path().join("task")).into_iter().flatten())
        .flatten();
    threads
        .filter(|t| fs::read_link(t.path().join("ns/net")).is_ok_and(|l| l.as_os_str() == &*link))
        .count()
}

#[test]
fn nothing_is_left_when_dropped() -> Result<()> {
    in_lab!();
    let link = link(LinkConfig::default())?;
    let pass = Xdp::pass(&link.dut)?;
    let nic = Nic::new(&link.dut, &[0])?;
    send(&link, 0, &exactly(1000, UdpFlows::to(&link.dut, 10)))?;
    let (device, inode) = (link.dut.name.clone(), link.dut.netns.inode()?);
    assert_eq!(napi_threads(&device), 1);
    drop((link, pass, nic));
    assert_eq!(settle(0, || napi_threads(&device) as u64), 0);
    assert_eq!(members(inode), 0);
    Ok(())
}

/// Set in the process to be killed.
const VICTIM: &str = "RXSTEER_TEST_VICTIM";

/// The same test in a process of its own, killed by `nothing_is_left_when_killed`.
fn victim() -> Result<()> {
    let link = link(LinkConfig::default())?;
    let _pass = Xdp::pass(&link.dut)?;
    let _nic = Nic::new(&link.dut, &[0])?;
    let config = GeneratorConfig {
        count: None,
        ..exactly(0, UdpFlows::to(&link.dut, 10))
    };
    let _wire = Generator::start(&link, 0, &config)?;
    let mut child = link.dut.netns.command("sleep")?.arg("60").spawn()?;
    let inode = link.dut.netns.inode()?;
    eprintln!("victim {} {inode}", link.dut.name);
    child.wait()?;
    Ok(())
}

#[test]
fn nothing_is_left_when_killed() -> Result<()> {
    if std::env::var_os(VICTIM).is_some() {
        return victim();
    }
    in_lab!();
    let mut victim = Command::new(std::env::current_exe()?)
        .args(["--exact", test_name!(), "--nocapture"])
        .env(VICTIM, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut stderr = BufReader::new(victim.stderr.take().expect("piped"));
    let mut line = String::new();
    stderr.read_line(&mut line)?;
    let words: Vec<&str> = line.split_whitespace().collect();
    let ["victim", device, inode] = words[..] else {
        stderr.read_to_string(&mut line)?;
        panic!("{line}");
    };
    let inode = inode.parse()?;
    assert_eq!(napi_threads(device), 1);
    assert_eq!(members(inode), 1, "the victim's child");
    victim.kill()?;
    victim.wait()?;
    assert_eq!(settle(0, || napi_threads(device) as u64), 0);
    assert_eq!(settle(0, || members(inode) as u64), 0);
    Ok(())
}
