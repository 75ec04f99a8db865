/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * backlog.h: what may enter a backlog, and the proofs that what entered has been delivered
 * (docs/order.md).
 *
 * Plain C without helpers, maps or a clock (types.h); asks through the functions declared below,
 * as steer.h does.
 */
#pragma once

#include <stdbool.h>

#include "types.h"

/* Frames a backlog may hold, at most (ring size - 16): docs/backlog.md. */
static __u64 backlog_limit_of(void);
/* Whether the state of the backlog's kthread is that of one that sleeps; `in_loop` as read before.
 */
static bool backlog_sleeping(const struct backlog *b, bool in_loop);

/* NAPI_POLL_WEIGHT: a cpumap's kthread flushes GRO after so many frames, or when its ring is empty
 * (kernel/bpf/cpumap.c). */
#define BACKLOG_FLUSH 64

#define backlog_read(field) (*(const volatile __u64 *)&(field))

/*
 * An atomic that returns a value is fully ordered on every architecture, one whose value nobody
 * uses is not; nor are plain reads on arm64.
 */
static __always_inline __u64 backlog_read_ordered(__u64 *field)
{
	__u64 value = __sync_fetch_and_add(field, 0);

	asm volatile("" : : "r"(value));
	return value;
}

enum backlog_room {
	BACKLOG_OPEN,
	BACKLOG_CROWDED, /* half full, and a flow limit is set: not open to large flows */
	BACKLOG_FULL,
};

/*
 * Whether a frame may enter. `dequeued` is the kthread's cache line, so it is read only when the
 * frames seen to have room are used up.
 */
static __always_inline enum backlog_room backlog_room(struct backlog *b, bool flow_limit)
{
	__u64 limit = backlog_limit_of();
	__u64 dequeued;

	if (likely(b->tail < b->tail_limit))
		return BACKLOG_OPEN;
	dequeued = backlog_read(b->dequeued) + b->nr_lost;
	b->tail_limit = dequeued + (flow_limit ? (limit + 1) / 2 : limit);
	if (b->tail < b->tail_limit)
		return BACKLOG_OPEN;
	return b->tail < dequeued + limit ? BACKLOG_CROWDED : BACKLOG_FULL;
}

/* Whether more than half of what may wait does. */
static __always_inline bool backlog_crowded(const struct backlog *b)
{
	__u64 queued = b->tail - b->nr_lost - backlog_read(b->dequeued);

	return queued > backlog_limit_of() / 2;
}

/*
 * Frames that entered the ring, or will when the bulk queue is flushed. What the kernel loses is
 * found out only then: the count may go down again by as much.
 */
static __always_inline __u64 backlog_entered(const struct backlog *b)
{
	return b->tail - b->nr_lost;
}

/*
 * Proof "asleep": every frame has been dequeued or lost, read first, and then the
 * kthread has set itself to sleep. It does so only after passing up, GRO lists
 * included, what it took (kernel/bpf/cpumap.c, cpu_map_kthread_run). Then everything has been
 * delivered.
 *
 * User space asks too, while frames come and a kthread wakes up: so nr_lost is read before tail,
 * since later losses, subtracted from an earlier tail, would prove too much; and in_loop before the
 * state that it vouches for.
 */
static __always_inline bool backlog_asleep(struct backlog *b)
{
	bool in_loop = backlog_read(b->in_loop);
	__u64 entered, lost;

	if (backlog_read(b->dequeued) != backlog_read(b->tail) - backlog_read(b->nr_lost))
		return false;
	lost = backlog_read_ordered(&b->nr_lost);
	entered = backlog_read(b->tail) - lost;
	if (backlog_read_ordered(&b->dequeued) != entered || !backlog_sleeping(b, in_loop))
		return false;
	b->head_asleep = entered;
	return true;
}

/*
 * Whether what had entered when the count was last_qtail has been delivered. `head` was written
 * after an ordered atomic, and another stands between reading it and acting on it: whatever the
 * kthread delivered is seen by who comes next, with locks or without.
 */
static __always_inline bool backlog_delivered(struct backlog *b, __u64 last_qtail)
{
	__u64 head = backlog_read(b->head);

	if (head < b->head_asleep)
		head = b->head_asleep;
	if (head < last_qtail)
		return backlog_asleep(b);
	backlog_read_ordered(&b->dequeued);
	return true;
}

/*
 * Proof "GRO old", for a kthread that never sleeps and whose GRO is never empty because its
 * flushes spare the packets of the present jiffy (HZ >= 1000): what was dequeued before jiffy j is
 * old from j + 1 on, and gone with the first flush after that.
 */
static __always_inline void backlog_age_gro(struct backlog *b, __u64 before, __u64 jiffies)
{
	if (!b->old_dequeued) {
		b->old_dequeued = before;
		b->old_jiffies = jiffies;
		b->old_flush = 0;
	} else if (!b->old_flush) {
		if (jiffies != b->old_jiffies)
			b->old_flush = before + BACKLOG_FLUSH;
	} else if (before >= b->old_flush) {
		b->head = b->old_dequeued;
		b->old_dequeued = 0;
	}
}

/*
 * A batch of n frames has been dequeued from the ring; on the kthread itself, and since 6.12
 * before the batch is passed up.
 *
 * Proof "GRO empty": whatever was dequeued before this batch has gone up, unless GRO
 * still holds some of it. `dequeued` is counted by an atomic that orders all of that before `head`.
 */
static __always_inline void backlog_dequeue(struct backlog *b, __u32 n, bool gro_empty,
					    __u64 jiffies)
{
	__u64 before = __sync_fetch_and_add(&b->dequeued, n);

	if (likely(gro_empty)) {
		b->head = before;
		b->old_dequeued = 0;
	} else {
		backlog_age_gro(b, before, jiffies);
	}
}
