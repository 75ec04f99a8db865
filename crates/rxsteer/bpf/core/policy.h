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
 * CPU that is offline, outside of the queue's mask, or does not exist. The other locations stay as
 * they are. */
static __always_inline __u32 rx_usable(const struct rx *rx, __u32 cpu)
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
 * known, online and, unlike there, in the queue's mask; otherwise the CPU by RPS; otherwise INLINE.
 * INLINE too for an application that polls the queue: its polls would not find packets elsewhere.
 */
static __always_inline __u32 rx_base(struct rx *rx)
{
	__u32 base = RPS_NO_CPU;

	if (rx->q->policy & RX_FOLLOW) {
		base = sock_flow_location(rx_sock_flow(rx), rx->sock_hash, rx_cpu_mask());
		if (unlikely(base == RPS_INLINE))
			rx->q->load.polled_for = rx->q->load.window + 1;
		base = rx_usable(rx, base);
	}
	rx->followed = base != RPS_NO_CPU;
	if (!rx->followed)
		base = rx_usable(rx, rx_rps_location(rx, rx->hash));
	return base == RPS_NO_CPU ? RPS_INLINE : base;
}

/* ---- by the load of CPUs ---------------------------------------------------- */

/* Flows may fill a CPU up to this share of its time. */
#define POLICY_ROOM (LOAD_WHOLE * 7 / 8)

/*
 * A CPU with less time gets a flow per half-life while it is still idle now and then: packets that
 * come faster wake it less often, and cost less. POLICY_STEP is the share given lately up to which
 * this holds, and also the share that a crowded CPU loses per window.
 */
#define POLICY_BUSY (LOAD_WHOLE * 63 / 64)
#define POLICY_STEP (LOAD_WHOLE / 32)

/* Runnable tasks on a CPU, times 1024, without the backlog's kthread. With more of them the
 * kthread's share of the CPU is too small. */
#define POLICY_DEMAND (8 * LOAD_WHOLE)

/* Share given to a CPU that is crowded: no flow goes there for some half-lives, however idle the
 * CPU seems. The flows that caused this are still there. */
#define POLICY_CROWDED (LOAD_WHOLE / 4)

/*
 * A flow with this share of its queue's frames is alone. It has no others to yield to, and moves as
 * a whole: it goes to no CPU that would need more than POLICY_OVER of its time for it, and leaves
 * one where its frames find the backlog half full.
 */
#define POLICY_ALONE (LOAD_WHOLE * 63 / 64)
#define POLICY_OVER  (LOAD_WHOLE * 9 / 8)

/*
 * GRO merges the segments of a flow that come in one poll. A merged segment costs the polling CPU
 * less than a hop, and behind a hop GRO finds fewer to merge: the sender gets more
 * acknowledgements. rps_dev_flow.merging has the last segment's poll in its upper half, modulo 16,
 * and in its lower half a count, which every segment after another one of its poll increases, and
 * every other one decreases. It grows while more than two segments of the flow come in a poll.
 */
#define MERGING_POLLS 4 /* bits */
#define MERGING_MOST  ((1 << MERGING_POLLS) - 1)

/* Slots of the rps_map that are searched for a CPU with room. */
#define POLICY_SLOTS 4

/*
 * The flow's cost in ns per window, an estimate (load_cost()), times the capacity of the polling
 * CPU, where it was measured. The present frame counts: a flow with less than a frame per window
 * has a cost.
 */
static __always_inline __u64 flow_work(const struct rx *rx, const struct rps_dev_flow *flow)
{
	const struct cpu *here = cpu_of(rx->cpu);
	__u32 cost = load_cost(&rx->q->load, flow->load + 1);

	return (__u64)cost * (here ? here->capacity : LOAD_WHOLE);
}

/* Counts a TCP segment with data that came in this poll. */
static __always_inline void flow_note_segment(struct rps_dev_flow *flow, __u64 poll)
{
	__u8 count = flow->merging & MERGING_MOST;
	__u8 last = flow->merging >> MERGING_POLLS;
	__u8 now = poll & MERGING_MOST;

	if (last == now)
		count += count < MERGING_MOST;
	else
		count -= count > 0;
	flow->merging = now << MERGING_POLLS | count;
}

