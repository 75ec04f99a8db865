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
/* Whether the state of the backlog's kthread is that of one that sleeps. */
static bool backlog_sleeping(const struct backlog *b);

/* NAPI_POLL_WEIGHT: a cpumap's kthread flushes GRO after so many frames, or when its ring is empty
 * (kernel/bpf/cpumap.c). */
#define BACKLOG_FLUSH 64

#define backlog_read(field) (*(const volatile __u64 *)&(field))

/*
 * Whether no frame may enter. `taken` is the kthread's cache line, so it is read
 * only when the frames seen to have room are used up.
 */
static __always_inline bool backlog_full(struct backlog *b)
{
	if (likely(b->tail < b->tail_limit))
		return false;
	b->tail_limit = backlog_read(b->taken) + b->nr_lost + backlog_limit_of();
	return b->tail >= b->tail_limit;
}

/*
 * Proof "asleep": every frame has been taken or lost, read first, and then the
 * kthread has set itself to sleep. It does so only after passing up, GRO lists
 * included, what it took (kernel/bpf/cpumap.c, cpu_map_kthread_run). The plain
 * read filters; the atomic one orders (on arm64 plain reads are not ordered).
 */
static __always_inline bool backlog_asleep(struct backlog *b, __u64 tail)
{
	__u64 entered = tail - backlog_read(b->nr_lost);

	if (backlog_read(b->taken) != entered || __sync_fetch_and_add(&b->taken, 0) != entered)
		return false;
	return backlog_sleeping(b);
}

/*
 * Frames of the backlog known to be delivered; proves more if that falls short of
 * `enough`. It counts what was taken: after losses it trails the tail's count, which
 * has them, until the kthread sleeps.
 */
static __always_inline __u64 backlog_head(struct backlog *b, __u64 enough)
{
	__u64 head = backlog_read(b->head);
	__u64 tail = backlog_read(b->tail);

	if (head < b->head_asleep)
		head = b->head_asleep;
	if (head < enough && backlog_asleep(b, tail))
		head = b->head_asleep = tail;
	return head;
}

/*
 * Proof "GRO old", for a kthread that never sleeps and whose GRO is never empty because its
 * flushes spare the packets of the present jiffy (HZ >= 1000): what was taken before jiffy j is
 * old from j + 1 on, and gone with the first flush after that.
 */
static __always_inline void backlog_age_gro(struct backlog *b, __u64 before, __u64 jiffies)
{
	if (!b->old_taken) {
		b->old_taken = before;
		b->old_jiffies = jiffies;
		b->old_flush = 0;
	} else if (!b->old_flush) {
		if (jiffies != b->old_jiffies)
			b->old_flush = before + BACKLOG_FLUSH;
	} else if (before >= b->old_flush) {
		b->head = b->old_taken;
		b->old_taken = 0;
	}
}

/*
 * A batch of n frames has been taken off the ring; on the kthread itself, and since 6.12
 * before the batch is passed up.
 *
 * Proof "GRO empty": whatever was taken before this batch has gone up, unless GRO
 * still holds some of it. `taken` is counted by an atomic that orders all of that before `head`.
 */
static __always_inline void backlog_take(struct backlog *b, __u32 n, bool gro_empty, __u64 jiffies)
{
	__u64 before = __sync_fetch_and_add(&b->taken, n);

	if (likely(gro_empty)) {
		b->head = before;
		b->old_taken = 0;
	} else {
		backlog_age_gro(b, before, jiffies);
	}
}
