/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * native.h: what steer.h and backlog.h ask their surroundings, as a host's program answers it.
 * User space gets the type from native.bpf.c.
 */
#pragma once

#include "types.h"

/* One packet's surroundings; the sets of CPUs are bits: CPUs 0 to 63. */
struct rx_facts {
	__u64 entries;	/* CPUs whose backlog has a cpumap entry */
	__u64 sleeping; /* CPUs whose backlog's kthread sleeps */
	__u64 nr_polls; /* ended on the polling CPU */
	__u64 limit;	/* frames a backlog may hold */
	__u32 nr_cpus;
	__u32 cpu_mask;	 /* the bits of a sock_flow_table's entry that hold a CPU */
	__u32 sock_flow; /* the flow's entry there */
	__u32 jiffies;
	__u32 gro_empty; /* of the NAPI instance that polls */
	__u32 unguarded;
	__u64 idle;	  /* CPUs that are */
	__u32 busy[64];	  /* by CPU: cpu_busy() */
	__u32 demand[64]; /* by CPU: cpu_demand() */
	__u32 flow_limit;
	__u32 consumer_waits;
	__u32 consumer_waits_so_far;
	__u32 consumer_busy;
	struct cpu cpus[64]; /* where each looks for an idle one */

	/* The answers' other half. */
	__u32 poll_asked;   /* the poll's stamp was */
	__u32 nr_flows_new; /* slots taken by another flow */
};
