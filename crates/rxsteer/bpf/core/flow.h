/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * flow.h: from the bytes of a packet to its flow key (flow_key.h).
 *
 * Plain C without helpers, maps or a clock (types.h). The parser follows Ethernet, VLAN tags,
 * PPPoE, MPLS, IPv4, IPv6 and, if configured, tunnels; each up to a limit below.
 *
 * flow_plain() is a fast path for TCP and UDP over IP over Ethernet, and these in VXLAN.
 * flow_follow() parses all packets, and has the same result for those of the fast path.
 *
 * flow_follow() is all inlined, because before 6.8 the verifier does not track a structure in
 * another stack frame; its callers are functions of their own.
 */
#pragma once

#include <stddef.h>

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/udp.h>

#include "flow_cursor.h"
#include "flow_headers.h"
#include "flow_key.h"
#include "flow_tunnel.h"
#include "types.h"

/* Limits: a packet with more has no flow, or inside a tunnel the outer flow. */
#define FLOW_VLANS	3
#define FLOW_LABELS	8 /* MPLS */
#define FLOW_EXTENSIONS 8 /* IPv6, a fragment header included */
#define FLOW_TUNNELS	2 /* nested; the flow of a third tunnel is its outer one */

/* ---- the general parser ------------------------------------------------- */

static __always_inline enum flow_result flow_mpls(struct flow_cursor *c, __u16 *type)
{
	for (int i = 0; i < FLOW_LABELS; i++) {
		const __be32 *label = flow_take(c, sizeof(*label));

		if (!label)
			return FLOW_TRUNCATED;
		if (*label & flow_swap32(0x100)) /* bottom of the stack */
			return flow_nibble(c, type);
	}
	return FLOW_UNKNOWN;
}

static __always_inline enum flow_result flow_pppoe(struct flow_cursor *c, __u16 *type)
{
	const struct flow_pppoe *pppoe = flow_take(c, sizeof(*pppoe));

	if (!pppoe)
		return FLOW_TRUNCATED;
	if (pppoe->version_type != 0x11 || pppoe->code)
		return FLOW_UNKNOWN;
	switch (flow_swap16(pppoe->protocol)) {
	case 0x0021:
		*type = ETH_P_IP;
		break;
	case 0x0057:
		*type = ETH_P_IPV6;
		break;
	default:
		return FLOW_UNKNOWN;
	}
	return flow_narrow(c, c->off - sizeof(pppoe->protocol), flow_swap16(pppoe->length));
}

static __always_inline int flow_is_vlan(__u16 type)
{
	return type == ETH_P_8021Q || type == ETH_P_8021AD || type == FLOW_ETH_P_QINQ2;
}

/* Parses link headers, the first of this type; sets the type of the network header. */
static __always_inline enum flow_result flow_link(struct flow_cursor *c, __u16 *type)
{
	if (*type == FLOW_ETH_P_TEB) {
		const struct flow_ethernet *eth = flow_take(c, sizeof(*eth));

		if (!eth)
			return FLOW_TRUNCATED;
		*type = flow_swap16(eth->type);
	}
	for (int i = 0; i < FLOW_VLANS && flow_is_vlan(*type); i++) {
		const struct flow_vlan *vlan = flow_take(c, sizeof(*vlan));

		if (!vlan)
			return FLOW_TRUNCATED;
		*type = flow_swap16(vlan->type);
	}
	switch (*type) {
	case ETH_P_PPP_SES:
		return flow_pppoe(c, type);
	case ETH_P_MPLS_UC:
	case ETH_P_MPLS_MC:
		return flow_mpls(c, type);
	}
	return FLOW_KEYED;
}

static __always_inline enum flow_result flow_ipv4(struct flow_cursor *c, struct flow_found *found)
{
	const struct iphdr *ip = flow_take(c, sizeof(*ip));
	__u32 options;

	if (!ip || ip->version != 4 || ip->ihl < 5)
		return FLOW_TRUNCATED;
	options = ip->ihl * 4 - sizeof(*ip);
	if (flow_narrow(c, found->network, flow_swap16(ip->tot_len)) || flow_skip(c, options))
		return FLOW_TRUNCATED;
	found->proto = ip->protocol;
	found->fragment = !!(ip->frag_off & flow_swap16(0x3fff)); /* offset, or more to come */
	return FLOW_KEYED;
}

/* Whether the header has the usual form of extensions: next header, length in words of eight bytes
 * without the first, content. */
static __always_inline int flow_is_options(__u8 proto)
{
	switch (proto) {
	case IPPROTO_HOPOPTS:
	case IPPROTO_ROUTING:
	case IPPROTO_DSTOPTS:
	case IPPROTO_MH:
	case 139: /* HIP */
	case 140: /* shim6 */
		return 1;
	}
	return 0;
}

