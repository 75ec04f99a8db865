/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * policy.h: the wanted location of a flow, by the tables and by the load of CPUs (docs/policy.md).
 * steer.h decides whether the flow may move there.
 *
 * Plain C without helpers, maps or a clock (types.h); inputs come through the functions of env.h.
 */
#pragma once

#include <stdbool.h>

#include "backlog.h"
#include "load.h"
#include "env.h"
#include "tables.h"
#include "types.h"

/* ---- by the tables alone --------------------------------------------------- */

/* A CPU as a location: INLINE for the polling CPU, where the packet already is; RPS_NO_CPU for a
 * CPU that is offline or does not exist. The other locations stay as they are. */
static __always_inline __u16 rx_usable(const struct rx *rx, __u16 cpu)
{
	struct backlog *b;

	if (cpu == rx->cpu)
		return RPS_INLINE;
	if (cpu >= RPS_INLINE_SHED)
		return cpu;
	b = rx_backlog(rx, cpu);
	return b && likely(!b->closed) ? cpu : RPS_NO_CPU;
}

/*
 * The location by the tables, as in get_rps_cpu() (net/core/dev.c): the application's CPU if it is
 * known and online, also outside of the queue's mask; otherwise the CPU by RPS; otherwise INLINE.
 * INLINE too for an application that polls the queue: its polls would not find packets elsewhere.
 */
static __always_inline __u16 rx_base(struct rx *rx, const struct rps_map *map)
{
	__u16 base = RPS_NO_CPU;

	if (rx->q->policy & RX_FOLLOW) {
		base = sock_flow_location(rx_sock_flow(rx), rx->hash, rx_cpu_mask());
		if (unlikely(base == RPS_INLINE))
			rx->q->polled_for = rx->q->load.window + 1;
		base = rx_usable(rx, base);
	}
	rx->followed = base != RPS_NO_CPU;
	if (!rx->followed)
		base = rx_usable(rx, rps_location_of(map, rx->hash));
	return base == RPS_NO_CPU ? RPS_INLINE : base;
}

/* ---- by the load of CPUs ---------------------------------------------------- */

/* A CPU that other tasks need for more of its time has no room for flows. */
#define POLICY_ROOM (LOAD_WHOLE * 7 / 8)

/*
 * Runnable tasks on a CPU, times 1024, without the backlog's kthread. With more of them the
 * kthread's share of the CPU is too small. Flows go there up to this number, and leave above twice
 * this number.
 */
#define POLICY_OTHERS (4 * LOAD_WHOLE)

/* Windows without new flows for a CPU after it was crowded (rx_note_crowded()). The flows that
 * caused this are still there: another one would crowd it again. */
#define POLICY_REST 100

/* Windows after which a flow's last observation of its application is out of date. A flow leaves
 * its application's CPU when the application has not waited in this number of windows. */
#define POLICY_LATELY 16

/* A flow with at most this share of a CPU's time may go to its application's CPU whatever other
 * tasks run there, if the application keeps the time that it needs. */
#define POLICY_SMALL (LOAD_WHOLE / 8)

/*
 * A flow's wanted location changes once in 2^backoff windows at most. A change soon after the last
 * one increments the backoff, up to 2^10 windows (10 s); a late change decrements it. Changes to
 * the default location are exempt.
 */
#define POLICY_BACKOFF 10
#define POLICY_SOON    256U /* windows, times 2^backoff: an earlier change is soon */

/* The flow's cost as a share of a CPU's time; an estimate (load_cost()). */
static __always_inline __u32 flow_share(const struct rx *rx, const struct rps_dev_flow *flow)
{
	return load_share(load_cost(&rx->q->load, flow->load), LOAD_WINDOW_NS);
}

/* Whether the CPU's idle time covers the flow's cost. */
static __always_inline bool flow_fits(const struct rx *rx, const struct rps_dev_flow *flow,
				      __u32 cpu)
{
	return flow_share(rx, flow) + cpu_busy(cpu) <= LOAD_WHOLE;
}

