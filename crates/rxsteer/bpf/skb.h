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
	SKB_DEVICE, /* ifindex */
	SKB_NUMBER, /* backlog.tail with this skb, the low bits */
	NR_SKB_WORDS,
};

static __always_inline void skb_mark(struct __sk_buff *skb, __u64 mark, __u32 from, __u32 to,
				     __u32 number)
{
	skb->cb[SKB_MARK_LOW] = mark;
	skb->cb[SKB_MARK_HIGH] = mark >> 32;
	/* With the carrier's queue_mapping, this one selects the CPU. */
	skb->cb[SKB_WAY] = from << 24 | to << 16 | (__u16)skb->queue_mapping;
	skb->cb[SKB_DEVICE] = skb->ifindex;
	skb->cb[SKB_NUMBER] = number;
}

static __always_inline bool skb_is_marked(const __u32 *cb, __u64 mark)
{
	return cb[SKB_MARK_LOW] == (__u32)mark && cb[SKB_MARK_HIGH] == mark >> 32;
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
