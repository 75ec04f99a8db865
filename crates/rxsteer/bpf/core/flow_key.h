/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * flow_key.h: the key of a flow, and its hash (docs/hash.md).
 *
 * Plain C without helpers, maps or a clock (types.h).
 */
#pragma once

#include <linux/in.h>
#include <linux/tcp.h>
#include <linux/types.h>
#include <linux/udp.h>
#include <stdbool.h>

#include "types.h"

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define flow_swap16(x) __builtin_bswap16(x)
#define flow_swap32(x) __builtin_bswap32(x)
#else
#define flow_swap16(x) (x)
#define flow_swap32(x) (x)
#endif

/* ---- keys --------------------------------------------------------------- */

#define FLOW_V4_MAPPED flow_swap32(0x0000ffff) /* third word of ::ffff:a.b.c.d */

/* Two ports as one word, in the order of the packet. */
static __always_inline __be32 flow_ports(__be16 source, __be16 dest)
{
	union {
		__be16 half[2];
		__be32 word;
	} ports = {{source, dest}};

	return ports.word;
}

/* The key of packets from (saddr, source port) to a local port, for any local address. The parser
 * uses it for packets, and socket.bpf.c for the socket that receives them. */
static __always_inline void flow_key_ports(struct flow_key *key, const __be32 saddr[4],
					   __be32 ports, __u32 proto)
{
	*key = (struct flow_key){
		.saddr = {saddr[0], saddr[1], saddr[2], saddr[3]},
		.ports = ports,
		.proto = proto,
	};
}

static __always_inline void flow_key_ports4(struct flow_key *key, __be32 saddr, __be32 ports,
					    __u32 proto)
{
	*key = (struct flow_key){
		.saddr = {0, 0, FLOW_V4_MAPPED, saddr},
		.ports = ports,
		.proto = proto,
	};
}

/* Minimum size of a header that begins with the ports; 0 for other protocols. */
static __always_inline __u32 flow_ports_header(__u8 proto)
{
	switch (proto) {
	case IPPROTO_TCP:
		return sizeof(struct tcphdr);
	case IPPROTO_UDP:
	case IPPROTO_UDPLITE:
		return sizeof(struct udphdr);
	case IPPROTO_SCTP:
	case IPPROTO_DCCP:
		return 12;
	}
	return 0;
}

/* Whether the key is that of packets with a receiver's port: fragments have none. */
static __always_inline bool flow_has_ports(const struct flow_key *key)
{
	return key->ports && flow_ports_header(key->proto);
}

static __always_inline void flow_key_daddr4(struct flow_key *key, __be32 daddr)
{
	key->daddr[2] = FLOW_V4_MAPPED;
	key->daddr[3] = daddr;
}

/*
 * Orders the ends of a key with both addresses, so that the packets of the other direction have the
 * same key (__flow_hash_consistentify() in net/core/flow_dissector.c does so for the kernel's
 * hash). An SPI has one direction, and stays as it is.
 */
static __always_inline void flow_key_order(struct flow_key *key)
{
	__u32 source = flow_swap32(key->ports) >> 16;
	__u32 dest = flow_swap32(key->ports) & 0xffff;
	bool ports = flow_ports_header(key->proto);
	int order = 0;

	for (int i = 0; i < 4 && !order; i++)
		order = (key->saddr[i] > key->daddr[i]) - (key->saddr[i] < key->daddr[i]);
	if (!order && ports)
		order = (source > dest) - (source < dest);
	if (order <= 0)
		return;
	for (int i = 0; i < 4; i++) {
		__be32 saddr = key->saddr[i];

		key->saddr[i] = key->daddr[i];
		key->daddr[i] = saddr;
	}
	if (ports)
		key->ports = flow_swap32(dest << 16 | source);
}

/* Whether the flow is one of UDP from or to one of these ports; the list ends with the first 0. The
 * list is volatile because the loader sets it: the verifier removes the comparisons behind its end.
 */
static __always_inline bool flow_has_port(const struct flow_key *key,
					  const volatile __u16 ports[FLOW_INLINE_PORTS])
{
	__u32 both = flow_swap32(key->ports);

	if (key->proto != IPPROTO_UDP)
		return false;
	for (int i = 0; i < FLOW_INLINE_PORTS; i++) {
		__u16 port = ports[i];

		if (!port)
			return false;
		if (port == both >> 16 || port == (both & 0xffff))
			return true;
	}
	return false;
}

