/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * policy.h: where a flow wants to be: by the tables, and by what the CPUs are doing
 * (docs/policy.md). Whether it may go there is steer.h's.
 *
 * Plain C without helpers, maps or a clock (types.h); asks through the functions of env.h.
 */
#pragma once

#include <stdbool.h>

#include "backlog.h"
#include "load.h"
#include "env.h"
#include "tables.h"
#include "types.h"

/* ---- by the tables alone --------------------------------------------------- */

/*
 * A CPU as a location: INLINE if it is the one that polls, since there is no hop to where the
 * packet already is; RPS_NO_CPU if it is offline, or no CPU at all.
 */
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
 * As get_rps_cpu() in net/core/dev.c: the CPU of the application if it is known and online, in the
 * queue's mask or not; RPS otherwise; and where neither knows a CPU, here. Also what an application
 * polls for: elsewhere its polls would not find it.
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

/* ---- by what the CPUs are doing --------------------------------------------- */

/* A CPU that others want for more of the time has none to give. */
#define POLICY_ROOM (LOAD_WHOLE * 7 / 8)

/* Where more others want to run, the backlog's thread, which is one of many, would hardly be
 * served: so many at most before flows go there, and twice as many before they leave. */
#define POLICY_OTHERS (4 * LOAD_WHOLE)

/* Windows for which nobody goes to a CPU that frames came to faster than it took them: the others
 * stay then, and who would try again would only bring it back. */
#define POLICY_REST 100

/* Windows after which what a flow knew of its application says nothing any more. */
#define POLICY_LATELY 16

/* A flow that costs less of a CPU's time goes to its application whatever else runs there, as long
 * as that leaves the application the time that it needs. */
#define POLICY_SMALL (LOAD_WHOLE / 8)

/* A flow that changes its mind soon after the last time waits twice as long before the next: up to
 * 2^10 windows, ten seconds. */
#define POLICY_BACKOFF 10
#define POLICY_SOON    256U /* times what it had to wait */

/* What the flow costs, as a share of a CPU's time, as far as is known. */
static __always_inline __u32 flow_share(const struct rx *rx, const struct rps_dev_flow *flow)
{
	return load_share(load_cost(&rx->q->load, flow->load), LOAD_WINDOW_NS);
}

/* Whether the flow would find the time on the CPU that it needs. */
static __always_inline bool flow_fits(const struct rx *rx, const struct rps_dev_flow *flow,
				      __u32 cpu)
{
	return flow_share(rx, flow) + cpu_busy(cpu) <= LOAD_WHOLE;
}

/* Whether frames come to the CPU faster than it takes them, or soon will. */
static __always_inline bool rx_crowded(const struct rx *rx, __u32 cpu)
{
	struct backlog *b = rx_backlog(rx, cpu);

	if (!b)
		return true;
	if (!backlog_crowded(b) && cpu_demand(cpu, b) <= 2 * POLICY_OTHERS)
		return false;
	b->crowded = rx->q->load.window;
	return true;
}

/* Whether frames have not come faster than the CPU took them for a while. */
static __always_inline bool rx_rested(const struct rx *rx, __u32 cpu)
{
	const struct backlog *b = rx_backlog(rx, cpu);

	if (!b || backlog_crowded(b))
		return false;
	return !b->crowded || rx->q->load.window - (__u32)b->crowded >= POLICY_REST;
}

/* Whether the CPU may be given more than it has. */
static __always_inline bool rx_open(const struct rx *rx, __u32 cpu)
{
	return rx_rested(rx, cpu) && cpu_demand(cpu, rx_backlog(rx, cpu)) <= POLICY_OTHERS;
}

/* An idle CPU near this one, on which the flow fits, as a location; or RPS_NO_CPU. */
static __always_inline __u16 rx_idle_near(const struct rx *rx, const struct rps_dev_flow *flow,
					  __u32 cpu)
{
	const struct cpu *center = cpu_of(cpu);

	if (!center)
		return RPS_NO_CPU;
	for (__u32 i = 0; i < CPU_NEAR && i < center->nr_near; i++) {
		__u16 near = center->near[i];

		/* The one that polls is not idle right now. */
		if (near == rx->cpu && rx->q->load.pressure == RX_RELAXED)
			return RPS_INLINE;
		if (near == rx->cpu || near >= RPS_INLINE_SHED || !cpu_is_idle(near))
			continue;
		if (rx_usable(rx, near) == near && flow_fits(rx, flow, near) && rx_rested(rx, near))
			return near;
	}
	return RPS_NO_CPU;
}

/* Whether others leave the CPU time for the queue's backlog there. */
static __always_inline bool rx_has_room(const struct rx *rx, __u32 cpu)
{
	return !rx_crowded(rx, cpu) && cpu_demand(cpu, rx_backlog(rx, cpu)) <= POLICY_ROOM;
}

/*
 * Whether the flow's application keeps up with what comes: it waits now, or has since the flow
 * asked last.
 */
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