/* Whether GRO merges the flow's segments where they are INLINE. */
static __always_inline bool flow_is_merged(const struct rps_dev_flow *flow)
{
	return (flow->merging & MERGING_MOST) > MERGING_MOST / 2;
}

/* Whether +adapt leaves the flow INLINE for that. While an application polls the queue, merged
 * flows leave like others. */
static __always_inline bool flow_stays_merged(const struct rx_load *l,
					      const struct rps_dev_flow *flow)
{
	return flow_is_merged(flow) && l->pressure != RX_POLLED;
}

/* Whether the flow had nearly all frames of its queue in the last window. */
static __always_inline bool flow_is_alone(const struct rx *rx, const struct rps_dev_flow *flow)
{
	return (__u64)flow->load * LOAD_WHOLE >= (__u64)rx->q->load.received * POLICY_ALONE;
}

/* The work as a share of this CPU's time. */
static __always_inline __u32 cpu_share(const struct cpu *c, __u64 work)
{
	return load_share(work, LOAD_WINDOW_NS * c->capacity);
}

/* The time in half-lives of the scheduler's averages, as of the beginning of the queue's window:
 * queues differ, also by much if one has seen no packet for long. */
static __always_inline __u32 rx_half_lives(const struct rx *rx)
{
	return rx->q->load.window_start / LOAD_HALF_LIFE_NS;
}

/* Whether `now` is later than when time of the CPU was last given: not so for a queue that is
 * behind the one that gave it. A CPU that was never given any has no such time. */
static __always_inline bool cpu_given_before(const struct cpu *c, __u32 now)
{
	return !c->given_at || (__s32)(now - c->given_at) > 0;
}

/* Share of the CPU's time that was given to flows and that the scheduler's averages do not show
 * yet: they approach the load with the half-life with which this decreases. */
static __always_inline __u32 cpu_given(const struct cpu *c, __u32 now)
{
	return cpu_given_before(c, now) ? load_decayed(c->given, now - c->given_at) : c->given;
}

/* The queue's backlog for a CPU with the CPU's load, which is read once per window: every run queue
 * is in cache lines of another CPU. NULL beyond nr_cpus. */
static __always_inline struct backlog *rx_look(const struct rx *rx, __u32 cpu)
{
	struct backlog *b = rx_backlog(rx, cpu);

	if (b && b->looked != rx->q->load.window + 1) {
		b->looked = rx->q->load.window + 1;
		b->left = 0;
		rx_read_load_apart(rx, cpu);
	}
	return b;
}

static __always_inline void cpu_set_given(struct cpu *c, __u32 now, __u32 share)
{
	c->given = share;
	if (cpu_given_before(c, now))
		c->given_at = now;
}

/* Whether the backlog is more than half full, or its CPU has more than POLICY_DEMAND runnable
 * tasks. Gives the CPU POLICY_CROWDED if so. */
static __always_inline bool rx_note_crowded(const struct rx *rx, const struct backlog *b,
					    struct cpu *c)
{
	if (!backlog_crowded(b) && b->demand <= POLICY_DEMAND)
		return false;
	cpu_set_given(c, rx_half_lives(rx), POLICY_CROWDED);
	return true;
}

/* Whether flows may go to the CPU, and it has time for this one. */
static __always_inline bool rx_has_room(const struct rx *rx, __u32 cpu,
					const struct rps_dev_flow *flow)
{
	const struct backlog *b = rx_look(rx, cpu);
	struct cpu *c = cpu_of(cpu);
	__u32 given, needed;

	if (!b || !c || b->closed || rx_note_crowded(rx, b, c))
		return false;
	given = cpu_given(c, rx_half_lives(rx));
	needed = b->busy + given + cpu_share(c, flow_work(rx, flow));
	if (needed > POLICY_OVER && flow_is_alone(rx, flow))
		return false;
	return needed <= POLICY_ROOM || (b->busy < POLICY_BUSY && given < POLICY_STEP);
}

