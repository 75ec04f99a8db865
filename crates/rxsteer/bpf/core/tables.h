/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * tables.h: which entries of the flow tables belong to a hash, and the format of their values.
 *
 * Plain C without helpers, maps or a clock (types.h), and without the functions of env.h: user
 * space reads the tables with the same functions (native.c).
 */
#pragma once

#include <stdbool.h>

#include "types.h"

/* The RPS location of a flow: the top bits of its hash select the slot. */
static __always_inline __u32 rps_location_of(const struct rps_map *map, __u32 hash)
{
	return map->location[hash >> (32 - RPS_MAP_ORDER)];
}

/*
 * The slot of the flow in its queue's dev_flow_table, by the top bits of the hash like the slot of
 * the rps_map: flows that share a slot want the same location by RPS if the table has at least
 * RPS_MAP_SLOTS slots. By other bits, two flows of one slot could move each other with every
 * packet. The slots of all queues are consecutive; `shift` is 32 - log2(rps_flow_cnt).
 */
static __always_inline __u32 flow_slot(__u32 queue, __u32 hash, __u32 shift)
{
	return (queue << (32 - shift)) + (__u32)((__u64)hash >> shift);
}

/* The same in a table that several devices share (softirq mode): a flow that passes two of them, as
 * through a bridge, has two slots. The factor is 2^32 by the golden ratio. */
static __always_inline __u32 flow_shared_slot(__u32 queue, __u32 ifindex, __u32 hash, __u32 shift)
{
	return flow_slot(queue, hash + ifindex * 0x9e3779b1, shift);
}

/* The bit of an entry, above those of the CPU, that marks the flow of a datagram to an unconnected
 * socket. */
static __always_inline __u32 sock_flow_peer(__u32 cpu_mask)
{
	return cpu_mask + 1;
}

/*
 * The sock_flow_table is indexed by the low bits of the hash, and an entry holds the upper ones: as
 * in the kernel, a flow that finds another flow's entry has no CPU instead of a wrong one.
 * `cpu_mask` covers the numbers 0 to nr_cpus + 1: all of its bits stand for RPS_INLINE, and 0,
 * which is RPS_NO_CPU + 1 in 16 bits, for RPS_NO_CPU: the entry of a closed socket.
 */
static __always_inline __u32 sock_flow_entry(__u32 hash, __u16 location, __u32 cpu_mask)
{
	return (hash & ~(cpu_mask | sock_flow_peer(cpu_mask))) |
	       (location == RPS_INLINE ? cpu_mask : (__u16)(location + 1));
}

/* The CPU where the flow's application was last seen; RPS_INLINE if the application polls; or
 * RPS_NO_CPU. */
static __always_inline __u32 sock_flow_location(__u32 entry, __u32 hash, __u32 cpu_mask)
{
	__u32 cpu = entry & cpu_mask;

	if (!cpu || (entry ^ hash) & ~(cpu_mask | sock_flow_peer(cpu_mask)))
		return RPS_NO_CPU;
	return cpu == cpu_mask ? RPS_INLINE : cpu - 1;
}

/* Whether the entry is that of a connected socket in use. Anybody can make up the sender of a
 * datagram to an unconnected socket, and so choose the entry: such a flow does not replace one of
 * these, but for one datagram in SOCK_FLOW_AGES. */
static __always_inline bool sock_flow_is_connected(__u32 entry, __u32 cpu_mask)
{
	return entry & cpu_mask && !(entry & sock_flow_peer(cpu_mask));
}

/* The present poll on `cpu`, as a value that no other poll has, and never zero. NAPI polls don't
 * nest on a CPU: between two frames of a queue with different values, a poll has ended. */
static __always_inline __u64 poll_stamp(__u16 cpu, __u64 nr_polls)
{
	return ((__u64)cpu << 48 | (nr_polls & ((1ULL << 48) - 1))) + 1;
}

/* The CPU of a poll's stamp. */
static __always_inline __u16 poll_stamp_cpu(__u64 stamp)
{
	return (stamp - 1) >> 48;
}
