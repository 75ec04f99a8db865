/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * native.h: the inputs of steer.h and backlog.h for native.c. User space gets the type from
 * types.bpf.c.
 */
#pragma once

#include "types.h"

/* Inputs for one packet. Sets of CPUs are bits: CPUs 0 to 63. */
struct rx_facts {
	__u64 entries; /* CPUs for which there is a cpumap entry */
	/* CPUs for which the backlog's kthread is in TASK_INTERRUPTIBLE, and off the run queue. */
	__u64 interruptible;
	__u64 off_rq;
	__u64 nr_polls; /* ended on the polling CPU */
	__u64 limit;	/* frames a backlog may hold */
	__u32 nr_cpus;
	__u32 cpu_mask;	 /* the bits of a sock_flow_table's entry that hold a CPU */
	__u32 sock_flow; /* the flow's entry in the table */
	__u32 jiffies;
	__u32 gro_empty; /* of the polling NAPI instance */
	__u32 unguarded;
	__u32 dry_run;
	__u64 idle;	  /* CPUs that are idle */
	__u32 busy[64];	  /* by CPU: backlog.busy */
	__u32 demand[64]; /* by CPU: backlog.demand */
	__u32 flow_limit;
	__u32 consumer_waits;
	__u32 no_stamp; /* the polling CPU has no element in poll_cpus */
	__u32 softnet;	/* softirq mode: rx_shares_flows() */
	__u32 queue;	/* the packet's */
	__u32 segment;	/* the packet is a TCP segment with data */
	__u32 tunnel; /* of a packet in a tunnel: by which rx.hash and rx.sock_hash differ (XOR) */
	__u32 poll_ended_elsewhere;
	__u32 entered_elsewhere;
	__u32 polls_ended; /* those before the mixing */
	__u32 inline_passed;
	__u64 mixing;
	struct cpu cpus[64]; /* with the CPUs near each */

	/* Softirq mode: the ways to CPUs and INLINE, and the counters of softnet backlogs, the last
	 * INLINE's. */
	struct softnet_way ways[64], here;
	__u32 tails[65], heads[65];

	__u64 mixed_at; /* the slot's; also an output */

	/* Outputs. */
	__u32 poll_asked;   /* rx_poll_stamp() was called */
	__u32 nr_flows_new; /* calls of rx_flow_new() */
};
