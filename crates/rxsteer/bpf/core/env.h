/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * env.h: a packet to be steered, and the inputs of steer.h and policy.h. The including file defines
 * these functions: rx.bpf.c from the kernel, native.c from struct rx_facts.
 *
 * Plain C without helpers, maps or a clock (types.h).
 */
#pragma once

#include <stdbool.h>

#include "types.h"

/* A packet to be steered, its queue and its flow. */
struct rx {
	struct rx_queue *q;
	__u32 queue;
	__u32 ifindex; /* of the device */
	__u32 hash;
	__u32 sock_hash;	    /* by which its socket knows the flow */
	__u32 slot;		    /* the flow's, in the dev_flow_tables */
	__u32 cpu;		    /* the polling one */
	__u16 epoch;		    /* the queue's, read once */
	const struct flow_key *key; /* NULL: only the device's hash is known */
	__u64 poll;		    /* rx_poll(); 0: not called yet for this packet */
	struct poll_cpu *poll_cpu;  /* this CPU's, in softirq mode */
	bool unmixes;		    /* the slot is no longer mixed if it enters the backlog */
	bool segment;		    /* a TCP segment with data, which GRO may merge */
	bool followed;		    /* rx_base() is the location of the flow's application */
};

/* Whether the rule of order is off: a control for tests. */
static bool steer_unguarded(void);
/* The queue's backlog for a CPU, or NULL beyond nr_cpus. */
static struct backlog *rx_backlog(const struct rx *rx, __u32 cpu);
/* Redirects the packet to the queue's backlog for the CPU. If the backlog does not exist: requests
 * it, and returns false. */
static bool rx_enqueue(const struct rx *rx, __u32 cpu);
/* Begins a sample with the frame that enters the queue's backlog for the CPU next, unless another
 * one is pending (wait.h). */
static void rx_measure_wait(const struct rx *rx, __u32 cpu);
/* poll_stamp() of the present poll; marks the poll as the queue's. 0 if this CPU's polls are not
 * counted. */
static __u64 rx_poll_stamp(const struct rx *rx);
/* Whether GRO of the polling NAPI instance holds no packets. */
static bool rx_gro_empty(const struct rx *rx);
/* Whether queues share the table of flows: softirq mode, where a queue is a CPU that receives. */
static bool rx_shares_flows(void);
/* Softirq mode: the way from the CPU of this queue to a location; NULL beyond nr_cpus. */
static struct softnet_way *rx_way(__u32 queue, __u32 location);
/* The counters of the softnet backlog at its end (softnet.h). */
static __u32 rx_softnet_tail(const struct softnet_way *w);
static __u32 rx_softnet_head(const struct softnet_way *w);
/* Whether the poll with this number of another queue has ended. */
static bool rx_poll_ended_elsewhere(__u32 queue, __u64 poll);
/* For a flow whose last packet came in another queue: whether that packet has been passed up
 * INLINE, or has entered the softnet backlog. */
static bool rx_entered_elsewhere(const struct rx *rx, const struct rps_dev_flow *flow);
/* rx_delivered(), which the verifier may follow once. */
static bool rx_delivered_apart(struct rx *rx, struct rps_dev_flow *flow, bool set, __u64 closed);
/* Softirq mode: whether all CPUs have passed up what they hold in their own softnet backlogs. */
static bool rx_inline_passed(void);
/* The slot's flow_name.mixed_at; NULL if there is none. */
static __u64 *rx_mixed_at(const struct rx *rx);
/* The number of a new mixing: polls that begin later have a greater one (poll_cpu.since). */
static __u64 rx_mixing(void);
/* Whether all polls have ended that began before this mixing, on any CPU. */
static bool rx_polls_ended(const struct rx *rx, __u64 mixing);
/* rx_decide() in a function of its own: once per window and flow. */
static void rx_decide_apart(const struct rx *rx, struct rps_dev_flow *flow);
/* The queue's RPS location of a hash. */
static __u32 rx_rps_location(const struct rx *rx, __u32 hash);
/* The sock_flow_table's entry for the flow. */
static __u32 rx_sock_flow(const struct rx *rx);
static __u32 rx_cpu_mask(void);
static __u32 rx_jiffies(void);
/* Stores the key of a slot's new flow, for `rxsteer flows` and `rxsteer explain`. */
static void rx_flow_new(const struct rx *rx);
/* Whether the flow's application sleeps, or `cpu`, where the application was last seen, is idle. */
static bool rx_consumer_waits(const struct rx *rx, __u32 cpu);
/* Facts about a CPU; NULL beyond nr_cpus. */
static struct cpu *cpu_of(__u32 cpu);
/* Whether the CPU runs its idle task now. */
static bool cpu_is_idle(__u32 cpu);
/* Sets the load of the backlog's CPU, in a function of its own: once per window. `busy`: share of
 * the CPU's time, of 1024, in which it is not idle, averaged over some tens of ms. `demand`:
 * average number of runnable tasks, times 1024, without the backlog's kthread. */
static void rx_read_load_apart(const struct rx *rx, __u32 cpu);
/* Share of the queue's frames, of 1024, above which a flow is large; 0: no flow is large. */
static __u32 flow_limit_of(void);
