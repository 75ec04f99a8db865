/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * load.h: how much a queue has to do, and whether the CPU that polls it has room: window by window,
 * and flow by flow (docs/policy.md).
 *
 * Plain C without helpers, maps or a clock (types.h).
 */
#pragma once

#include <stdbool.h>

#include "types.h"

#define LOAD_WINDOW_NS (LOAD_WINDOW_MS * 1000000ULL)

/*
 * The polling CPU is saturated when it is idle for less than an eighth of the time, and polls are
 * the reason: they take three eighths, or use up their budget again and again. It has room for all
 * when it would be idle for three eighths with all at home.
 */
#define LOAD_SATURATED	  (LOAD_WHOLE * 7 / 8)
#define LOAD_SATURATED_BY (LOAD_WHOLE * 3 / 8)
#define LOAD_RELAXED	  (LOAD_WHOLE * 5 / 8)

/* Frames from which what one costs can be told. */
#define LOAD_SAMPLE 32

/* Frames in two windows from which others' place is worth keeping. */
#define LOAD_OTHERS 8

/* Polls from which can be told whether they are behind. */
#define LOAD_POLLS 4

/* An application polls the queue from this part of the polls on that found packets, and until it is
 * half of that. Its packets have come in one of the last windows. */
#define LOAD_POLLED	(LOAD_WHOLE / 2)
#define LOAD_POLLED_FOR 16

/* Flows that cost more of a window than this don't change their minds at the same time: averages of
 * what the CPUs do show it only some windows later. */
#define LOAD_MOVING_NS (LOAD_WINDOW_NS / 8)

/* Fraction bits of rx_load.inline_ns. */
#define LOAD_COST_SHIFT 4

/* What a frame is taken to cost until that is known, in ns: rather more than most do. */
#define LOAD_COST_GUESS 2000

/* Longer windows were idle: their sample is discarded. */
#define LOAD_LONGEST_NS (100 * LOAD_WINDOW_NS)

static __always_inline __u32 load_share(__u64 part, __u64 whole)
{
	return part >= whole ? LOAD_WHOLE : part * LOAD_WHOLE / whole;
}

/* What frames cost here, in ns, wherever they go. */
static __always_inline __u64 load_cost(const struct rx_load *l, __u64 frames)
{
	if (!l->inline_ns)
		return frames * LOAD_COST_GUESS;
	return (frames * l->inline_ns) >> LOAD_COST_SHIFT;
}

/* Whether a flow that costs so much, in ns a window, may change its mind now; alone, any may. */
static __always_inline bool load_may_move(const struct rx_load *l, __u64 cost)
{
	return l->moving_ns <= LOAD_MOVING_NS / 8 || l->moving_ns + cost <= LOAD_MOVING_NS;
}

/* Whether applications poll the queue more often than interrupts do; to be asked once a window. */
static __always_inline bool load_busy_polled(struct rx_queue *q)
{
	const struct rx_load *l = &q->load;
	__u32 enough = l->pressure == RX_POLLED ? LOAD_POLLED / 2 : LOAD_POLLED;

	q->busy_polled -= q->busy_polled / 4;
	if (l->nr_polls)
		q->busy_polled += load_share(q->nr_busy_polls, l->nr_polls) / 4;
	return (q->policy & RX_FOLLOW) && q->busy_polled >= enough;
}

/* Whether the tables know an application that polls the queue. Nobody asks them while there is room
 * for all. */
static __always_inline bool load_polled_for(const struct rx_queue *q)
{
	return q->polled_for && q->load.window + 1 - q->polled_for <= LOAD_POLLED_FOR;
}

/*
 * Large flows leave first: who has half as many frames as the largest, then a quarter, and so on
 * for as long as the CPU is saturated, each when nobody waits any more who may already.
 */
static __always_inline __u32 load_leaving(const struct rx_load *l)
{
	if (l->pressure == RX_POLLED)
		return 0;
	if (l->pressure != RX_SATURATED || !l->largest)
		return LOAD_NOBODY;
	if (l->nr_waiting && l->leaving != LOAD_NOBODY)
		return l->leaving;
	return (l->leaving < l->largest ? l->leaving : l->largest) / 2;
}

/* Whether polls are behind what comes: of a window's, that many at least used up their budget. */
static __always_inline bool load_behind(const struct rx_load *l, __u32 polls)
{
	return l->nr_polls >= LOAD_POLLS && l->nr_exhausted >= polls;
}

/*
 * The part of large flows' frames to drop INLINE: more while the device's ring is never seen empty
 * and the CPU does little else than to poll, when it overflows for small flows too; less otherwise,
 * and none while there is room for all.
 */
static __always_inline __u32 load_police(const struct rx_load *l)
{
	__u32 police = l->police;

	if (l->pressure == RX_RELAXED)
		return 0;
	if (l->pressure == RX_SATURATED && load_behind(l, l->nr_polls - l->nr_polls / 16))
		return police + (LOAD_WHOLE - police) / 8;
	return police - (police + 15) / 16;
}

