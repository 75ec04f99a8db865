// SPDX-License-Identifier: MIT OR Apache-2.0
//! The data path's pure C, compiled for the host: the same code as in the kernel.

use std::net::{IpAddr, SocketAddr};

use super::config::InlinePorts;
use crate::types::rx_facts;
use crate::types::{
    backlog, backlog_wait, flow_key, flow_result, flow_secret, load_unit, rps_dev_flow, rps_map,
    rx_queue, rx_trial, rx_verdict,
};

unsafe extern "C" {
    fn native_flow_parse(
        data: *const u8,
        linear: u32,
        len: u32,
        options: u32,
        key: *mut flow_key,
    ) -> flow_result;
    fn native_flow_key_ports(
        key: *mut flow_key,
        saddr: *const [u32; 4],
        source: u16,
        dest: u16,
        proto: u32,
    );
    fn native_flow_key_connection(
        key: *mut flow_key,
        saddr: *const [u32; 4],
        daddr: *const [u32; 4],
        source: u16,
        dest: u16,
        proto: u32,
    );
    fn native_flow_has_port(key: *const flow_key, ports: *const InlinePorts) -> bool;
    fn native_flow_tunnel_of(proto: u8, dest: u16) -> u32;
    fn native_flow_hash(key: *const flow_key, secret: *const flow_secret) -> u32;
    fn native_flow_hashes(key: *const flow_key, secret: *const flow_secret, own: *mut u32) -> u32;
    fn native_rx_steer(
        facts: *mut rx_facts,
        q: *mut rx_queue,
        backlogs: *mut backlog,
        map: *const rps_map,
        flow: *mut rps_dev_flow,
        hash: u32,
        cpu: u32,
    ) -> rx_verdict;
    fn native_rx_usable(facts: *mut rx_facts, b: *mut backlog, location: u16, cpu: u32) -> u16;
    fn native_rx_base(
        facts: *mut rx_facts,
        q: *mut rx_queue,
        backlogs: *mut backlog,
        map: *const rps_map,
        hash: u32,
        cpu: u32,
        followed: *mut bool,
    ) -> u16;
    fn native_rx_wanted(
        facts: *mut rx_facts,
        q: *mut rx_queue,
        backlogs: *mut backlog,
        map: *const rps_map,
        flow: *mut rps_dev_flow,
        cpu: u32,
    ) -> u16;
    fn native_load_polled(
        q: *mut rx_queue,
        start: u64,
        now: u64,
        over_idle: u32,
        exhausted: u32,
        busy: u32,
    ) -> bool;
    fn native_load_measure(q: *mut rx_queue);
    fn native_load_window(
        q: *mut rx_queue,
        t: *mut rx_trial,
        nr_refused: u64,
        now: u64,
        tasks: u32,
        irq: u32,
    );
    fn native_load_share(part: u64, whole: u64) -> u32;
    fn native_load_busy(tasks: u32, irq: u32) -> u32;
    fn native_load_saturated() -> u32;
    fn native_load_saturated_by() -> u32;
    fn native_rps_location_of(map: *const rps_map, hash: u32) -> u16;
    fn native_flow_slot(queue: u32, hash: u32, shift: u32) -> u32;
    fn native_flow_shared_slot(queue: u32, ifindex: u32, hash: u32, shift: u32) -> u32;
    fn native_sock_flow_entry(hash: u32, location: u16, cpu_mask: u32) -> u32;
    fn native_sock_flow_peer(cpu_mask: u32) -> u32;
    fn native_sock_flow_is_connected(entry: u32, cpu_mask: u32) -> bool;
    fn native_sock_flow_location(entry: u32, hash: u32, cpu_mask: u32) -> u16;
    fn native_poll_stamp(cpu: u16, nr_polls: u64) -> u64;
    fn native_backlog_asleep(facts: *mut rx_facts, backlogs: *mut backlog, cpu: u32) -> bool;
    fn native_backlog_settle(
        facts: *mut rx_facts,
        backlogs: *mut backlog,
        cpu: u32,
        flushed: u64,
    ) -> bool;
    fn native_wait_begin(w: *mut backlog_wait, b: *const backlog, now: u64);
    fn native_wait_is_pending(w: *const backlog_wait) -> bool;
    fn native_wait_end(w: *mut backlog_wait, b: *const backlog, now: u64);
    fn native_wait_bucket(ns: u64) -> u32;
    fn native_backlog_dequeue(b: *mut backlog, n: u32, gro_empty: u32, jiffies: u64);
    fn native_poll_stamp_cpu(stamp: u64) -> u16;
}

