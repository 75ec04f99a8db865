/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * steer.h: from a flow's hash to the location where its packet is processed: the wanted location
 * (policy.h), and whether the flow may move there (docs/order.md).
 *
 * Plain C without helpers, maps or a clock (types.h); inputs come through the functions of env.h.
 */
#pragma once

#include <stdbool.h>

#include "backlog.h"
#include "policy.h"
#include "env.h"
#include "softnet.h"
#include "tables.h"
#include "types.h"
#include "wait.h"

/* ---- INLINE's own backlog ------------------------------------------------- */

/*
 * The number of the present poll (rx_queue.nr_polls), from 1. Polls without a stamp are one poll:
 * no flow leaves INLINE between them. While a flow waits to leave INLINE, the first call in a poll,
 * for its first INLINE frame at the latest, reads GRO's lists: later they may hold packets of this
 * poll.
 */
static __always_inline __u64 rx_poll(struct rx *rx)
{
	struct rx_queue *q = rx->q;
	__u64 poll;

	if (rx->poll)
		return rx->poll;
	poll = rx_poll_stamp(rx);
	if (q->poll != poll || unlikely(!q->nr_polls)) {
		q->poll = poll;
		q->nr_polls++;
		if (unlikely(q->leaving)) {
			q->leaving = 0;
			if (rx_gro_empty(rx))
				q->polls_delivered = q->nr_polls - 1;
		}
	}
	return rx->poll = q->nr_polls;
}

/* Whether all packets of the polls up to number `last_qtail` have been delivered: that poll has
 * ended, and the owner of the NAPI instance has seen its GRO lists empty since. */
static __always_inline bool inline_delivered(struct rx *rx, __u64 last_qtail)
{
	struct rx_queue *q = rx->q;
	__u64 poll;

	if (q->polls_delivered >= last_qtail)
		return true;
	poll = rx_poll(rx);
	if (q->polls_delivered >= last_qtail)
		return true;
	if (last_qtail < poll && rx_gro_empty(rx)) {
		q->polls_delivered = poll - 1;
		return true;
	}
	q->leaving = 1;
	return false;
}

/* ---- the rule of order ---------------------------------------------------- */

/*
 * The last_qtail of an unset slot: the first poll of the epoch in which one is needed. Packets of
 * the slot's flows from before the epoch were processed INLINE, at the latest in the poll that
 * received the epoch's first frame.
 */
static __always_inline __u64 rx_first_poll(struct rx *rx)
{
	struct rx_queue *q = rx->q;

	if (unlikely(q->first_epoch != rx->epoch)) {
		q->first_poll = rx_poll(rx);
		q->first_epoch = rx->epoch;
	}
	return q->first_poll;
}

/*
 * For a flow that waits, or that finds the backlog full: whether all frames that entered have been
 * delivered, by proof "blocked". `leaving` stands while no frame enters after its poll: in a later
 * poll all of `tail` has then entered in polls that have ended.
 */
static __always_inline bool rx_settle(struct rx *rx, struct backlog *b)
{
	__u64 poll = rx_poll(rx);

	if (b->leaving && b->leaving != poll && backlog_settle(b, b->tail))
		return true;
	b->leaving = poll;
	return false;
}

/*
 * Two flows may share a slot, and in softirq mode come to two CPUs at once. The slot knows the last
 * packet of one of them, and the other's may still wait, INLINE or on its way into the softnet
 * backlog. The slot is then mixed until all polls have ended in which its packets may have come.
 */
static __always_inline void rx_mix(const struct rx *rx)
{
	__u64 *mixed_at = rx_mixed_at(rx);

	if (mixed_at)
		*mixed_at = rx_mixing();
}

static __always_inline void rx_unmix(const struct rx *rx)
{
	__u64 *mixed_at = rx_mixed_at(rx);
	__u64 before;

	if (!mixed_at)
		return;
	/* What follows sees what other CPUs wrote in the polls that have ended, on arm64 too. */
	before = __sync_lock_test_and_set(mixed_at, 0);
	asm volatile("" : : "r"(before));
}

