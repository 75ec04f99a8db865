// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * carrier.bpf.c: the program at the carrier, and the tracepoints of skb mode: skbs that the kernel
 * drops on their way to another CPU (skb.bpf.c), packets that it has delivered outside of polls,
 * and CPUs that go offline.
 */
#include <linux/bpf.h>
#include <linux/if_packet.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "kernel.h"
#include "maps.h"
#include "napi.h"
#include "skb.h"

static __always_inline struct backlog *backlog_on(__u32 way)
{
	__u32 index = skb_backlog(way);

	return bpf_map_lookup_elem(&backlogs, &index);
}

/*
 * Whether the skb's CPU has gone offline, and the kernel has moved it here. The kernel moves skbs
 * one by one, and softirqs run in between (dev_cpu_dead() in net/core/dev.c): this one would go on
 * at once, ahead of those that were at the carrier on their own CPU, and are moved later. So it is
 * dropped.
 */
static __always_inline bool skb_is_late(__u32 way)
{
	struct backlog *b;

	if (likely(skb_target(way) == bpf_get_smp_processor_id()) || config.unguarded)
		return false;
	b = backlog_on(way);
	if (!b || !(b->closed & BACKLOG_DOWN))
		return false;
	__sync_fetch_and_add(&b->nr_lost, 1);
	return true;
}

/* On the CPU that the skb was sent to. */
SEC("tc")
int rxsteer_carrier(struct __sk_buff *skb)
{
	__u32 device = skb->cb[SKB_DEVICE];

	if (!skb_is_marked(skb->cb))
		return TC_ACT_UNSPEC;
	if (skb_is_late(skb->cb[SKB_WAY]))
		return TC_ACT_SHOT;
	/* Kernel RPS looks up this queue at the device. */
	skb->queue_mapping = (__u16)skb->cb[SKB_WAY];
	if (!(device & SKB_EGRESS))
		return bpf_redirect(device, BPF_F_INGRESS);
	/* To the carrier it was a packet for another host, and lo leaves that as it is. */
	bpf_skb_change_type(skb, PACKET_HOST);
	return bpf_redirect(device & ~SKB_EGRESS, 0);
}

/* A CPU's softnet backlog was full (net.core.netdev_max_backlog). Other drops are those of copies
 * that still have the mark, as of a capture that is full. */
SEC("tp_btf/kfree_skb")
int BPF_PROG(on_kfree_skb, struct sk_buff *skb, void *location, __u32 reason)
{
	struct qdisc_skb_cb *cb;
	__u32 words[NR_SKB_WORDS];
	struct backlog *b;

	if (reason != bpf_core_enum_value(enum skb_drop_reason, SKB_DROP_REASON_CPU_BACKLOG))
		return 0;
	cb = (void *)skb + bpf_core_field_offset(skb->cb);
	if (bpf_probe_read_kernel(words, sizeof(words), &cb->data))
		return 0;
	if (!skb_is_marked(words) || skb_is_sent(words))
		return 0;
	b = backlog_on(words[SKB_WAY]);
	/* By the CPU that sent the skb, or by the one that it was sent to. */
	if (b)
		__sync_fetch_and_add(&b->nr_lost, 1);
	return 0;
}

/* Attached while there are devices without polls. */
SEC("tp_btf/netif_receive_skb_exit")
int BPF_PROG(on_receive_exit, int result)
{
	receive_ended();
	return 0;
}

static long backlog_down(__u32 queue, const __u32 *cpu)
{
	__u32 index = (config.queue_base + queue) * config.nr_cpus + *cpu;
	struct backlog *b = bpf_map_lookup_elem(&backlogs, &index);

	if (b)
		__sync_fetch_and_or(&b->closed, BACKLOG_DOWN);
	return 0;
}

/*
 * A step of a CPU on its way offline. After CPUHP_TEARDOWN_CPU it is offline, unless that fails:
 * the kernel then leaves skbs for it on the CPU that sends them, and only later passes up those
 * that wait on it, on another one (dev_cpu_dead() in net/core/dev.c). The step stops all CPUs,
 * outside of softirqs: what was decided before has come into the softnet backlog.
 */
SEC("tp_btf/cpuhp_enter")
int BPF_PROG(on_cpuhp_enter, unsigned int cpu, int target, int step)
{
	int teardown = bpf_core_enum_value(enum cpuhp_state, CPUHP_TEARDOWN_CPU);
	__u32 down = cpu;

	if (step == teardown && target < step && cpu < config.nr_cpus)
		bpf_loop(config.nr_cpus, backlog_down, &down, 0);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
