// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * hash.bpf.c: at the tc ingress of devices that an XDP program steers, gives each skb the hash of
 * its flow (`--follow-nat`). It runs where the packet is processed, redirected or INLINE: XDP has
 * no skb, and a cpumap's skb takes no hash from the frame.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "skb_flow.h"

SEC("tc")
int rxsteer_hash(struct __sk_buff *skb)
{
	struct flow_key key;
	enum flow_result result = skb_flow(skb, &key);

	skb_tell_flow(skb, result, &key, flow_hash(&key, &config.flow_secret));
	/* The next program decides, or the stack (TCX_NEXT, since 6.6). */
	return TC_ACT_UNSPEC;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