/* Whether the last packet that the slot knows says enough about the earlier ones. If not, but all
 * of them are in the softnet backlog, this packet will when it enters there too. */
static __always_inline bool rx_unmixed(struct rx *rx, const struct rps_dev_flow *flow)
{
	__u64 *mixed_at = rx_mixed_at(rx);

	if (!mixed_at || likely(!*mixed_at))
		return true;
	if (!rx_polls_ended(rx, *mixed_at))
		return false;
	if (flow->location == RPS_INLINE) {
		/* Without NAPI they may still wait, on the CPU that received them. */
		if (!rx_inline_passed())
			return false;
		rx_unmix(rx);
		return true;
	}
	rx->unmixes = true;
	return false;
}

/*
 * Softirq mode: whether the slot's last packet has been passed up, and with it all before it. What
 * came INLINE on another CPU, in a poll that has ended there, has entered that CPU's softnet
 * backlog if it had to. Of a CPU that goes offline the kernel counts what it takes to another one
 * as passed up (dev_cpu_dead() in net/core/dev.c).
 */
static __always_inline bool rx_passed(struct rx *rx, struct rps_dev_flow *flow, __u64 closed)
{
	struct softnet_way *w = rx_way(flow->queue, flow->location);
	__u32 tail;

	if (!w || closed & BACKLOG_DOWN)
		return false;
	if (flow->location == RPS_INLINE) {
		__u64 poll = softnet_poll(flow->last_qtail);

		if (flow->queue == rx->queue ? !inline_delivered(rx, poll)
					     : !rx_poll_ended_elsewhere(flow->queue, poll))
			return false;
	} else if (flow->queue != rx->queue && !rx_entered_elsewhere(rx, flow)) {
		return false;
	}
	tail = rx_softnet_tail(w);
	return softnet_passed(w, flow->last_qtail, tail, rx_softnet_head(w));
}

/* Whether the softnet backlog at the end of a way has passed up all that it held, of every CPU. */
static __always_inline bool rx_way_passed(const struct softnet_way *w)
{
	__u32 tail = rx_softnet_tail(w);

	return (__s32)(rx_softnet_head(w) - tail) >= 0;
}

/*
 * Softirq mode, when a backlog is full: what has entered and was not counted when the softnet
 * backlog has passed up all, has vanished on the way. Each packet enters before the next one is
 * decided. User space looks too (hop_settled()).
 */
static __always_inline void rx_settle_softnet(const struct rx *rx, struct backlog *b, __u32 cpu)
{
	struct softnet_way *w = rx_way(rx->queue, cpu);

	if (w && rx_way_passed(w))
		backlog_vanished(b, b->tail);
}

/* Of a slot that is unset: what its flows had before the epoch was INLINE. */
static __always_inline bool rx_first_passed(struct rx *rx)
{
	struct softnet_way *w = rx_way(rx->queue, RPS_INLINE);

	return inline_delivered(rx, rx_first_poll(rx)) && w && rx_way_passed(w);
}

/* The rule of order: a flow changes its location only when all its earlier packets have been
 * delivered to the stack. Staying is always safe. `set`: the slot is. `closed`: that of the backlog
 * where the flow is. */
static __always_inline bool rx_delivered(struct rx *rx, struct rps_dev_flow *flow, bool set,
					 __u64 closed)
{
	struct backlog *b;

	if (steer_unguarded())
		return true;
	if (rx_shares_flows()) {
		if (unlikely(!set))
			return rx_first_passed(rx);
		return rx_unmixed(rx, flow) && rx_passed(rx, flow, closed);
	}
	if (unlikely(!set))
		return inline_delivered(rx, rx_first_poll(rx));
	if (flow->location == RPS_INLINE)
		return inline_delivered(rx, flow->last_qtail);
	b = rx_backlog(rx, flow->location);
	if (!b)
		return false;
	return backlog_delivered(b, flow->last_qtail) || rx_settle(rx, b);
}

/* Why no flow may want the backlog where a flow is. Read once for each packet: others change it,
 * and a packet is dropped by what it may leave by. */
static __always_inline __u64 rx_closed(const struct rx *rx, __u32 location)
{
	const struct backlog *b = location == RPS_INLINE ? NULL : rx_backlog(rx, location);

	return b ? backlog_read(b->closed) : 0;
}