/// The flow key of a packet of `len` bytes that begins with `linear`, or why it has none. `options`
/// are bits of `enum flow_option`.
///
/// # Panics
/// When `len` is less than the length of `linear`.
pub fn flow_parse(linear: &[u8], len: u32, options: u32) -> Result<flow_key, flow_result> {
    assert!(linear.len() <= len as usize);
    let mut key = flow_key::default();
    // SAFETY: the parser reads within `linear`, which is no longer than `len`, and writes the key.
    let result =
        unsafe { native_flow_parse(linear.as_ptr(), linear.len() as u32, len, options, &mut key) };
    match result {
        flow_result::FLOW_KEYED => Ok(key),
        other => Err(other),
    }
}

/// The flow key of the socket that receives from `peer` on `local_port`; `proto` is an `IPPROTO_*`
/// with ports.
pub fn flow_key_ports(peer: SocketAddr, local_port: u16, proto: u32) -> flow_key {
    let mut key = flow_key::default();
    let (source, dest) = (peer.port().to_be(), local_port.to_be());
    let saddr = address_words(peer.ip());
    // SAFETY: the callee only reads four words and writes the key.
    unsafe { native_flow_key_ports(&mut key, &saddr, source, dest, proto) };
    key
}

/// The flow key of the packets of a connection, in both directions, under `--hash symmetric`; `proto`
/// is an `IPPROTO_*` with ports.
pub fn flow_key_connection(one: SocketAddr, other: SocketAddr, proto: u32) -> flow_key {
    let mut key = flow_key::default();
    let (source, dest) = (one.port().to_be(), other.port().to_be());
    let [saddr, daddr] = [one, other].map(|end| address_words(end.ip()));
    // SAFETY: the callee only reads eight words and writes the key.
    unsafe { native_flow_key_connection(&mut key, &saddr, &daddr, source, dest, proto) };
    key
}

/// Whether the flow always stays INLINE by one of these ports.
pub fn flow_has_port(key: &flow_key, ports: &InlinePorts) -> bool {
    // SAFETY: plain computation on its arguments.
    unsafe { native_flow_has_port(key, ports) }
}

/// The tunnel, a `FLOW_TUNNEL_*`, that the protocol, and for UDP the destination port, stand for;
/// or 0 (flow_key.h).
pub fn flow_tunnel_of(proto: u8, dest: u16) -> u32 {
    // SAFETY: no memory is involved.
    unsafe { native_flow_tunnel_of(proto, dest) }
}

/// The hash of a key under a secret: `docs/hash.md`.
pub fn flow_hash(key: &flow_key, secret: &flow_secret) -> u32 {
    // SAFETY: the callee only reads key and secret.
    unsafe { native_flow_hash(key, secret) }
}

/// The hash by which packets with this key are steered: in a tunnel another one than [`flow_hash`], by
/// which their socket knows them (flow_key.h).
pub fn flow_own_hash(key: &flow_key, secret: &flow_secret) -> u32 {
    let mut own = 0;
    // SAFETY: reads key and secret, writes own, keeps no pointer.
    unsafe { native_flow_hashes(key, secret, &mut own) };
    own
}

