// SPDX-License-Identifier: MIT OR Apache-2.0
//! `--mode auto` chooses at the start. No traffic changes it.

use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::Duration;

use crate::helpers::process::*;
use anyhow::{Result, anyhow, ensure};
use nix::sys::signal::Signal;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, TcpFlows, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::LinkConfig;
use rxlab::lab::resident::Resident;
use rxlab::testing::testbed::*;
use tempfile::TempDir;

/// Limit on the time between two looks.
const PATIENCE: Duration = Duration::from_secs(60);

/// Looks with each kind of traffic. Seven were enough for a change: two to know rates and flows, and five
/// in a row that ask for it.
const LOOKS: u32 = 12;

/// Counts the looks of a rxsteer at its devices: it says to a service manager's watchdog, once a look,
/// that it is alive.
struct Looks {
    manager: UnixDatagram,
    folder: TempDir,
}

impl Looks {
    fn new() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let manager = UnixDatagram::bind(folder.path().join("notify"))?;
        manager.set_read_timeout(Some(PATIENCE))?;
        Ok(Self { manager, folder })
    }

    fn told_by(&self, command: &mut Command) {
        command
            .env("NOTIFY_SOCKET", self.folder.path().join("notify"))
            .env("WATCHDOG_USEC", "30000000");
    }

    /// Waits for this number of looks from now on.
    fn pass(&self, number: u32) -> Result<()> {
        let mut message = [0; 256];
        self.manager.set_nonblocking(true)?;
        while self.manager.recv(&mut message).is_ok() {}
        self.manager.set_nonblocking(false)?;
        let mut passed = 0;
        while passed < number {
            let length = self.manager.recv(&mut message)?;
            passed += u32::from(message[..length].starts_with(b"WATCHDOG=1"));
        }
        Ok(())
    }
}

/// Large TCP and small datagrams, each for longer than a rxsteer took that changed the mode by them. The program stays the same one, so that no driver has to restart its queues.
#[test]
fn the_mode_stays_whatever_the_traffic() -> Result<()> {
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
    let _container = Resident::start(&tester.netns)?;
    let looks = Looks::new()?;
    let mut command = Rxsteer::command(&dut.netns, &args)?;
    looks.told_by(&mut command);
    let rxsteer = Rxsteer::spawn(&dut.netns, command, true)?;
    let rxsteer = rxsteer.map_err(|ended| anyhow!("{ended:?}"))?;
    let state = || {
        let status = rxsteer.status()?;
        anyhow::Ok((status.devices[0].mode.clone(), attached(&bed)?))
    };
    let before = state()?;
    ensure!(before.0 == "native" && before.1.is_some(), "{before:?}");

    let flows = UdpFlows::to(dut, 64);
    let large = UdpFlows {
        payload_len: 1400,
        run: 16,
        ..UdpFlows::to(dut, 4)
    };
    let large = TcpFlows {
        flows: large,
        first_seq: 1,
        ack: 1,
        push: false,
    };
    for frames in [Frames::Tcp(large), Frames::Udp(flows)] {
        let flood = Generator::start(&bed.link, POLLING_CPU, &GeneratorConfig::flood(frames))?;
        looks.pass(LOOKS)?;
        let sent = flood.stop()?;
        let after = state()?;
        ensure!(
            after == before,
            "{sent:?}, {:?}",
            rxsteer.stop(Signal::SIGTERM)?
        );
    }
    let ended = rxsteer.stop(Signal::SIGTERM)?;
    ensure!(ended.code == Some(0), "{ended:?}");
    Ok(())
}