/* The nearest idle CPU with room for the flow, as a location; RPS_NO_CPU if there is none. */
static __always_inline __u16 rx_idle_near(const struct rx *rx, const struct rps_dev_flow *flow)
{
	const struct cpu *center = cpu_of(flow->base);

	if (!center)
		return RPS_NO_CPU;
	for (__u32 i = 0; i < CPU_NEAR && i < center->nr_near; i++) {
		__u16 near = center->near[i];

		/* The polling CPU is never idle now; while it is relaxed, it counts as idle. */
		if (near == rx->cpu && rx->q->load.pressure == RX_RELAXED)
			return RPS_INLINE;
		if (near != rx->cpu && near < RPS_INLINE_SHED && cpu_is_idle(near) &&
		    rx_has_room(rx, near, flow))
			return near;
	}
	return RPS_NO_CPU;
}

/*
 * A CPU of the rps_map with room for the flow; RPS_NO_CPU if none is found. After its own slot each
 * flow searches others in each window (a linear congruential generator): neighbouring slots belong
 * to neighbouring CPUs, and from slot to slot all flows of a CPU would go to the next one.
 */
static __always_inline __u16 rx_spread(const struct rx *rx, const struct rps_dev_flow *flow)
{
	__u32 hash = rx->hash;

	for (__u32 i = 0; i < POLICY_SLOTS; i++) {
		__u16 cpu = rx_rps_location(rx, hash);

		if (cpu != rx->cpu && cpu < RPS_INLINE_SHED && rx_has_room(rx, cpu, flow))
			return cpu;
		hash = hash * 0x9e3779b1 + 2 * rx->q->load.window + 1;
	}
	return RPS_NO_CPU;
}

/* Whether the flow may stay on the CPU that it wants: it is usable, and not crowded. A crowded CPU
 * loses POLICY_STEP in each window: it mostly has little too much. A flow that is alone leaves as
 * soon as its backlog is half full: with a limit for large flows it never has more there. */
static __always_inline bool rx_holds(const struct rx *rx, const struct rps_dev_flow *flow)
{
	const struct backlog *b = rx_look(rx, flow->wanted);
	struct cpu *c = cpu_of(flow->wanted);

	if (!b || !c || b->closed || flow->wanted == rx->cpu)
		return false;
	if (flow_is_alone(rx, flow) && backlog_half(b)) {
		cpu_set_given(c, rx_half_lives(rx), POLICY_CROWDED);
		return false;
	}
	return !rx_note_crowded(rx, b, c) || b->left >= POLICY_STEP;
}

/* INLINE while the polling CPU has room; otherwise a CPU with room for the flow. A flow stays where
 * it is while nothing is better. */
static __always_inline __u16 rx_adapt(const struct rx *rx, const struct rps_dev_flow *flow,
				      __u8 *reason)
{
	const struct rx_load *l = &rx->q->load;
	__u16 cpu;

	*reason = load_relaxed_reason(l);
	if (l->pressure == RX_RELAXED)
		return RPS_INLINE;
	*reason = RX_MERGED;
	if (flow_stays_merged(l, flow))
		return RPS_INLINE;
	*reason = RX_STAY;
	if (flow->wanted == RPS_INLINE && !flow->may_leave)
		return RPS_INLINE;
	*reason = rx->followed ? RX_CONSUMER : RX_SPREAD;
	if (flow->wanted == flow->base ? rx_holds(rx, flow) : rx_has_room(rx, flow->base, flow))
		return flow->base;
	*reason = RX_STAY;
	if (flow->wanted != RPS_INLINE && flow->wanted != flow->base && rx_holds(rx, flow))
		return flow->wanted;
	*reason = RX_IDLE_CPU;
	if (rx->followed && rx->q->policy & RX_IDLE) {
		cpu = rx_idle_near(rx, flow);
		if (cpu != RPS_NO_CPU)
			return cpu;
	}
	*reason = RX_SPREAD;
	cpu = rx_spread(rx, flow);
	if (cpu != RPS_NO_CPU)
		return cpu;
	*reason = RX_NO_GAIN;
	return RPS_INLINE;
}

/* Whether the idle CPU that was chosen for the flow still has room. */
static __always_inline bool rx_idle_holds(const struct rx *rx, const struct rps_dev_flow *flow)
{
	if (flow->reason != RX_IDLE_CPU || flow->wanted == flow->base)
		return false;
	if (flow->wanted == RPS_INLINE)
		return rx->q->load.pressure <= RX_FULL;
	return rx_holds(rx, flow);
}

/* The CPU by the tables; while it is busy and the application does not wait, an idle CPU near it,
 * as in "[RFC] net;sched: Try to find idle cpu for RPS to handle packets" (Tkhai, 2018). */
