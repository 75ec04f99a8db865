// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * rx.bpf.c: the data path. The XDP program decides where each packet is processed;
 * the tracepoints keep the backlogs' counts.
 *
 * User space fills every map before it attaches anything. Devices share the maps
 * and the tracepoints; each has its own copy of the XDP program, whose constants
 * say which queues are its own and what it parses.
 */
#include <linux/bpf.h>
#include <linux/errno.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "backlog.h"
#include "flow.h"
#include "napi.h"
#include "steer.h"

/* The device's queues are queue_base … queue_base + nr_rx_queues - 1 in every table. */
const volatile __u32 queue_base = 0;
const volatile __u32 nr_rx_queues = 1;

/* Tunnels to look into: bits of enum flow_tunnel. */
const volatile __u32 flow_tunnels = 0;
const volatile struct flow_secret flow_secret = {};

/* Decide and count, but process every packet as without rxsteer. */
const volatile bool dry_run = false;

/*
 * The rule of order switched off, everything else as it is: the control of every test that
 * counts overtaken packets. No command sets it for a device that is not the lab's.
 */
const volatile bool unguarded = false;

/* Only for the skeleton: enums that no map mentions. */
const enum flow_tunnel flow_tunnel_type = 0;
const enum rps_location rps_location_type = 0;
const enum flow_result flow_result_type = 0;

/* Indexed by queue. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct rps_map);
} rps_maps SEC(".maps");

/* Every queue's dev_flow_table, one behind the other: rx_queue.flow_base, flow_shift. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct rps_dev_flow);
} dev_flow_tables SEC(".maps");

/* What a packet needs to be steered: its queue, its flow's hash, and who polls. */
struct rx {
	struct rx_queue *q;
	__u32 queue;
	__u32 hash;
	__u32 cpu;   /* polling */
	__u64 stamp; /* of the poll in progress; 0 until rx_stamp() */
};

/* Marks the poll in progress on this CPU as the queue's, and names it. */
static __always_inline __u64 rx_stamp(struct rx *rx)
{
	struct poll_cpu *poll;

	if (rx->stamp)
		return rx->stamp;
	poll = bpf_map_lookup_elem(&poll_cpus, &rx->cpu);
	if (poll) {
		poll->queue = rx->queue + 1;
		rx->stamp = poll_stamp(rx->cpu, poll->nr_polls);
	}
	return rx->stamp;
}

/*
 * Whether all that the queue passed up before the epoch's first frame has been
 * delivered: until then, flows without a location stay INLINE, where they were.
 */
static __always_inline bool rx_settled(struct rx *rx)
{
	struct rx_queue *q = rx->q;

	if (likely(q->settled))
		return true;
	if (!q->first_poll)
		q->first_poll = rx_stamp(rx);
	q->settled = inline_delivered(q->first_poll, rx_stamp(rx), napi_gro_empty(q));
	return q->settled;
}

static __always_inline bool rx_delivered(struct rx *rx, const struct rps_dev_flow *flow,
					 __u16 location)
{
	struct backlog *b;

	if (unguarded)
		return true;
	if (location == RPS_INLINE)
		return inline_delivered(flow->last_qtail, rx_stamp(rx), napi_gro_empty(rx->q));
	b = backlog_of(rx->queue, location);
	return b && backlog_delivered(backlog_head(b, flow->last_qtail), flow->last_qtail);
}

static __always_inline void rx_locate(const struct rx *rx, struct rps_dev_flow *flow,
				      __u16 location, __u64 last_qtail)
{
	if (unlikely(flow->location != location))
		rx->q->nr_moves += flow->epoch == rx->q->epoch;
	flow_set(flow, rx->q->epoch, location, last_qtail);
}

static __always_inline int rx_inline(struct rx *rx, struct rps_dev_flow *flow)
{
	rx->q->nr_inline++;
	rx_locate(rx, flow, RPS_INLINE, rx_stamp(rx));
	return XDP_PASS;
}

/*
 * Into the backlog for `cpu`. While it has none, INLINE: no entry is ever removed
 * under the program, so a flow without one is on its way here and may be anywhere.
 */
static __always_inline int rx_redirect(struct rx *rx, struct rps_dev_flow *flow, __u32 cpu)
{
	struct backlog *b = backlog_of(rx->queue, cpu);
	void *cpumap = bpf_map_lookup_elem(&cpumaps, &rx->queue);

	if (!b || !cpumap)
		return rx_inline(rx, flow);
	if (backlog_full(b)) {
		b->nr_dropped++;
		return XDP_DROP;
	}
	if (bpf_redirect_map(cpumap, cpu, XDP_PASS) != XDP_REDIRECT) {
		backlog_request(rx->queue, cpu);
		return rx_inline(rx, flow);
	}
	b->tail++;
	rx_locate(rx, flow, cpu, b->tail);
	return XDP_REDIRECT;
}

static __always_inline int rx_dry_run(const struct rx *rx, __u16 wanted)
{
	struct backlog *b = backlog_of(rx->queue, wanted);

	rx->q->nr_inline++;
	if (b)
		b->nr_decided++;
	return XDP_PASS;
}

