/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * trial.h: whether it helps that a queue's flows move (docs/policy.md).
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

/* A question ends after a pair with a difference of 1/4, after two with 1/8 and so on. After the
 * last pair 1/32 is a difference. */
#define TRIAL_PAIRS   4
#define TRIAL_CLEAR   4
#define TRIAL_DIFFERS 32

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

/* Counts from here on. */
static __always_inline void trial_mark(struct rx_queue *q, __u64 now)
{
	struct rx_trial *t = &q->trial;

	t->since = now;
	t->since_bytes = t->bytes;
	t->since_received = q->nr_received;
	t->since_refused = *(volatile __u64 *)&t->nr_refused;
}

/* Bytes per 2^20 ns that were delivered since then. A packet that found a socket full was not
 * delivered; its bytes are the average. */
static __always_inline __u64 trial_rate(const struct rx_queue *q, __u64 now)
{
	const struct rx_trial *t = &q->trial;
	__u64 bytes = t->bytes - t->since_bytes;
	__u64 received = q->nr_received - t->since_received;
	__u64 refused = *(const volatile __u64 *)&t->nr_refused - t->since_refused;

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

/* A question is over, in which the queue had these rates. */
static __always_inline void trial_answer(struct rx_trial *t, bool opposite, __u64 moving,
					 __u64 staying, __u64 now)
{
	if (opposite) {
		t->stay = !t->stay;
		t->pause = TRIAL_PAUSE;
	} else if (t->pause < TRIAL_PAUSE) {
		t->pause = TRIAL_PAUSE;
	} else if (t->pause < TRIAL_PAUSE_MOST) {
		t->pause *= 2;
	}
	t->left = t->pause;
	t->asks = 0;
	t->moving = t->staying = 0;
	t->answered_at = now;
	t->answer_moving = moving;
	t->answer_staying = staying;
}

/* A stretch of a question is over, in which the queue had `rate`. */
static __always_inline void trial_asked(struct rx_trial *t, __u64 rate, __u64 now)
{
	__u32 pairs = t->asks / 2;
	__u64 as_before, opposite;
	bool differs;

	if (trial_stays(t))
		t->sum_staying += rate;
	else
		t->sum_moving += rate;
	if (t->asks++ & 1)
		return;
	as_before = t->stay ? t->sum_staying : t->sum_moving;
	opposite = t->stay ? t->sum_moving : t->sum_staying;
	differs = trial_exceeds(opposite, as_before, TRIAL_CLEAR * pairs);
	if (pairs >= TRIAL_PAIRS)
		differs = trial_exceeds(opposite, as_before, TRIAL_DIFFERS);
	else if (!differs && !trial_exceeds(as_before, opposite, TRIAL_CLEAR * pairs))
		return;
	trial_answer(t, differs, t->sum_moving / pairs, t->sum_staying / pairs, now);
}

/* A stretch without a question is over: asks if it is time, or if the load is another one than in
 * the stretch before. The first question can wait if moving clearly delivers more, or less, than
 * the queue had before. */
static __always_inline void trial_next(struct rx_trial *t, __u64 rate, __u64 now)
{
	__u64 before = t->stay ? t->staying : t->moving;
	__u64 staying = t->staying;

	if (t->stay)
		t->staying = rate;
	else
		t->moving = rate;
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
		t->asks = 1;
	}
}

/* A window without load, or of which an application's polls are the reason. */
static __always_inline void trial_rest(struct rx_queue *q, __u64 now, bool forget)
{
	struct rx_trial *t = &q->trial;

	t->asks = 0;
	t->windows = 0;
	if (forget || now - t->loaded_at > TRIAL_FORGET_NS) {
		t->stay = 0;
		t->left = t->pause = 0;
		t->moving = t->staying = t->answered_at = 0;
	}
	trial_mark(q, now);
}

/* Ends a window, in which the queue had this pressure, and so many packets went elsewhere. Returns
 * whether flows stay INLINE. */
static __always_inline bool trial_window(struct rx_queue *q, enum rx_pressure pressure,
					 __u64 elsewhere, __u64 now)
{
	struct rx_trial *t = &q->trial;

	if (pressure == RX_POLLED || (pressure == RX_RELAXED && !elsewhere)) {
		trial_rest(q, now, pressure == RX_POLLED);
		return trial_stays(t);
	}
	t->loaded_at = now;
	if (!trial_stays(t) && !elsewhere) {
		/* None has moved yet, or none can. */
		t->staying = trial_rate(q, now);
		t->windows = 0;
		if (now - t->since >= TRIAL_WINDOWS * LOAD_WINDOW_NS)
			trial_mark(q, now);
		return false;
	}
	t->windows++;
	if (t->windows <= TRIAL_SETTLE)
		trial_mark(q, now);
	if (t->windows < TRIAL_WINDOWS)
		return trial_stays(t);
	if (t->asks)
		trial_asked(t, trial_rate(q, now), now);
	else
		trial_next(t, trial_rate(q, now), now);
	t->windows = 0;
	trial_mark(q, now);
	return trial_stays(t);
}
