// SPDX-License-Identifier: MIT OR Apache-2.0
//! Softirq mode answers the kernel's flow dissector, which others ask too. What others decide by
//! a packet's hash or headers is the same as without rxsteer, and none of their questions is in the account. The
//! secret of the kernel's hashes stays the same until it boots, so the decisions can be compared.

use std::collections::BTreeSet;
use std::fs;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsFd;

use crate::helpers::process::Rxsteer;
use crate::helpers::waiting::{Waiting, tc};
use crate::helpers::watch::*;
use crate::tc::program;
use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use rxlab::lab::bond::{add_port, bond};
use rxlab::lab::bridge::bridge;
use rxlab::lab::filter::{choose_by, extension, instruction};
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::link::{End, Link, LinkConfig};
use rxlab::lab::netns::Netns;
use rxlab::lab::option;
use rxlab::lab::rtnl::{route, set_up};
use rxlab::lab::sockets::{reuseport, server};
use rxlab::lab::stacked::{Kind, Stacked};
use rxlab::lab::tun::Tunnel;
use rxlab::testing::app::{App, soon};
use rxlab::testing::not_run;
use rxlab::testing::testbed::{OTHER_CPU, POLLING_CPU, Testbed, until};
use rxlab::{in_lab, test_name};
use rxsteer::host::tc::{Hook, TcLink, attach};

const FLOWS: u16 = 32;

/// Transmit queues of a device that has several.
const QUEUES: u32 = 4;

/// Reports what this machine lacks.
fn there<T>(test: &str, made: Result<T>) -> Option<T> {
    made.map_err(|error| not_run(test, &format!("{error:#}")))
        .ok()
}

/// Each flow, of which a round sends one packet to `dut`, goes where it goes without rxsteer, which steers `dut`
/// and `others`.
fn goes_where_it_went(
    dut: &End,
    others: &[&str],
    round: impl Fn() -> Result<Places>,
) -> Result<()> {
    let without = round()?;
    let places: BTreeSet<_> = without.values().collect();
    ensure!(places.len() > 1, "all flows go to one place: {without:?}");
    let cpus = format!("--rps-cpus={OTHER_CPU}");
    let args = [&dut.name, "--mode=softirq", "--policy=rps", &cpus];
    let running = Rxsteer::steering(&dut.netns, &[&args, others].concat())?;
    let mut sent = 0;
    // The first packets find no softnet backlog yet.
    until("all packets of a round are redirected", || {
        let before = running.at_rest()?.redirected;
        let with = round()?;
        ensure!(with == without, "with rxsteer {with:?}, before {without:?}");
        sent += u64::from(FLOWS);
        let asked = running.received()?;
        ensure!(asked == sent, "{asked} answers for {sent} packets");
        let redirected = running.at_rest()?.redirected - before;
        Ok((redirected == u64::from(FLOWS)).then_some(()))
    })?;
    let ended = running.stop(Signal::SIGTERM)?;
    ensure!(ended.code == Some(0), "{ended:?}");
    Ok(())
}

/// Packets come by the device under test, and leave by `out`, whose other ends are in a namespace of their own.
struct Router {
    bed: Testbed,
    out: Vec<Link>,
}

impl Router {
    /// With so many devices to leave by. Each device has so many transmit queues.
    fn new(devices: u8, queues: u32) -> Result<Self> {
        let bed = Testbed::new(&LinkConfig {
            reply_queues: queues,
            ..LinkConfig::default()
        })?;
        let (dut, far) = (&bed.link.dut.netns, Netns::new("far")?);
        dut.forward()?;
        let link = |id| {
            let config = LinkConfig {
                id,
                queues,
                // With GRO, packets would lose a hash before a queue is chosen.
                gro: false,
                ..LinkConfig::default()
            };
            Link::new(dut, &far, &config)
        };
        let out = (1..=devices).map(link).collect::<Result<_>>()?;
        Ok(Self { bed, out })
    }

    fn dut(&self) -> &End {
        &self.bed.link.dut
    }

