/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * wait.h: how long frames wait in a backlog, by samples: one frame in WAIT_EVERY is measured, from
 * its redirect until it is dequeued.
 *
 * The queue's NAPI owner begins a sample, and whatever empties the backlog ends it. A backlog has
 * one sample at a time: a frame that is due while another is measured is left out. Each side writes
 * lines of its own and changes its counter last, by an ordered atomic, so that neither reads a
 * sample that is half written, nor replaces one that has not been read.
 *
 * Plain C without helpers, maps or a clock (types.h).
 */
#pragma once

#include <stdbool.h>

#include "backlog.h"
#include "types.h"

/* Whether frame `number`, the low bits of `tail` with it, is one with which samples begin. */
static __always_inline bool wait_is_sampled(__u32 number)
{
	return !((number - 1) & (WAIT_EVERY - 1));
}

/* Whether to begin a sample with the frame that enters next. */
static __always_inline bool wait_is_due(const struct backlog *b)
{
	return wait_is_sampled(b->tail + 1);
}

static __always_inline bool wait_is_pending(const struct backlog_wait *w)
{
	return backlog_read(w->nr_begun) != backlog_read(w->nr_ended);
}

static __always_inline __u64 wait_losses(const struct backlog *b)
{
	return backlog_read(b->nr_lost) + backlog_read(b->nr_vanished);
}

/* Begins a sample with the frame that enters next, at `now`, in ns. */
static __always_inline void wait_begin(struct backlog_wait *w, const struct backlog *b, __u64 now)
{
	__u64 begun;

	w->losses = wait_losses(b);
	w->number = b->tail - w->losses;
	w->since = now;
	begun = __sync_fetch_and_add(&w->nr_begun, 1);
	asm volatile("" : : "r"(begun));
}

/* Whether the frame of a pending sample has been dequeued. wait_is_pending() was true before
 * backlog_dequeue(), which orders that read before these. */
static __always_inline bool wait_is_over(const struct backlog_wait *w, const struct backlog *b)
{
	return b->dequeued > backlog_read(w->number);
}

/* The bucket of a time in ns: bucket i is below 2^(i + 1) us, the last one has no bound. */
static __always_inline __u32 wait_bucket(__u64 ns)
{
	__u64 us = ns / 1000;
	__u32 bucket = 0;

	while (bucket < WAIT_BUCKETS - 1 && us >> (bucket + 1))
		bucket++;
	return bucket;
}

/*
 * Ends the sample, at `now`. If frames have been lost since it began, the sample is left out:
 * frames before it, or itself, may not have come into the ring, and later ones were counted
 * instead.
 */
static __always_inline void wait_end(struct backlog_wait *w, const struct backlog *b, __u64 now)
{
	__u64 since = backlog_read(w->since), ended;

	if (wait_losses(b) != backlog_read(w->losses)) {
		w->nr_left_out++;
	} else {
		/* Clocks of two CPUs may differ by a little. */
		__u64 ns = now > since ? now - since : 0;

		w->ns += ns;
		w->nr[wait_bucket(ns)]++;
	}
	ended = __sync_fetch_and_add(&w->nr_ended, 1);
	asm volatile("" : : "r"(ended));
}
