// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * hash.bpf.c: at the tc ingress of devices that an XDP program steers, gives each skb the hash of
 * its flow (`--follow-nat`). It runs where the packet is processed, redirected or INLINE: XDP has
 * no skb, and a cpumap's skb takes no hash from the frame. The kernel keeps skb->hash while it
 * rewrites addresses and ports, and stores it in the socket that receives the packet
 * (sock_rps_save_rxhash() in include/net/rps.h).
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "core/flow.h"
#include "maps.h"

/* Headers that are parsed, in bytes, if they are not in the linear part. */
#define SKB_HEADERS 256

/* A global function, so that the compiler keeps no packet pointer across it. */
__noinline int skb_key(struct __sk_buff *skb, struct flow_key *key)
{
	void *data = (void *)(long)skb->data;
	void *data_end = (void *)(long)skb->data_end;

	if (!key)
		return FLOW_UNKNOWN;
	return flow_follow(data, data_end, skb->len, config.flow_options, key);
}

/* Brings headers into the linear part; whether that may help. */
static __always_inline bool skb_pull_headers(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data;
	void *data_end = (void *)(long)skb->data_end;
	__u64 linear = data_end - data;

	return linear < skb->len && linear < SKB_HEADERS &&
	       !bpf_skb_pull_data(skb, skb->len < SKB_HEADERS ? skb->len : SKB_HEADERS);
}

/* As rx_follow() (rx.bpf.c). */
__noinline int skb_follow(struct __sk_buff *skb, struct flow_key *key)
{
	enum flow_result result;

	if (!key)
		return FLOW_UNKNOWN;
	result = skb_key(skb, key);
	if (unlikely(result == FLOW_TRUNCATED) && skb_pull_headers(skb))
		result = skb_key(skb, key);
	return result;
}

static __always_inline enum flow_result skb_flow(struct __sk_buff *skb, struct flow_key *key)
{
	void *data = (void *)(long)skb->data;
	void *data_end = (void *)(long)skb->data_end;

	if (flow_plain(data, data_end, skb->len, config.flow_options, key))
		return FLOW_KEYED;
	*key = (struct flow_key){};
	return skb_follow(skb, key);
}

/* Kernel RPS leaves packets with the hash 0 where they are, and computes its own for them. */
static __always_inline void skb_set_hash(struct __sk_buff *skb, __u32 hash)
{
	bpf_set_hash(skb, hash ? hash : 1);
}

/* Sets the hash by which a socket knows the packet's flow. Packets without ports belong to no
 * socket, or carry the packets of many: they get none, since a socket would take the hash of a
 * sender or a device for its flow's. */
static __always_inline void skb_tell_flow(struct __sk_buff *skb, enum flow_result result,
					  const struct flow_key *key, __u32 hash)
{
	if (likely(result == FLOW_KEYED && flow_has_ports(key)))
		skb_set_hash(skb, hash);
	else
		bpf_set_hash_invalid(skb);
}

SEC("tc")
int rxsteer_hash(struct __sk_buff *skb)
{
	struct flow_key key;
	enum flow_result result = skb_flow(skb, &key);
	__u32 hash = flow_hash(&key, &config.flow_secret);
	struct hop_hash *hop = hop_at(hash);

	/* The socket writes the kernel's table too, where the slot is that of a hop (softirq mode).
	 */
	if (hop && unlikely(hop->hash))
		bpf_set_hash_invalid(skb);
	else
		skb_tell_flow(skb, result, &key, hash);
	/* The next program decides, or the stack (TCX_NEXT, since 6.6). */
	return TC_ACT_UNSPEC;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
