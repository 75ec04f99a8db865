/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * backlog.h: which frames may enter a backlog, and the proofs that its frames have been delivered
 * (docs/order.md).
 *
 * Plain C without helpers, maps or a clock (types.h); inputs come through the functions declared
 * below, as in steer.h.
 */
#pragma once

#include <stdbool.h>

#include "types.h"

/* Limit of frames in a backlog: ring size - 16 (docs/backlog.md). */
static __u64 backlog_limit_of(void);
/* Whether the backlog's kthread sleeps, by its state; `in_loop` was read before. */
static bool backlog_sleeping(const struct backlog *b, bool in_loop);

/* NAPI_POLL_WEIGHT: a cpumap's kthread flushes GRO after this number of frames, or when its ring is
 * empty (kernel/bpf/cpumap.c). */
#define BACKLOG_FLUSH 64

#define backlog_read(field) (*(const volatile __u64 *)&(field))

/* A fully ordered read. On every architecture an atomic that returns a value is fully ordered; an
 * atomic with an unused result is not, nor is a plain read on arm64. */
static __always_inline __u64 backlog_read_ordered(__u64 *field)
{
	__u64 value = __sync_fetch_and_add(field, 0);

	asm volatile("" : : "r"(value));
	return value;
}

enum backlog_room {
	BACKLOG_OPEN,
	BACKLOG_CROWDED, /* half full: not open to large flows */
	BACKLOG_FULL,
};

/* Whether a frame may enter. The kthread writes the cache line of `dequeued`, so `dequeued` is read
 * only when `tail` has reached the limit computed from the last read. */
static __always_inline enum backlog_room backlog_room(struct backlog *b)
{
	__u64 limit = backlog_limit_of();
	__u64 dequeued;

	if (likely(b->tail < b->tail_limit))
		return BACKLOG_OPEN;
	dequeued = backlog_read(b->dequeued) + b->nr_lost;
	b->tail_limit = dequeued + (limit + 1) / 2;
	if (b->tail < b->tail_limit)
		return BACKLOG_OPEN;
	return b->tail < dequeued + limit ? BACKLOG_CROWDED : BACKLOG_FULL;
}

/* Whether more than half of the limit is queued. */
static __always_inline bool backlog_crowded(const struct backlog *b)
{
	__u64 queued = b->tail - b->nr_lost - backlog_read(b->dequeued);

	return queued > backlog_limit_of() / 2;
}

/* Frames in the ring or already dequeued, and those in the bulk queue. The kernel reports lost
 * frames later, mostly when it flushes the bulk queue; the count then decreases by that number. */
static __always_inline __u64 backlog_entered(const struct backlog *b)
{
	return b->tail - b->nr_lost;
}

/*
 * Proof "asleep": every frame has been dequeued or lost, and after that read the kthread's state is
 * TASK_INTERRUPTIBLE. In its loop, cpu_map_kthread_run() (kernel/bpf/cpumap.c) sets this state only
 * after it has passed up all frames dequeued, those in GRO's lists included.
 *
 * User space runs this too, while frames arrive and the kthread wakes up. Therefore nr_lost is read
 * before tail (a later loss subtracted from an earlier tail would count too few frames), and
 * in_loop before the state.
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
 * Whether all frames counted in last_qtail have been delivered. The kthread writes `head` after an
 * ordered atomic, and an ordered read follows here: the CPU that processes the flow's next frame
 * sees all writes of the kthread for the delivered frames, without a lock.
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
 * Proof "GRO old", for a kthread that never sleeps, with a GRO that is never empty because flushes
 * spare the packets of the present jiffy (HZ >= 1000). Frames dequeued up to jiffy j are old from
 * jiffy j + 1 on, and the first flush after that delivers them.
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
 * Counts a batch of n frames dequeued from the ring. Runs on the kthread; since 6.12 before the
 * batch is passed up.
 *
 * Proof "GRO empty": all frames dequeued before this batch have been passed up, except those in
 * GRO's lists. The atomic on `dequeued` orders their delivery before the store to `head`.
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
