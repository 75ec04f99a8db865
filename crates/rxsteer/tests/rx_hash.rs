// SPDX-License-Identifier: MIT OR Apache-2.0
//! Steering by the hash that the device computed (`--hash device`).

use std::net::UdpSocket;

use anyhow::Result;
use rxlab::bench::setup::mode::Active;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::{Link, LinkConfig};
use rxlab::lab::netns::Netns;
use rxlab::{in_lab, test_name};
use rxsteer::api::status::Queue;
use rxsteer::daemon::options::{Hash, Options};
use rxsteer::datapath::policy::Policy;
use rxsteer::host::caps;

const PACKETS: u64 = 300;

/// The counters after packets from sockets, with a hash, and as many from a generator, without.
fn account(link: &Link, hash: Hash) -> Result<[Queue; 2]> {
    let mut options = Options::new([link.dut.name.as_str()]);
    options.hash = hash;
    options.policy = Policy::RPS;
    let active = Active::steer(&link.dut, options)?;
    let queue = || -> Result<Queue> {
        let status = active.status()?.expect("rxsteer keeps account");
        Ok(status.devices[0].queues[0].clone())
    };
    let received = |n: u64| -> Result<Queue> {
        loop {
            let now = queue()?;
            if now.received >= n {
                return Ok(now);
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    };

    let target = (link.dut.ipv4, 9);
    link.tester.netns.run(|| {
        for _ in 0..PACKETS {
            UdpSocket::bind("0.0.0.0:0")?.send_to(b"one flow each", target)?;
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

#[test]
fn the_devices_hash_is_used_where_there_is_one_and_only_when_asked_for() -> Result<()> {
    in_lab!();
    let link = Link::new(
        &Netns::new("tester")?,
        &Netns::new("dut")?,
        &LinkConfig::default(),
    )?;

    if !caps::has_device_hash()? {
        let refused = account(&link, Hash::Device).map(drop).unwrap_err();
        assert!(format!("{refused:#}").contains("Linux 6.3"), "{refused:#}");
        rxlab::testing::not_run(test_name!(), "before Linux 6.3 there is none; that is said");
        return Ok(());
    }
    let [sockets, wire] = account(&link, Hash::Device)?;
    assert_eq!(sockets.rx_hash, PACKETS);
    // The generator's frames have no hash: flows come from their headers, and the counter stays.
    assert_eq!(wire.rx_hash, PACKETS);
    assert_eq!(wire.received, 2 * PACKETS);
    assert_eq!(wire.no_flow_truncated + wire.no_flow_unknown, 0);

    let [sockets, wire] = account(&link, Hash::Packet)?;
    assert_eq!((sockets.rx_hash, wire.rx_hash), (0, 0));
    assert_eq!(wire.received, 2 * PACKETS);
    Ok(())
}
