/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Everything the two sides share: user space gets these types from the
 * object's BTF (the generated skeleton), never from a copy.
 *
 * Plain C: compiled for the kernel, for the native tests and for the simulator.
 */
#pragma once

#include <linux/types.h>

#ifndef __always_inline
#define __always_inline inline __attribute__((always_inline))
#endif
#ifndef likely
#define likely(x)   __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
#endif

/* ---- flow keys (flow.h) ------------------------------------------------- */

/*
 * What makes two packets one flow; without padding, as keys are hashed and compared
 * as words. Addresses are in network order; an IPv4
 * address is written as its v4-mapped IPv6 address, so that a v4-mapped socket
 * and the packets it receives have one key.
 *
 * Protocols with ports leave daddr zero: a socket bound to the wildcard address
 * can't know the local address of its datagrams (docs/hash.md).
 */
struct flow_key {
	__be32 saddr[4];
	__be32 daddr[4];
	__be32 ports; /* source port, destination port; or the SPI; or 0 */
	__u32 proto;  /* IPPROTO_*; IPPROTO_FRAGMENT for every IPv6 fragment */
};

/* Why a packet has, or has no, key. Counted per queue: nr_no_flow[]. */
enum flow_result {
	FLOW_KEYED = 0,
	FLOW_TRUNCATED, /* a header ends outside the packet, or lies about it */
	FLOW_UNKNOWN,	/* not IP, or more headers than the parser follows */
	NR_FLOW_RESULTS,
};

/* Tunnels whose inner flow is the key, when asked for (`--tunnels`). */
enum flow_tunnel {
	FLOW_TUNNEL_IPIP = 1 << 0, /* IPIP, 6in4, 4in6, ip6ip6 */
	FLOW_TUNNEL_GRE = 1 << 1,
	FLOW_TUNNEL_VXLAN = 1 << 2,  /* UDP 4789, and 8472 as Linux had it first */
	FLOW_TUNNEL_GENEVE = 1 << 3, /* UDP 6081 */
	FLOW_TUNNEL_GTPU = 1 << 4,   /* UDP 2152 */
};

/*
 * The secret of the flow hash, drawn once per start: one 64-bit multiplier per
 * 32-bit word of the key, and one addend. Nobody outside can aim at one CPU.
 */
#define FLOW_KEY_WORDS (sizeof(struct flow_key) / sizeof(__u32))
struct flow_secret {
	__u64 addend;
	__u64 multiplier[10]; /* FLOW_KEY_WORDS */
};
_Static_assert(FLOW_KEY_WORDS == 10, "one multiplier per word of the key");
