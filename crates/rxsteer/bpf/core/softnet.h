/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * softnet.h: the rule of order for the kernel's own hop, from a CPU that receives to the softnet
 * backlog of another CPU, or of itself (enqueue_to_backlog() and process_backlog() in
 * net/core/dev.c; docs/order.md).
 *
 * The kernel counts what enters each softnet backlog (input_queue_tail) and, a part at a time, what
 * it has passed up (input_queue_head); both wrap. The program runs before its packet enters, so it
 * does not know the packet's own tail. But a tail that this CPU reads later covers the packet: a
 * CPU puts one after the other, with softirqs off.
 *
 * Plain C without helpers, maps or a clock (types.h).
 */
#pragma once

#include <stdbool.h>

#include "backlog.h"
#include "types.h"

/* A packet is going to enter; `tail` has just been read. */
static __always_inline void softnet_enter(struct softnet_way *w, __u32 tail)
{
	__u64 before;

	w->tails[(w->nr + 1) % SOFTNET_TAILS] = tail;
	/* Another CPU that sees the number sees the tail too, on arm64 as well. */
	before = __sync_fetch_and_add(&w->nr, 1);
	asm volatile("" : : "r"(before));
}

/* Whether packet number `nr` has entered the softnet backlog for certain: a later one is going to.
 */
static __always_inline bool softnet_entered(const struct softnet_way *w, __u64 nr)
{
	return *(const volatile __u64 *)&w->nr > nr;
}

/*
 * Whether packet number `nr`, its low bits at least, which has entered, and all before it have been
 * passed up. `tail` was read before `head`. With the tail of the next packet, or of a later one
 * that has replaced it: each covers this packet.
 */
static __always_inline bool softnet_passed(struct softnet_way *w, __u64 nr, __u32 tail, __u32 head)
{
	/* Ordered: a later packet's tail is written before its number. */
	if ((__u8)backlog_read_ordered(&w->nr) != (__u8)nr)
		tail = *(const volatile __u32 *)&w->tails[(nr + 1) % SOFTNET_TAILS];
	return (__s32)(head - tail) >= 0;
}

/*
 * INLINE is the poll that received the packet, and without NAPI the softnet backlog of that CPU. So
 * a flow's last_qtail has both: the number of the poll, and the low bits of the packet's number.
 */
static __always_inline __u64 softnet_inline(__u64 poll, __u64 nr)
{
	return poll << 8 | (__u8)nr;
}

static __always_inline __u64 softnet_poll(__u64 last_qtail)
{
	return last_qtail >> 8;
}
