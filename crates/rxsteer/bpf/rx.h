/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * rx.h: what the programs that steer have in common, wherever they are attached: the inputs of
 * steer.h and policy.h.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "core/flow.h"
#include "core/steer.h"
#include "cpu.h"
#include "cpumap.h"
#include "maps.h"
#include "napi.h"
#include "socket.h"

static __always_inline bool steer_unguarded(void)
{
	return config.unguarded;
}

static __always_inline struct backlog *rx_backlog(const struct rx *rx, __u32 cpu)
{
	return backlog_of(rx->queue, cpu);
}

static __always_inline __u64 rx_poll_stamp(const struct rx *rx)
{
	struct poll_cpu *poll = rx_shares_flows() ? rx->poll_cpu : poll_of(rx->cpu);

	if (!poll)
		return 0;
	poll->queue = rx->queue + 1;
	return poll_stamp(rx->cpu, poll->nr_polls);
}

static __always_inline __u32 rx_rps_location(const struct rx *rx, __u32 hash)
{
	__u32 queue = rx->queue;
	struct rps_map *map = bpf_map_lookup_elem(&rps_maps, &queue);

	return map ? rps_location_of(map, hash) : RPS_NO_CPU;
}

static __always_inline __u32 rx_cpu_mask(void)
{
	return config.sock_flow_cpu_mask;
}

static __always_inline __u32 rx_sock_flow(const struct rx *rx)
{
	__u32 *entry = sock_flow_entry_of(rx->sock_hash);

	return entry ? *(volatile __u32 *)entry : 0;
}

static __always_inline __u32 rx_jiffies(void)
{
	return bpf_jiffies64();
}

/* The flow's slot in the table of its queue, or of all queues. */
static __always_inline __u32 rx_slot(const struct rx *rx)
{
	__u32 shift = config.flow_shift;

	if (rx_shares_flows())
		return flow_shared_slot(config.queue_base, rx->ifindex, rx->hash, shift);
	return flow_slot(rx->queue, rx->hash, shift);
}

/* The most CPUs of softirq mode: what polls_ended() looks at. */
#define RX_SHARED_CPUS 256

/* Requests the backlog from user space, once. */
static __noinline int backlog_request(__u32 queue, __u32 cpu)
{
	struct backlog_request request = {.queue = queue, .cpu = cpu};
	struct backlog *b = backlog_of(queue, cpu);

	if (!b || b->wanted)
		return 0;
	b->wanted = !bpf_ringbuf_output(&backlog_requests, &request, sizeof(request), 0);
	return 0;
}

/* ---- the kernel's own hop --------------------------------------------------- */

static __always_inline struct softnet_way *rx_way(__u32 queue, __u32 location)
{
	__u32 to = location == RPS_INLINE ? config.nr_cpus : location;
	__u32 index = (queue - config.queue_base) * (config.nr_cpus + 1) + to;

	return to <= config.nr_cpus ? bpf_map_lookup_elem(&softnet_ways, &index) : NULL;
}

/* A counter of the softnet backlog at the end of a way. Since Linux 6.2 without a call. */
#define softnet_counter(way, counter)                                                              \
	({                                                                                         \
		const struct softnet_data *softnet = (void *)(way)->softnet;                       \
		__u32 value;                                                                       \
                                                                                                   \
		if (bpf_ksym_exists(bpf_rdonly_cast)) {                                            \
			softnet = bpf_rdonly_cast(softnet, bpf_core_type_id_kernel(*softnet));     \
			value = *(volatile __u32 *)&softnet->counter;                              \
		} else {                                                                           \
			value = BPF_CORE_READ(softnet, counter);                                   \
		}                                                                                  \
		value;                                                                             \
	})

static __always_inline __u32 rx_softnet_tail(const struct softnet_way *w)
{
	return softnet_counter(w, input_queue_tail);
}

/* The head of an unknown softnet backlog never comes near: flows stay. */
static __always_inline __u32 rx_softnet_head(const struct softnet_way *w)
{
	return w->softnet ? softnet_counter(w, input_queue_head) : 1U << 31;
}

/* It has if a later one is under way, or none. */
static __always_inline bool rx_poll_ended_elsewhere(__u32 queue, __u64 poll)
{
	struct rx_queue *q = queue_of(queue);

	return q && (backlog_read(q->nr_polls) > poll || poll_ended(backlog_read(q->poll)));
}

/* A global function, as policy_decide(). Of a slot of softirq mode. */
__noinline int flow_entered_elsewhere(__u32 slot)
{
	struct rps_dev_flow *flow = flow_of(slot);
	struct softnet_way *w;
	struct poll_cpu *poll;

	if (!flow)
		return false;
	w = rx_way(flow->queue, flow->location);
	if (!w)
		return false;
	if (flow->location == RPS_INLINE) {
		__u32 tail;

		if (!rx_poll_ended_elsewhere(flow->queue, softnet_poll(flow->last_qtail)))
			return false;
		tail = rx_softnet_tail(w);
		return softnet_passed(w, flow->last_qtail, tail, rx_softnet_head(w));
	}
	poll = poll_of(flow->queue - config.queue_base);
	if (poll && !backlog_read(poll->since))
		return true;
	return softnet_entered(w, flow->last_qtail);
}