    /// The flows, which differ in their source ports.
    fn flows_to(&self, daddr: Ipv4Addr) -> UdpFlows {
        UdpFlows {
            daddr: daddr.into(),
            nr_saddrs: 1,
            // So long as Waiting needs.
            payload_len: 200,
            ..UdpFlows::to(self.dut(), FLOWS.into())
        }
    }

    fn send(&self, flows: &UdpFlows) -> Result<()> {
        let count = flows.nr_flows.into();
        self.bed.send(Frames::Udp(flows.clone()), count)
    }

    /// Sends a packet of each flow once `place` has found where the one before went.
    fn one_by_one(
        &self,
        flows: &UdpFlows,
        mut place: impl FnMut() -> Result<Option<u32>>,
    ) -> Result<Places> {
        let sports = flows.sport..flows.sport + FLOWS;
        let one = |sport| {
            self.send(&UdpFlows {
                sport,
                nr_flows: 1,
                ..flows.clone()
            })?;
            Ok((sport, until("the packet has come", &mut place)?))
        };
        sports.map(one).collect()
    }

    /// The class in which the next packet of each flow waits.
    fn classes(&self, flows: &UdpFlows, waiting: &Waiting) -> Result<Places> {
        let mut before = waiting.in_classes()?;
        self.one_by_one(flows, || {
            let now = waiting.in_classes()?;
            let more = now
                .iter()
                .find(|(class, packets)| before.get(class).unwrap_or(&0) < *packets);
            let class = more.map(|(&class, _)| class);
            before = now;
            Ok(class)
        })
    }

    /// The flows go to the places that are watched.
    fn goes_where_it_went(&self, others: &[&str], flows: &UdpFlows, watch: &Watch) -> Result<()> {
        goes_where_it_went(self.dut(), others, || {
            self.send(flows)?;
            watch.places(FLOWS)
        })
    }
}

#[test]
fn transmit_queues_behind_a_router() -> Result<()> {
    in_lab!();
    let router = Router::new(1, QUEUES)?;
    let out = &router.out[0].dut;
    let watch = Watch::queues(out, QUEUES, SOURCE_PORT)?;
    router.goes_where_it_went(&[], &router.flows_to(out.ipv4), &watch)
}

/// Packets have no route, and are sent by a device that is steered.
#[test]
fn transmit_queues_behind_a_bridge() -> Result<()> {
    in_lab!();
    let router = Router::new(1, QUEUES)?;
    let (dut, out) = (router.dut(), &router.out[0]);
    let made = bridge(&dut.netns, &[dut, &out.tester]);
    let Some(()) = there(test_name!(), made) else {
        return Ok(());
    };
    let watch = Watch::queues(&out.dut, QUEUES, SOURCE_PORT)?;
    let flows = UdpFlows {
        dmac: out.dut.mac,
        ..router.flows_to(out.dut.ipv4)
    };
    router.goes_where_it_went(&[&out.tester.name], &flows, &watch)
}

/// Packets that a socket sends by the device.
#[test]
fn transmit_queues_of_answers() -> Result<()> {
    in_lab!();
    let router = Router::new(0, QUEUES)?;
    let dut = router.dut();
    let flows = router.flows_to(dut.ipv4);
    // Not connected: it would have one queue for all its packets.
    let socket = dut
        .netns
        .run(|| Ok(UdpSocket::bind((dut.ipv4, flows.dport))?))?;
    let socket = soon(socket)?;
    let answer = move || {
        let mut bytes = [0; 256];
        let (len, from) = socket.recv_from(&mut bytes)?;
        socket.send_to(&bytes[..len], from)
    };
    let _app = App::start(&dut.netns, Box::new(answer))?;
    let watch = Watch::queues(&router.bed.link.tester, QUEUES, DESTINATION_PORT)?;
    router.goes_where_it_went(&[], &flows, &watch)
}

/// An address that is nobody's.
const BEYOND: Ipv4Addr = Ipv4Addr::new(198, 19, 254, 1);

