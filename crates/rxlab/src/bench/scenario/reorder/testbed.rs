// SPDX-License-Identifier: MIT OR Apache-2.0
//! Testbed of a case.

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::{Result, ensure};
use rxsteer::host::cpumask::CpuMask;
use rxsteer::host::setting::Setting;
use rxsteer::host::topology::Topology;

use super::case::Case;
use crate::lab::bridge::bridge;
use crate::lab::frame::{Frames, TcpFlows, UdpFlows, Vxlan};
use crate::lab::link::{End, Link, LinkConfig};
use crate::lab::netns::Netns;
use crate::lab::nic::Nic;
use crate::lab::senders;
use crate::lab::slow::slow;
use crate::lab::tun::Tunnel;
use crate::lab::{sockets, tx_queue};

/// The CPU that polls the queue, until the case moves it.
pub(super) const INTERRUPT_CPU: u32 = 0;

/// UDP flows: few enough that a dozen packets of each are under way.
pub(super) const NR_FLOWS: u32 = 512;

/// Few enough that several of [`super::BUSY_POLL_WINDOW`] packets are of one flow.
pub(super) const NR_BUSY_POLL_FLOWS: u32 = 32;

/// Flows that are forwarded, and packets of each in a row: a flow moves in the middle of them, and
/// has a pause after them.
pub(super) const BURSTS: (u32, u32) = (32, 64);

/// Time that a container takes for a packet, so that packets wait for it.
const COST: Duration = Duration::from_micros(100);

/// Packets that are forwarded at first, until every flow has its location: two bursts of each flow.
pub(super) const WARM_UP: u64 = 2 * BURSTS.0 as u64 * BURSTS.1 as u64;

/// Receive buffer of each socket, bytes; a frame takes about 5 kB.
pub(super) const RCVBUF: usize = 64 << 20;

/// Few enough that several of [`super::TUN_WINDOW`] packets are of one flow.
pub(super) const NR_TUN_FLOWS: u32 = 32;

/// Each has a thread that sends and one that reads.
pub(super) const NR_LO_FLOWS: u32 = 16;

/// A link, the application's sockets, and the frames to them.
pub(super) struct Testbed {
    pub(super) link: Link,
    /// What the link's packets are routed to.
    pub(super) tunnel: Option<Tunnel>,
    /// The steered device, if it is not the link's end: the tunnel's second one, or the loopback
    /// device.
    pub(super) other: Option<End>,
    /// The link to the application, if packets are forwarded.
    pub(super) second: Option<Link>,
    /// Settings of the host that let packets wait where they seldom do.
    pub(super) kernel: Option<Setting>,
    /// Threads that poll the queue; None: softirq polls it on the generator's CPU.
    pub(super) nic: Option<Nic>,
    pub(super) frames: Frames,
    /// The application's namespace, and its sockets by thread.
    pub(super) application: Netns,
    pub(super) sockets: Vec<Vec<OwnedFd>>,
    /// A socket that polls in some steps; flows of an application that polls stay inline.
    pub(super) polling: Option<OwnedFd>,
    pub(super) online: CpuMask,
}