/* ---- hash --------------------------------------------------------------- */

static __always_inline __u64 flow_hash_words(__u64 sum, const __be32 *word, __u32 nr,
					     const volatile __u64 *multiplier)
{
	for (__u32 i = 0; i < nr; i++)
		sum += multiplier[i] * word[i];
	return sum;
}

/* Words that are zero add nothing. IPv4 addresses begin with two, and daddr is mostly zero. */
static __always_inline bool flow_has_words(const __be32 word[2])
{
	__u64 both;

	__builtin_memcpy(&both, word, sizeof(both));
	return both;
}

/*
 * Strongly universal multilinear hashing of 32-bit words (Lemire and Kaser, "Strongly universal
 * string hashing is fast", 2014), then MurmurHash3's 32-bit finaliser: a bijection, so the bound
 * still holds, that spreads arithmetic sequences. The secret is volatile because the loader sets
 * it, not the compiler.
 */
static __always_inline __u64 flow_hash_sum(const struct flow_key *key,
					   const volatile struct flow_secret *secret)
{
	const volatile __u64 *multiplier = secret->multiplier;
	__u64 sum = secret->addend;

	if (flow_has_words(key->saddr))
		sum = flow_hash_words(sum, key->saddr, 2, multiplier);
	sum = flow_hash_words(sum, key->saddr + 2, 2, multiplier + 2);
	if (flow_has_words(key->daddr) || flow_has_words(key->daddr + 2))
		sum = flow_hash_words(sum, key->daddr, 4, multiplier + 4);
	return flow_hash_words(sum, &key->ports, 2, multiplier + 8);
}

static __always_inline __u32 flow_hash_finish(__u64 sum)
{
	__u32 hash = sum >> 32;

	hash ^= hash >> 16;
	hash *= 0x85ebca6b;
	hash ^= hash >> 13;
	hash *= 0xc2b2ae35;
	hash ^= hash >> 16;
	return hash;
}

/* The hash by which sockets know the flow. */
static __always_inline __u32 flow_hash(const struct flow_key *key,
				       const volatile struct flow_secret *secret)
{
	return flow_hash_finish(flow_hash_sum(key, secret));
}

/*
 * The same, and in `own` the hash by which the flow is steered. In a tunnel that is another one:
 * anybody may send an inner packet with the addresses of somebody else's flow, but would have to
 * forge the outer source to have its slot.
 */
static __always_inline __u32 flow_hashes(const struct flow_key *key,
					 const volatile struct flow_secret *secret, bool tunnels,
					 __u32 *own)
{
	__u64 sum = flow_hash_sum(key, secret);
	__u32 hash = flow_hash_finish(sum);

	*own = hash;
	if (tunnels && (flow_has_words(key->outer) || flow_has_words(key->outer + 2))) {
		sum = flow_hash_words(sum, key->outer, 4, secret->multiplier + 10);
		sum = flow_hash_words(sum, &key->tunnel, 1, secret->multiplier + 14);
		*own = flow_hash_finish(sum);
	}
	return hash;
}

/* ---- tunnels -------------------------------------------------------------- */

enum flow_port {
	FLOW_PORT_VXLAN = 4789,
	FLOW_PORT_VXLAN_LINUX = 8472, /* Linux's default, from before the port was assigned */
	FLOW_PORT_GENEVE = 6081,
	FLOW_PORT_GTPU = 2152,
};

/* The tunnel that the protocol, and for UDP the destination port, stand for; or 0. Only the
 * tunnel's header shows whether a packet is one. */
static __always_inline __u32 flow_tunnel_of(__u8 proto, __u16 dest)
{
	if (proto == IPPROTO_IPIP || proto == IPPROTO_IPV6)
		return FLOW_TUNNEL_IPIP;
	if (proto == IPPROTO_GRE)
		return FLOW_TUNNEL_GRE;
	if (proto != IPPROTO_UDP)
		return 0;
	switch (dest) {
	case FLOW_PORT_VXLAN:
	case FLOW_PORT_VXLAN_LINUX:
		return FLOW_TUNNEL_VXLAN;
	case FLOW_PORT_GENEVE:
		return FLOW_TUNNEL_GENEVE;
	case FLOW_PORT_GTPU:
		return FLOW_TUNNEL_GTPU;
	}
	return 0;
}