/// The decision on a packet of the flow with this hash that `q` receives on `cpu` (steer.h,
/// `rx_steer`). `flow` is the flow's slot.
///
/// # Panics
/// When there are fewer `backlogs` than CPUs, or more CPUs than the facts have bits.
pub fn rx_steer(
    facts: &mut rx_facts,
    q: &mut rx_queue,
    backlogs: &mut [backlog],
    map: &rps_map,
    flow: &mut rps_dev_flow,
    hash: u32,
    cpu: u32,
) -> rx_verdict {
    check(facts, backlogs);
    // SAFETY: the callee keeps no pointer, and its only indices are CPUs below `nr_cpus`.
    unsafe { native_rx_steer(facts, q, backlogs.as_mut_ptr(), map, flow, hash, cpu) }
}

fn check(facts: &rx_facts, backlogs: &[backlog]) {
    assert!(facts.nr_cpus <= u64::BITS && facts.nr_cpus as usize <= backlogs.len());
}

/// A CPU as a location of flows that `cpu` polls (policy.h, `rx_usable`). Of the facts, only
/// `nr_cpus` is read.
///
/// # Panics
/// When there are fewer `backlogs` than CPUs.
pub fn rx_usable(facts: &mut rx_facts, backlogs: &[backlog], location: u16, cpu: u32) -> u16 {
    assert!(facts.nr_cpus as usize <= backlogs.len());
    // SAFETY: the callee only reads the backlogs, of CPUs below `nr_cpus`.
    unsafe { native_rx_usable(facts, backlogs.as_ptr().cast_mut(), location, cpu) }
}

/// The location by the tables of the flow with this hash, polled by `cpu`, and whether it is the
/// location of the flow's application (policy.h, `rx_base`). Of the facts, only `nr_cpus`,
/// `cpu_mask` and `sock_flow` are read.
///
/// # Panics
/// When there are fewer `backlogs` than CPUs.
pub fn rx_base(
    facts: &mut rx_facts,
    q: &rx_queue,
    backlogs: &[backlog],
    map: &rps_map,
    hash: u32,
    cpu: u32,
) -> (u16, bool) {
    assert!(facts.nr_cpus as usize <= backlogs.len());
    let (mut q, mut followed) = (*q, false);
    let backlogs = backlogs.as_ptr().cast_mut();
    // SAFETY: the callee only reads the backlogs, of CPUs below `nr_cpus`, and keeps no pointer.
    let base = unsafe { native_rx_base(facts, &mut q, backlogs, map, hash, cpu, &mut followed) };
    (base, followed)
}

/// The flow's wanted location at a packet that `cpu` polls, if no new window has begun (policy.h,
/// `rx_wanted`).
///
/// # Panics
/// As [`rx_steer`].
pub fn rx_wanted(
    facts: &mut rx_facts,
    q: &mut rx_queue,
    backlogs: &mut [backlog],
    map: &rps_map,
    flow: &mut rps_dev_flow,
    cpu: u32,
) -> u16 {
    check(facts, backlogs);
    // SAFETY: the callee keeps no pointer, and its only indices are CPUs below `nr_cpus`.
    unsafe { native_rx_wanted(facts, q, backlogs.as_mut_ptr(), map, flow, cpu) }
}

/// Counts a poll of the queue that lasted from `start` to `now`, in ns, an application's if `busy`.
/// Returns whether the window is over (load.h).
pub fn load_polled(
    q: &mut rx_queue,
    start: u64,
    now: u64,
    over_idle: bool,
    exhausted: bool,
    busy: bool,
) -> bool {
    let [over_idle, exhausted, busy] = [over_idle, exhausted, busy].map(u32::from);
    // SAFETY: the callee only writes the queue.
    unsafe { native_load_polled(q, start, now, over_idle, exhausted, busy) }
}

/// Measures the cost of a frame at the end of the queue's window (load.h).
pub fn load_measure(q: &mut rx_queue) {
    // SAFETY: the callee only writes the queue.
    unsafe { native_load_measure(q) }
}