/* What the CPU spent in polls in this window, other queues' included. */
static __always_inline void load_others(struct rx_load *l, __u64 poll_ns, __u64 over_idle_ns)
{
	l->others_ns = poll_ns > l->poll_ns ? poll_ns - l->poll_ns : 0;
	if (over_idle_ns > l->over_idle_ns)
		l->over_idle_ns = over_idle_ns;
}

/* Frames of which nothing has gone elsewhere. */
static __always_inline __u64 load_here(const struct rx_queue *q)
{
	return q->nr_inline + q->nr_no_flow[FLOW_TRUNCATED] + q->nr_no_flow[FLOW_UNKNOWN] +
	       q->load.nr_limited;
}

/*
 * A window ends; `tasks` and `irq` are the shares of its time, of LOAD_WHOLE, in which the CPU ran
 * tasks and interrupts, as far as the scheduler knows. Of interrupts it often does not: polls over
 * an idle CPU are counted here.
 */
static __always_inline void load_window(struct rx_queue *q, __u64 now, __u32 tasks, __u32 irq)
{
	struct rx_load *l = &q->load;
	bool busy_polled = load_busy_polled(q);
	__u64 received = q->nr_received - l->window_received;
	__u64 here = load_here(q);
	__u64 elsewhere = received - (here - l->window_here);
	__u64 elapsed = now - l->window_start;
	__u32 over_idle = load_share(l->over_idle_ns, elapsed);
	__u32 busy = tasks + (irq > over_idle ? irq : over_idle);

	/* Frames that were dropped cost next to nothing. */
	if (received >= LOAD_SAMPLE && elsewhere <= received / 8 &&
	    (__u32)l->nr_limited == l->window_limited && elapsed < LOAD_LONGEST_NS)
		l->inline_ns = (l->poll_ns << LOAD_COST_SHIFT) / received;
	l->poll_share = load_share(l->poll_ns + l->others_ns, elapsed);
	l->busy_share = busy < LOAD_WHOLE ? busy : LOAD_WHOLE;
	if (l->busy_share >= LOAD_SATURATED &&
	    (l->poll_share >= LOAD_SATURATED_BY || load_behind(l, l->nr_polls / 2)))
		l->pressure = RX_SATURATED;
	else if (busy_polled)
		l->pressure = load_polled_for(q) ? RX_POLLED : RX_FULL;
	else if (l->busy_share + load_share(load_cost(l, elsewhere), elapsed) <= LOAD_RELAXED)
		l->pressure = RX_RELAXED;
	else
		l->pressure = RX_FULL;
	l->leaving = load_leaving(l);
	l->police = load_police(l);
	l->received = received;
	l->moving_ns -= l->moving_ns / 4;
	l->nr_waiting = 0;

	l->window++;
	l->window_start = now;
	l->window_received = q->nr_received;
	l->window_here = here;
	l->window_limited = l->nr_limited;
	l->poll_ns = l->others_ns = l->over_idle_ns = 0;
	l->nr_polls = l->nr_exhausted = l->largest = q->nr_busy_polls = 0;
}

/*
 * A poll of the queue has ended, an application's if `busy`; `start` is when, in ns, it received
 * its first frame. Returns whether the window is over. An application takes few packets at a time:
 * that its poll is exhausted says nothing.
 */
static __always_inline bool load_polled(struct rx_queue *q, __u64 start, __u64 now, bool over_idle,
					bool exhausted, bool busy)
{
	struct rx_load *l = &q->load;

	l->poll_ns += now - start;
	if (over_idle)
		l->over_idle_ns += now - start;
	l->nr_polls++;
	l->nr_exhausted += exhausted && !busy;
	q->nr_busy_polls += busy;
	if (unlikely(!l->window_start))
		l->window_start = start;
	return now - l->window_start >= LOAD_WINDOW_NS;
}

/*
 * Whether the flow's part of what its queue has received lately, in this window and the one before,
 * is more than `limit` of LOAD_WHOLE; 0 is no limit. A flow that has the queue to itself takes
 * nobody's place.
 */
static __always_inline bool flow_is_large(const struct rx_queue *q, const struct rps_dev_flow *flow,
					  __u32 limit)
{
	const struct rx_load *l = &q->load;
	__u64 frames = flow->nr_packets + flow->nr_dropped - flow->frames;
	__u64 all = q->nr_received - l->window_received + l->received;

	if (flow->window == l->window)
		frames += flow->load;
	return limit && frames * LOAD_WHOLE > all * limit && all >= frames + LOAD_OTHERS;
}

/* The flow's frames in the window that has just ended; after a pause, in a window of it on average.
 */
static __always_inline void flow_window(const struct rx_load *l, struct rps_dev_flow *flow)
{
	__u32 frames = flow->nr_packets + flow->nr_dropped;
	__u32 windows = l->window - flow->window;

	flow->load = windows > 1 ? (frames - flow->frames) / windows : frames - flow->frames;
	flow->frames = frames;
	flow->window = l->window;
}