/* Whether its packets leave the application the time that it needs, as far as is known. */
static __always_inline bool flow_spares_consumer(const struct rx *rx,
						 const struct rps_dev_flow *flow)
{
	__u32 share = flow_share(rx, flow);

	return share <= POLICY_SMALL && share + rx_consumer_busy(rx) <= POLICY_ROOM;
}

/* Where the flow's application is, or RPS would have it, if that is worth a hop now. */
static __always_inline bool rx_base_has_room(const struct rx *rx, struct rps_dev_flow *flow)
{
	__u16 base = flow->base;

	if (rx_crowded(rx, base))
		return false;
	if (flow->wanted != base && !rx_open(rx, base))
		return false;
	/* Near the application its packets are cheapest, if it isn't kept from its work by them. */
	if (rx->followed && !rx_keeps_up(rx, flow))
		return false;
	if (flow->wanted == base || (rx->followed && flow_spares_consumer(rx, flow)))
		return true;
	return (rx->followed || rx_has_room(rx, base)) && flow_fits(rx, flow, base);
}

/* Whether the idle CPU that the flow has found still has the time. */
static __always_inline bool rx_idle_holds(const struct rx *rx, const struct rps_dev_flow *flow)
{
	if (flow->reason != RX_IDLE_CPU || flow->wanted == flow->base)
		return false;
	if (flow->wanted == RPS_INLINE)
		return rx->q->load.pressure <= RX_FULL;
	return rx_usable(rx, flow->wanted) == flow->wanted && rx_has_room(rx, flow->wanted);
}

/*
 * As [RFC] net;sched: "Try to find idle cpu for RPS to handle packets": an idle CPU near an
 * application that is busy. One that sleeps keeps its packets on its own CPU.
 */
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

/* INLINE unless the CPU that polls is saturated, or there for other packets, and another would be
 * better. */
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
	if (flow->wanted == flow->base && !rx_crowded(rx, flow->base) &&
	    !(rx->followed && flow->behind >= POLICY_LATELY)) {
		*reason = RX_STAY;
		stay = flow->base;
	}
	return rx_choose_near(rx, flow, stay, reason);
}

/* Where the flow wants to be from this window on, and why. */
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

/* Where a flow is that nothing speaks for moving. */
static __always_inline __u16 flow_home(const struct rx *rx, const struct rps_dev_flow *flow)
{
	return rx->q->policy & RX_ADAPT ? (__u16)RPS_INLINE : flow->base;
}

/* Whether it is too early for the flow to leave for anywhere but home. */
static __always_inline bool flow_rests(const struct rps_dev_flow *flow)
{
	return flow->window - flow->changed < 1U << flow->backoff;
}

/* The flow leaves: next time it rests for longer, if it does so soon. */
static __always_inline void flow_back_off(struct rps_dev_flow *flow)
{
	if (flow->window - flow->changed < POLICY_SOON << flow->backoff)
		flow->backoff += flow->backoff < POLICY_BACKOFF;
	else
		flow->backoff -= flow->backoff > 0;
}

/* Whether where the flow wants to be is no place to rest at: its frames may be lost. */
static __always_inline bool rx_overrun(const struct rx *rx, const struct rps_dev_flow *flow)
{
	if (flow->wanted == RPS_INLINE)
		return rx->q->load.pressure == RX_SATURATED;
	return rx_crowded(rx, flow->wanted);
}

/* Whether the flow may change its mind now, with what is changing already. */
static __always_inline bool rx_may_change(const struct rx *rx, struct rps_dev_flow *flow,
					  __u16 wanted)
{
	bool leaves = wanted != flow_home(rx, flow);
	struct rx_load *l = &rx->q->load;
	/* Of many that have less than a frame in a window, this one has come now. */
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

/* The slot knows nothing: the flow begins where the policy would have it without a load. */
static __always_inline void flow_begin(const struct rx *rx, struct rps_dev_flow *flow, __u16 base)
{
	flow->changed = flow->window;
	flow->load = 0;
	flow->backoff = flow->reason = 0;
	flow->base = base;
	flow->wanted = flow_home(rx, flow);
}

/* Whether the flow is where it is because the tables have it there. Who adapts is INLINE for the
 * load's sake, whatever the tables say. */
static __always_inline bool flow_at_base(const struct rx *rx, const struct rps_dev_flow *flow)
{
	return flow->wanted == flow->base &&
	       !(rx->q->policy & RX_ADAPT && flow->wanted == RPS_INLINE);
}

/*
 * Where the flow wants to be, whose tables say `base`. Decided once a window; and when the tables
 * change, since who follows an application follows it at once.
 */
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
		flow->wanted = lost ? flow_home(rx, flow) : base;
		flow->reason = RX_TABLES;
	} else if (wanted == RPS_INLINE) {
		/* The CPU that it had chosen polls now. */
		flow->wanted = RPS_INLINE;
	}
	wanted = rx_choose(rx, flow, &reason);
	home = flow_home(rx, flow);
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