#[test]
fn routes_with_several_paths() -> Result<()> {
    in_lab!();
    let router = Router::new(2, 1)?;
    let paths = [0, 1].map(|i| router.out[i].tester.name.as_str());
    let made = router.dut().netns.run(|| {
        route(BEYOND, &paths)?;
        // By ports, too.
        Ok(fs::write(
            "/proc/sys/net/ipv4/fib_multipath_hash_policy",
            "1",
        )?)
    });
    let Some(()) = there(test_name!(), made) else {
        return Ok(());
    };
    let watch = Watch::devices(&router.out)?;
    router.goes_where_it_went(&[], &router.flows_to(BEYOND), &watch)
}

#[test]
fn ports_of_a_bond() -> Result<()> {
    in_lab!();
    const BOND: &str = "bond7";
    let router = Router::new(2, 1)?;
    let netns = &router.dut().netns;
    let Some(()) = there(test_name!(), bond(netns, BOND)) else {
        return Ok(());
    };
    let sys = |name: &str, value: &str| {
        let path = format!("/sys/class/net/{BOND}/{name}");
        netns.run(|| Ok(fs::write(&path, value)?))
    };
    netns.run(|| set_up(BOND, false))?;
    sys("bonding/mode", "balance-xor")?;
    // It asks nobody for a neighbour.
    sys("flags", &format!("{:#x}", libc::IFF_UP | libc::IFF_NOARP))?;
    for link in &router.out {
        add_port(BOND, &link.tester)?;
    }
    netns.run(|| route(BEYOND, &[BOND]))?;
    let watch = Watch::devices(&router.out)?;
    for policy in ["layer3+4", "encap3+4"] {
        sys("bonding/xmit_hash_policy", policy)?;
        router.goes_where_it_went(&[], &router.flows_to(BEYOND), &watch)?;
    }
    Ok(())
}

/// Packets of a VXLAN behind a router, or behind a bridge of which it is a port that is steered.
fn vxlan(test: &str, bridged: bool) -> Result<()> {
    in_lab!(test);
    let router = Router::new(1, 1)?;
    let (dut, out) = (router.dut(), &router.out[0]);
    let Some(vxlan) = there(test, Stacked::new(out, Kind::Vxlan)) else {
        return Ok(());
    };
    let watch = Watch {
        sockets: vec![packets(&out.dut, libc::ETH_P_IP, &[])?],
        // Behind the headers of IP, UDP, VXLAN and Ethernet.
        port: 20 + 8 + 8 + 14 + SOURCE_PORT,
        place: Some(SOURCE_PORT),
    };
    let flows = router.flows_to(vxlan.ipv4);
    if !bridged {
        return router.goes_where_it_went(&[], &flows, &watch);
    }
    let port = dut.netns.run(|| End::of_host(&vxlan.name))?;
    bridge(&dut.netns, &[dut, &port])?;
    let flows = UdpFlows {
        dmac: out.dut.mac,
        ..flows
    };
    router.goes_where_it_went(&[&vxlan.name], &flows, &watch)
}

#[test]
fn source_ports_of_a_vxlan_behind_a_router() -> Result<()> {
    vxlan(test_name!(), false)
}

#[test]
fn source_ports_of_a_vxlan_behind_a_bridge() -> Result<()> {
    vxlan(test_name!(), true)
}

#[test]
fn transmit_queues_below_wireguard() -> Result<()> {
    in_lab!();
    let router = Router::new(1, QUEUES)?;
    let out = &router.out[0];
    let wireguard = Stacked::new(out, Kind::WireGuard);
    let Some(wireguard) = there(test_name!(), wireguard) else {
        return Ok(());
    };
    let watch = Watch::queues(&out.dut, QUEUES, SOURCE_PORT)?;
    let flows = router.flows_to(wireguard.ipv4);
    // The first packet waits for the handshake.
    let round = || router.one_by_one(&flows, || watch.next());
    goes_where_it_went(router.dut(), &[&wireguard.name], round)
}

