// SPDX-License-Identifier: MIT OR Apache-2.0
//! A TCP connection between two namespaces.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};

use anyhow::{Result, ensure};
use rxlab::lab::netns::Netns;
use rxlab::testing::testbed::{OTHER_CPU, POLLING_CPU};

/// Bytes of a connection.
const BYTES: usize = 16 << 20;

/// Sends over TCP to `to`, whose reader runs on the other CPU; every byte must arrive.
pub fn transfer(from: &Netns, to: &Netns, at: Ipv4Addr) -> Result<()> {
    let listener = to.run(|| Ok(TcpListener::bind((at, 0))?))?;
    let at = listener.local_addr()?;
    let reader = to.spawn(Some(OTHER_CPU), "reader", move || {
        let (mut stream, _) = listener.accept()?;
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes)?;
        anyhow::Ok(bytes)
    })?;
    let sent: Vec<u8> = (0..BYTES).map(|n| (n ^ n >> 8) as u8).collect();
    let bytes = sent.clone();
    let writer = from.spawn(Some(POLLING_CPU), "writer", move || {
        let mut stream = TcpStream::connect(at)?;
        stream.write_all(&bytes)?;
        anyhow::Ok(())
    })?;
    writer.join()?;
    let received = reader.join()?;
    ensure!(received == sent, "{} bytes arrived", received.len());
    Ok(())
}
