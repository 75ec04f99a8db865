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

#include "cpu.h"
#include "cpumap.h"
#include "core/flow.h"
#include "napi.h"
#include "socket.h"
#include "core/steer.h"

/* The device's queues are queue_base … queue_base + nr_rx_queues - 1 in every table. */
const volatile __u32 queue_base = 0;
const volatile __u32 nr_rx_queues = 1;
const volatile __u32 ifindex = 0;

/* Frames a backlog may hold, at most (ring size - 16): docs/backlog.md. */
const volatile __u64 backlog_limit = 1000;

/* A flow with a larger part of its queue's frames, of 1024, is shed first; 0: none is. */
const volatile __u32 flow_limit = 0;

/* 32 - log2(rps_flow_cnt) */
const volatile __u32 flow_shift = 32;

/* Tunnels to look into: bits of enum flow_tunnel. */
const volatile __u32 flow_tunnels = 0;

/* The program runs behind GRO, on what a poll has already taken out of it, and what it passes goes
 * up before the poll ends. */
const volatile bool generic = false;

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
const enum rx_verdict rx_verdict_type = 0;
const enum rx_policy rx_policy_type = 0;
const enum rx_reason rx_reason_type = 0;
const enum rx_pressure rx_pressure_type = 0;
const enum load_unit load_unit_type = 0;
const enum load_leaving load_leaving_type = 0;

/* Indexed by queue. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct rps_map);
} rps_maps SEC(".maps");

/* Every queue's dev_flow_table, one behind the other: flow_slot(). */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct rps_dev_flow);
} dev_flow_tables SEC(".maps");

/* The keys of the flows that used a dev_flow_table's slots last. Read by user space alone. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct flow_key);
} flow_keys SEC(".maps");

/* ---- what steer.h and policy.h ask ---------------------------------------- */

static __always_inline bool steer_unguarded(void)
{
	return unguarded;
}

static __always_inline __u64 backlog_limit_of(void)
{
	return backlog_limit;
}

static __always_inline struct backlog *rx_backlog(const struct rx *rx, __u32 cpu)
{
	return backlog_of(rx->queue, cpu);
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
	return generic || napi_gro_empty(rx->q);
}

static __always_inline __u32 rx_cpu_mask(void)
{
	return sock_flow_cpu_mask;
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
	__u32 slot = flow_slot(rx->queue, rx->hash, flow_shift);
	struct flow_key *key = bpf_map_lookup_elem(&flow_keys, &slot);

	if (key && rx->key)
		*key = *rx->key;
}

static __always_inline __u32 flow_limit_of(void)
{
	return flow_limit;
}

static __always_inline bool rx_consumer_waits(const struct rx *rx, __u32 cpu)
{
	return sock_consumer_waits(rx->hash) || cpu_is_idle(cpu);
}

static __always_inline __u32 rx_consumer_waits_so_far(const struct rx *rx)
{
	return sock_consumer_waits_so_far(rx->hash);
}

static __always_inline __u32 rx_consumer_busy(const struct rx *rx)
{
	return sock_consumer_busy(rx->hash);
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
	__u32 slot = flow_slot(rx->queue, rx->hash, flow_shift);
	struct rps_map *map = bpf_map_lookup_elem(&rps_maps, &rx->queue);
	struct rps_dev_flow *flow = bpf_map_lookup_elem(&dev_flow_tables, &slot);

	if (!map || !flow) {
		rx->q->nr_inline++;
		return XDP_PASS;
	}
	if (dry_run)
		return rx_dry_run(rx, rx_base(rx, map));
	return rx_act(rx_steer(rx, map, flow));
}

/* Names the packet's flow by its headers; false if it has none. */
static __always_inline bool rx_parse(struct rx *rx, struct xdp_md *ctx, struct flow_key *key)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	enum flow_result result = FLOW_KEYED;

	/* flow_parse(), but the frame's length costs a call: only off the short road. */
	if (!flow_plain(data, data_end, flow_tunnels, key))
		result = flow_follow(data, data_end, bpf_xdp_get_buff_len(ctx), flow_tunnels, key);
	if (unlikely(result != FLOW_KEYED)) {
		rx->q->nr_no_flow[result < NR_FLOW_RESULTS ? result : FLOW_UNKNOWN]++;
		return false;
	}
	rx->key = key;
	rx->hash = flow_hash(key, &flow_secret);
	return true;
}

