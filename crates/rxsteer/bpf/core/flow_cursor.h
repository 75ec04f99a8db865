/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * flow_cursor.h: a position in the headers of a packet, and what was found there.
 *
 * Plain C without helpers, maps or a clock (types.h). Every header is addressed from the start of
 * the packet by an offset of bounded range, so that the verifier merges states that differ only in
 * the offset.
 */
#pragma once

#include <stddef.h>

#include <linux/if_ether.h>

#include "types.h"

/* Bytes, all ones: headers beyond are not parsed. */
#define FLOW_REACH 0x1fff

/* The parser's position. off never exceeds end. */
struct flow_cursor {
	const void *data;
	const void *data_end; /* of the linear part */
	__u64 off;
	__u64 end; /* of the packet, by the innermost length field */
};

/* The source of the key, unless inner headers replace it. */
struct flow_found {
	__u64 network; /* offset of the IP header */
	__u16 type;    /* ETH_P_IP or ETH_P_IPV6 */
	__u8 proto;
	__u8 fragment;
	__u8 has_ports;
	__be32 id; /* ports or SPI or 0 */
};

/*
 * The next size bytes, or NULL if the packet has fewer.
 *
 * The new offset is the difference of two pointers, of which the verifier knows no range. The
 * offsets before a header then have one range, and all paths to the header are one state; without
 * that a million instructions are not enough. The barriers keep the compiler from computing pointer
 * and offset from each other.
 */
static __always_inline const void *flow_take(struct flow_cursor *c, __u64 size)
{
	__u64 off = c->off, reach = FLOW_REACH;
	const char *header;

	if (off > FLOW_REACH || off + size > c->end)
		return NULL;
	/* Changes nothing: the compiler may compare one copy of off and add another one, of which
	 * the verifier of 6.1 then knows no range. */
	asm("" : "+r"(reach));
	off &= reach;
	header = (const char *)c->data + off;
	asm("" : "+r"(header));
	if (header + size > (const char *)c->data_end)
		return NULL;
	c->off = header + size - (const char *)c->data;
	asm("" : "+r"(c->off));
	return header;
}

static __always_inline enum flow_result flow_skip(struct flow_cursor *c, __u64 size)
{
	if (size > c->end - c->off)
		return FLOW_TRUNCATED;
	c->off += size;
	return FLOW_KEYED;
}

/* Applies a length field: the packet ends size bytes after start, no later than known so far. */
static __always_inline enum flow_result flow_narrow(struct flow_cursor *c, __u64 start, __u64 size)
{
	if (start + size < c->off || start + size > c->end)
		return FLOW_TRUNCATED;
	c->end = start + size;
	return FLOW_KEYED;
}

/* Whether IP follows, and its version: after MPLS and GTP-U, which have no field for that. */
static __always_inline enum flow_result flow_nibble(struct flow_cursor *c, __u16 *type)
{
	const __u8 *first = flow_take(c, sizeof(*first));

	if (!first)
		return FLOW_TRUNCATED;
	c->off -= sizeof(*first);
	switch (*first >> 4) {
	case 4:
		*type = ETH_P_IP;
		return FLOW_KEYED;
	case 6:
		*type = ETH_P_IPV6;
		return FLOW_KEYED;
	}
	return FLOW_UNKNOWN;
}