/// Ends the window of the queue at `now`, in ns, and that of the trial if it is over; shares as for
/// [`load_busy`] (load.h). UDP sockets have refused `nr_refused` of the queue's packets so far.
///
/// # Panics
/// When a share is more than 1024.
pub fn load_window(
    q: &mut rx_queue,
    trial: &mut rx_trial,
    nr_refused: u64,
    now: u64,
    tasks: u32,
    irq: u32,
) {
    assert!(tasks.max(irq) <= load_unit::LOAD_WHOLE.0);
    // SAFETY: the callee only writes the queue and the trial.
    unsafe { native_load_window(q, trial, nr_refused, now, tasks, irq) }
}

/// A part as a share, of 1024 (load.h).
pub fn load_share(part: u64, whole: u64) -> u32 {
    // SAFETY: no memory is involved.
    unsafe { native_load_share(part, whole) }
}

/// Share of a CPU's time, of 1024, in which it is not idle: `irq` is the share of interrupts,
/// `tasks` that of tasks in the remaining time (load.h).
///
/// # Panics
/// When a share is more than 1024.
pub fn load_busy(tasks: u32, irq: u32) -> u32 {
    assert!(tasks.max(irq) <= load_unit::LOAD_WHOLE.0);
    // SAFETY: no memory is involved.
    unsafe { native_load_busy(tasks, irq) }
}

/// Share of a CPU's time, of 1024, in which it is not idle, that is a sign of saturation (load.h).
pub fn load_saturated() -> u32 {
    // SAFETY: no memory is involved.
    unsafe { native_load_saturated() }
}

/// Share of a CPU's time, of 1024, that is a sign of saturation if polls take it (load.h).
pub fn load_saturated_by() -> u32 {
    // SAFETY: no memory is involved.
    unsafe { native_load_saturated_by() }
}

/// The RPS location of a flow (tables.h).
pub fn rps_location_of(map: &rps_map, hash: u32) -> u16 {
    // SAFETY: the callee only reads the map.
    unsafe { native_rps_location_of(map, hash) }
}

/// A flow's slot among those of all queues, 2^(32 - `shift`) for each queue (tables.h).
///
/// # Panics
/// When a queue's slots are more than 2^31, or fewer than one.
pub fn flow_slot(queue: u32, hash: u32, shift: u32) -> u32 {
    assert!((1..=32).contains(&shift));
    // SAFETY: no memory is involved.
    unsafe { native_flow_slot(queue, hash, shift) }
}

/// As [`flow_slot`], in the table that the queues of several devices share, of which `queue` is the
/// first (tables.h).
///
/// # Panics
/// As [`flow_slot`].
pub fn flow_shared_slot(queue: u32, ifindex: u32, hash: u32, shift: u32) -> u32 {
    assert!((1..=32).contains(&shift));
    // SAFETY: no memory is involved.
    unsafe { native_flow_shared_slot(queue, ifindex, hash, shift) }
}

/// The `sock_flow_table`'s entry of a flow with its application on a CPU. `RPS_INLINE`: the
/// application polls; `RPS_NO_CPU`: the application has closed its socket (tables.h).
pub fn sock_flow_entry(hash: u32, location: u16, cpu_mask: u32) -> u32 {
    // SAFETY: no memory is involved.
    unsafe { native_sock_flow_entry(hash, location, cpu_mask) }
}

/// The bit of an entry for the flow of a datagram to an unconnected socket.
pub fn sock_flow_peer(cpu_mask: u32) -> u32 {
    // SAFETY: no memory is involved.
    unsafe { native_sock_flow_peer(cpu_mask) }
}

/// Whether the entry is that of a connected socket in use.
pub fn sock_flow_is_connected(entry: u32, cpu_mask: u32) -> bool {
    // SAFETY: no memory is involved.
    unsafe { native_sock_flow_is_connected(entry, cpu_mask) }
}