static __always_inline enum flow_result flow_ipv6(struct flow_cursor *c, struct flow_found *found)
{
	const struct ipv6hdr *ip = flow_take(c, sizeof(*ip));

	if (!ip || ip->version != 6 || flow_narrow(c, c->off, flow_swap16(ip->payload_len)))
		return FLOW_TRUNCATED;
	found->proto = ip->nexthdr;
	found->fragment = 0; /* a fragment has proto IPPROTO_FRAGMENT */

	for (int i = 0; i < FLOW_EXTENSIONS; i++) {
		if (flow_is_options(found->proto)) {
			const struct ipv6_opt_hdr *options = flow_take(c, 8);

			if (!options || flow_skip(c, 8 * options->hdrlen))
				return FLOW_TRUNCATED;
			found->proto = options->nexthdr;
		} else if (found->proto == IPPROTO_FRAGMENT) {
			const struct flow_ipv6_fragment *fragment = flow_take(c, sizeof(*fragment));

			if (!fragment)
				return FLOW_TRUNCATED;
			if (fragment->offset & flow_swap16(0xfff9)) /* offset, or more to come */
				return FLOW_KEYED;
			found->proto = fragment->next; /* atomic: RFC 6946 */
		} else {
			return FLOW_KEYED;
		}
	}
	return flow_is_options(found->proto) || found->proto == IPPROTO_FRAGMENT ? FLOW_UNKNOWN
										 : FLOW_KEYED;
}

static __always_inline enum flow_result flow_network(struct flow_cursor *c,
						     struct flow_found *found)
{
	found->network = c->off;
	switch (found->type) {
	case ETH_P_IP:
		return flow_ipv4(c, found);
	case ETH_P_IPV6:
		return flow_ipv6(c, found);
	}
	return FLOW_UNKNOWN;
}

/* The parser stops at AH although the authenticated headers are readable: like ESP, AH numbers the
 * packets of one SPI, and its receiver drops packets that are too far out of order. */
static __always_inline enum flow_result flow_transport(struct flow_cursor *c,
						       struct flow_found *found)
{
	__u32 size = flow_ports_header(found->proto);
	const __be32 *word;

	found->id = 0;
	found->has_ports = 0;
	if (found->fragment || (!size && found->proto != IPPROTO_ESP && found->proto != IPPROTO_AH))
		return FLOW_KEYED;
	if (!(word = flow_take(c, 8)))
		return FLOW_TRUNCATED;
	if (size) {
		found->id = word[0];
		found->has_ports = 1;
		return flow_skip(c, size - 8);
	}
	if (found->proto == IPPROTO_ESP) {
		found->id = word[0];
		return FLOW_KEYED;
	}
	found->id = word[1];
	return flow_skip(c, 4); /* AH's sequence number */
}

static __always_inline enum flow_result flow_key_found(const struct flow_cursor *c,
						       const struct flow_found *found,
						       __u32 options, struct flow_key *key)
{
	struct flow_cursor at = {c->data, c->data_end, found->network, c->end};

	if (found->type == ETH_P_IP) {
		const struct iphdr *ip = flow_take(&at, sizeof(*ip));

		if (!ip)
			return FLOW_TRUNCATED;
		flow_key_ports4(key, ip->saddr, found->id, found->proto);
		if (!found->has_ports || options & FLOW_SYMMETRIC)
			flow_key_daddr4(key, ip->daddr);
	} else {
		const struct ipv6hdr *ip = flow_take(&at, sizeof(*ip));

		if (!ip)
			return FLOW_TRUNCATED;
		flow_key_ports(key, ip->saddr.in6_u.u6_addr32, found->id, found->proto);
		if (!found->has_ports || options & FLOW_SYMMETRIC)
			__builtin_memcpy(key->daddr, &ip->daddr, sizeof(key->daddr));
	}
	if (options & FLOW_SYMMETRIC)
		flow_key_order(key);
	return FLOW_KEYED;
}

/* The source address of the headers found. */
static __always_inline enum flow_result flow_source(const struct flow_cursor *c,
						    const struct flow_found *found, __be32 saddr[4])
{
	struct flow_cursor at = {c->data, c->data_end, found->network, c->end};

	if (found->type == ETH_P_IP) {
		const struct iphdr *ip = flow_take(&at, sizeof(*ip));

		if (!ip)
			return FLOW_TRUNCATED;
		saddr[2] = FLOW_V4_MAPPED;
		saddr[3] = ip->saddr;
	} else {
		const struct ipv6hdr *ip = flow_take(&at, sizeof(*ip));

		if (!ip)
			return FLOW_TRUNCATED;
		__builtin_memcpy(saddr, &ip->saddr, 4 * sizeof(*saddr));
	}
	return FLOW_KEYED;
}

