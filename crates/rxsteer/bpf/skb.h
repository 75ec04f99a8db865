/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * skb.h: the mark of an skb on its way to another CPU, in skb->cb. What is there otherwise is left
 * from other layers: a random number of 64 bits tells the mark from it. (cb[] of a tc program is
 * the field `data` of the kernel's struct qdisc_skb_cb.)
 */
#pragma once

#include <linux/bpf.h>
#include <stdbool.h>

#include "types.h"

/* Words of cb[]. */
enum skb_cb {
	SKB_MARK_LOW,
	SKB_MARK_HIGH,
	SKB_BACKLOG, /* index in `backlogs` */
	SKB_DEVICE,  /* ifindex */
	SKB_QUEUE,   /* queue_mapping before: with the carrier's, it selects the CPU */
};

static __always_inline void skb_mark(struct __sk_buff *skb, __u64 mark, __u32 backlog,
				     __u32 ifindex)
{
	skb->cb[SKB_MARK_LOW] = mark;
	skb->cb[SKB_MARK_HIGH] = mark >> 32;
	skb->cb[SKB_BACKLOG] = backlog;
	skb->cb[SKB_DEVICE] = ifindex;
	skb->cb[SKB_QUEUE] = skb->queue_mapping;
}

static __always_inline bool skb_is_marked(const struct __sk_buff *skb, __u64 mark)
{
	return skb->cb[SKB_MARK_LOW] == (__u32)mark && skb->cb[SKB_MARK_HIGH] == mark >> 32;
}

static __always_inline __u32 skb_backlog(const struct __sk_buff *skb)
{
	return skb->cb[SKB_BACKLOG];
}

static __always_inline void skb_unmark(struct __sk_buff *skb)
{
	skb->cb[SKB_MARK_LOW] = skb->cb[SKB_MARK_HIGH] = 0;
}
