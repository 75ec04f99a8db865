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
/* Whether the state of the backlog's kthread is exactly TASK_INTERRUPTIBLE, and whether the kthread
 * is off the run queue; false while the kthread is unknown. */
static bool backlog_interruptible(const struct backlog *b);
static bool backlog_off_rq(const struct backlog *b);

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

/* Frames that have left the ring, or never came there. The kthread writes the cache line of
 * `dequeued`. */
static __always_inline __u64 backlog_gone(const struct backlog *b)
{
	return backlog_read(b->dequeued) + b->nr_lost + backlog_read(b->nr_vanished);
}

/* Softirq mode: of the first `entered` packets all have been passed up or have vanished. Several
 * CPUs may say so at once. */
static __always_inline void backlog_vanished(struct backlog *b, __u64 entered)
{
	__u64 vanished = backlog_read(b->nr_vanished);
	__u64 gone = backlog_read_ordered(&b->dequeued) + backlog_read(b->nr_lost) + vanished;

	if (gone < entered)
		__sync_val_compare_and_swap(&b->nr_vanished, vanished, vanished + entered - gone);
}

/* Whether a frame may enter. backlog_gone() is called
 * only when `tail` has reached the limit computed from the last read. */
static __always_inline enum backlog_room backlog_room(struct backlog *b)
{
	__u64 limit = backlog_limit_of();
	__u64 gone;

	if (likely(b->tail < b->tail_limit))
		return BACKLOG_OPEN;
	gone = backlog_gone(b);
	b->tail_limit = gone + (limit + 1) / 2;
	if (b->tail < b->tail_limit)
		return BACKLOG_OPEN;
	return b->tail < gone + limit ? BACKLOG_CROWDED : BACKLOG_FULL;
}

/* Whether more than half of the limit is queued. */
static __always_inline bool backlog_crowded(const struct backlog *b)
{
	return b->tail - backlog_gone(b) > backlog_limit_of() / 2;
}

/* Whether it is closed to large flows (BACKLOG_CROWDED), or about to be: they may have to wait. */
static __always_inline bool backlog_half(const struct backlog *b)
{
	return b->tail - backlog_gone(b) >= backlog_limit_of() / 2;
}

/* Frames in the ring or already dequeued, and those in the bulk queue. The kernel reports lost
 * frames later, mostly when it flushes the bulk queue; the count then decreases by that number. */
static __always_inline __u64 backlog_entered(const struct backlog *b)
{
	return b->tail - b->nr_lost;
}

/* Whether all frames that were dequeued have been passed up; `in_loop` was read before. */
static __always_inline bool backlog_sleeping(const struct backlog *b, bool in_loop)
{
	/* No batch yet: no frame has been dequeued, so those that entered have been lost. */
	if (!backlog_read(b->kthread))
		return true;
	/*
	 * A new kthread sets TASK_INTERRUPTIBLE once before its loop, and delivers frames in that
	 * state until it first sleeps. Therefore the state alone proves nothing until a batch has
	 * been seen in TASK_RUNNING (in_loop); until then the kthread also has to be off the run
	 * queue, where it can't deliver.
	 */
	return backlog_interruptible(b) && (in_loop || backlog_off_rq(b));
}

/*
 * Proof "asleep": every frame has been dequeued, lost or has vanished, and after that read the
 * kthread's state is TASK_INTERRUPTIBLE. In its loop, cpu_map_kthread_run() (kernel/bpf/cpumap.c)
 * sets this state only after it has passed up all frames dequeued, those in GRO's lists included.
 *
 * User space runs this too, while frames arrive and the kthread wakes up. Therefore nr_lost is read
 * before tail (a later loss subtracted from an earlier tail would count too few frames), and
 * in_loop before the state.
 */
static __always_inline bool backlog_asleep(struct backlog *b)
{
	bool in_loop = backlog_read(b->in_loop);
	__u64 entered, lost, vanished;

	if (backlog_read(b->tail) != backlog_gone(b))
		return false;
	vanished = backlog_read(b->nr_vanished);
	lost = backlog_read_ordered(&b->nr_lost);
	entered = backlog_read(b->tail) - lost;
	if (backlog_read_ordered(&b->dequeued) + vanished != entered ||
	    !backlog_sleeping(b, in_loop))
		return false;
	/* What follows sees what was written for the delivered frames, on arm64 too. */
	backlog_read_ordered(&b->dequeued);
	b->head_asleep = entered;
	return true;
}

/*
 * Proof "blocked", which also finds frames that vanished: a driver may drop a frame between the
 * program's XDP_REDIRECT and xdp_do_redirect(), and no tracepoint reports this. `flushed` is `tail`
 * as of polls that have ended: these frames are in the ring, and the kthread has been woken after
 * they came there. If the kthread is blocked after that, it has seen the ring empty since, and has
 * passed up all frames.
 *
 * Of `flushed`, what has not been dequeued or lost has vanished. Later losses and dequeued frames
 * are subtracted too, so nr_vanished is a lower bound, which is all that the proofs need: the owner
 * and user space may both write it.
 */
static __always_inline bool backlog_settle(struct backlog *b, __u64 flushed)
{
	__u64 dequeued;
	__s64 entered;

	if (!backlog_interruptible(b) || !backlog_off_rq(b))
		return false;
	dequeued = backlog_read_ordered(&b->dequeued);
	/* Less than zero if later frames have been lost. */
	entered = (__s64)(flushed - backlog_read(b->nr_lost));
	if (entered > (__s64)backlog_read(b->head_asleep))
		b->head_asleep = entered;
	if (entered > (__s64)(dequeued + backlog_read(b->nr_vanished)))
		b->nr_vanished = entered - dequeued;
	return true;
}

/*
 * Whether all frames counted in last_qtail have been delivered. `head` has no frames that vanished,
 * last_qtail has: those counted in nr_vanished entered before the frames that last_qtail waits for,
 * or the proof that counted them has covered last_qtail. The kthread writes `head` after an
 * ordered atomic, and an ordered read follows here: the CPU that processes the flow's next frame
 * sees all writes of the kthread for the delivered frames, without a lock.
 */
static __always_inline bool backlog_delivered(struct backlog *b, __u64 last_qtail)
{
	__u64 head = backlog_read(b->head) + backlog_read(b->nr_vanished);

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
