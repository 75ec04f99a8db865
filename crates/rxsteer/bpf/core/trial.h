/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * trial.h: whether it helps that flows move (docs/policy.md).
 *
 * What a hop costs the application, and whether the other CPU's time was really free, is not known
 * before a flow has moved. So moving is a question, and what has been delivered is the answer: the
 * bytes per time while flows move, against those while they stay INLINE. Time is cut into
 * stretches. A question has pairs of them: one in which flows do the opposite, and one in which
 * they do as before.
 *
 * Plain C without helpers, maps or a clock (types.h).
 */
#pragma once

#include <stdbool.h>

#include "types.h"

/* Windows at the beginning of a stretch in which flows still move over, and all of its windows. */
#define TRIAL_SETTLE  2
#define TRIAL_WINDOWS 6

/*
 * Moving wins a pair if it delivers 1/32 more. A question ends when one side has won so many pairs
 * more than the other, at the latest after TRIAL_PAIRS: loads vary by more than what moving gains,
 * and single pairs say little. Flows move only if moving has won.
 */
#define TRIAL_LEAD    3
#define TRIAL_PAIRS   9
#define TRIAL_DIFFERS 32

/* The first stretch needs no question if it differs by this part from what was before. */
#define TRIAL_CLEAR 4

/* Stretches until the next question; twice as many after each answer that is as before. */
#define TRIAL_PAUSE	 32
#define TRIAL_PAUSE_MOST 1024

/* An answer is forgotten after so much time without load. */
#define TRIAL_FORGET_NS 1000000000ULL

/* Whether flows stay INLINE in the present stretch. */
static __always_inline bool trial_stays(const struct rx_trial *t)
{
	return (t->stay ^ t->asks) & 1;
}

static __always_inline void trial_unlock(struct rx_trial *t)
{
	__u32 before = __sync_lock_test_and_set(&t->lock, 0);

	asm volatile("" : : "r"(before));
}

/* A window of a queue has ended, under load or not, in which so many of its packets went elsewhere.
 */
static __always_inline void trial_note(struct rx_trial *t, bool loaded, __u64 elsewhere, __u64 now)
{
	if (loaded || elsewhere)
		t->loaded_at = now;
	if (elsewhere)
		t->moved_at = now;
}

/* Whether the window is over, and nobody else ends it. The caller has the lock then. */
static __always_inline bool trial_is_over(struct rx_trial *t, __u64 now)
{
	if ((__s64)(now - *(volatile __u64 *)&t->window_start) < (__s64)LOAD_WINDOW_NS)
		return false;
	if (__sync_lock_test_and_set(&t->lock, 1))
		return false;
	if ((__s64)(now - *(volatile __u64 *)&t->window_start) >= (__s64)LOAD_WINDOW_NS)
		return true;
	trial_unlock(t);
	return false;
}

/* Counts from here on. */
static __always_inline void trial_mark(struct rx_trial *t, const struct rx_delivered *sum,
				       __u64 now)
{
	t->since = now;
	t->before = *sum;
}

/* Bytes per 2^20 ns that were delivered since then. A packet that found a socket full was not
 * delivered; its bytes are the average. */
static __always_inline __u64 trial_rate(const struct rx_trial *t, const struct rx_delivered *sum,
					__u64 now)
{
	__u64 bytes = sum->bytes - t->before.bytes;
	__u64 received = sum->nr_received - t->before.nr_received;
	__u64 refused = sum->nr_refused - t->before.nr_refused;

	if (refused >= received)
		return 0;
	bytes -= bytes * refused / received;
	return (bytes << 10) / (((now - t->since) >> 10) + 1);
}

/* Whether `more` exceeds `less` by one part of this many. */
static __always_inline bool trial_exceeds(__u64 more, __u64 less, __u32 part)
{
	return more > less + less / part;
}

