/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * socket.h: a flow's entries in the sock_flow_table and sock_flow_consumers, and the state of the
 * thread that receives its data.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "kernel.h"
#include "maps.h"

static __always_inline __u32 *sock_flow_entry_of(__u32 hash)
{
	__u32 index = hash & config.sock_flow_mask;
	__u32 line = index >> RPS_SOCK_FLOW_ORDER;
	struct rps_sock_flow *flows = bpf_map_lookup_elem(&sock_flow_table, &line);

	return flows ? &flows->ents[index & ((1 << RPS_SOCK_FLOW_ORDER) - 1)] : NULL;
}

static __always_inline __u64 *sock_flow_consumer_of(__u32 hash)
{
	__u32 index = hash & config.sock_flow_mask;

	return bpf_map_lookup_elem(&sock_flow_consumers, &index);
}

/* The thread that receives or sends the flow's data, or NULL. A hint: the thread may have ended. */
static __always_inline struct task_struct *sock_consumer(__u32 hash)
{
	__u64 *consumer = sock_flow_consumer_of(hash);

	return consumer ? (struct task_struct *)*consumer : NULL;
}

/* Whether that thread sleeps; false if it is not known. */
static __always_inline bool sock_consumer_waits(__u32 hash)
{
	struct task_struct *consumer = sock_consumer(hash);

	return consumer && BPF_CORE_READ(consumer, __state) != TASK_RUNNING;
}
