/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * steer.h: from a flow's hash to the location where its packet is processed: where the flow
 * wants to be, and whether it may go there (docs/order.md).
 *
 * Plain C without helpers, maps or a clock (types.h). What it has to ask, it asks through the
 * functions declared below, which whoever includes this defines: rx.bpf.c by asking the kernel,
 * native.c by asking a test.
 */
#pragma once

#include <stdbool.h>

#include "backlog.h"
#include "tables.h"
#include "types.h"

/* ---- a packet and its surroundings ---------------------------------------- */

/* A packet to be steered: its queue, its flow, and who polls. */
struct rx {
	struct rx_queue *q;
	__u32 queue;
	__u32 hash;
	__u32 cpu;		    /* polling */
	__u16 epoch;		    /* the queue's, read once */
	const struct flow_key *key; /* NULL: the device gave the hash alone */
	__u64 poll;		    /* rx_queue.nr_polls with this poll in it; 0 until asked for */
};

enum rx_verdict {
	RX_PASS,
	RX_REDIRECTED,
	RX_DROP,
};

/* Tests' control: the rule of order is off. */
static bool steer_unguarded(void);
/* The queue's backlog for a CPU, or NULL beyond nr_cpus. */
static struct backlog *rx_backlog(const struct rx *rx, __u32 cpu);
/* Redirects the packet; false, and asks for the backlog, while it does not exist. */
static bool rx_enqueue(const struct rx *rx, __u32 cpu);
/* poll_stamp() of now; marks the poll as the queue's. */
static __u64 rx_poll_stamp(const struct rx *rx);
/* Whether GRO of the NAPI instance that polls right now holds nothing. */
static bool rx_gro_empty(const struct rx *rx);
/* The sock_flow_table's entry for the flow. */
static __u32 rx_sock_flow(const struct rx *rx);
static __u32 rx_cpu_mask(void);
static __u32 rx_jiffies(void);
/* A slot has a new flow: whoever shows flows wants to know its key. */
static void rx_flow_new(const struct rx *rx);

/* ---- INLINE's own backlog ------------------------------------------------- */

/*
 * The poll in progress, by its number. While somebody waits to leave, a poll's first INLINE frame
 * looks at GRO's lists: later in the poll they may hold what the poll itself received.
 */
static __always_inline __u64 rx_poll(struct rx *rx)
{
	struct rx_queue *q = rx->q;
	__u64 poll;

	if (rx->poll)
		return rx->poll;
	poll = rx_poll_stamp(rx);
	if (q->poll != poll) {
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

/*
 * Whether everything up to this poll, inclusive, has been delivered: it has ended, and since then
 * the NAPI's GRO lists have been seen empty, by their owner.
 */
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
 * An unset slot stands for whatever the queue passed up before the epoch, INLINE: a frame in the
 * poll of the epoch's first one.
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
 * A flow changes location only when every earlier packet of it has been delivered to the stack.
 * Staying is always safe.
 */
static __always_inline bool rx_delivered(struct rx *rx, __u16 location, __u64 last_qtail)
{
	struct backlog *b;

	if (steer_unguarded())
		return true;
	if (location == RPS_INLINE)
		return inline_delivered(rx, last_qtail);
	b = rx_backlog(rx, location);
	if (!b)
		return false;
	if (backlog_delivered(b, last_qtail))
		return true;
	b->leaving = rx_poll(rx);
	return false;
}

/* ---- where a flow wants to be --------------------------------------------- */

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
 * queue's mask or not; RPS otherwise; and where neither knows a CPU, here.
 */
static __always_inline __u16 rx_wanted(const struct rx *rx, const struct rps_map *map)
{
	__u16 wanted = RPS_NO_CPU;

	if (rx->q->rfs)
		wanted = rx_usable(rx, sock_flow_cpu(rx_sock_flow(rx), rx->hash, rx_cpu_mask()));
	if (wanted == RPS_NO_CPU)
		wanted = rx_usable(rx, rps_location_of(map, rx->hash));
	return wanted == RPS_NO_CPU ? RPS_INLINE : wanted;
}

/* ---- what becomes of a packet --------------------------------------------- */

static __always_inline void rx_locate(const struct rx *rx, struct rps_dev_flow *flow,
				      __u16 location, __u64 last_qtail)
{
	bool set = flow->epoch == rx->epoch;

	if (unlikely(flow->hash != rx->hash || !set)) {
		flow->hash = rx->hash;
		flow->nr_packets = flow->nr_moves = 0;
		rx_flow_new(rx);
	}
	if (unlikely(flow->location != location && set)) {
		rx->q->nr_moves++;
		flow->nr_moves++;
	}
	flow->last_qtail = last_qtail;
	flow->location = location;
	flow->epoch = rx->epoch;
	flow->shed = 0;
	flow->nr_packets++;
	flow->last_seen = rx_jiffies();
}

static __always_inline enum rx_verdict rx_inline(struct rx *rx, struct rps_dev_flow *flow)
{
	rx->q->nr_inline++;
	rx_locate(rx, flow, RPS_INLINE, rx_poll(rx));
	return RX_PASS;
}

/*
 * Into the backlog for `cpu`. While it has none, INLINE: no entry is removed while flows are
 * in it, so a flow without one is on its way here and may be anywhere.
 */
static __always_inline enum rx_verdict rx_redirect(struct rx *rx, struct rps_dev_flow *flow,
						   __u32 cpu)
{
	struct backlog *b = rx_backlog(rx, cpu);

	if (!b)
		return rx_inline(rx, flow);
	if (backlog_full(b)) {
		b->nr_dropped++;
		return RX_DROP;
	}
	if (!rx_enqueue(rx, cpu))
		return rx_inline(rx, flow);
	/* Once a poll's first frame is in, the kthread has not taken all, asleep or not: a flow
	 * that waits, and is not the first of its poll, would wait for ever. So the first one
	 * looks. */
	if (unlikely(b->leaving) && b->leaving != rx_poll(rx)) {
		b->leaving = 0;
		backlog_asleep(b);
	}
	b->tail++;
	rx_locate(rx, flow, cpu, backlog_entered(b));
	return RX_REDIRECTED;
}

/*
 * Whether a frame whose flow has to wait at `location` is better dropped. A full backlog may stay
 * full for as long as the overload lasts, and the flow with it: from the first frame that finds it
 * full, the flow's frames are dropped until those before have been delivered.
 */
static __always_inline bool rx_shed(const struct rx *rx, struct rps_dev_flow *flow, __u16 location,
				    bool all)
{
	struct backlog *b = rx_backlog(rx, location);

	if (!b || (!all && !flow->shed && !backlog_full(b)))
		return false;
	flow->shed = 1;
	b->nr_shed++;
	return true;
}

static __always_inline enum rx_verdict rx_steer(struct rx *rx, const struct rps_map *map,
						struct rps_dev_flow *flow)
{
	bool set = likely(flow->epoch == rx->epoch);
	__u16 location = set ? flow->location : RPS_INLINE;
	__u16 wanted = rx_wanted(rx, map);
	bool shed_all = wanted == RPS_INLINE_SHED;

	if (shed_all)
		wanted = RPS_INLINE;
	if (unlikely(location != wanted)) {
		if (rx_delivered(rx, location, set ? flow->last_qtail : rx_first_poll(rx))) {
			location = wanted;
		} else {
			rx->q->nr_held++;
			if (location != RPS_INLINE && rx_shed(rx, flow, location, shed_all))
				return RX_DROP;
		}
	}
	if (location == RPS_INLINE)
		return rx_inline(rx, flow);
	return rx_redirect(rx, flow, location);
}
