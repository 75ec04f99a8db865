// SPDX-License-Identifier: MIT OR Apache-2.0
//! `--mode auto` moves a device to skb mode while it receives mostly TCP in bulk, and back, without
//! a packet that is lost or overtaken.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use common::container::Container;
use common::process::*;
use nix::sys::signal::Signal;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::LinkConfig;
use rxlab::lab::netns::{Netns, Thread};
use rxlab::testing::testbed::*;

/// Limit on a change: traffic has to last, and a second change comes after a pause.
const PATIENCE: Duration = Duration::from_secs(150);

/// A TCP connection in bulk until this is dropped.
struct Bulk {
    stream: TcpStream,
    threads: Vec<Thread<()>>,
}

impl Bulk {
    fn start(from: &Netns, to: &Netns, at: Ipv4Addr) -> Result<Self> {
        let listener = to.run(|| Ok(TcpListener::bind((at, 0))?))?;
        let at = listener.local_addr()?;
        let stream = from.run(|| Ok(TcpStream::connect(at)?))?;
        let mut writer = stream.try_clone()?;
        let writes = move || while writer.write_all(&[0; 1 << 16]).is_ok() {};
        let reads = move || {
            let Ok((mut stream, _)) = listener.accept() else {
                return;
            };
            let mut bytes = vec![0; 1 << 18];
            while stream.read(&mut bytes).is_ok_and(|read| read > 0) {}
        };
        let threads = vec![
            from.spawn(Some(POLLING_CPU), "writer", writes)?,
            to.spawn(Some(OTHER_CPU), "reader", reads)?,
        ];
        Ok(Self { stream, threads })
    }

    fn end(self) -> Result<()> {
        match self.stream.shutdown(Shutdown::Both) {
            Err(e) if e.kind() != ErrorKind::NotConnected => return Err(e.into()),
            _ => {}
        }
        self.threads.into_iter().for_each(Thread::join);
        Ok(())
    }
}

/// Numbered datagrams until this is dropped. Some may be lost beside a connection in bulk.
struct Numbers {
    ended: Arc<AtomicBool>,
    sender: Thread<Result<()>>,
    reader: Thread<Result<u64>>,
}

impl Numbers {
    fn start(from: &Netns, to: &Netns, at: Ipv4Addr) -> Result<Self> {
        let sink = to.run(|| Ok(UdpSocket::bind((at, 0))?))?;
        sink.set_read_timeout(Some(Duration::from_millis(100)))?;
        let at = sink.local_addr()?;
        let ended = Arc::new(AtomicBool::new(false));
        let until = || {
            let ended = Arc::clone(&ended);
            move || ended.load(Ordering::Relaxed)
        };
        let over = until();
        let sends = move || {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            for number in 1u64.. {
                if over() {
                    break;
                }
                socket.send_to(&number.to_be_bytes(), at)?;
                std::thread::sleep(Duration::from_micros(100));
            }
            anyhow::Ok(())
        };
        let over = until();
        let reads = move || {
            let (mut count, mut last) = (0, 0);
            while !over() {
                let mut number = [0; 8];
                match sink.recv(&mut number) {
                    Err(e) if e.kind() == ErrorKind::WouldBlock => continue,
                    received => received?,
                };
                let number = u64::from_be_bytes(number);
                ensure!(number > last, "{number} after {last}");
                (count, last) = (count + 1, number);
            }
            anyhow::Ok(count)
        };
        Ok(Self {
            sender: from.spawn(Some(POLLING_CPU), "numbers", sends)?,
            reader: to.spawn(Some(OTHER_CPU), "numbered", reads)?,
            ended,
        })
    }

    /// How many have arrived; an error if one has overtaken another.
    fn end(self) -> Result<u64> {
        self.ended.store(true, Ordering::Relaxed);
        self.sender.join()?;
        self.reader.join()
    }
}

/// Waits until the device is steered in this mode.
fn comes_into(rxsteer: &Rxsteer, mode: &str) -> Result<()> {
    let start = Instant::now();
    loop {
        // A start anew answers late.
        let status = rxsteer.status()?;
        if status.devices[0].mode == mode {
            return Ok(());
        }
        let text = format!("{status:?}");
        ensure!(start.elapsed() < PATIENCE, "never in {mode} mode: {text}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn the_mode_follows_the_traffic() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let (tester, dut) = (&bed.link.tester, &bed.link.dut);
    let args = [
        &dut.name[..],
        "--rps-cpus=0-1",
        "--mode=auto",
        "--policy=adaptive",
        "--flow-limit=12",
    ];
    // By its process the other end of the veth is found.
    let _container = Container::start(&tester.netns)?;
    let rxsteer = Rxsteer::steering(&dut.netns, &args)?;
    if rxsteer.status()?.devices[0].mode != "native" {
        bail!("{:?}", rxsteer.stop(Signal::SIGTERM)?);
    }

    let bulk = Bulk::start(&tester.netns, &dut.netns, dut.ipv4)?;
    let numbers = Numbers::start(&tester.netns, &dut.netns, dut.ipv4)?;
    let became_skb = comes_into(&rxsteer, "skb");
    let in_order = numbers.end();
    bulk.end()?;
    if let Err(e) = became_skb {
        let log = rxsteer.stop(Signal::SIGTERM)?.log;
        bail!("{e:#}\n{log}");
    }
    ensure!(in_order? > 0, "no datagram arrived");

    // The control: small datagrams ask for native mode.
    let flows = UdpFlows::to(dut, 64);
    let flood = GeneratorConfig::lossless(Frames::Udp(flows), None);
    let flood = Generator::start(&bed.link, 0, &flood)?;
    let became_native = comes_into(&rxsteer, "native");
    drop(flood);
    became_native?;

    let ended = rxsteer.stop(Signal::SIGTERM)?;
    ensure!(ended.code == Some(0), "{ended:?}");
    for mode in ["skb", "native"] {
        let said = format!("steered in {mode} mode from now on");
        ensure!(ended.log.contains(&said), "{ended:?}");
    }
    Ok(())
}