/* A global function, as polls_ended(). */
__noinline int inline_passed(void)
{
	for (int i = 0; i < RX_SHARED_CPUS; i++) {
		struct softnet_way *w;

		asm volatile("" : "+r"(i));
		w = rx_way(config.queue_base + i, RPS_INLINE);
		if (!w)
			break;
		if (w->nr && !rx_way_passed(w))
			return false;
	}
	return true;
}

static __always_inline bool rx_inline_passed(void)
{
	return inline_passed();
}

static __always_inline bool rx_entered_elsewhere(const struct rx *rx,
						 const struct rps_dev_flow *flow)
{
	return flow_entered_elsewhere(rx->slot);
}

static __always_inline struct rx_mixings *mixings_of_all(void)
{
	__u32 only = 0;

	return bpf_map_lookup_elem(&mixings, &only);
}

/* Called for each packet of softirq mode, before its slot is locked, which orders this. What GRO
 * passes up after the end of a poll, whose budget was used up, counts as the CPU's next poll. */
static __always_inline void poll_note_mixing(struct poll_cpu *poll)
{
	struct rx_mixings *all;

	if (likely(poll->since))
		return;
	all = mixings_of_all();
	poll->since = all ? backlog_read(all->nr) + 1 : 1;
}

static __always_inline __u64 *rx_mixed_at(const struct rx *rx)
{
	struct flow_name *name = name_of(rx->slot);

	return name ? &name->mixed_at : NULL;
}

static __always_inline __u64 rx_mixing(void)
{
	struct rx_mixings *all = mixings_of_all();

	return all ? __sync_fetch_and_add(&all->nr, 1) + 1 : 1;
}

/* A global function: the verifier follows the loop once. A CPU may poll nothing any more since its
 * last packet; user space settles its poll. */
__noinline int polls_ended(__u64 mixing)
{
	struct rx_mixings *all = mixings_of_all();

	if (all && mixing <= backlog_read(all->settled))
		return true;
	for (int i = 0; i < RX_SHARED_CPUS; i++) {
		struct poll_cpu *poll = poll_of(i);
		__u64 since;

		/* The counter stays in a register: the verifier does not follow it in the key. */
		asm volatile("" : "+r"(i));
		if (!poll)
			break;
		since = backlog_read(poll->since);
		if (since && since <= mixing)
			return false;
	}
	return true;
}

static __always_inline bool rx_polls_ended(const struct rx *rx, __u64 mixing)
{
	return polls_ended(mixing);
}

static __always_inline void rx_flow_new(const struct rx *rx)
{
	struct flow_name *name = name_of(rx->slot);

	if (!name || !rx->key)
		return;
	name->key = *rx->key;
	name->ifindex = rx->ifindex;
}

static __always_inline __u32 flow_limit_of(void)
{
	return config.flow_limit;
}

static __always_inline bool rx_consumer_waits(const struct rx *rx, __u32 cpu)
{
	return sock_consumer_waits(rx->sock_hash) || cpu_is_idle(cpu);
}

/* A global function, as policy_decide(). */
__noinline int wait_measure(__u32 queue, __u32 cpu)
{
	__u32 index = queue * config.nr_cpus + cpu;
	struct backlog_wait *w = bpf_map_lookup_elem(&backlog_waits, &index);
	struct backlog *b = backlog_of(queue, cpu);

	if (w && b && !wait_is_pending(w))
		wait_begin(w, b, bpf_ktime_get_ns());
	return 0;
}

static __always_inline void rx_measure_wait(const struct rx *rx, __u32 cpu)
{
	wait_measure(rx->queue, cpu);
}

/* As policy_decide(), which calls it from each of its ways to a CPU. */
__noinline int policy_read_load(__u32 queue, __u32 cpu)
{
	struct backlog *b = backlog_of(queue, cpu);

	if (!b)
		return 0;
	b->busy = cpu_busy(cpu);
	b->demand = cpu_demand(cpu, b);
	return 0;
}

static __always_inline void rx_read_load_apart(const struct rx *rx, __u32 cpu)
{
	policy_read_load(rx->queue, cpu);
}

/* A global function: the verifier checks it once, not once per way of a packet to it. */
__noinline int policy_decide(__u32 queue, __u32 hash, __u32 slot, __u32 cpu, bool followed)
{
	struct rx rx = {.queue = queue, .hash = hash, .cpu = cpu, .followed = followed};
	struct rps_dev_flow *flow = flow_of(slot);
	struct flow_name *name = name_of(slot);

	rx.sock_hash = hash;
	if (config.flow_options & FLOW_TUNNEL_ANY && name)
		rx.sock_hash = flow_hash(&name->key, &config.flow_secret);

	rx.q = queue_of(queue);
	if (flow && rx.q)
		rx_decide(&rx, flow);
	return 0;
}