#[test]
fn packet_sockets_that_share_by_hash() -> Result<()> {
    in_lab!();
    let router = Router::new(0, 1)?;
    let dut = router.dut();
    let flows = router.flows_to(dut.ipv4);
    // Otherwise the kernel answers, and the device has these packets, too.
    let _reader = server(&dut.netns, &flows, 1 << 20)?;
    // Before the hash of the hop is cleared, and afterwards.
    for protocol in [libc::ETH_P_ALL, libc::ETH_P_IP] {
        const GROUP: u32 = 7;
        let fanout = GROUP | libc::PACKET_FANOUT_HASH << 16;
        let socket = |_| {
            let socket = packets(dut, protocol, &[])?;
            option::set(&socket, libc::SOL_PACKET, libc::PACKET_FANOUT, &fanout)?;
            Ok(socket)
        };
        let watch = Watch::of((0..2).map(socket).collect::<Result<_>>()?);
        router.goes_where_it_went(&[], &flows, &watch)?;
    }
    Ok(())
}

/// Attaches a program that asks for each packet's hash where rxsteer has cleared it.
fn asks_for_hashes(dut: &End) -> Result<TcLink> {
    let asks = program(Some(libbpf_sys::BPF_FUNC_get_hash_recalc))?;
    dut.netns
        .run(|| attach(asks.as_fd(), dut.ifindex, Hook::Ingress))
}

/// Sockets that share a port at the device under test.
fn sharing(dut: &End, port: u16) -> Result<Watch> {
    let socket = |_| {
        let socket = reuseport((dut.ipv4, port).into())?;
        socket.set_nonblocking(true)?;
        Ok(socket.into())
    };
    let sockets = dut.netns.run(|| (0..2).map(socket).collect())?;
    Ok(Watch::of(sockets))
}

/// Has the sockets share by the packets' hash.
fn share_by_hash(watch: &Watch) -> Result<()> {
    let mut by_hash = [
        extension(libc::SKF_AD_RXHASH),
        instruction(libc::BPF_ALU | libc::BPF_MOD | libc::BPF_K, 2),
        instruction(libc::BPF_RET | libc::BPF_A, 0),
    ];
    choose_by(&watch.sockets[0], &mut by_hash)
}

/// By the kernel's choice, and by a program that reads the hash, for which another one has asked.
#[test]
fn sockets_that_share_a_port() -> Result<()> {
    in_lab!();
    let router = Router::new(0, 1)?;
    let dut = router.dut();
    let flows = router.flows_to(dut.ipv4);
    let watch = sharing(dut, flows.dport)?;
    router.goes_where_it_went(&[], &flows, &watch)?;

    let _asks = asks_for_hashes(dut)?;
    share_by_hash(&watch)?;
    router.goes_where_it_went(&[], &flows, &watch)
}

/// Packets begin with the network header at tc, too.
#[test]
fn sockets_that_share_a_port_of_a_tunnel() -> Result<()> {
    in_lab!();
    const PORT: u16 = 9;
    let [tester, dut] = [Netns::new("tester")?, Netns::new("dut")?];
    let tunnel = Tunnel::new(&tester, &dut, libc::IFF_TUN, POLLING_CPU)?;
    let dut = dut.run(|| End::of_host(&tunnel.name))?;
    let watch = sharing(&dut, PORT)?;
    let socket = |port| Ok(UdpSocket::bind((tunnel.peer, port))?);
    let sockets = || (1024..1024 + FLOWS).map(socket).collect();
    let sockets: Vec<_> = tester.run(sockets)?;
    let _asks = asks_for_hashes(&dut)?;
    share_by_hash(&watch)?;
    goes_where_it_went(&dut, &[], || {
        for socket in &sockets {
            socket.send_to(&[0; 64], (tunnel.ipv4, PORT))?;
        }
        watch.places(FLOWS)
    })
}