/* What a key has of the outermost tunnel. */
struct flow_outer {
	__be32 saddr[4];
	__be32 id;
};

static __always_inline void flow_key_outer(struct flow_key *key, const struct flow_outer *outer)
{
	__builtin_memcpy(key->outer, outer->saddr, sizeof(key->outer));
	key->tunnel = outer->id;
}

/* Whether a key has it. With FLOW_SYMMETRIC it has not: the other direction comes from the other
 * end of the tunnel. */
static __always_inline bool flow_has_outer(__u32 options)
{
	return options & FLOW_TUNNEL_ANY && !(options & FLOW_SYMMETRIC);
}

/* `type`: the first header's ethertype; FLOW_ETH_P_TEB for Ethernet. */
static __always_inline enum flow_result flow_walk(struct flow_cursor *c, __u16 type, __u32 options,
						  struct flow_key *key)
{
	struct flow_found inner, found = {};
	struct flow_outer outer = {};
	enum flow_result keyed;
	__be32 id = 0;

	for (int level = 0; level <= FLOW_TUNNELS; level++) {
		enum flow_result result = flow_link(c, &type);

		inner.type = type;
		if (result == FLOW_KEYED)
			result = flow_network(c, &inner);
		if (result == FLOW_KEYED)
			result = flow_transport(c, &inner);
		if (result == FLOW_UNKNOWN && level > 0) {
			if (level == 1)
				outer = (struct flow_outer){};
			break;
		}
		if (result != FLOW_KEYED)
			return result;

		found = inner;
		if (level == FLOW_TUNNELS)
			break;
		result = flow_tunnel(c, &found, options, &type, &id);
		if (result == FLOW_UNKNOWN)
			break;
		if (result != FLOW_KEYED)
			return result;
		if (level == 0 && flow_has_outer(options)) {
			if (flow_source(c, &found, outer.saddr))
				return FLOW_TRUNCATED;
			outer.id = id;
		}
	}
	keyed = flow_key_found(c, &found, options, key);
	if (keyed == FLOW_KEYED)
		flow_key_outer(key, &outer);
	return keyed;
}

static __always_inline enum flow_result flow_follow(const void *data, const void *data_end,
						    __u32 len, __u32 options, struct flow_key *key)
{
	struct flow_cursor c = {data, data_end, 0, len};

	return flow_walk(&c, FLOW_ETH_P_TEB, options, key);
}

/* As flow_follow(), for a packet that begins with an IP header. */
static __always_inline enum flow_result flow_follow_ip(const void *data, const void *data_end,
						       __u32 len, __u32 options,
						       struct flow_key *key)
{
	struct flow_cursor c = {data, data_end, 0, len};
	enum flow_result result;
	__u16 type;

	result = flow_nibble(&c, &type);
	return result == FLOW_KEYED ? flow_walk(&c, type, options, key) : result;
}

/* ---- the fast path ------------------------------------------------------ */

/* A frame's IP payload: its start with the ports, and its size by the IP header. */
struct flow_payload {
	const __be32 *ports;
	__u32 size;
};

/* The tunnel, of those in options, that the TCP or UDP packet of this key may be of; or 0. */
static __always_inline __u32 flow_may_be_tunnel(const struct flow_key *key, __u32 options)
{
	if (key->proto != IPPROTO_UDP)
		return 0;
	return options & flow_tunnel_of(IPPROTO_UDP, flow_swap32(key->ports));
}

/* Whether an IP payload of size bytes is TCP or UDP with a complete header. */
static __always_inline int flow_is_plain(__u8 proto, __u32 size)
{
	if (proto == IPPROTO_TCP)
		return size >= sizeof(struct tcphdr);
	return proto == IPPROTO_UDP && size >= sizeof(struct udphdr);
}

/*
 * Whether the packet, room bytes that are all in the linear part, is TCP or UDP over IP of this
 * ethertype without options, extension headers or fragments; writes the key and the payload if so.
 * Lengths are compared as numbers: the verifier of 6.1 knows no range of a byte-swapped word, and
 * rejects adding one to a pointer.
 */
static __always_inline int flow_plain_packet(const void *packet, const void *data_end, __be16 type,
					     __u64 room, __u32 options, struct flow_key *key,
					     struct flow_payload *payload)
{
	const struct iphdr *v4 = packet;
	const struct ipv6hdr *v6 = packet;
	__u32 size;

