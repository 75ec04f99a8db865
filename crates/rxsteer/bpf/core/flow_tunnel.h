/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * flow_tunnel.h: the headers of tunnels, up to the inner header (flow.h).
 *
 * Plain C without helpers, maps or a clock (types.h).
 */
#pragma once

#include <linux/if_ether.h>
#include <linux/in.h>

#include "flow_cursor.h"
#include "flow_headers.h"
#include "flow_key.h"
#include "types.h"

/* Limit: the flow of a packet with more is the outer one. */
#define FLOW_GTPU_EXTENSIONS 4

/* A receiver that checks sequence numbers drops packets that arrive after a later one of the tunnel
 * (RFC 2890): packets that have them are one flow, the outer one. The same holds for GTP-U. */
static __always_inline enum flow_result flow_gre(struct flow_cursor *c, __u16 *type, __be32 *id)
{
	const struct flow_gre *gre = flow_take(c, sizeof(*gre));
	const __be32 *key;
	__u32 has_key;
	__u16 flags;

	if (!gre)
		return FLOW_TRUNCATED;
	flags = flow_swap16(gre->flags);
	/* Source routing of RFC 1701, a sequence number, or a version that is not 0. */
	if (flags & 0x5007)
		return FLOW_UNKNOWN;
	has_key = flags >> 13 & 1;
	*type = flow_swap16(gre->type);
	/* A word for each of checksum and key. The last word is read in any case, and is part of
	 * the header: one path is less work for the verifier. */
	if (flow_skip(c, 4 * (!!(flags & 0x8000) + has_key)))
		return FLOW_TRUNCATED;
	c->off -= sizeof(*key);
	key = flow_take(c, sizeof(*key));
	if (!key)
		return FLOW_TRUNCATED;
	*id = *key * has_key;
	return FLOW_KEYED;
}

/* A VNI of 24 bits, without the byte behind it. */
static __always_inline __be32 flow_vni(__be32 word)
{
	return word & flow_swap32(0xffffff00);
}

static __always_inline enum flow_result flow_vxlan(struct flow_cursor *c, __u16 *type, __be32 *id)
{
	const struct flow_vxlan *vxlan = flow_take(c, sizeof(*vxlan));

	if (!vxlan)
		return FLOW_TRUNCATED;
	if ((vxlan->flags & 0x0c) != 0x08) /* no VNI, or VXLAN-GPE: another protocol */
		return FLOW_UNKNOWN;
	*type = FLOW_ETH_P_TEB;
	*id = flow_vni(vxlan->vni);
	return FLOW_KEYED;
}

static __always_inline enum flow_result flow_geneve(struct flow_cursor *c, __u16 *type, __be32 *id)
{
	const struct flow_geneve *geneve = flow_take(c, sizeof(*geneve));

	if (!geneve)
		return FLOW_TRUNCATED;
	if (geneve->version_length >> 6 || geneve->flags & 0x80) /* control message */
		return FLOW_UNKNOWN;
	*type = flow_swap16(geneve->type);
	*id = flow_vni(geneve->vni);
	return flow_skip(c, 4 * (geneve->version_length & 0x3f));
}

static __always_inline enum flow_result flow_gtpu(struct flow_cursor *c, __u16 *type, __be32 *id)
{
	const struct flow_gtpu *gtpu = flow_take(c, sizeof(*gtpu));
	const struct flow_gtpu_options *options;
	__u8 next, flags;

	if (!gtpu)
		return FLOW_TRUNCATED;
	flags = gtpu->flags;
	/* Not version 1, GTP', a sequence number, or signalling. */
	if ((flags & 0xf2) != 0x30 || gtpu->message != 255)
		return FLOW_UNKNOWN;
	*id = gtpu->teid;
	if (flow_narrow(c, c->off, flow_swap16(gtpu->length)))
		return FLOW_TRUNCATED;
	if (!(flags & 0x07))
		return flow_nibble(c, type);

	if (!(options = flow_take(c, sizeof(*options))))
		return FLOW_TRUNCATED;
	next = flags & 0x04 ? options->next : 0;
	for (int i = 0; i < FLOW_GTPU_EXTENSIONS && next; i++) {
		/* length in words, content, and in the last byte the type of the next extension */
		const __u8 *extension = flow_take(c, 4);

		if (!extension || !*extension || flow_skip(c, 4 * (*extension - 1)))
			return FLOW_TRUNCATED;
		c->off -= 1;
		if (!(extension = flow_take(c, 1)))
			return FLOW_TRUNCATED;
		next = *extension;
	}
	return next ? FLOW_UNKNOWN : flow_nibble(c, type);
}

/* Parses the tunnel's header behind the headers found; sets the type of the inner header, and the
 * tunnel's id if it has one. */
static __always_inline enum flow_result flow_tunnel(struct flow_cursor *c,
						    const struct flow_found *found, __u32 options,
						    __u16 *type, __be32 *id)
{
	if (found->fragment)
		return FLOW_UNKNOWN;
	switch (options & flow_tunnel_of(found->proto, flow_swap32(found->id))) {
	case FLOW_TUNNEL_IPIP:
		*type = found->proto == IPPROTO_IPIP ? ETH_P_IP : ETH_P_IPV6;
		return FLOW_KEYED;
	case FLOW_TUNNEL_GRE:
		return flow_gre(c, type, id);
	case FLOW_TUNNEL_VXLAN:
		return flow_vxlan(c, type, id);
	case FLOW_TUNNEL_GENEVE:
		return flow_geneve(c, type, id);
	case FLOW_TUNNEL_GTPU:
		return flow_gtpu(c, type, id);
	}
	return FLOW_UNKNOWN;
}
