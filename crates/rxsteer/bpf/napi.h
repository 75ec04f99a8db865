/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * napi.h: which NAPI instance polls a queue, when its polls end, how long they take, and whether
 * its GRO lists hold packets. The rule of order (steer.h) and the policies (policy.h) need this for
 * flows that are INLINE.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "busy_poll.h"
#include "cpu.h"
#include "kernel.h"
#include "core/load.h"
#include "maps.h"
#include "types.h"

/* More queues and CPUs than a host has; the loops end with the last one. */
#define TRIAL_QUEUES (1 << 16)

static __always_inline struct rx_trial *trial_of_all(void)
{
	__u32 only = 0;

	return bpf_map_lookup_elem(&trials, &only);
}

/* This CPU passes up a packet of a queue. */
static __always_inline void poll_delivers(void)
{
	struct poll_cpu *poll = poll_of(bpf_get_smp_processor_id());

	if (poll)
		poll->delivers = true;
}

/* Called for each frame: the time from a poll's first frame on is the queue's. */
static __always_inline void poll_begin(struct poll_cpu *poll, __u32 queue)
{
	struct task_struct *task;

	if (likely(poll->start))
		return;
	task = (void *)bpf_get_current_task();
	poll->start = bpf_ktime_get_ns();
	poll->jiffies = bpf_jiffies64();
	poll->over_idle = !BPF_CORE_READ(task, pid);
	poll->queue = queue + 1;
	poll->delivers = true;
}

static long trial_add_queue(__u32 queue, struct rx_delivered *sum)
{
	struct rx_queue *q = queue_of(queue);

	if (!q)
		return 1;
	sum->bytes += *(volatile __u64 *)&q->load.bytes;
	sum->nr_received += *(volatile __u64 *)&q->nr_received;
	return 0;
}

static long trial_add_cpu(__u32 cpu, struct rx_delivered *sum)
{
	struct poll_cpu *poll = poll_of(cpu);

	if (!poll)
		return 1;
	sum->nr_refused += *(volatile __u64 *)&poll->nr_refused;
	return 0;
}

/* Ends the trial's window if it is over. A global function, as policy_decide(). */
__noinline int trial_end_window(__u64 now)
{
	struct rx_delivered sum = {};
	struct rx_trial *t = trial_of_all();

	if (!t || !trial_is_over(t, now))
		return 0;
	bpf_loop(TRIAL_QUEUES, trial_add_queue, &sum, 0);
	bpf_loop(TRIAL_QUEUES, trial_add_cpu, &sum, 0);
	trial_window(t, &sum, now);
	trial_unlock(t);
	return 0;
}

static __always_inline void queue_polled(struct rx_queue *q, struct poll_cpu *poll, __u32 cpu,
					 bool exhausted, bool busy)
{
	__u64 now = bpf_ktime_get_ns();
	struct rx_load *l = &q->load;

	poll->poll_ns += now - poll->start;
	if (poll->over_idle)
		poll->over_idle_ns += now - poll->start;
	if (!load_polled(q, poll->start, now, poll->over_idle, exhausted, busy))
		return;
	if (l->cpu == cpu)
		load_others(l, poll->poll_ns - l->cpu_poll_ns,
			    poll->over_idle_ns - l->cpu_over_idle_ns);
	load_measure(q);
	load_window(q, trial_of_all(), now, cpu_tasks(cpu), cpu_irq(cpu));
	if (q->policy & RX_ADAPT)
		trial_end_window(now);
	l->cpu = cpu;
	l->cpu_poll_ns = poll->poll_ns;
	l->cpu_over_idle_ns = poll->over_idle_ns;
}

/* A poll in which a queue's program ran has ended: stores its NAPI instance as the queue's. */
static __always_inline void queue_polled_by(struct rx_queue *q, struct napi_struct *napi)
{
	__u32 ifindex;

	if (q->napi == (__u64)napi)
		return;
	/* Some drivers have the instances of all their devices on a device without an ifindex. */
	ifindex = BPF_CORE_READ(napi, dev, ifindex);
	if (!ifindex || ifindex == q->ifindex)
		q->napi = (__u64)napi;
}

/* A poll has ended on this CPU: stores that, and returns its queue if a queue's program ran. */
static __always_inline struct rx_queue *poll_end(struct poll_cpu *poll, __u32 cpu, bool exhausted,
						 bool busy)
{
	struct rx_queue *q = NULL;
	__u64 nr_polls;

	/* After the delivery of the poll's packets, for other CPUs (backlog_poll_ended()). An
	 * atomic is ordered only if its result is used. */
	nr_polls = __sync_fetch_and_add(&poll->nr_polls, 1);
	asm volatile("" : : "r"(nr_polls));
	poll->since = poll->unpolled = poll->delivers = 0;
	if (poll->queue)
		q = queue_of(poll->queue - 1);
	if (q && poll->start)
		queue_polled(q, poll, cpu, exhausted, busy);
	poll->start = 0;
	poll->queue = 0;
	return q;
}

/* The softnet backlog's NAPI instance belongs to no device. */
static __always_inline void softnet_learn(struct poll_cpu *poll, struct napi_struct *napi,
					  __u32 cpu)
{
	struct softnet_data *softnet =
		(void *)napi - bpf_core_field_offset(struct softnet_data, backlog);

	if (!BPF_CORE_READ(napi, dev) && BPF_CORE_READ(softnet, cpu) == cpu)
		poll->softnet = (__u64)softnet;
}

static __always_inline void napi_polled(struct napi_struct *napi, int work, int budget)
{
	__u32 cpu = bpf_get_smp_processor_id();
	struct poll_cpu *poll = poll_of(cpu);
	struct rx_queue *q;
	bool busy;

	if (!poll)
		return;
	if (unlikely(!poll->softnet))
		softnet_learn(poll, napi, cpu);
	busy = poll->start && napi_busy_polled(napi, budget, config.napi_state_in_busy_poll);
	q = poll_end(poll, cpu, work >= budget, busy);
	if (q)
		queue_polled_by(q, napi);
}

/*
 * The kernel has delivered a packet on this CPU, or one that came with it, as through a bridge. If
 * it came in no poll, it is a poll of its own: softirqs are off, so that the kernel takes no other
 * packet on this CPU meanwhile (hosts with PREEMPT_RT are refused).
 */
static __always_inline void receive_ended(void)
{
	__u32 cpu = bpf_get_smp_processor_id();
	struct poll_cpu *poll = poll_of(cpu);

	if (poll && unlikely(poll->unpolled))
		poll_end(poll, cpu, false, false);
}

/*
 * Whether GRO of the queue's NAPI instance holds no packets, neither in its lists nor in its
 * rx_list, to which this poll may have moved packets of earlier polls. Only on the instance's
 * owner, in XDP.
 */
static __always_inline bool napi_gro_empty(const struct rx_queue *q)
{
	struct napi_struct *napi = (void *)q->napi;
	struct napi_struct___before_6_15 *old = (void *)napi;

	if (!napi)
		return false;
	if (bpf_core_field_exists(napi->gro))
		return !BPF_CORE_READ(napi, gro.bitmask) && !BPF_CORE_READ(napi, gro.rx_count);
	return !BPF_CORE_READ(old, gro_bitmask) && !BPF_CORE_READ(old, rx_count);
}
