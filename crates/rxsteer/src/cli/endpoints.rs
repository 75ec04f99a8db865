// SPDX-License-Identifier: MIT OR Apache-2.0
//! The TCP and UDP sockets of a process or of a local port, and the names of their flows.

use std::collections::HashSet;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use nix::unistd::gettid;
use procfs::ProcError;
use procfs::net::TcpState;
use procfs::process::{FDTarget, Process};

use crate::datapath::flow::Flow;

const TCP: u8 = libc::IPPROTO_TCP as u8;
const UDP: u8 = libc::IPPROTO_UDP as u8;

/// Facts about some sockets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Endpoints {
    /// The flows of sockets that are connected to another host.
    pub flows: Vec<Flow>,
    /// Local ports of UDP sockets that are not connected.
    pub unconnected: Vec<u16>,
    /// Local ports on which TCP connections are accepted.
    pub listening: Vec<u16>,
    /// The sockets belong to another network namespace than the caller's.
    pub foreign: bool,
}

impl Endpoints {
    /// The sockets that a process has open.
    ///
    /// # Errors
    /// When the process does not exist, may not be examined, or has no such sockets.
    pub fn of_process(pid: u32) -> Result<Self> {
        let because = |e: ProcError| match e {
            ProcError::NotFound(_) => anyhow!("there is no process {pid}"),
            ProcError::PermissionDenied(_) => {
                anyhow!("the sockets of process {pid} may not be seen: use sudo")
            }
            e => anyhow!("process {pid}: {e}"),
        };
        let process = Process::new(i32::try_from(pid)?).map_err(because)?;
        let sockets: HashSet<u64> = process
            .fd()
            .map_err(because)?
            // Descriptors may be closed before they are read.
            .filter_map(|fd| match fd.ok()?.target {
                FDTarget::Socket(inode) => Some(inode),
                _ => None,
            })
            .collect();
        let mut endpoints = Self::read(&process, |inode, _| sockets.contains(&inode))?;
        let netns = |path: PathBuf| fs::metadata(path.join("ns/net")).map(|m| m.ino());
        endpoints.foreign =
            netns(Path::new("/proc").join(pid.to_string())).ok() != netns(own_task()).ok();
        if endpoints.flows.is_empty() && endpoints.unconnected.is_empty() {
            match &endpoints.listening[..] {
                [] => bail!("process {pid} has no TCP or UDP socket that another host could reach"),
                [port, ..] => bail!(
                    "process {pid} has no connection to another host; it accepts some on port \
                     {port}: ask about port:{port}"
                ),
            }
        }
        Ok(endpoints)
    }

    /// Sockets with this local port in the caller's network namespace; possibly none.
    ///
    /// # Errors
    /// When /proc can't be read.
    pub fn of_port(port: u16) -> Result<Self> {
        let task = Process::new_with_root(own_task())?;
        Self::read(&task, |_, local_port| local_port == port)
    }

    /// The sockets in the network namespace of a process for which `wanted` is true of inode and
    /// local port.
    fn read(process: &Process, wanted: impl Fn(u64, u16) -> bool) -> Result<Self> {
        let mut this = Self::default();
        let wanted = |inode, local: SocketAddr| wanted(inode, local.port());
        // Without IPv6 its tables don't exist.
        let tcp = [process.tcp()?, process.tcp6().unwrap_or_default()];
        for socket in tcp.iter().flatten() {
            if wanted(socket.inode, socket.local_address) {
                let state = Some(&socket.state).filter(|state| **state != TcpState::TimeWait);
                this.add(TCP, socket.local_address, socket.remote_address, state);
            }
        }
        let udp = [process.udp()?, process.udp6().unwrap_or_default()];
        for socket in udp.iter().flatten() {
            if wanted(socket.inode, socket.local_address) {
                this.add(UDP, socket.local_address, socket.remote_address, None);
            }
        }
        for ports in [&mut this.unconnected, &mut this.listening] {
            ports.sort_unstable();
            ports.dedup();
        }
        Ok(this)
    }

    fn add(&mut self, proto: u8, local: SocketAddr, remote: SocketAddr, tcp: Option<&TcpState>) {
        let flow = Flow::of_connection(proto, remote, local);
        if tcp == Some(&TcpState::Listen) {
            self.listening.push(local.port());
        } else if remote.port() == 0 {
            if proto == UDP {
                self.unconnected.push(local.port());
            }
        } else if !remote.ip().to_canonical().is_loopback() && !self.flows.contains(&flow) {
            self.flows.push(flow);
        }
    }
}

/// The calling thread's folder: the thread's network namespace may differ from that of its process.
fn own_task() -> PathBuf {
    Path::new("/proc/self/task").join(gettid().to_string())
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, UdpSocket};

    use super::*;

    #[test]
    fn own_sockets_are_found_by_process_and_by_port() {
        let unconnected = UdpSocket::bind("127.0.0.1:0").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connected = UdpSocket::bind("127.0.0.1:0").unwrap();
        connected.connect("127.0.0.1:9").unwrap();
        let port = |addr: std::io::Result<SocketAddr>| addr.unwrap().port();
        let (unconnected, listening) =
            (port(unconnected.local_addr()), port(listener.local_addr()));

        let all = Endpoints::of_process(std::process::id()).unwrap();
        assert!(all.unconnected.contains(&unconnected), "{all:?}");
        assert!(all.listening.contains(&listening), "{all:?}");
        assert!(!all.foreign);
        // Not connected to another host: no device receives the packets.
        assert_eq!(all.flows, []);

        let one = Endpoints::of_port(unconnected).unwrap();
        assert_eq!(one.unconnected, [unconnected]);
        assert!(!one.listening.contains(&listening), "{one:?}");
        let one = Endpoints::of_port(port(connected.local_addr())).unwrap();
        assert_eq!((one.unconnected, one.flows), (vec![], vec![]));
    }

    #[test]
    fn a_process_that_is_not_there_is_said_to_be_so() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let why = Endpoints::of_process(child.id()).unwrap_err().to_string();
        assert_eq!(why, format!("there is no process {}", child.id()));
    }
}