/* Flows stay from now on, or move; by these rates. */
static __always_inline void trial_answer(struct rx_trial *t, bool stay, __u64 moving, __u64 staying,
					 __u64 now)
{
	if (t->stay != stay || t->pause < TRIAL_PAUSE)
		t->pause = TRIAL_PAUSE;
	else if (t->pause < TRIAL_PAUSE_MOST)
		t->pause *= 2;
	t->stay = stay;
	t->left = t->pause;
	t->asks = 0;
	t->moving = t->staying = 0;
	t->answered_at = now;
	t->answer_moving = moving;
	t->answer_staying = staying;
}

/* Stores what the queues delivered in a stretch. */
static __always_inline void trial_store(struct rx_trial *t, __u64 rate)
{
	if (trial_stays(t))
		t->staying = rate;
	else
		t->moving = rate;
}

/* A stretch of a question is over. */
static __always_inline void trial_asked(struct rx_trial *t, __u64 now)
{
	__u32 pairs = t->asks / 2;

	if (t->asks++ & 1)
		return;
	t->sum_moving += t->moving;
	t->sum_staying += t->staying;
	t->lead += trial_exceeds(t->moving, t->staying, TRIAL_DIFFERS) ? 1 : -1;
	if (t->lead < TRIAL_LEAD && t->lead > -TRIAL_LEAD && pairs < TRIAL_PAIRS)
		return;
	trial_answer(t, t->lead < TRIAL_LEAD, t->sum_moving / pairs, t->sum_staying / pairs, now);
}

/* A stretch without a question is over, before whose end the queues had these rates: asks if it is
 * time, or if the load is another one than in the stretch before. */
static __always_inline void trial_next(struct rx_trial *t, __u64 moving, __u64 staying, __u64 now)
{
	__u64 before = t->stay ? staying : moving;
	__u64 rate = t->stay ? t->staying : t->moving;

	if (before && (rate > 2 * before || 2 * rate < before))
		t->left = 0;
	if (t->left) {
		t->left--;
	} else if (!t->pause && rate >= staying + staying / TRIAL_CLEAR) {
		trial_answer(t, false, rate, staying, now);
	} else if (!t->pause && trial_exceeds(staying, rate, TRIAL_CLEAR)) {
		trial_answer(t, true, rate, staying, now);
	} else {
		t->sum_moving = t->sum_staying = 0;
		t->lead = 0;
		t->asks = 1;
	}
}

/* Nothing is under load. */
static __always_inline void trial_rest(struct rx_trial *t, __u64 now)
{
	t->asks = 0;
	t->windows = 0;
	if ((__s64)(now - t->loaded_at) <= (__s64)TRIAL_FORGET_NS)
		return;
	t->stay = 0;
	t->left = t->pause = 0;
	t->moving = t->staying = t->answered_at = 0;
}

/* Whether a queue noted this in the last two windows: windows of queues end at different times. */
static __always_inline bool trial_lately(__u64 noted_at, __u64 now)
{
	return noted_at && (__s64)(now - noted_at) < (__s64)(2 * LOAD_WINDOW_NS);
}

/* Ends a window, until whose end the queues had delivered `sum`. */
static __always_inline void trial_window(struct rx_trial *t, const struct rx_delivered *sum,
					 __u64 now)
{
	__u64 before_moving = t->moving, before_staying = t->staying;
	bool moved = trial_lately(t->moved_at, now);

	t->window_start = now;
	if (!trial_lately(t->loaded_at, now)) {
		trial_rest(t, now);
		trial_mark(t, sum, now);
		return;
	}
	if (!trial_stays(t) && !moved) {
		/* None has moved yet, or none can. */
		t->staying = trial_rate(t, sum, now);
		t->windows = 0;
		if (now - t->since >= TRIAL_WINDOWS * LOAD_WINDOW_NS)
			trial_mark(t, sum, now);
		return;
	}
	t->windows++;
	if (t->windows <= TRIAL_SETTLE)
		trial_mark(t, sum, now);
	if (t->windows < TRIAL_WINDOWS)
		return;
	trial_store(t, trial_rate(t, sum, now));
	if (t->asks)
		trial_asked(t, now);
	else
		trial_next(t, before_moving, before_staying, now);
	t->windows = 0;
	trial_mark(t, sum, now);
}
