// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * rx.bpf.c: the XDP program, which decides where each packet is processed. Each device has its own
 * copy of the program; all copies share the maps.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "rx.h"

/* Fewest bytes of a frame with a TCP segment that GRO merges; an acknowledgement is none. */
#define RX_SEGMENT 512

static __always_inline bool rx_shares_flows(void)
{
	return false;
}

static __always_inline bool rx_enqueue(const struct rx *rx, __u32 cpu)
{
	__u32 queue = rx->queue;
	void *cpumap = bpf_map_lookup_elem(&cpumaps, &queue);

	if (!cpumap)
		return false;
	if (bpf_redirect_map(cpumap, cpu, XDP_PASS) == XDP_REDIRECT)
		return true;
	backlog_request(rx->queue, cpu);
	return false;
}

static __always_inline bool rx_gro_empty(const struct rx *rx)
{
	return napi_gro_empty(rx->q);
}

static __always_inline bool rx_delivered_apart(struct rx *rx, struct rps_dev_flow *flow, bool set,
					       __u64 closed)
{
	return rx_delivered(rx, flow, set, closed);
}

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

/* In bytes, of its first buffer. */
static __always_inline __u32 rx_len(const struct xdp_md *ctx)
{
	return ctx->data_end - ctx->data;
}

static __always_inline int rx_hashed(struct rx *rx, const struct xdp_md *ctx)
{
	struct rps_dev_flow *flow = rx_flow(rx);
	enum rx_verdict verdict;

	if (!flow)
		return XDP_PASS;
	verdict = config.dry_run ? rx_dry_run(rx, flow) : rx_steer(rx, flow);
	if (verdict == RX_DROP)
		rx->q->load.bytes -= rx_len(ctx);
	return rx_act(verdict);
}

/* Off the fast path. A global function: the verifier checks it once, and what follows for one
 * result. */
__noinline int rx_follow(struct xdp_md *ctx, struct flow_key *key)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;

	if (!key)
		return FLOW_UNKNOWN;
	return flow_follow(data, data_end, bpf_xdp_get_buff_len(ctx), config.flow_options, key);
}

/* Sets key and hash of the packet from its headers; false if the packet has no flow, or
 * one that always stays INLINE. */
static __always_inline bool rx_parse(struct rx *rx, struct xdp_md *ctx, struct flow_key *key)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	enum flow_result result = FLOW_KEYED;

	/* As flow_parse(). */
	if (!flow_plain(data, data_end, data_end - data, config.flow_options, key)) {
		*key = (struct flow_key){};
		result = rx_follow(ctx, key);
	}
	if (unlikely(result != FLOW_KEYED)) {
		rx_count_no_flow(rx, result);
		return false;
	}
	rx->segment = config.gro && key->proto == IPPROTO_TCP && data_end - data >= RX_SEGMENT;
	return rx_keyed(rx, key);
}

/* User space adds BPF_F_XDP_HAS_FRAGS for native mode. */
SEC("?xdp")
int rxsteer(struct xdp_md *ctx)
{
	struct flow_key key;
	struct rx rx = {};

	if (!rx_begin(&rx, ctx->ingress_ifindex, ctx->rx_queue_index, rx_len(ctx)) ||
	    !rx_parse(&rx, ctx, &key))
		return XDP_PASS;
	return rx_hashed(&rx, ctx);
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

	if (!rx_begin(&rx, ctx->ingress_ifindex, ctx->rx_queue_index, rx_len(ctx)))
		return XDP_PASS;
	if (bpf_xdp_metadata_rx_hash(ctx, &key.ports, &type) || !(type & XDP_RSS_L4)) {
		if (!rx_parse(&rx, ctx, &key))
			return XDP_PASS;
	} else {
		rx.q->nr_rx_hash++;
		rx.hash = rx.sock_hash = flow_hash(&key, &config.flow_secret);
	}
	return rx_hashed(&rx, ctx);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