static __always_inline int rx_steer(struct rx *rx)
{
	struct rps_dev_flow *flow;
	struct rps_map *map;
	__u32 slot = rx->q->flow_base + flow_slot(rx->hash, rx->q->flow_shift);
	__u16 wanted, location;
	bool shed;

	map = bpf_map_lookup_elem(&rps_maps, &rx->queue);
	flow = bpf_map_lookup_elem(&dev_flow_tables, &slot);
	if (!map || !flow) {
		rx->q->nr_inline++;
		return XDP_PASS;
	}

	wanted = rps_wanted(map, rx->hash, rx->cpu);
	if (dry_run)
		return rx_dry_run(rx, wanted);
	shed = wanted == RPS_INLINE_SHED;
	if (shed)
		wanted = RPS_INLINE;

	location = flow_location(flow, rx->q->epoch);
	if (unlikely(location == RPS_NO_CPU)) {
		location = rx_settled(rx) ? wanted : RPS_INLINE;
	} else if (unlikely(location != wanted)) {
		if (rx_delivered(rx, flow, location))
			location = wanted;
		else
			rx->q->nr_held++;
	}
	if (location == RPS_INLINE)
		return rx_inline(rx, flow);
	if (unlikely(shed)) {
		struct backlog *b = backlog_of(rx->queue, location);

		if (b)
			b->nr_shed++;
		return XDP_DROP;
	}
	return rx_redirect(rx, flow, location);
}

/* Steers by the flow that the packet's headers name. */
static __always_inline int rx_parse(struct rx *rx, struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	enum flow_result result = FLOW_KEYED;
	struct flow_key key;

	/* flow_parse(), but the frame's length costs a call: only off the short road. */
	if (!flow_plain(data, data_end, flow_tunnels, &key))
		result = flow_follow(data, data_end, bpf_xdp_get_buff_len(ctx), flow_tunnels, &key);
	if (unlikely(result != FLOW_KEYED)) {
		rx->q->nr_no_flow[result < NR_FLOW_RESULTS ? result : FLOW_UNKNOWN]++;
		return XDP_PASS;
	}
	rx->hash = flow_hash(&key, &flow_secret);
	return rx_steer(rx);
}

/* Counts the packet in; false if its queue is not ours. */
static __always_inline bool rx_begin(struct rx *rx, const struct xdp_md *ctx)
{
	rx->queue = queue_base + ctx->rx_queue_index;
	rx->cpu = bpf_get_smp_processor_id();
	if (unlikely(ctx->rx_queue_index >= nr_rx_queues))
		return false;
	rx->q = bpf_map_lookup_elem(&rx_queues, &rx->queue);
	if (!rx->q)
		return false;
	rx->q->nr_received++;
	return true;
}

/* User space adds BPF_F_XDP_HAS_FRAGS for native mode. */
SEC("?xdp")
int rxsteer(struct xdp_md *ctx)
{
	struct rx rx = {};

	return rx_begin(&rx, ctx) ? rx_parse(&rx, ctx) : XDP_PASS;
}

/*
 * The same, with the hash that the device computed where it has one. A program that
 * asks for it is bound to its device, and only kernels since 6.3 load it.
 *
 * A device with several queues has used the hash's low bits to choose the queue, so
 * it is mixed again, with the secret: equal bits would leave slots unused.
 */
SEC("?xdp")
int rxsteer_rx_hash(struct xdp_md *ctx)
{
	enum xdp_rss_hash_type type = 0;
	struct flow_key key = {};
	struct rx rx = {};

	if (!rx_begin(&rx, ctx))
		return XDP_PASS;
	if (bpf_xdp_metadata_rx_hash(ctx, &key.ports, &type) || !(type & XDP_RSS_L4))
		return rx_parse(&rx, ctx);
	rx.q->nr_rx_hash++;
	rx.hash = flow_hash(&key, &flow_secret);
	return rx_steer(&rx);
}

/* ---- tracepoints --------------------------------------------------------- */

SEC("tp_btf/xdp_cpumap_kthread")
int BPF_PROG(on_cpumap_kthread, int map_id, unsigned int processed, unsigned int drops)
{
	struct backlog *b = backlog_current(map_id);

	if (b)
		backlog_take(b, processed, drops);
	return 0;
}

SEC("tp_btf/xdp_cpumap_enqueue")
int BPF_PROG(on_cpumap_enqueue, int map_id, unsigned int processed, unsigned int drops, int to_cpu)
{
	if (unlikely(drops))
		backlog_lose(map_id, to_cpu, drops);
	return 0;
}

/* A full ring is on_cpumap_enqueue()'s: in generic mode the kernel reports it here too. */
static __always_inline void redirect_failed(int err, __u32 map_id, __u32 index)
{
	if (err != -ENOSPC)
		backlog_lose(map_id, index, 1);
}

SEC("tp_btf/xdp_redirect_err")
int BPF_PROG(on_redirect_err, void *dev, void *prog, void *target, int err, int map_type,
	     __u32 map_id, __u32 index)
{
	redirect_failed(err, map_id, index);
	return 0;
}

/* Kernels that still have it report failed map redirects here. */
SEC("?tp_btf/xdp_redirect_map_err")
int BPF_PROG(on_redirect_map_err, void *dev, void *prog, void *target, int err, int map_type,
	     __u32 map_id, __u32 index)
{
	redirect_failed(err, map_id, index);
	return 0;
}

SEC("tp_btf/napi_poll")
int BPF_PROG(on_napi_poll, struct napi_struct *napi)
{
	napi_polled(napi);
	return 0;
}

/* ---- asked by user space ------------------------------------------------- */

/* Whether all that entered the backlog with this index has been delivered. */
SEC("syscall")
int backlog_drained(__u32 *index)
{
	__u32 key = *index;
	struct backlog *b = bpf_map_lookup_elem(&backlogs, &key);

	return b && backlog_head(b, b->tail) >= b->tail;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
