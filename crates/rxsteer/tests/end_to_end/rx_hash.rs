// SPDX-License-Identifier: MIT OR Apache-2.0
//! Steering by the hash that the device computed (`--hash device`).

use std::net::UdpSocket;

use anyhow::Result;
use rxlab::bench::setup::mode::Active;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::{Link, LinkConfig};
use rxlab::lab::netns::Netns;
use rxlab::lab::resident::Resident;
use rxlab::testing::not_run;
use rxlab::testing::testbed::until;
use rxlab::{in_lab, test_name};
use rxsteer::daemon::options::{Mode, Options};
use rxsteer::datapath::hash::Hash;
use rxsteer::datapath::policy::Policy;
use rxsteer::host::device::Device;
use rxsteer::host::{caps, kernel};

const PACKETS: u64 = 300;

/// Sums over the queues.
#[derive(Debug, Default)]
struct Account {
    received: u64,
    rx_hash: u64,
    no_flow: u64,
}

fn account_of(active: &Active<'_>) -> Result<Account> {
    let status = active.status()?.expect("rxsteer keeps account");
    let mut account = Account::default();
    for queue in &status.devices[0].queues {
        account.received += queue.received;
        account.rx_hash += queue.rx_hash;
        account.no_flow += queue.no_flow_truncated + queue.no_flow_unknown;
    }
    Ok(account)
}

/// The counters after packets from sockets, with a hash, and as many from a generator, without.
fn account(link: &Link, mode: Mode, hash: Hash) -> Result<[Account; 2]> {
    let mut options = Options::new([link.dut.name.as_str()]);
    options.mode = mode;
    options.hash = hash;
    options.policy = Policy::RPS;
    let active = Active::steer(&link.dut, options)?;
    let received = |n: u64| {
        until("the packets have arrived", || {
            let now = account_of(&active)?;
            Ok((now.received >= n).then_some(now))
        })
    };

    let target = (link.dut.ipv4, 9);
    link.tester.netns.run(|| {
        for _ in 0..PACKETS {
            // Of a connected socket: before, the kernel gives its packets no hash.
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            socket.connect(target)?;
            socket.send(b"one flow each")?;
        }
        Ok(())
    })?;
    let sockets = received(PACKETS)?;

    let frames = Frames::Udp(UdpFlows::to(&link.dut, 100));
    let config = GeneratorConfig::lossless(frames, Some(PACKETS));
    Generator::start(link, 0, &config)?.wait()?;
    let wire = received(2 * PACKETS)?;
    active.stop()?;
    Ok([sockets, wire])
}

/// The generator's frames have no hash: flows come from their headers, and the counter stays.
fn the_hash_is_used_where_there_is_one(link: &Link, mode: Mode) -> Result<()> {
    let [sockets, wire] = account(link, mode, Hash::Device)?;
    assert_eq!((sockets.rx_hash, wire.rx_hash), (PACKETS, PACKETS));
    assert_eq!((wire.received, wire.no_flow), (2 * PACKETS, 0));

    let [sockets, wire] = account(link, mode, Hash::Packet)?;
    assert_eq!((sockets.rx_hash, wire.rx_hash), (0, 0));
    assert_eq!(wire.received, 2 * PACKETS);
    Ok(())
}

fn plain_link() -> Result<Link> {
    let (tester, dut) = (Netns::new("tester")?, Netns::new("dut")?);
    Link::new(&tester, &dut, &LinkConfig::default())
}

#[test]
fn the_devices_hash_is_used_where_there_is_one_and_only_when_asked_for() -> Result<()> {
    in_lab!();
    let link = plain_link()?;
    if !caps::has_device_hash()? {
        let refused = account(&link, Mode::Native, Hash::Device).unwrap_err();
        assert!(format!("{refused:#}").contains("Linux 6.3"), "{refused:#}");
        not_run(test_name!(), "before Linux 6.3 there is none; that is said");
        return Ok(());
    }
    if kernel::loses_bound_programs(kernel::version()) {
        // The control: with another hash the device is steered natively.
        account(&link, Mode::Native, Hash::Packet)?;
        let refused = account(&link, Mode::Native, Hash::Device).unwrap_err();
        let refused = format!("{refused:#}");
        for words in [
            &link.dut.name,
            "Linux 6.18 can stop",
            "leave `--hash device`",
        ] {
            assert!(refused.contains(words), "not {words:?}: {refused}");
        }
        let _container = Resident::start(&link.tester.netns)?;
        let device = link.dut.netns.run(|| Device::open(&link.dut.name))?;
        assert_eq!(device.objection_to_native(), None);
        not_run(
            test_name!(),
            "this kernel may stop when the device ends: native mode is refused",
        );
        return Ok(());
    }
    the_hash_is_used_where_there_is_one(&link, Mode::Native)
}

/// The kernel asks nobody about packets that have one.
#[test]
fn in_softirq_mode_it_is_refused() -> Result<()> {
    in_lab!();
    let refused = account(&plain_link()?, Mode::Softirq, Hash::Device).unwrap_err();
    let refused = format!("{refused:#}");
    assert!(
        refused.contains("softirq mode, also that of patterns, turns the device's hash off"),
        "{refused}"
    );
    Ok(())
}
