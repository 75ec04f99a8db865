/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * steer.h: from a flow's hash to the location where its packet is processed.
 *
 * Plain C without helpers, maps or a clock (types.h). What has to be looked up in
 * the kernel arrives as an argument.
 */
#pragma once

#include <stdbool.h>

#include "types.h"

/*
 * Where RPS wants the flow: the top bits of the hash choose. The polling CPU itself is INLINE: no
 * hop to where the packet already is.
 */
static __always_inline __u16 rps_wanted(const struct rps_map *map, __u32 hash, __u16 polling_cpu)
{
	__u16 wanted = map->location[hash >> (32 - RPS_MAP_ORDER)];

	return wanted == polling_cpu ? RPS_INLINE : wanted;
}

/*
 * The slot of the flow in its queue's dev_flow_table: the top bits again, and more
 * of them, so that flows that share a slot share what RPS wants for them. By other
 * bits, two flows of one slot could send each other to and fro with every packet.
 */
static __always_inline __u32 flow_slot(__u32 hash, __u32 shift)
{
	return (__u64)hash >> shift;
}

/* The flow's location now, or RPS_NO_CPU. */
static __always_inline __u16 flow_location(const struct rps_dev_flow *flow, __u16 epoch)
{
	return flow->epoch == epoch ? flow->location : RPS_NO_CPU;
}

/*
 * The poll in progress on `cpu`, as a value that no other poll has, and never
 * zero. NAPI polls don't nest on a CPU, so two frames with different stamps have
 * the end of a poll between them.
 */
static __always_inline __u64 poll_stamp(__u16 cpu, __u64 nr_polls)
{
	return ((__u64)cpu << 48 | (nr_polls & ((1ULL << 48) - 1))) + 1;
}

/*
 * The rule of order (docs/order.md): a flow changes location only when every
 * earlier packet of it has been delivered to the stack. Staying is always safe.
 *
 * INLINE: a poll has ended since the flow's last frame, and the NAPI's GRO lists
 * are empty.
 */
static __always_inline bool inline_delivered(__u64 last_stamp, __u64 stamp, bool gro_empty)
{
	return last_stamp != stamp && gro_empty;
}

/* A backlog: its head has reached the tail as it was after the flow's last frame. */
static __always_inline bool backlog_delivered(__u64 head, __u64 last_qtail)
{
	return head >= last_qtail;
}

static __always_inline void flow_set(struct rps_dev_flow *flow, __u16 epoch, __u16 location,
				     __u64 last_qtail)
{
	flow->last_qtail = last_qtail;
	flow->location = location;
	flow->epoch = epoch;
}
