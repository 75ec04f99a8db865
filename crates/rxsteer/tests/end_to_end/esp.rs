// SPDX-License-Identifier: MIT OR Apache-2.0
//! The security associations of two hosts spread over CPUs, each by its SPI. Not so in UDP.

use std::net::{SocketAddr, UdpSocket};

use anyhow::Result;
use rxlab::bench::setup::mode::Active;
use rxlab::in_lab;
use rxlab::lab::link::LinkConfig;
use rxlab::testing::testbed::*;
use socket2::{Domain, Protocol, Socket, Type};

/// Enough for either of two CPUs to have 10 of them, except once in 10^8 starts.
const NR_SPIS: u32 = 64;

/// The port of ESP in UDP and of IKE.
const PORT: u16 = 4500;

#[derive(Clone, Copy)]
enum Carrier {
    Ip,
    Udp,
}

/// Sends a frame of each of [`NR_SPIS`] SPIs, round after round, until `done` says so of the frames of a
/// round at the polling CPU and at the other one.
fn rounds(carrier: Carrier, what: &str, mut done: impl FnMut([u64; 2]) -> bool) -> Result<()> {
    let bed = Testbed::new(&LinkConfig::default())?;
    let options = bed.options(&[POLLING_CPU, OTHER_CPU]);
    let active = Active::steer(&bed.link.dut, options)?;
    let from = SocketAddr::new(bed.link.tester.ipv4.into(), PORT);
    let socket: Socket = bed.link.tester.netns.run(|| {
        Ok(match carrier {
            Carrier::Ip => Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(50)))?,
            Carrier::Udp => UdpSocket::bind(from)?.into(),
        })
    })?;
    let to = SocketAddr::new(bed.link.dut.ipv4.into(), PORT).into();
    let mut received = 0;
    let mut before = [0; 2];
    until(what, || {
        for spi in 1..=NR_SPIS {
            // SPI, sequence number, content.
            let esp = [&spi.to_be_bytes()[..], &[0; 60]].concat();
            socket.send_to(&esp, &to)?;
        }
        received += u64::from(NR_SPIS);
        let now = places(&at_rest(&active, 0, received)?);
        let round = [0, 1].map(|place| now[place] - before[place]);
        before = now;
        Ok(done(round).then_some(()))
    })?;
    active.stop()
}

#[test]
fn esp_spreads_by_its_spi() -> Result<()> {
    in_lab!();
    // The same twice: of one flow that moves meanwhile, only one round is at both places.
    let mut last = [0; 2];
    rounds(Carrier::Ip, "the SPIs are spread", |round| {
        let same = std::mem::replace(&mut last, round) == round;
        same && round.iter().all(|&nr| nr >= 10)
    })?;
    // The control: in UDP all SPIs are one flow, that of the ports.
    let (mut nr_rounds, mut nr_spread) = (0, 0);
    rounds(Carrier::Udp, "twenty rounds", |round| {
        nr_spread += u32::from(!round.contains(&0));
        nr_rounds += 1;
        nr_rounds == 20
    })?;
    assert!(nr_spread <= 1, "{nr_spread} of {nr_rounds} rounds");
    Ok(())
}
