/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * tables.h: what the tables of flows say about a hash, and what their values mean.
 *
 * Plain C without helpers, maps or a clock (types.h), and it asks nobody: user space reads the
 * tables by the same functions (native.c).
 */
#pragma once

#include "types.h"

/* The RPS location of a flow: the top bits of its hash choose. */
static __always_inline __u16 rps_location_of(const struct rps_map *map, __u32 hash)
{
	return map->location[hash >> (32 - RPS_MAP_ORDER)];
}

/*
 * The slot of the flow in its queue's dev_flow_table: the top bits again, and more
 * of them, so that flows that share a slot share what RPS wants for them. By other
 * bits, two flows of one slot could send each other to and fro with every packet.
 * The tables of all queues lie one behind the other; `shift` is 32 - log2(rps_flow_cnt).
 */
static __always_inline __u32 flow_slot(__u32 queue, __u32 hash, __u32 shift)
{
	return (queue << (32 - shift)) + (__u32)((__u64)hash >> shift);
}

/*
 * The sock_flow_table is indexed by the low bits of the hash, and an entry holds the upper ones:
 * as in the kernel, a flow that meets another's entry finds no CPU rather than a wrong one.
 * `cpu_mask` covers the numbers 0 to nr_cpus + 1; all of its bits stand for RPS_INLINE, none for
 * RPS_NO_CPU, whose number + 1 is 0 in 16 bits: the entry of a closed socket.
 */
static __always_inline __u32 sock_flow_entry(__u32 hash, __u16 location, __u32 cpu_mask)
{
	return (hash & ~cpu_mask) | (location == RPS_INLINE ? cpu_mask : (__u16)(location + 1));
}

/* The CPU where the flow's application was last seen; RPS_INLINE if it polls; or RPS_NO_CPU. */
static __always_inline __u16 sock_flow_location(__u32 entry, __u32 hash, __u32 cpu_mask)
{
	__u32 cpu = entry & cpu_mask;

	if (!cpu || (entry ^ hash) & ~cpu_mask)
		return RPS_NO_CPU;
	return cpu == cpu_mask ? RPS_INLINE : cpu - 1;
}

/*
 * The poll in progress on `cpu`, as a value that no other poll has, and never
 * zero. NAPI polls don't nest on a CPU, so two frames of a queue with different values
 * have the end of a poll between them.
 */
static __always_inline __u64 poll_stamp(__u16 cpu, __u64 nr_polls)
{
	return ((__u64)cpu << 48 | (nr_polls & ((1ULL << 48) - 1))) + 1;
}

/* The CPU of such a stamp. */
static __always_inline __u16 poll_stamp_cpu(__u64 stamp)
{
	return (stamp - 1) >> 48;
}