/* Whether the queue's backlog for the CPU is more than half full, or the CPU has more than twice
 * POLICY_OTHERS runnable tasks. Stores the window in `crowded`: rx_rested() reads it. */
static __always_inline bool rx_note_crowded(const struct rx *rx, __u32 cpu)
{
	struct backlog *b = rx_backlog(rx, cpu);

	if (!b)
		return true;
	if (!backlog_crowded(b) && cpu_demand(cpu, b) <= 2 * POLICY_OTHERS)
		return false;
	b->crowded = rx->q->load.window;
	return true;
}

/* Whether the queue's backlog for the CPU is at most half full, and the CPU was not crowded in the
 * last POLICY_REST windows. */
static __always_inline bool rx_rested(const struct rx *rx, __u32 cpu)
{
	const struct backlog *b = rx_backlog(rx, cpu);

	if (!b || backlog_crowded(b))
		return false;
	return !b->crowded || rx->q->load.window - (__u32)b->crowded >= POLICY_REST;
}

/* Whether further flows may go to the CPU. */
static __always_inline bool rx_open(const struct rx *rx, __u32 cpu)
{
	return rx_rested(rx, cpu) && cpu_demand(cpu, rx_backlog(rx, cpu)) <= POLICY_OTHERS;
}

/* The nearest idle CPU with room for the flow, as a location; RPS_NO_CPU if there is none. */
static __always_inline __u16 rx_idle_near(const struct rx *rx, const struct rps_dev_flow *flow,
					  __u32 cpu)
{
	const struct cpu *center = cpu_of(cpu);

	if (!center)
		return RPS_NO_CPU;
	for (__u32 i = 0; i < CPU_NEAR && i < center->nr_near; i++) {
		__u16 near = center->near[i];

		/* The polling CPU is never idle now; while it is relaxed, it counts as idle. */
		if (near == rx->cpu && rx->q->load.pressure == RX_RELAXED)
			return RPS_INLINE;
		if (near == rx->cpu || near >= RPS_INLINE_SHED || !cpu_is_idle(near))
			continue;
		if (rx_usable(rx, near) == near && flow_fits(rx, flow, near) && rx_rested(rx, near))
			return near;
	}
	return RPS_NO_CPU;
}

/* Whether the CPU is not crowded, and other tasks leave time for the queue's backlog there. */
static __always_inline bool rx_has_room(const struct rx *rx, __u32 cpu)
{
	return !rx_note_crowded(rx, cpu) && cpu_demand(cpu, rx_backlog(rx, cpu)) <= POLICY_ROOM;
}

/* Whether the flow's application keeps up with its packets: it waits now, or has waited since the
 * flow's last observation, at most POLICY_LATELY windows ago. */
static __always_inline bool rx_keeps_up(const struct rx *rx, struct rps_dev_flow *flow)
{
	__u32 waits = rx_consumer_waits_so_far(rx);
	__u32 windows = flow->window - flow->asked;
	bool waited = waits != flow->waits && windows <= POLICY_LATELY;
	__u32 behind = flow->behind + windows;

	if (waited || rx_consumer_waits(rx, flow->base))
		behind = 0;
	flow->behind = behind < 255 ? behind : 255;
	flow->waits = waits;
	flow->asked = flow->window;
	return !behind;
}

/* Whether the flow is small, and its packets leave the application the time that it takes now. */
static __always_inline bool flow_spares_consumer(const struct rx *rx,
						 const struct rps_dev_flow *flow)
{
	__u32 share = flow_share(rx, flow);

	return share <= POLICY_SMALL && share + rx_consumer_busy(rx) <= POLICY_ROOM;
}

