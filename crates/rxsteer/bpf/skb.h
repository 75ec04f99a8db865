/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * skb.h: the mark of an skb on its way to another CPU, in skb->cb. What is there otherwise is left
 * from other layers: a random number of 64 bits tells the mark from it. (cb[] of a tc program is
 * the field `data` of the kernel's struct qdisc_skb_cb.)
 */
#pragma once

#include <linux/bpf.h>
#include <stdbool.h>

#include "maps.h"

/* Words of cb[]. */
enum skb_cb {
	SKB_MARK_LOW,
	SKB_MARK_HIGH,
	SKB_WAY,    /* from CPU, to CPU, queue_mapping before: 8, 8 and 16 bits */
	SKB_DEVICE, /* ifindex, and SKB_EGRESS */
	SKB_NUMBER, /* backlog.tail with this skb, the low bits */
	NR_SKB_WORDS,
};

/* It left for the other CPU at its device's egress, and goes on from there. */
#define SKB_EGRESS (1U << 31)

static __always_inline void skb_mark(struct __sk_buff *skb, __u32 way, __u32 device, __u32 number)
{
	skb->cb[SKB_MARK_LOW] = config.hop_mark;
	skb->cb[SKB_MARK_HIGH] = config.hop_mark >> 32;
	skb->cb[SKB_WAY] = way;
	skb->cb[SKB_DEVICE] = device;
	skb->cb[SKB_NUMBER] = number;
}

/*
 * The mark of a packet that has left lo's egress and has not come to its ingress: no device, the
 * epoch, and its flow's slot. It is counted there meanwhile.
 */
static __always_inline void skb_mark_sent(struct __sk_buff *skb, struct flow_name *name,
					  __u16 epoch, __u32 slot)
{
	__sync_fetch_and_add(&name->nr_sent, 1);
	skb_mark(skb, epoch, 0, slot);
}

static __always_inline bool skb_is_sent(const __u32 *cb)
{
	return !cb[SKB_DEVICE];
}

/* A packet with such a mark has been decided on, or dropped. The tables of another epoch have other
 * slots. */
static __always_inline void skb_came(__u32 epoch, __u32 slot)
{
	struct rx_queue *q = queue_of(config.queue_base);
	struct flow_name *name = name_of(slot);

	if (q && name && epoch == q->epoch)
		__sync_fetch_and_add(&name->nr_sent, -1);
}

static __always_inline bool skb_is_marked(const __u32 *cb)
{
	return cb[SKB_MARK_LOW] == (__u32)config.hop_mark &&
	       cb[SKB_MARK_HIGH] == config.hop_mark >> 32;
}

/* The CPU that the skb was sent to. */
static __always_inline __u32 skb_target(__u32 way)
{
	return way >> 16 & 0xff;
}

/* Index in `backlogs`. */
static __always_inline __u32 skb_backlog(__u32 way)
{
	return (config.queue_base + (way >> 24)) * config.nr_cpus + skb_target(way);
}

static __always_inline void skb_unmark(struct __sk_buff *skb)
{
	skb->cb[SKB_MARK_LOW] = skb->cb[SKB_MARK_HIGH] = 0;
}