/* ---- what becomes of a packet --------------------------------------------- */

/* Gives the slot to this flow if it is unset, or if another one had it and no packet was accepted
 * in this tick: flows that alternate would write name and counters with each packet. The location
 * stays: the rule of order binds all flows of the slot. Returns whether this flow has it. */
static __always_inline bool rx_own(const struct rx *rx, struct rps_dev_flow *flow, bool set)
{
	if (likely(flow->hash == rx->hash && set))
		return true;
	if (set && flow->last_seen == rx_jiffies())
		return false;
	/* For packets that are dropped. */
	flow->last_seen = rx_jiffies();
	flow->hash = rx->hash;
	flow->frames -= flow->nr_packets + flow->nr_dropped;
	flow->nr_packets = flow->nr_dropped = flow->nr_moves = 0;
	flow->merging = 0;
	rx_flow_new(rx);
	return true;
}

/* Notes a packet of the flow, wherever it is processed. */
static __always_inline void rx_note(struct rx *rx, struct rps_dev_flow *flow, bool set)
{
	if (rx_own(rx, flow, set) && rx->segment && rx->q->policy & RX_ADAPT)
		flow_note_segment(flow, rx_poll(rx));
}

/* Counts a packet in a counter of the flow that has the slot; one of another flow counts for the
 * load of the slot alone (flow_window()). Without a branch, which the verifier would follow in each
 * way of a packet. */
static __always_inline void rx_count(const struct rx *rx, struct rps_dev_flow *flow, __u32 *counter)
{
	__u32 differs = flow->hash ^ rx->hash;
	__u32 other;

	asm volatile("" : "+r"(differs));
	other = (differs | -differs) >> 31;
	*counter += 1 - other;
	flow->frames -= other;
}

static __always_inline void rx_locate(const struct rx *rx, struct rps_dev_flow *flow,
				      __u32 location, __u64 last_qtail)
{
	if (unlikely(flow->location != location && flow->epoch == rx->epoch)) {
		rx->q->nr_moves++;
		flow->nr_moves++;
	}
	flow->last_qtail = last_qtail;
	flow->location = location;
	flow->queue = rx->queue;
	flow->epoch = rx->epoch;
	flow->shed = 0;
	rx_count(rx, flow, &flow->nr_packets);
	flow->last_seen = rx_jiffies();
}

/* A packet goes there by the kernel's hop, or INLINE: returns its number (softnet.h). */
static __always_inline __u64 rx_enter(const struct rx *rx, __u32 location)
{
	struct softnet_way *w = rx_way(rx->queue, location);

	if (!w)
		return 0;
	softnet_enter(w, rx_softnet_tail(w));
	return w->nr;
}

static __always_inline enum rx_verdict rx_inline(struct rx *rx, struct rps_dev_flow *flow)
{
	__u64 last_qtail = rx_poll(rx);

	rx->q->nr_inline++;
	if (rx_shares_flows())
		last_qtail = softnet_inline(last_qtail, rx_enter(rx, RPS_INLINE));
	rx_locate(rx, flow, RPS_INLINE, last_qtail);
	return RX_PASS;
}

/* The backlog's room for a frame of this flow: BACKLOG_CROWDED concerns large flows only. */
static __always_inline enum backlog_room rx_room(const struct rx *rx,
						 const struct rps_dev_flow *flow, struct backlog *b)
{
	enum backlog_room room = backlog_room(b);

	if (room == BACKLOG_CROWDED && !flow_is_large(rx->q, flow, flow_limit_of()))
		return BACKLOG_OPEN;
	return room;
}

/* Whether a frame of the flow may enter the backlog; if not, counts the frame. */
static __always_inline bool rx_admit(struct rx *rx, struct rps_dev_flow *flow, struct backlog *b,
				     __u32 cpu)
{
	switch (rx_room(rx, flow, b)) {
	case BACKLOG_OPEN:
		return true;
	case BACKLOG_CROWDED:
		b->nr_limited++;
		break;
	case BACKLOG_FULL:
		b->nr_dropped++;
		/* If frames that vanished fill it, later ones find room. */
		if (rx_shares_flows())
			rx_settle_softnet(rx, b, cpu);
		else
			rx_settle(rx, b);
		break;
	}
	rx_count(rx, flow, &flow->nr_dropped);
	return false;
}