/// The location that an entry names for a flow, or `RPS_NO_CPU` (tables.h).
pub fn sock_flow_location(entry: u32, hash: u32, cpu_mask: u32) -> u16 {
    // SAFETY: no memory is involved.
    unsafe { native_sock_flow_location(entry, hash, cpu_mask) }
}

/// The stamp of the poll that runs on `cpu` after `nr_polls` polls have ended there (tables.h).
pub fn poll_stamp(cpu: u16, nr_polls: u64) -> u64 {
    // SAFETY: no memory is involved.
    unsafe { native_poll_stamp(cpu, nr_polls) }
}

/// Whether all frames that entered the backlog for `cpu` have been delivered, by proof "asleep"
/// (backlog.h).
///
/// # Panics
/// As [`rx_steer`]; and when there is no such CPU.
pub fn backlog_asleep(facts: &mut rx_facts, backlogs: &mut [backlog], cpu: u32) -> bool {
    check(facts, backlogs);
    assert!(cpu < facts.nr_cpus);
    // SAFETY: the callee keeps no pointer, and the CPU is one of the backlogs'.
    unsafe { native_backlog_asleep(facts, backlogs.as_mut_ptr(), cpu) }
}

/// Whether the first `flushed` frames of a CPU's backlog have been delivered or have vanished, which
/// counts the latter (backlog.h). The polls in which these frames entered must have ended.
///
/// # Panics
/// As [`backlog_asleep`].
pub fn backlog_settle(
    facts: &mut rx_facts,
    backlogs: &mut [backlog],
    cpu: u32,
    flushed: u64,
) -> bool {
    check(facts, backlogs);
    assert!(cpu < facts.nr_cpus);
    // SAFETY: the callee keeps no pointer, and the CPU is one of the backlogs'.
    unsafe { native_backlog_settle(facts, backlogs.as_mut_ptr(), cpu, flushed) }
}

/// Counts `n` frames dequeued by a backlog's kthread (backlog.h).
pub fn backlog_dequeue(b: &mut backlog, n: u32, gro_empty: bool, jiffies: u64) {
    // SAFETY: the callee only writes the backlog.
    unsafe { native_backlog_dequeue(b, n, gro_empty.into(), jiffies) }
}

/// Begins a sample at `now`, in ns, with the frame that enters the backlog next, if one is due and
/// none is pending (wait.h).
pub fn wait_begin(w: &mut backlog_wait, b: &backlog, now: u64) {
    // SAFETY: the callee only writes the sample.
    unsafe { native_wait_begin(w, b, now) }
}

/// Whether a sample is pending (wait.h).
pub fn wait_is_pending(w: &backlog_wait) -> bool {
    // SAFETY: the callee only reads.
    unsafe { native_wait_is_pending(w) }
}

/// Ends a pending sample at `now`, in ns, if its frame has been dequeued (wait.h). Before these frames
/// were counted by [`backlog_dequeue`], [`wait_is_pending`] must have been true.
pub fn wait_end(w: &mut backlog_wait, b: &backlog, now: u64) {
    // SAFETY: the callee only writes the sample.
    unsafe { native_wait_end(w, b, now) }
}

/// The bucket of a time in ns (wait.h).
pub fn wait_bucket(ns: u64) -> u32 {
    // SAFETY: no memory is involved.
    unsafe { native_wait_bucket(ns) }
}

/// The CPU that ran the poll with this stamp, which must not be zero (tables.h).
pub fn poll_stamp_cpu(stamp: u64) -> u16 {
    // SAFETY: no memory is involved.
    unsafe { native_poll_stamp_cpu(stamp) }
}

/// An address as the four words of a key, which are in network order in memory: an IPv4 address as
/// its v4-mapped one.
pub fn address_words(address: IpAddr) -> [u32; 4] {
    let octets = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(octets.chunks_exact(4)) {
        *word = u32::from_ne_bytes(bytes.try_into().expect("chunks of four"));
    }
    words
}