/* Counts the packet in; false if its queue is not ours. */
static __always_inline bool rx_begin(struct rx *rx, const struct xdp_md *ctx)
{
	rx->queue = queue_base + ctx->rx_queue_index;
	rx->cpu = bpf_get_smp_processor_id();
	/* A bond's port, or the virtual function behind a netvsc, may run its upper device's
	 * program, with queues and NAPI instances of its own. */
	if (unlikely(ctx->rx_queue_index >= nr_rx_queues || ctx->ingress_ifindex != ifindex))
		return false;
	rx->q = bpf_map_lookup_elem(&rx_queues, &rx->queue);
	if (!rx->q)
		return false;
	rx->epoch = *(volatile __u16 *)&rx->q->epoch;
	rx->q->nr_received++;
	if (flow_limit || (rx->q->policy & (RX_IDLE | RX_ADAPT)))
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
	if (bpf_xdp_metadata_rx_hash(ctx, &key.ports, &type) || !(type & XDP_RSS_L4)) {
		if (!rx_parse(&rx, ctx, &key))
			return XDP_PASS;
	} else {
		rx.q->nr_rx_hash++;
		rx.hash = flow_hash(&key, &flow_secret);
	}
	return rx_hashed(&rx);
}

/* ---- tracepoints --------------------------------------------------------- */

SEC("tp_btf/xdp_cpumap_kthread")
int BPF_PROG(on_cpumap_kthread, int map_id, unsigned int processed, unsigned int drops)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct backlog *b;

	/* Nothing to count; and a thread that is told to end must not be learnt once more. */
	if (!processed)
		return 0;
	b = backlog_current(map_id);
	if (!b)
		return 0;
	b->nr_unbuilt += drops;
	if (unlikely(!b->in_loop))
		b->in_loop = BPF_CORE_READ(task, __state) == TASK_RUNNING;
	backlog_take(b, processed, backlog_gro_empty((void *)b->entry), bpf_jiffies64());
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
int BPF_PROG(on_napi_poll, struct napi_struct *napi, int work, int budget)
{
	/* Without a budget it was netpoll, perhaps in the middle of another poll on this CPU. */
	if (budget)
		napi_polled(napi, work, budget);
	return 0;
}

/* ---- asked by user space ------------------------------------------------- */

/* Whether all that entered the backlog with this index has been delivered. */
SEC("syscall")
int backlog_drained(__u32 *index)
{
	__u32 key = *index;
	struct backlog *b = bpf_map_lookup_elem(&backlogs, &key);

	return b && backlog_asleep(b);
}

/* Nobody may want to be in the backlog with this index any more, or everybody again. */
SEC("syscall")
int backlog_close(struct backlog_closing *closing)
{
	__u32 key = closing->index;
	struct backlog *b = bpf_map_lookup_elem(&backlogs, &key);

	if (!b)
		return 0;
	b->closed = closing->closed;
	return 1;
}

/*
 * The thread of the backlog with this index is going to end: another may take its place. Only for a
 * closed and drained backlog: its counts go on.
 */
SEC("syscall")
int backlog_forget(__u32 *index)
{
	__u32 key = *index;
	struct backlog *b = bpf_map_lookup_elem(&backlogs, &key);
	__u64 kthread;

	if (!b)
		return 0;
	kthread = b->kthread;
	bpf_map_delete_elem(&backlog_kthreads, &kthread);
	b->kthread = b->in_loop = b->old_taken = b->wanted = 0;
	return 1;
}

/* What a queue's flows follow, and what its slots mean, from now on. */
SEC("syscall")
int rx_queue_set(struct rx_queue_setting *setting)
{
	__u32 key = setting->queue;
	struct rx_queue *q = bpf_map_lookup_elem(&rx_queues, &key);

	if (!q)
		return 0;
	q->policy = setting->policy;
	q->epoch = setting->epoch;
	return 1;
}

/* The time of rps_dev_flow.last_seen. */
SEC("syscall")
int jiffies_now(__u32 *unused)
{
	return bpf_jiffies64();
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
