// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "flow.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct flow_key);
} keys SEC(".maps");

const volatile struct flow_secret flow_secret;
const volatile enum flow_tunnel flow_tunnels;

SEC("xdp.frags")
int rxsteer(struct xdp_md *ctx)
{
	return XDP_PASS;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