/* Drops the packet: its flow has to leave the backlog, and can't yet. */
static __always_inline enum rx_verdict rx_drop_shed(const struct rx *rx, struct rps_dev_flow *flow,
						    struct backlog *b)
{
	flow->shed = 1;
	rx_count(rx, flow, &flow->nr_dropped);
	b->nr_shed++;
	return RX_DROP;
}

/*
 * Redirects the packet to the backlog for `cpu`; INLINE until that backlog exists. An entry with
 * frames is never removed, so all earlier frames of this flow have been delivered. In softirq mode
 * they may have come by another CPU's way, and wait: `left`, none does.
 */
static __always_inline enum rx_verdict rx_redirect(struct rx *rx, struct rps_dev_flow *flow,
						   __u32 cpu, bool left)
{
	struct backlog *b = rx_backlog(rx, cpu);

	if (!b)
		return rx_inline(rx, flow);
	if (!rx_admit(rx, flow, b, cpu))
		return RX_DROP;
	if (!rx_enqueue(rx, cpu)) {
		if (rx_shares_flows() && !left &&
		    !rx_delivered_apart(rx, flow, true, rx_closed(rx, cpu)))
			return rx_drop_shed(rx, flow, b);
		return rx_inline(rx, flow);
	}
	/*
	 * Once a frame of a poll has entered, `dequeued` is below `tail` until the poll ends: proof
	 * "asleep" fails for all later frames of the poll. A flow that waits, with frames that are
	 * never first, would wait forever, so the first frame evaluates the proofs for that flow.
	 */
	if (!rx_shares_flows() && unlikely(b->leaving) && b->leaving != rx_poll(rx)) {
		b->leaving = 0;
		if (!backlog_asleep(b))
			backlog_settle(b, b->tail);
	}
	if (unlikely(wait_is_due(b)))
		rx_measure_wait(rx, cpu);
	if (unlikely(rx->unmixes))
		rx_unmix(rx);
	b->tail++;
	rx_locate(rx, flow, cpu, rx_shares_flows() ? rx_enter(rx, cpu) : backlog_entered(b));
	return RX_REDIRECTED;
}

/*
 * Whether a frame of a flow that waits to leave its backlog may be dropped instead. During an
 * overload a backlog stays full, and a flow that keeps sending could never leave. From its first
 * frame without room on, its frames are dropped until the earlier ones have been delivered; with
 * `all` (RPS_INLINE_SHED, BACKLOG_SHED), even while there is room: the backlog is to be empty.
 */
static __always_inline bool rx_may_shed(const struct rx *rx, const struct rps_dev_flow *flow,
					struct backlog *b, bool all)
{
	if (!all && !flow->shed && rx_room(rx, flow, b) == BACKLOG_OPEN)
		return false;
	/* Another packet has to enter, after those of all CPUs. */
	return !rx->unmixes;
}

/*
 * Whether the flow returns since it does not help that it has moved. One that always has packets on
 * their way, as TCP in bulk does, never could: after a window its packets are dropped until those
 * have been passed up, but not once the flow has paused for two ticks. Also while its slot is
 * mixed: a CPU whose packets all go elsewhere polls nothing, and its polls seem to last.
 */
static __always_inline bool rx_returns(const struct rx *rx, const struct rps_dev_flow *flow,
				       __u32 wanted)
{
	return wanted == RPS_INLINE && rx->q->load.kept > 1 && rx_jiffies() - flow->last_seen <= 1;
}

/* Drops a frame of a flow that waits to leave `location`, if it may be dropped, or if that CPU goes
 * offline or its packets come elsewhere: the kernel would leave the frame on this one, ahead of
 * those that wait there. */
