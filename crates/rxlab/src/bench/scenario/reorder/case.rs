// SPDX-License-Identifier: MIT OR Apache-2.0
//! Situations that may reorder packets.

use std::fmt;

/// Traffic of a case, and the changes during it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// A connected socket per flow.
    Udp,
    /// One unconnected socket for all flows, as in DNS and QUIC servers.
    UdpServer,
    /// TCP without PSH: GRO holds segments.
    Tcp,
    /// TCP with PSH at the end of each run, which makes GRO flush.
    TcpPush,
    /// UDP in a VXLAN tunnel, steered by the inner flow.
    Vxlan,
    /// Routed to another namespace, over a veth with one queue.
    SecondVeth,
    /// As [`Self::SecondVeth`], over a veth with four transmit queues, of which the first is slow.
    /// INLINE packets have recorded their receive queue, as those of a network card, so that they
    /// go to the first queue; redirected ones go to a queue by their hash.
    TxQueues,
    /// As [`Self::TxQueues`]; packets lose receive queue and hash of the steered device.
    TxQueuesByHash,
    /// As [`Self::TxQueues`], with `--policy rps` and a mask that does not change.
    TxQueuesByRps,
    /// Bridged to another namespace, over a veth without GRO, as containers have it: it has no NAPI,
    /// and its packets wait in a queue of each CPU.
    Container,
    /// The application busy-polls the queue in every other step.
    BusyPoll,
    /// The thread that polls the queue moves to another CPU in each step.
    Irq,
    /// The queue is polled in softirq, on another CPU in each step.
    Softirq,
    /// Two queues, polled on two CPUs, with flows of their own, and more flows than slots. In skb
    /// mode the two flows of a slot come at the same time.
    SharedSlots,
    /// rxsteer is stopped and restarted.
    Restart,
    /// A CPU goes offline and online.
    Hotplug,
    /// The policy changes, including to policies that consider load.
    Policies,
    /// A tun device, in softirq mode only. It receives outside of polls, in the calls of the thread that
    /// writes to it, which moves to another CPU in each step.
    Tun,
    /// The loopback device, in softirq mode only: a thread sends the packets of each flow, and moves to
    /// another CPU every 10 ms, once all that it has sent were read.
    Lo,
}

impl Case {
    /// All cases, in the order of the report.
    pub const ALL: [Self; 19] = [
        Self::Udp,
        Self::UdpServer,
        Self::Tcp,
        Self::TcpPush,
        Self::Vxlan,
        Self::SecondVeth,
        Self::TxQueues,
        Self::TxQueuesByHash,
        Self::TxQueuesByRps,
        Self::Container,
        Self::BusyPoll,
        Self::Irq,
        Self::Softirq,
        Self::SharedSlots,
        Self::Restart,
        Self::Hotplug,
        Self::Policies,
        Self::Tun,
        Self::Lo,
    ];

    pub(super) fn is_tcp(self) -> bool {
        matches!(self, Self::Tcp | Self::TcpPush)
    }

    /// Whether the case has countable events.
    pub(super) fn is_eventful(self) -> bool {
        matches!(
            self,
            Self::BusyPoll
                | Self::Irq
                | Self::Softirq
                | Self::Restart
                | Self::Hotplug
                | Self::Policies
                | Self::Tun
                | Self::Lo
        )
    }

    /// Whether the device is one that softirq mode alone steers.
    pub(super) fn needs_softirq_mode(self) -> bool {
        matches!(self, Self::Tun | Self::Lo)
    }

    /// Whether packets leave by another device.
    pub(super) fn is_forwarded(self) -> bool {
        self == Self::SecondVeth || self.is_beyond()
    }

    /// Whether the case is about packets that wait behind the stack, where the rule does not hold.
    pub(super) fn is_beyond(self) -> bool {
        self.has_tx_queues() || self == Self::Container
    }

    /// Whether that device has several transmit queues.
    pub(super) fn has_tx_queues(self) -> bool {
        matches!(
            self,
            Self::TxQueues | Self::TxQueuesByHash | Self::TxQueuesByRps
        )
    }

    /// Whether the mask stays, and flows with it.
    pub(super) fn is_steady(self) -> bool {
        self == Self::TxQueuesByRps
    }

    /// Whether devices with queues of their own lie between the steered device and the application.
    pub(super) fn has_devices_above(self) -> bool {
        self == Self::Vxlan || self.is_forwarded()
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Udp => "udp",
            Self::UdpServer => "udp-server",
            Self::Tcp => "tcp",
            Self::TcpPush => "tcp-push",
            Self::Vxlan => "vxlan",
            Self::SecondVeth => "second-veth",
            Self::TxQueues => "tx-queues",
            Self::TxQueuesByHash => "tx-queues-by-hash",
            Self::TxQueuesByRps => "tx-queues-by-rps",
            Self::Container => "container",
            Self::BusyPoll => "busy-poll",
            Self::Irq => "irq",
            Self::Softirq => "softirq",
            Self::SharedSlots => "shared-slots",
            Self::Restart => "restart",
            Self::Policies => "policies",
            Self::Hotplug => "hotplug",
            Self::Tun => "tun",
            Self::Lo => "loopback",
        })
    }
}