/* Whether the CPU by the tables, the application's or that of RPS, is worth a hop now. */
static __always_inline bool rx_base_has_room(const struct rx *rx, struct rps_dev_flow *flow)
{
	__u16 base = flow->base;

	if (rx_note_crowded(rx, base))
		return false;
	if (flow->wanted != base && !rx_open(rx, base))
		return false;
	/* Packets cost least near the application, unless they take the time that it needs. */
	if (rx->followed && !rx_keeps_up(rx, flow))
		return false;
	if (flow->wanted == base || (rx->followed && flow_spares_consumer(rx, flow)))
		return true;
	return (rx->followed || rx_has_room(rx, base)) && flow_fits(rx, flow, base);
}

/* Whether the idle CPU that was chosen for the flow still has room. */
static __always_inline bool rx_idle_holds(const struct rx *rx, const struct rps_dev_flow *flow)
{
	if (flow->reason != RX_IDLE_CPU || flow->wanted == flow->base)
		return false;
	if (flow->wanted == RPS_INLINE)
		return rx->q->load.pressure <= RX_FULL;
	return rx_usable(rx, flow->wanted) == flow->wanted && rx_has_room(rx, flow->wanted);
}

/* An idle CPU near a busy application, as in "[RFC] net;sched: Try to find idle cpu for RPS to
 * handle packets" (Tkhai, 2018). Packets of a sleeping application stay on its own CPU. */
static __always_inline __u16 rx_choose_idle(const struct rx *rx, const struct rps_dev_flow *flow)
{
	return rx_idle_holds(rx, flow) ? flow->wanted : rx_idle_near(rx, flow, flow->base);
}

static __always_inline __u16 rx_choose_near(const struct rx *rx, struct rps_dev_flow *flow,
					    __u16 otherwise, __u8 *reason)
{
	__u16 idle = RPS_NO_CPU;

	if (rx->q->policy & RX_IDLE)
		idle = rx_choose_idle(rx, flow);
	if (idle == RPS_NO_CPU)
		return otherwise;
	*reason = RX_IDLE_CPU;
	return idle;
}

/* INLINE, unless another CPU is better, and the polling CPU is saturated or polled by an
 * application for its own packets (RX_POLLED). */
static __always_inline __u16 rx_adapt(const struct rx *rx, struct rps_dev_flow *flow, __u8 *reason)
{
	struct rx_load *l = &rx->q->load;
	__u16 stay = RPS_INLINE;

	if (l->pressure == RX_RELAXED) {
		*reason = RX_ROOM;
		return RPS_INLINE;
	}
	if (flow->wanted == RPS_INLINE) {
		if (l->largest < flow->load)
			l->largest = flow->load;
		*reason = l->pressure == RX_SATURATED ? RX_SMALL : RX_STAY;
		if (flow->load < l->leaving)
			return RPS_INLINE;
	}
	if (rx_base_has_room(rx, flow)) {
		*reason = rx->followed ? RX_CONSUMER : RX_SPREAD;
		return flow->base;
	}
	*reason = RX_NO_GAIN;
	if (flow->wanted == flow->base && !rx_note_crowded(rx, flow->base) &&
	    !(rx->followed && flow->behind >= POLICY_LATELY)) {
		*reason = RX_STAY;
		stay = flow->base;
	}
	return rx_choose_near(rx, flow, stay, reason);
}

/* The location that the flow wants from this window on, and the reason. */
static __always_inline __u16 rx_choose(const struct rx *rx, struct rps_dev_flow *flow, __u8 *reason)
{
	*reason = RX_TABLES;
	if (flow->base == RPS_INLINE)
		return RPS_INLINE;
	if (rx->q->policy & RX_ADAPT)
		return rx_adapt(rx, flow, reason);
	if (!rx->followed || cpu_is_idle(flow->base) || rx_consumer_waits(rx, flow->base))
		return flow->base;
	return rx_choose_near(rx, flow, flow->base, reason);
}

/* The default location: INLINE under RX_ADAPT, otherwise the location by the tables. */
static __always_inline __u16 flow_default(const struct rx *rx, const struct rps_dev_flow *flow)
{
	return rx->q->policy & RX_ADAPT ? (__u16)RPS_INLINE : flow->base;
}