	payload->ports = (const void *)(v4 + 1);
	if ((const void *)(payload->ports + 1) > data_end)
		return 0;
	if (type == flow_swap16(ETH_P_IP)) {
		size = flow_swap16(v4->tot_len);
		payload->size = size - sizeof(*v4);
		if (*(const __u8 *)v4 != 0x45 || v4->frag_off & flow_swap16(0x3fff) ||
		    size > room || size < sizeof(*v4) ||
		    !flow_is_plain(v4->protocol, payload->size))
			return 0;
		flow_key_ports4(key, v4->saddr, *payload->ports, v4->protocol);
		if (options & FLOW_SYMMETRIC)
			flow_key_daddr4(key, v4->daddr);
		return 1;
	}
	payload->ports = (const void *)(v6 + 1);
	if (type != flow_swap16(ETH_P_IPV6) || (const void *)(payload->ports + 1) > data_end)
		return 0;
	size = flow_swap16(v6->payload_len);
	payload->size = size;
	if (*(const __u8 *)v6 >> 4 != 6 || sizeof(*v6) + size > room ||
	    !flow_is_plain(v6->nexthdr, size))
		return 0;
	flow_key_ports(key, v6->saddr.in6_u.u6_addr32, *payload->ports, v6->nexthdr);
	if (options & FLOW_SYMMETRIC)
		__builtin_memcpy(key->daddr, &v6->daddr, sizeof(key->daddr));
	return 1;
}

/* As flow_plain_packet(), with an Ethernet header before it. */
static __always_inline int flow_plain_frame(const void *frame, const void *data_end, __u64 room,
					    __u32 options, struct flow_key *key,
					    struct flow_payload *payload)
{
	const struct flow_ethernet *eth = frame;

	return (const void *)(eth + 1) <= data_end && room >= sizeof(*eth) &&
	       flow_plain_packet(eth + 1, data_end, eth->type, room - sizeof(*eth), options, key,
				 payload);
}

/* The key of the packet itself, or of the frame in it if that is VXLAN; 0 for other tunnels. */
static __always_inline int flow_plain_key(const void *data_end, __u32 options, struct flow_key *key,
					  struct flow_payload payload)
{
	const struct flow_vxlan *vxlan;
	struct flow_outer outer;
	__u32 tunnel;

	/* What follows reads the key from memory. In registers its ten words would take the place
	 * of all else, for flow_key_order() alone. */
	asm volatile("" : : "r"(key) : "memory");
	if ((tunnel = flow_may_be_tunnel(key, options))) {
		vxlan = (const void *)((const struct udphdr *)payload.ports + 1);
		if (tunnel != FLOW_TUNNEL_VXLAN ||
		    payload.size < sizeof(struct udphdr) + sizeof(*vxlan) ||
		    (const void *)(vxlan + 1) > data_end || (vxlan->flags & 0x0c) != 0x08)
			return 0;
		payload.size -= sizeof(struct udphdr) + sizeof(*vxlan);
		__builtin_memcpy(outer.saddr, key->saddr, sizeof(outer.saddr));
		outer.id = flow_vni(vxlan->vni);
		if (!flow_plain_frame(vxlan + 1, data_end, payload.size, options, key, &payload) ||
		    flow_may_be_tunnel(key, options))
			return 0;
		if (flow_has_outer(options))
			flow_key_outer(key, &outer);
	}
	if (options & FLOW_SYMMETRIC)
		flow_key_order(key);
	return 1;
}

/*
 * Whether the packet is such a frame, or has one in VXLAN; writes the key, of which nothing is
 * known otherwise. `room`: the packet's length, or that of its linear part where the former costs a
 * call into the kernel, which takes as long as this function.
 */
static __always_inline int flow_plain(const void *data, const void *data_end, __u64 room,
				      __u32 options, struct flow_key *key)
{
	struct flow_payload payload;

	return flow_plain_frame(data, data_end, room, options, key, &payload) &&
	       flow_plain_key(data_end, options, key, payload);
}

/* As flow_plain(), for a packet that begins with the header of this ethertype. */
static __always_inline int flow_plain_network(const void *data, const void *data_end, __u16 type,
					      __u32 options, struct flow_key *key)
{
	__u64 linear = (const char *)data_end - (const char *)data;
	struct flow_payload payload;

	return flow_plain_packet(data, data_end, flow_swap16(type), linear, options, key,
				 &payload) &&
	       flow_plain_key(data_end, options, key, payload);
}

/* The fast path, then the general parser. rx.bpf.c calls both itself: there the length costs a
 * call. */
static __always_inline enum flow_result flow_parse(const void *data, const void *data_end,
						   __u32 len, __u32 options, struct flow_key *key)
{
	__u64 linear = (const char *)data_end - (const char *)data;
	struct flow_key plain;

	if (flow_plain(data, data_end, linear, options, &plain)) {
		*key = plain;
		return FLOW_KEYED;
	}
	return flow_follow(data, data_end, len, options, key);
}
