/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * env.h: a packet to be steered, and what steer.h and policy.h have to ask about its surroundings.
 * Whoever includes them defines the functions: rx.bpf.c by asking the kernel, native.c by asking a
 * test.
 *
 * Plain C without helpers, maps or a clock (types.h).
 */
#pragma once

#include <stdbool.h>

#include "types.h"

/* A packet to be steered: its queue, its flow, and who polls. */
struct rx {
	struct rx_queue *q;
	__u32 queue;
	__u32 hash;
	__u32 cpu;		    /* polling */
	__u16 epoch;		    /* the queue's, read once */
	const struct flow_key *key; /* NULL: the device gave the hash alone */
	__u64 poll;		    /* rx_queue.nr_polls with this poll in it; 0 until asked for */
	bool followed;		    /* rx_base() is where the flow's application is */
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
/* Whether the flow's application, last seen on `cpu`, has nothing to do before its next packet. */
static bool rx_consumer_waits(const struct rx *rx, __u32 cpu);
/* How often the application has begun to wait for something; wraps. */
static __u32 rx_consumer_waits_so_far(const struct rx *rx);
/* The share of a CPU's time that it takes itself, of 1024, over some tens of milliseconds. */
static __u32 rx_consumer_busy(const struct rx *rx);
/* What is known of a CPU, or NULL beyond nr_cpus. */
static const struct cpu *cpu_of(__u32 cpu);
/* Whether nothing runs there right now. */
static bool cpu_is_idle(__u32 cpu);
/* The share of its time in which it is not idle, of 1024, over some tens of milliseconds. */
static __u32 cpu_busy(__u32 cpu);
/* How many others than the backlog's kthread run there or wait to, on average, times 1024. */
static __u32 cpu_demand(__u32 cpu, const struct backlog *b);
/* A flow whose part of the queue's frames is larger, of 1024, is large; 0: no flow is. */
static __u32 flow_limit_of(void);