static __always_inline bool rx_shed(const struct rx *rx, struct rps_dev_flow *flow, __u32 location,
				    __u64 closed, bool all)
{
	struct backlog *b = rx_backlog(rx, location);

	if (!b)
		return false;
	all |= !!(closed & BACKLOG_SHED);
	if (!(unlikely(closed & (BACKLOG_DOWN | BACKLOG_MISDIRECTED)) ||
	      rx_may_shed(rx, flow, b, all)))
		return false;
	rx_drop_shed(rx, flow, b);
	return true;
}

/*
 * Whether the packet has come to the CPU where its flow belongs by the decision of another queue,
 * or to that of its application: it needs no hop, and decides nothing. A veth's packets come on the
 * CPU of the sending thread, and on that of its peer, whose acknowledgement lets the sender go on.
 */
static __always_inline bool rx_is_there(const struct rx *rx, const struct rps_dev_flow *flow,
					__u32 base)
{
	if (!(rx->q->policy & (RX_IDLE | RX_ADAPT)))
		return false;
	if (base == RPS_INLINE)
		return rx->followed || flow->wanted == rx->cpu;
	return flow->base == base && flow->wanted == rx->cpu;
}

/* Decides and counts, and leaves the packet where it is: the flow has the account of one that is
 * INLINE. The decision is that of the tables, on a polling CPU without room. */
static __always_inline enum rx_verdict rx_dry_run(struct rx *rx, struct rps_dev_flow *flow)
{
	__u16 base = rx_base(rx);
	struct backlog *b;
	bool merged;

	rx_note(rx, flow, flow->epoch == rx->epoch);
	merged = rx->q->policy & RX_ADAPT && flow_stays_merged(&rx->q->load, flow);
	flow->reason = merged ? RX_MERGED : RX_TABLES;
	flow->base = base;
	flow->wanted = merged ? (__u16)RPS_INLINE : base;
	b = rx_backlog(rx, flow->wanted);
	if (b)
		b->nr_decided++;
	return rx_inline(rx, flow);
}

static __always_inline enum rx_verdict rx_steer(struct rx *rx, struct rps_dev_flow *flow)
{
	bool set = likely(flow->epoch == rx->epoch);
	__u32 location = set ? flow->location : RPS_INLINE;
	struct rx_queue *q = rx->q;
	bool decided_elsewhere = set && rx_shares_flows() && flow->decider != rx->queue;
	bool new_window, shed_all, there, left = false;
	__u32 wanted;

	if (set && rx_shares_flows() && unlikely(flow->queue != rx->queue) &&
	    !rx_entered_elsewhere(rx, flow))
		rx_mix(rx);
	rx_note(rx, flow, set);
	if ((q->policy & RX_ADAPT) && set && location == RPS_INLINE && !decided_elsewhere &&
	    rx_stays_inline(&q->load, flow))
		return rx_inline(rx, flow);
	wanted = rx_base(rx);
	there = decided_elsewhere && rx_is_there(rx, flow, wanted);
	new_window = !there && (!set || decided_elsewhere || flow->window != q->load.window);
	if (unlikely(new_window)) {
		/* Queues number their windows apart. */
		if (decided_elsewhere)
			flow->window = q->load.window - 1;
		flow->decider = rx->queue;
		flow_window(&q->load, flow);
	}
	shed_all = wanted == RPS_INLINE_SHED;
	if (shed_all || there) {
		wanted = RPS_INLINE;
	} else if (q->policy & (RX_IDLE | RX_ADAPT)) {
		if (unlikely(!set))
			flow_begin(rx, flow, wanted);
		wanted = rx_wanted(rx, flow, wanted, new_window);
	}
	if (unlikely(location != wanted)) {
		__u64 closed = rx_closed(rx, location);

		/* What a CPU held that went offline may count as passed up. */
		if (closed & BACKLOG_PASSED || rx_delivered_apart(rx, flow, set, closed)) {
			location = wanted;
			left = true;
		} else {
			q->nr_held++;
			if (location != RPS_INLINE &&
			    rx_shed(rx, flow, location, closed,
				    shed_all || rx_returns(rx, flow, wanted)))
				return RX_DROP;
		}
	}
	if (location == RPS_INLINE)
		return rx_inline(rx, flow);
	return rx_redirect(rx, flow, location, left);
}
