/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * load.h: the load of a queue and of the CPU that polls it, by window, and of each flow
 * (docs/policy.md).
 *
 * Plain C without helpers, maps or a clock (types.h).
 */
#pragma once

#include <stdbool.h>

#include "trial.h"
#include "types.h"

/*
 * The polling CPU is saturated if two of three are so: it is idle for less than 1/8 of the time,
 * polls take 3/8 of the time, half of the polls use up their budget. It is relaxed if it would be
 * idle for 3/8 of the time with all flows INLINE.
 */
#define LOAD_SATURATED	  (LOAD_WHOLE * 7 / 8)
#define LOAD_SATURATED_BY (LOAD_WHOLE * 3 / 8)
#define LOAD_RELAXED	  (LOAD_WHOLE * 5 / 8)

/* Fewest frames of a window from which the cost of a frame is computed. */
#define LOAD_SAMPLE 32

/*
 * The queue counts as polled by an application when this share of the polls that found packets is
 * an application's, until the share falls below half of it; and if a packet for such an application
 * came in the last LOAD_POLLED_FOR windows.
 */
#define LOAD_POLLED	(LOAD_WHOLE / 2)
#define LOAD_POLLED_FOR 16

/* Fraction bits of rx_load.inline_ns. */
#define LOAD_COST_SHIFT 4

/* Cost of a frame in ns until it has been measured; most frames cost less. */
#define LOAD_COST_GUESS 2000

/* Half-life of the scheduler's averages, in ns (PELT). */
#define LOAD_HALF_LIFE_NS 32000000ULL

static __always_inline __u32 load_share(__u64 part, __u64 whole)
{
	return part >= whole ? LOAD_WHOLE : part * LOAD_WHOLE / whole;
}

/*
 * Share of a CPU's time for tasks, and in which it is not idle. The scheduler tracks `tasks`, the
 * tasks' share, in the time that interrupts and the hypervisor leave: they have `irq`. As
 * scale_irq_capacity() and effective_cpu_util() (kernel/sched/).
 */
static __always_inline __u32 load_tasks(__u32 tasks, __u32 irq)
{
	return tasks * (LOAD_WHOLE - irq) / LOAD_WHOLE;
}

static __always_inline __u32 load_busy(__u32 tasks, __u32 irq)
{
	return load_tasks(tasks, irq) + irq;
}

/* An average after `half_lives` without load. */
static __always_inline __u32 load_decayed(__u32 average, __u32 half_lives)
{
	return half_lives < 32 ? average >> half_lives : 0;
}

/* Cost of these frames in ns, as measured INLINE. */
static __always_inline __u64 load_cost(const struct rx_load *l, __u64 frames)
{
	if (!l->inline_ns)
		return frames * LOAD_COST_GUESS;
	return (frames * l->inline_ns) >> LOAD_COST_SHIFT;
}

/* Whether enough of the polls are applications' (LOAD_POLLED). Updates the average share, so it is
 * called once per window. */
static __always_inline bool load_busy_polled(struct rx_queue *q)
{
	struct rx_load *l = &q->load;
	__u32 enough = l->pressure == RX_POLLED ? LOAD_POLLED / 2 : LOAD_POLLED;

	l->busy_polled -= l->busy_polled / 4;
	if (l->nr_polls)
		l->busy_polled += load_share(l->nr_busy_polls, l->nr_polls) / 4;
	return (q->policy & RX_FOLLOW) && l->busy_polled >= enough;
}

/* Whether a packet for an application that polls the queue came in the last LOAD_POLLED_FOR
 * windows. Unknown under RX_RELAXED, where the tables are not read. */
static __always_inline bool load_polled_for(const struct rx_load *l)
{
	return l->polled_for && l->window + 1 - l->polled_for <= LOAD_POLLED_FOR;
}

/* Whether polls can't keep up: half of the window's polls used up their budget. */
static __always_inline bool load_behind(const struct rx_load *l)
{
	return l->nr_exhausted && 2 * l->nr_exhausted >= l->nr_polls;
}

/* Why flows are INLINE while the CPU is relaxed (enum rx_reason). */
static __always_inline __u8 load_relaxed_reason(const struct rx_load *l)
{
	return l->kept ? RX_UNHELPFUL : RX_ROOM;
}

/*
 * Whether a flow with packets in this window may leave: the CPU was saturated (or polled by an
 * application) then, or is so now. Flows may send in turns longer than a window: those that
 * saturated the CPU send again when it has room.
 */
static __always_inline bool load_may_leave(const struct rx_load *l, __u32 window)
{
	__u32 age = l->window - window;

	return l->saturated & 1 || (age - 1 < 32 && l->saturated >> (age - 1) & 1);
}

/* Stores the time of other queues' polls: `poll_ns` and `over_idle_ns` are those of all polls that
 * the CPU ran in this window. */
static __always_inline void load_others(struct rx_load *l, __u64 poll_ns, __u64 over_idle_ns)
{
	l->others_ns = poll_ns > l->poll_ns ? poll_ns - l->poll_ns : 0;
	if (over_idle_ns > l->over_idle_ns)
		l->over_idle_ns = over_idle_ns;
}