impl Testbed {
    pub(super) fn new(case: Case) -> Result<Self> {
        let online = Topology::host().online()?;
        ensure!(online.len() > 1, "a flow can't move on one CPU");
        let (tester, dut) = (Netns::new("tester")?, Netns::new("dut")?);
        let polling_cpus: Vec<u32> = match case {
            Case::SharedSlots => online.iter().take(2).collect(),
            _ => vec![INTERRUPT_CPU],
        };
        let config = LinkConfig {
            queues: polling_cpus.len() as u32,
            ..LinkConfig::default()
        };
        let link = Link::new(&tester, &dut, &config)?;
        let threaded = !matches!(case, Case::Softirq | Case::Lo);
        let nic = threaded.then(|| Nic::new(&link.dut, &polling_cpus));
        let mut application = dut.clone();
        let (mut second, mut kernel, mut tunnel, mut other) = (None, None, None, None);
        let mut flows = UdpFlows {
            run: 4,
            ..UdpFlows::to(&link.dut, NR_FLOWS)
        };
        let frames = match case {
            Case::Tcp | Case::TcpPush => {
                flows = UdpFlows {
                    nr_flows: 64,
                    run: 16,
                    payload_len: 500,
                    ..flows
                };
                Frames::Tcp(TcpFlows {
                    flows: flows.clone(),
                    first_seq: 1,
                    ack: 1,
                    push: case == Case::TcpPush,
                })
            }
            Case::Vxlan => {
                let vni = 42;
                let inner = link.dut.vxlan(1, vni)?;
                flows = UdpFlows {
                    run: flows.run,
                    ..UdpFlows::to(&inner, flows.nr_flows)
                };
                Frames::Vxlan(Vxlan::to(&link.dut, vni), flows.clone())
            }
            _ if case.is_forwarded() => {
                application = Netns::new("application")?;
                let onward = onward(case, &dut, &application)?;
                if case.is_beyond() {
                    (flows.nr_flows, flows.run) = BURSTS;
                }
                if case == Case::Container {
                    bridge(&dut, &[&link.dut, &onward.tester])?;
                    flows = UdpFlows {
                        run: flows.run,
                        ..UdpFlows::to(&onward.dut, flows.nr_flows)
                    };
                    kernel = Some(light()?);
                    slow(&onward.dut, COST)?;
                } else {
                    dut.forward()?;
                    flows.daddr = IpAddr::V4(onward.dut.ipv4);
                }
                if case.has_tx_queues() {
                    tx_queue::slow(&onward.tester)?;
                }
                second = Some(onward);
                Frames::Udp(flows.clone())
            }
            Case::Tun => {
                application = Netns::new("application")?;
                let made = Tunnel::new(&dut, &application, libc::IFF_TUN, INTERRUPT_CPU)?;
                let end = application.run(|| End::of_host(&made.name))?;
                dut.forward()?;
                flows.daddr = IpAddr::V4(end.ipv4);
                flows.nr_flows = NR_TUN_FLOWS;
                (tunnel, other) = (Some(made), Some(end));
                Frames::Udp(flows.clone())
            }
            Case::Lo => {
                let end = dut.run(|| End::of_host("lo"))?;
                flows = senders::flows(&end, NR_LO_FLOWS);
                other = Some(end);
                Frames::Udp(flows.clone())
            }
            Case::Hotplug => {
                kernel = Some(light()?);
                Frames::Udp(flows.clone())
            }
            Case::SharedSlots => {
                kernel = Some(long_lists()?);
                Frames::Udp(flows.clone())
            }
            Case::BusyPoll => {
                flows.nr_flows = NR_BUSY_POLL_FLOWS;
                Frames::Udp(flows.clone())
            }
            _ => Frames::Udp(flows.clone()),
        };
        let mut polling = None;
        let sockets = match &frames {
            Frames::Tcp(tcp) => halves(sockets::established(&application, tcp, RCVBUF)?),
            _ if case == Case::Lo => {
                let each = sockets::connected(&application, &flows, RCVBUF)?;
                each.into_iter().map(|socket| vec![socket]).collect()
            }
            _ if case == Case::Udp => halves(sockets::connected(&application, &flows, RCVBUF)?),
            _ => {
                let server = sockets::server(&application, &flows, RCVBUF)?;
                if case == Case::BusyPoll {
                    polling = Some(server.try_clone()?);
                }
                vec![vec![server]]
            }
        };
        Ok(Self {
            link,
            tunnel,
            other,
            second,
            kernel,
            nic: nic.transpose()?,
            frames,
            application,
            sockets,
            polling,
            online,
        })
    }
}

/// The link to the application.
fn onward(case: Case, dut: &Netns, application: &Netns) -> Result<Link> {
    let config = LinkConfig {
        id: 1,
        queues: if case.has_tx_queues() { 4 } else { 1 },
        gro: case != Case::Container,
        ..Default::default()
    };
    Link::new(dut, application, &config)
}

/// Lets a CPU take one packet at a time from its softnet backlog, and leave the rest for later: with
/// the kernel's weights, packets wait there only on a CPU that polls several devices.
/// The weights are the host's, of all namespaces.
fn light() -> Result<Setting> {
    let paths = ["dev_weight", "netdev_budget"].map(|name| format!("/proc/sys/net/core/{name}"));
    let weights = Setting::keep_all(paths.to_vec())?;
    weights.set("1")?;
    Ok(weights)
}

/// Lets a poll pass up all of its packets at once: the last is steered before the first is
/// delivered. The number is the host's, of all namespaces.
fn long_lists() -> Result<Setting> {
    let batch = Setting::keep("/proc/sys/net/core/gro_normal_batch")?;
    batch.set("64")?;
    Ok(batch)
}

/// Splits the sockets over two threads.
pub(super) fn halves(mut sockets: Vec<OwnedFd>) -> Vec<Vec<OwnedFd>> {
    let second = sockets.split_off(sockets.len() / 2);
    vec![sockets, second]
}
