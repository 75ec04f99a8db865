// SPDX-License-Identifier: MIT OR Apache-2.0
//! The BPF objects' skeletons, generated from `bpf/*.bpf.c`.

use std::mem::MaybeUninit;

use libbpf_rs::skel::SkelBuilder;

macro_rules! skeleton {
    ($name:ident, $file:literal, $doc:literal) => {
        #[doc = $doc]
        #[allow(clippy::all, clippy::pedantic, missing_docs)]
        pub mod $name {
            include!(concat!(env!("OUT_DIR"), "/", $file));
        }
    };
}

skeleton!(rx_skel, "rx.skel.rs", "The XDP program.");
skeleton!(
    dissector_skel,
    "dissector.skel.rs",
    "The programs of softirq mode."
);
skeleton!(hops_skel, "hops.skel.rs", "What softirq mode has once.");
skeleton!(
    hash_skel,
    "hash.skel.rs",
    "Gives each skb the hash of its flow."
);
skeleton!(
    trace_skel,
    "trace.skel.rs",
    "Tracepoints, and what user space calls."
);
skeleton!(
    socket_skel,
    "socket.skel.rs",
    "Watches applications' sockets."
);
skeleton!(poll_skel, "poll.skel.rs", "Counts applications' polls.");
skeleton!(
    types_skel,
    "types.skel.rs",
    "Has the types alone; never loaded."
);

/// Opens an object, for good: a skeleton borrows the memory of its object's handle, a few bytes,
/// which stays taken. There is an object for each device, each change of the tables' sizes, and
/// each time that sockets or polls begin to be watched.
///
/// # Errors
/// When the object can't be read.
pub(crate) fn open<B: SkelBuilder<'static>>(builder: B) -> libbpf_rs::Result<B::Output> {
    builder.open(Box::leak(Box::new(MaybeUninit::uninit())))
}