/// A filter at tc ingress asks for the hash again.
#[test]
fn classes_by_hash_at_ingress() -> Result<()> {
    in_lab!();
    let router = Router::new(0, 1)?;
    let dut = router.dut();
    let commands = [
        "qdisc add dev DEV ingress",
        "filter add dev DEV parent ffff: protocol ip handle 1 flow hash keys rxhash divisor 4 baseclass 1:1",
    ];
    let made = commands
        .iter()
        .try_for_each(|c| tc(&dut.netns, &dut.name, c).map(drop));
    let Some(()) = there(test_name!(), made) else {
        return Ok(());
    };
    let flows = router.flows_to(dut.ipv4);
    let watch = sharing(dut, flows.dport)?;
    router.goes_where_it_went(&[], &flows, &watch)
}

/// The flows wait in the classes in which they wait without rxsteer, at a device by which they leave to `daddr`.
/// `others` are steered, too.
fn wait_in_classes(
    router: &Router,
    (device, daddr): (&str, Ipv4Addr),
    others: &[&str],
    commands: &[&str],
    test: &str,
) -> Result<()> {
    let waiting = Waiting::new(&router.dut().netns, device, commands);
    let Some(waiting) = there(test, waiting) else {
        return Ok(());
    };
    let flows = router.flows_to(daddr);
    router.send(&flows)?;
    until(
        "one packet is sent, and one waits before the classes",
        || {
            let packets: u32 = waiting.in_classes()?.values().sum();
            Ok((packets == u32::from(FLOWS) - 2).then_some(()))
        },
    )?;
    goes_where_it_went(router.dut(), others, || router.classes(&flows, &waiting))
}

/// At a veth.
fn wait_behind_a_router(test: &str, commands: &[&str]) -> Result<()> {
    in_lab!(test);
    let router = Router::new(1, 1)?;
    let out = &router.out[0];
    let to = (out.tester.name.as_str(), out.dut.ipv4);
    wait_in_classes(&router, to, &[], commands, test)
}

/// In one of four classes, by this filter.
fn wait_by(test: &str, filter: &str) -> Result<()> {
    let commands = [
        "qdisc add dev DEV parent 1:1 handle 2: drr",
        "class add dev DEV parent 2: classid 2:1 drr",
        "class add dev DEV parent 2: classid 2:2 drr",
        "class add dev DEV parent 2: classid 2:3 drr",
        "class add dev DEV parent 2: classid 2:4 drr",
        &format!("filter add dev DEV parent 2: protocol ip {filter} divisor 4 baseclass 2:1"),
    ];
    wait_behind_a_router(test, &commands)
}

#[test]
fn classes_by_headers() -> Result<()> {
    let keys = "src,dst,proto,proto-src,proto-dst";
    wait_by(test_name!(), &format!("handle 1 flow hash keys {keys}"))
}

#[test]
fn classes_by_hash() -> Result<()> {
    wait_by(test_name!(), "handle 1 flow hash keys rxhash")
}

const FQ_CODEL: &str = "qdisc add dev DEV parent 1:1 handle 2: fq_codel flows 16";

#[test]
fn flows_of_fq_codel() -> Result<()> {
    wait_behind_a_router(test_name!(), &[FQ_CODEL])
}

/// Packets begin with the network header there, as where they are received, and the device is steered.
#[test]
fn flows_of_fq_codel_at_a_tunnel() -> Result<()> {
    in_lab!();
    let router = Router::new(1, 1)?;
    let gre = Stacked::new(&router.out[0], Kind::Gre);
    let Some(gre) = there(test_name!(), gre) else {
        return Ok(());
    };
    let to = (gre.name.as_str(), gre.ipv4);
    wait_in_classes(&router, to, &[&gre.name], &[FQ_CODEL], test_name!())
}

/// The kernel drops packets' routes before the classes.
#[test]
fn flows_of_fq_codel_at_a_tun_device() -> Result<()> {
    in_lab!();
    let router = Router::new(1, 1)?;
    let (dut, far) = (&router.dut().netns, &router.out[0].dut.netns);
    let tunnel = Tunnel::new(far, dut, libc::IFF_TUN, POLLING_CPU)?;
    let to = (tunnel.name.as_str(), tunnel.peer);
    wait_in_classes(&router, to, &[&tunnel.name], &[FQ_CODEL], test_name!())
}
