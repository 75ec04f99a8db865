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
	SKB_NUMBER, /* backlog.tail or poll_cpu.nr_sent with this skb, the low bits */
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

/* The mark of a packet that has left lo's egress and has not come to its ingress: no device. */
static __always_inline void skb_mark_sent(struct __sk_buff *skb, struct poll_cpu *poll, __u32 cpu)
{
	skb_mark(skb, cpu << 24, 0, ++poll->nr_sent);
}

static __always_inline bool skb_is_sent(const __u32 *cb)
{
	return !cb[SKB_DEVICE];
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