/* Whether the backoff still forbids a change, other than to the default location. */
static __always_inline bool flow_rests(const struct rps_dev_flow *flow)
{
	return flow->window - flow->changed < 1U << flow->backoff;
}

/* Adjusts the backoff at a change, other than to the default location. */
static __always_inline void flow_back_off(struct rps_dev_flow *flow)
{
	if (flow->window - flow->changed < POLICY_SOON << flow->backoff)
		flow->backoff += flow->backoff < POLICY_BACKOFF;
	else
		flow->backoff -= flow->backoff > 0;
}

/* Whether frames may be dropped at the wanted location, so that the backoff must not hold the flow
 * there. */
static __always_inline bool rx_overrun(const struct rx *rx, const struct rps_dev_flow *flow)
{
	if (flow->wanted == RPS_INLINE)
		return rx->q->load.pressure == RX_SATURATED;
	return rx_note_crowded(rx, flow->wanted);
}

/* Whether the wanted location may change now: backoff, and limit of the load that moves at once.
 * Accounts for the change if so. */
static __always_inline bool rx_may_change(const struct rx *rx, struct rps_dev_flow *flow,
					  __u16 wanted)
{
	bool leaves = wanted != flow_default(rx, flow);
	struct rx_load *l = &rx->q->load;
	/* Plus this frame: a flow with less than a frame per window would cost nothing. */
	__u64 cost = load_cost(l, flow->load + 1);

	if (leaves && flow_rests(flow))
		return false;
	if (!load_may_move(l, cost)) {
		l->nr_waiting += leaves;
		return false;
	}
	if (leaves)
		flow_back_off(flow);
	flow->changed = flow->window;
	l->moving_ns += cost;
	return true;
}

/* Initializes an unset slot: the flow wants its default location. */
static __always_inline void flow_begin(const struct rx *rx, struct rps_dev_flow *flow, __u16 base)
{
	flow->changed = flow->window;
	flow->load = 0;
	flow->backoff = flow->reason = 0;
	flow->base = base;
	flow->wanted = flow_default(rx, flow);
}

/* Whether the tables determine the wanted location. Under RX_ADAPT, INLINE is chosen by load, even
 * if the tables say INLINE too. */
static __always_inline bool flow_at_base(const struct rx *rx, const struct rps_dev_flow *flow)
{
	return flow->wanted == flow->base &&
	       !(rx->q->policy & RX_ADAPT && flow->wanted == RPS_INLINE);
}

/* The flow's wanted location; `base` is its location by the tables. Decided once per window, and
 * when `base` changes, so that a flow follows its application without delay. */
static __always_inline __u16 rx_wanted(const struct rx *rx, struct rps_dev_flow *flow, __u16 base,
				       bool new_window)
{
	__u16 wanted = rx_usable(rx, flow->wanted);
	bool moved = flow->base != base;
	bool lost = wanted == RPS_NO_CPU;
	bool follows = moved && flow_at_base(rx, flow);
	__u16 home;
	__u8 reason;

	if (likely(!new_window && !moved && !lost))
		return wanted;
	flow->base = base;
	if (lost || follows) {
		flow->wanted = lost ? flow_default(rx, flow) : base;
		flow->reason = RX_TABLES;
	} else if (wanted == RPS_INLINE) {
		/* The CPU that the flow wanted polls the queue now. */
		flow->wanted = RPS_INLINE;
	}
	wanted = rx_choose(rx, flow, &reason);
	home = flow_default(rx, flow);
	if (wanted != flow->wanted && flow->wanted != home && flow_rests(flow) &&
	    rx_overrun(rx, flow)) {
		wanted = home;
		reason = RX_NO_GAIN;
	}
	if (wanted == flow->wanted || rx_may_change(rx, flow, wanted)) {
		flow->wanted = wanted;
		flow->reason = reason;
	}
	return rx_usable(rx, flow->wanted);
}