static __always_inline void rx_decide_apart(const struct rx *rx, struct rps_dev_flow *flow)
{
	policy_decide(rx->queue, rx->hash, rx->slot, rx->cpu, rx->followed);
}

/* ---- a packet with a hash -------------------------------------------------- */

/* The packet's flow, or NULL if the packet is processed where it is. */
static __always_inline struct rps_dev_flow *rx_flow(struct rx *rx)
{
	struct rps_dev_flow *flow;

	rx->slot = rx_slot(rx);
	flow = flow_of(rx->slot);
	if (!flow)
		rx->q->nr_inline++;
	return flow;
}

/* Counts a packet without a flow. */
static __always_inline void rx_count_no_flow(const struct rx *rx, enum flow_result result)
{
	/* clang 21 knows from the global function that returned this that it is in range, and
	 * leaves out the check. The verifier knows each function alone, and needs it. */
	asm volatile("" : "+r"(result));
	rx->q->nr_no_flow[result < NR_FLOW_RESULTS ? result : FLOW_UNKNOWN]++;
}

/* Sets the packet's hash; false if its flow always stays INLINE. */
static __always_inline bool rx_keyed(struct rx *rx, const struct flow_key *key)
{
	/* A redirect loses the hardware's time stamp, among others. */
	if (!rx_shares_flows() && flow_has_port(key, config.inline_ports)) {
		rx->q->nr_inline++;
		rx->q->nr_inline_ports++;
		return false;
	}
	rx->key = key;
	rx->sock_hash = flow_hashes(key, &config.flow_secret, config.flow_options & FLOW_TUNNEL_ANY,
				    &rx->hash);
	return true;
}

/* Counts a packet that is not this program's to steer. */
static __noinline int rx_foreign(void)
{
	__u32 device = config.queue_base;
	__u64 *nr_frames = bpf_map_lookup_elem(&foreign_frames, &device);

	if (nr_frames)
		__sync_fetch_and_add(nr_frames, 1);
	return 0;
}

/* Sets the packet's queue; false if that does not exist. */
static __always_inline bool rx_in(struct rx *rx, __u32 ifindex, __u32 queue)
{
	rx->cpu = bpf_get_smp_processor_id();
	rx->queue = config.queue_base + queue;
	rx->ifindex = ifindex;
	rx->q = queue_of(rx->queue);
	if (!rx->q)
		return false;
	rx->epoch = *(volatile __u16 *)&rx->q->epoch;
	return true;
}

/*
 * Whether the time that began with a packet should have ended long ago, in ticks. On a device
 * without NAPI packets come in the calls of their senders, and no poll ends once all of them go to
 * another CPU.
 */
static __always_inline bool poll_is_overdue(const struct poll_cpu *poll)
{
	return poll->start && bpf_jiffies64() - poll->jiffies >= 2;
}

/* Ends it, for the queue's windows: polls had none of that time. A global function, as
 * policy_decide(). */
__noinline int poll_end_overdue(__u32 queue, __u32 cpu)
{
	struct poll_cpu *poll = poll_of(cpu);
	struct rx_queue *q = queue_of(queue);

	if (!poll || !q)
		return 0;
	poll->start = bpf_ktime_get_ns();
	queue_polled(q, poll, cpu, false, false);
	poll->start = 0;
	return 0;
}

/* Counts the packet, of this length in bytes; false if its device or queue is not this program's.
 * Whoever drops it takes the bytes back: counted where that is known, they double what the verifier
 * follows. */
static __always_inline bool rx_begin(struct rx *rx, __u32 ifindex, __u32 queue, __u32 len)
{
	bool timed;

	/* A bond's port, or the virtual function behind a netvsc, may run the program of its upper
	 * device, but has queues and NAPI instances of its own; a device may get more queues. */
	if (unlikely(queue >= config.nr_rx_queues ||
		     (!rx_shares_flows() && ifindex != config.ifindex))) {
		rx_foreign();
		return false;
	}
	if (!rx_in(rx, ifindex, queue))
		return false;
	rx->q->nr_received++;
	rx->q->load.bytes += len;
	timed = config.flow_limit || (rx->q->policy & (RX_IDLE | RX_ADAPT));
	if (rx_shares_flows() || timed)
		rx->poll_cpu = poll_of(rx->cpu);
	if (rx_shares_flows() && rx->poll_cpu)
		poll_note_mixing(rx->poll_cpu);
	if (timed && rx->poll_cpu) {
		if (rx_shares_flows() && unlikely(poll_is_overdue(rx->poll_cpu)))
			poll_end_overdue(rx->queue, rx->cpu);
		poll_begin(rx->poll_cpu, rx->queue);
	}
	return true;
}
