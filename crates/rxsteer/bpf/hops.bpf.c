// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * hops.bpf.c: what softirq mode has once, beside the programs of its devices (dissector.bpf.c):
 * what user space asks and sets of the kernel's hashes, and tracepoints: packets that the kernel
 * drops on their way to another CPU, packets that it has delivered outside of polls, and CPUs that
 * go offline.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "kernel.h"
#include "maps.h"
#include "napi.h"

/* The kernel's hash of a packet: called by user space. */
SEC("tc")
int rxsteer_hash_of(struct __sk_buff *skb)
{
	return bpf_get_hash_recalc(skb);
}

/* The hash of the anchor that is being made (host/anchors.rs). Set by user space. */
__u64 anchor_hash;

/* At the egress of the anchors' loopback device. */
SEC("tc")
int rxsteer_anchor(struct __sk_buff *skb)
{
	bpf_set_hash(skb, *(volatile __u64 *)&anchor_hash);
	return TC_ACT_UNSPEC;
}

/* A CPU's softnet backlog was full (net.core.netdev_max_backlog). */
SEC("tp_btf/kfree_skb")
int BPF_PROG(on_kfree_skb, struct sk_buff *skb, void *location, __u32 reason)
{
	struct hop_hash *hop;
	struct backlog *b;
	__u32 hash;

	if (reason != bpf_core_enum_value(enum skb_drop_reason, SKB_DROP_REASON_CPU_BACKLOG))
		return 0;
	hash = BPF_CORE_READ(skb, hash);
	hop = hop_at(hash);
	if (!hash || !hop || hop->hash != hash)
		return 0;
	b = bpf_map_lookup_elem(&backlogs, &hop->index);
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
 * the kernel then leaves packets for it on the CPU that sends them, and only later passes up those
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
