// SPDX-License-Identifier: MIT OR Apache-2.0
//! What may make packets overtake.

use std::fmt;

/// What the traffic is, and what is done to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// A connected socket per flow.
    Udp,
    /// One unconnected socket for all flows, as DNS and QUIC servers have.
    UdpServer,
    /// TCP without PSH: GRO waits for more.
    Tcp,
    /// TCP with PSH at the end of each run, which ends GRO's waiting.
    TcpPush,
    /// UDP in a VXLAN tunnel, steered by the inner flow.
    Vxlan,
    /// Routed to another namespace, over a veth of one queue.
    SecondVeth,
    /// The application polls the queue itself, and then not, in turns.
    BusyPoll,
    /// The thread that polls the queue goes to another CPU at each step.
    Irq,
    /// The queue is polled in softirq, on another CPU at each step.
    Softirq,
    /// rxsteer is stopped and started again.
    Restart,
    /// A CPU goes offline and comes back.
    Hotplug,
    /// Another policy holds, those that look at the load included.
    Policies,
}

impl Case {
    /// All of them, in the order in which they are reported.
    pub const ALL: [Self; 12] = [
        Self::Udp,
        Self::UdpServer,
        Self::Tcp,
        Self::TcpPush,
        Self::Vxlan,
        Self::SecondVeth,
        Self::BusyPoll,
        Self::Irq,
        Self::Softirq,
        Self::Restart,
        Self::Hotplug,
        Self::Policies,
    ];

    pub(super) fn is_tcp(self) -> bool {
        matches!(self, Self::Tcp | Self::TcpPush)
    }

    /// Something is done that can be counted.
    pub(super) fn is_eventful(self) -> bool {
        matches!(
            self,
            Self::BusyPoll
                | Self::Irq
                | Self::Softirq
                | Self::Restart
                | Self::Hotplug
                | Self::Policies
        )
    }

    /// Other devices, with queues of their own, are between the steered one and the application.
    pub(super) fn has_devices_above(self) -> bool {
        matches!(self, Self::Vxlan | Self::SecondVeth)
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
            Self::BusyPoll => "busy-poll",
            Self::Irq => "irq",
            Self::Softirq => "softirq",
            Self::Restart => "restart",
            Self::Policies => "policies",
            Self::Hotplug => "hotplug",
        })
    }
}