/* Frames that did not go to another CPU's backlog. */
static __always_inline __u64 load_here(const struct rx_queue *q)
{
	return q->nr_inline + q->nr_no_flow[FLOW_TRUNCATED] + q->nr_no_flow[FLOW_UNKNOWN];
}

/* Frames of this window. */
static __always_inline __u64 load_received(const struct rx_queue *q)
{
	return q->nr_received - q->load.window_received;
}

/* Those of them that went to another CPU's backlog. */
static __always_inline __u64 load_elsewhere(const struct rx_queue *q)
{
	return load_received(q) - (load_here(q) - q->load.window_here);
}

/* At the end of a window in which most frames were INLINE: what such a frame costs. */
static __always_inline void load_measure(struct rx_queue *q)
{
	struct rx_load *l = &q->load;
	__u64 received = load_received(q);

	if (received >= LOAD_SAMPLE && load_elsewhere(q) <= received / 8)
		l->inline_ns = (l->poll_ns << LOAD_COST_SHIFT) / received;
}

/*
 * Ends a window. `tasks` and `irq` are those of load_busy(). The scheduler often does not account
 * for interrupts; therefore polls that interrupted the idle task are counted here, and the larger
 * value is used. Only `irq` is missing in the time in which the scheduler tracks tasks.
 */
static __always_inline void load_window(struct rx_queue *q, struct rx_trial *t, __u64 now,
					__u32 tasks, __u32 irq)
{
	struct rx_load *l = &q->load;
	bool busy_polled = load_busy_polled(q);
	__u64 elsewhere = load_elsewhere(q);
	__u64 elapsed = now - l->window_start;
	__u32 over_idle = load_share(l->over_idle_ns, elapsed);
	__u32 busy = load_tasks(tasks, irq) + (irq > over_idle ? irq : over_idle);
	bool kept = false;
	__u32 signs;

	l->poll_share = load_share(l->poll_ns + l->others_ns, elapsed);
	/* The scheduler's averages show a new load only some windows later. */
	if (busy < l->poll_share)
		busy = l->poll_share;
	l->busy_share = busy < LOAD_WHOLE ? busy : LOAD_WHOLE;
	signs = (busy >= LOAD_SATURATED) + (l->poll_share >= LOAD_SATURATED_BY) + load_behind(l);
	if (signs >= 2)
		l->pressure = RX_SATURATED;
	else if (busy_polled)
		l->pressure = load_polled_for(l) ? RX_POLLED : RX_FULL;
	else if (l->busy_share + load_share(load_cost(l, elsewhere), elapsed) <= LOAD_RELAXED)
		l->pressure = RX_RELAXED;
	else
		l->pressure = RX_FULL;
	if (t && q->policy & RX_ADAPT && l->pressure != RX_POLLED) {
		trial_note(t, l->pressure != RX_RELAXED, elsewhere, now);
		kept = trial_stays(t);
	}
	/* The flows return, as if there were room. */
	if (kept)
		l->pressure = RX_RELAXED;
	l->kept = kept ? l->kept + 1 : 0;
	l->saturated =
		l->pressure == RX_RELAXED ? 0 : l->saturated << 1 | (l->pressure >= RX_SATURATED);
	l->received = load_received(q);

	l->window++;
	l->window_start = now;
	l->window_received = q->nr_received;
	l->window_here = load_here(q);
	l->poll_ns = l->others_ns = l->over_idle_ns = 0;
	l->nr_polls = l->nr_exhausted = l->nr_busy_polls = 0;
}

/*
 * Counts a poll of the queue that has ended, an application's if `busy`; its first frame was
 * received at `start`, in ns. Returns whether the window is over. An application's poll has a small
 * budget: it does not indicate an overload when that is used up.
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
	l->nr_busy_polls += busy;
	if (unlikely(!l->window_start))
		l->window_start = start;
	/* Another CPU may have polled the queue since, and ended a window. */
	return (__s64)(now - l->window_start) >= (__s64)LOAD_WINDOW_NS;
}

/*
 * Whether the flow has more than `limit` of LOAD_WHOLE of the queue's frames, in this window and
 * the last one; 0: no limit.
 */
static __always_inline bool flow_is_large(const struct rx_queue *q, const struct rps_dev_flow *flow,
					  __u32 limit)
{
	const struct rx_load *l = &q->load;
	__u64 frames = flow->nr_packets + flow->nr_dropped - flow->frames;
	__u64 all = load_received(q) + l->received;

	if (flow->window == l->window)
		frames += flow->load;
	return limit && frames * LOAD_WHOLE > all * limit;
}

/* Sets the flow's load: its frames in the last window, or after a pause the average per window. */
static __always_inline void flow_window(const struct rx_load *l, struct rps_dev_flow *flow)
{
	__u32 frames = flow->nr_packets + flow->nr_dropped;
	__u32 windows = l->window - flow->window;

	flow->load = windows > 1 ? (frames - flow->frames) / windows : frames - flow->frames;
	flow->frames = frames;
	flow->may_leave = load_may_leave(l, flow->window);
	flow->window = l->window;
}
