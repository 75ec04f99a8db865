// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * rx.bpf.c: the XDP program, which decides where each packet is processed. Each device has its own
 * copy of the program; all copies share the maps.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "core/flow.h"
#include "core/steer.h"
#include "cpu.h"
#include "cpumap.h"
#include "maps.h"
#include "napi.h"
#include "socket.h"

/* ---- inputs of steer.h and policy.h --------------------------------------- */

static __always_inline bool steer_unguarded(void)
{
	return config.unguarded;
}

static __always_inline struct backlog *rx_backlog(const struct rx *rx, __u32 cpu)
{
	return backlog_of(rx->queue, cpu);
}

/* Requests the cpumap entry from user space, once. */
static __noinline int backlog_request(__u32 queue, __u32 cpu)
{
	struct backlog_request request = {.queue = queue, .cpu = cpu};
	struct backlog *b = backlog_of(queue, cpu);

	if (!b || b->wanted)
		return 0;
	b->wanted = !bpf_ringbuf_output(&backlog_requests, &request, sizeof(request), 0);
	return 0;
}

static __always_inline bool rx_enqueue(const struct rx *rx, __u32 cpu)
{
	void *cpumap = bpf_map_lookup_elem(&cpumaps, &rx->queue);

	if (!cpumap)
		return false;
	if (bpf_redirect_map(cpumap, cpu, XDP_PASS) == XDP_REDIRECT)
		return true;
	backlog_request(rx->queue, cpu);
	return false;
}

static __always_inline __u64 rx_poll_stamp(const struct rx *rx)
{
	struct poll_cpu *poll = bpf_map_lookup_elem(&poll_cpus, &rx->cpu);

	if (!poll)
		return 0;
	poll->queue = rx->queue + 1;
	return poll_stamp(rx->cpu, poll->nr_polls);
}

static __always_inline bool rx_gro_empty(const struct rx *rx)
{
	return config.generic || napi_gro_empty(rx->q);
}

static __always_inline __u32 rx_cpu_mask(void)
{
	return config.sock_flow_cpu_mask;
}

static __always_inline __u32 rx_sock_flow(const struct rx *rx)
{
	__u32 *entry = sock_flow_entry_of(rx->hash);

	return entry ? *(volatile __u32 *)entry : 0;
}

static __always_inline __u32 rx_jiffies(void)
{
	return bpf_jiffies64();
}

static __always_inline void rx_flow_new(const struct rx *rx)
{
	__u32 slot = flow_slot(rx->queue, rx->hash, config.flow_shift);
	struct flow_key *key = bpf_map_lookup_elem(&flow_keys, &slot);

	if (key && rx->key)
		*key = *rx->key;
}

static __always_inline __u32 flow_limit_of(void)
{
	return config.flow_limit;
}

static __always_inline bool rx_consumer_waits(const struct rx *rx, __u32 cpu)
{
	return sock_consumer_waits(rx->hash) || cpu_is_idle(cpu);
}

/* A global function: the verifier checks it once, not once per way of a packet to it. */
__noinline int policy_decide(__u32 queue, __u32 hash, __u32 cpu, bool followed)
{
	struct rx rx = {.queue = queue, .hash = hash, .cpu = cpu, .followed = followed};
	__u32 slot = flow_slot(queue, hash, config.flow_shift);
	struct rps_dev_flow *flow = bpf_map_lookup_elem(&dev_flow_tables, &slot);

	rx.q = bpf_map_lookup_elem(&rx_queues, &queue);
	rx.map = bpf_map_lookup_elem(&rps_maps, &queue);
	if (flow && rx.q && rx.map)
		rx_decide(&rx, flow);
	return 0;
}

static __always_inline void rx_decide_apart(const struct rx *rx, struct rps_dev_flow *flow)
{
	policy_decide(rx->queue, rx->hash, rx->cpu, rx->followed);
}

/* ---- the program ---------------------------------------------------------- */

static __always_inline int rx_act(enum rx_verdict verdict)
{
	switch (verdict) {
	case RX_REDIRECTED:
		return XDP_REDIRECT;
	case RX_DROP:
		return XDP_DROP;
	default:
		return XDP_PASS;
	}
}