static __always_inline __u16 rx_beside(const struct rx *rx, const struct rps_dev_flow *flow,
				       __u8 *reason)
{
	__u16 idle;

	*reason = RX_TABLES;
	if (!rx->followed || cpu_is_idle(flow->base) || rx_consumer_waits(rx, flow->base))
		return flow->base;
	idle = rx_idle_holds(rx, flow) ? flow->wanted : rx_idle_near(rx, flow);
	if (idle == RPS_NO_CPU)
		return flow->base;
	*reason = RX_IDLE_CPU;
	return idle;
}

/* The location that the flow wants from this window on, and the reason. */
static __always_inline __u16 rx_choose(const struct rx *rx, const struct rps_dev_flow *flow,
				       __u8 *reason)
{
	bool adapt = rx->q->policy & RX_ADAPT;

	*reason = RX_TABLES;
	/* Where the application is, or by RPS alone. */
	if (flow->base == RPS_INLINE && (rx->followed || !adapt))
		return RPS_INLINE;
	return adapt ? rx_adapt(rx, flow, reason) : rx_beside(rx, flow, reason);
}

/* The default location: INLINE under RX_ADAPT, otherwise the location by the tables. */
static __always_inline __u16 flow_default(const struct rx *rx, const struct rps_dev_flow *flow)
{
	return rx->q->policy & RX_ADAPT ? (__u16)RPS_INLINE : flow->base;
}

/* Whether a flow that is INLINE stays there, whatever the tables say: they are not read. Sets what
 * the flow wants. */
static __always_inline bool rx_stays_inline(const struct rx_load *l, struct rps_dev_flow *flow)
{
	if (likely(l->pressure == RX_RELAXED)) {
		flow->wanted = RPS_INLINE;
		flow->reason = load_relaxed_reason(l);
		return true;
	}
	return flow->reason == RX_MERGED && flow->window == l->window && l->pressure != RX_POLLED;
}

/* Accounts for the flow's cost at the CPU that it is given to, and at the one that it leaves. */
static __always_inline void rx_give(const struct rx *rx, const struct rps_dev_flow *flow, __u16 cpu)
{
	__u64 work = flow_work(rx, flow);
	__u32 now = rx_half_lives(rx);
	struct backlog *b = rx_backlog(rx, flow->wanted);
	struct cpu *left = cpu_of(flow->wanted);
	struct cpu *c = cpu_of(cpu);

	if (b && left)
		b->left += cpu_share(left, work);
	if (c)
		cpu_set_given(c, now, cpu_given(c, now) + cpu_share(c, work));
}

/* Initializes an unset slot: the flow wants its default location. */
static __always_inline void flow_begin(const struct rx *rx, struct rps_dev_flow *flow, __u32 base)
{
	flow->changed = flow->window;
	flow->load = 0;
	flow->reason = 0;
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

/* Decides where the flow with this `base` wants to be from now on. */
static __always_inline void rx_decide(const struct rx *rx, struct rps_dev_flow *flow)
{
	__u8 reason;
	__u16 wanted = rx_choose(rx, flow, &reason);

	flow->reason = reason;
	if (wanted == flow->wanted)
		return;
	rx_give(rx, flow, wanted);
	flow->changed = flow->window;
	flow->wanted = wanted;
}

/* The flow's wanted location; `base` is its location by the tables, which is usable. Decided once
 * per window, and when `base` changes, so that a flow follows its application without delay. */
static __always_inline __u32 rx_wanted(const struct rx *rx, struct rps_dev_flow *flow, __u32 base,
				       bool decide)
{
	__u32 wanted = flow->wanted == base ? base : rx_usable(rx, flow->wanted);
	bool moved = flow->base != base;
	bool lost = wanted == RPS_NO_CPU;
	bool follows = moved && flow_at_base(rx, flow);

	if (likely(!decide && !moved && !lost))
		return wanted;
	flow->base = base;
	if (lost)
		flow->wanted = flow_default(rx, flow);
	else if (wanted == RPS_INLINE)
		/* Perhaps the CPU that the flow wanted polls the queue now. */
		flow->wanted = RPS_INLINE;
	else if (follows)
		flow->wanted = base;
	rx_decide_apart(rx, flow);
	return rx_usable(rx, flow->wanted);
}
