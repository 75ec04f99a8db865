// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "flow.h"

SEC("xdp.frags")
int pass(struct xdp_md *ctx)
{
	return XDP_PASS;
}

/* What flow_probe made of the last packet: compared with the native run. */
struct flow_probe {
	struct flow_key key;
	__u32 hash;
	enum flow_result result;
};

const volatile struct flow_secret flow_secret;
const volatile enum flow_tunnel flow_tunnels;
struct flow_probe flow_probed;

SEC("xdp.frags")
int flow_probe(struct xdp_md *ctx)
{
	const void *data = (const void *)(long)ctx->data;
	const void *data_end = (const void *)(long)ctx->data_end;
	struct flow_key key = {};
	enum flow_result result = FLOW_KEYED;

	if (!flow_plain(data, data_end, flow_tunnels, &key))
		result = flow_follow(data, data_end, bpf_xdp_get_buff_len(ctx), flow_tunnels, &key);
	flow_probed.result = result;
	flow_probed.key = key;
	flow_probed.hash = flow_hash(&key, &flow_secret);
	return XDP_PASS;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