static __always_inline int rx_dry_run(const struct rx *rx, __u16 wanted)
{
	struct backlog *b = rx_backlog(rx, wanted);

	rx->q->nr_inline++;
	if (b)
		b->nr_decided++;
	return XDP_PASS;
}

static __always_inline int rx_hashed(struct rx *rx)
{
	__u32 slot = flow_slot(rx->queue, rx->hash, config.flow_shift);
	struct rps_dev_flow *flow = bpf_map_lookup_elem(&dev_flow_tables, &slot);

	rx->map = bpf_map_lookup_elem(&rps_maps, &rx->queue);
	if (!rx->map || !flow) {
		rx->q->nr_inline++;
		return XDP_PASS;
	}
	if (config.dry_run)
		return rx_dry_run(rx, rx_base(rx));
	return rx_act(rx_steer(rx, flow));
}

/* Sets key and hash of the packet from its headers; false if the packet has no flow, or
 * one that always stays INLINE. */
static __always_inline bool rx_parse(struct rx *rx, struct xdp_md *ctx, struct flow_key *key)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	enum flow_result result = FLOW_KEYED;

	/* As flow_parse(); the frame's length costs a call: only off the fast path. */
	if (!flow_plain(data, data_end, config.flow_tunnels, key))
		result = flow_follow(data, data_end, bpf_xdp_get_buff_len(ctx), config.flow_tunnels,
				     key);
	if (unlikely(result != FLOW_KEYED)) {
		rx->q->nr_no_flow[result < NR_FLOW_RESULTS ? result : FLOW_UNKNOWN]++;
		return false;
	}
	/* A redirect loses the hardware's time stamp, among others. */
	if (flow_has_port(key, config.inline_ports)) {
		rx->q->nr_inline++;
		rx->q->nr_inline_ports++;
		return false;
	}
	rx->key = key;
	rx->hash = flow_hash(key, &config.flow_secret);
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

/* Counts the packet; false if its queue is not one of this program's device. */
static __always_inline bool rx_begin(struct rx *rx, const struct xdp_md *ctx)
{
	rx->queue = config.queue_base + ctx->rx_queue_index;
	rx->cpu = bpf_get_smp_processor_id();
	/* A bond's port, or the virtual function behind a netvsc, may run the program of its upper
	 * device, but has queues and NAPI instances of its own; a device may get more queues. */
	if (unlikely(ctx->rx_queue_index >= config.nr_rx_queues ||
		     ctx->ingress_ifindex != config.ifindex)) {
		rx_foreign();
		return false;
	}
	rx->q = bpf_map_lookup_elem(&rx_queues, &rx->queue);
	if (!rx->q)
		return false;
	rx->epoch = *(volatile __u16 *)&rx->q->epoch;
	rx->q->nr_received++;
	if (config.flow_limit || (rx->q->policy & (RX_IDLE | RX_ADAPT)))
		poll_begin(rx->cpu, rx->queue);
	return true;
}

/* User space adds BPF_F_XDP_HAS_FRAGS for native mode. */
SEC("?xdp")
int rxsteer(struct xdp_md *ctx)
{
	struct flow_key key;
	struct rx rx = {};

	if (!rx_begin(&rx, ctx) || !rx_parse(&rx, ctx, &key))
		return XDP_PASS;
	return rx_hashed(&rx);
}

/*
 * As rxsteer, with the hash that the device computed if there is one. A program that uses this hash
 * is bound to its device, and only kernels since 6.3 load it.
 *
 * A device with several queues has used low bits of the hash to select the queue. The hash is
 * therefore mixed again, with the secret: bits that are equal for all flows of a queue would leave
 * slots unused.
 */
SEC("?xdp")
int rxsteer_rx_hash(struct xdp_md *ctx)
{
	enum xdp_rss_hash_type type = 0;
	struct flow_key key = {};
	struct rx rx = {};

	if (!rx_begin(&rx, ctx))
		return XDP_PASS;
	if (bpf_xdp_metadata_rx_hash(ctx, &key.ports, &type) || !(type & XDP_RSS_L4)) {
		if (!rx_parse(&rx, ctx, &key))
			return XDP_PASS;
	} else {
		rx.q->nr_rx_hash++;
		rx.hash = flow_hash(&key, &config.flow_secret);
	}
	return rx_hashed(&rx);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
