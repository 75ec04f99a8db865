/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * cpumap.h: the kernel's side of a backlog: its kthread, and the state and GRO of that kthread.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "core/backlog.h"
#include "core/tables.h"
#include "core/wait.h"
#include "kernel.h"
#include "maps.h"
#include "types.h"

static __always_inline __u64 backlog_limit_of(void)
{
	return config.backlog_limit;
}

static __always_inline struct backlog *backlog_of(__u32 queue, __u32 cpu)
{
	__u32 index = queue * config.nr_cpus + cpu;

	return cpu < config.nr_cpus ? bpf_map_lookup_elem(&backlogs, &index) : NULL;
}

static __always_inline bool backlog_interruptible(const struct backlog *b)
{
	struct task_struct *kthread = (void *)backlog_read(b->kthread);

	return kthread && BPF_CORE_READ(kthread, __state) == TASK_INTERRUPTIBLE;
}

static __always_inline bool backlog_off_rq(const struct backlog *b)
{
	struct task_struct *kthread = (void *)backlog_read(b->kthread);

	return kthread && !BPF_CORE_READ(kthread, on_rq);
}

/* Whether the poll with this stamp has ended. */
static __always_inline bool poll_ended(__u64 stamp)
{
	__u32 cpu = poll_stamp_cpu(stamp);
	struct poll_cpu *poll = poll_of(cpu);

	return poll && poll_stamp(cpu, backlog_read(poll->nr_polls)) != stamp;
}

static __always_inline bool backlog_gro_empty(struct bpf_cpu_map_entry *entry)
{
	if (!bpf_core_field_exists(entry->gro))
		return true;
	return !BPF_CORE_READ(entry, gro.bitmask) && !BPF_CORE_READ(entry, gro.rx_count);
}

/* First batch of a kthread: finds its backlog by its cpumap entry, not by the CPU on which it runs
 * (the kthread of an offline CPU runs elsewhere). */
static __noinline int backlog_learn(__u32 map_id)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct backlog_id id = {.map_id = map_id};
	struct bpf_cpu_map_entry *entry;
	struct kthread *kthread;
	struct backlog *b;
	__u64 key = (__u64)task;
	__u32 *queue = bpf_map_lookup_elem(&cpumap_queues, &map_id);

	if (!queue)
		return 0;
	kthread = BPF_CORE_READ(task, worker_private);
	entry = BPF_CORE_READ(kthread, data);
	if (BPF_CORE_READ(entry, map_id) != (int)map_id)
		return 0;
	id.index = *queue * config.nr_cpus + BPF_CORE_READ(entry, cpu);
	b = bpf_map_lookup_elem(&backlogs, &id.index);
	if (!b)
		return 0;
	b->in_loop = 0;
	b->entry = (__u64)entry;
	b->kthread = key;
	bpf_map_update_elem(&backlog_kthreads, &key, &id, BPF_ANY);
	return 0;
}

/* The backlog that the current kthread serves, or NULL if the cpumap is not rxsteer's. */
static __always_inline const struct backlog_id *backlog_current(__u32 map_id)
{
	__u64 task = bpf_get_current_task();
	struct backlog_id *id = bpf_map_lookup_elem(&backlog_kthreads, &task);

	if (unlikely(!id || id->map_id != map_id)) {
		backlog_learn(map_id);
		id = bpf_map_lookup_elem(&backlog_kthreads, &task);
		if (!id || id->map_id != map_id)
			return NULL;
	}
	return id;
}

/* As backlog_dequeue(), for the backlog with this index; ends the sample whose frame is among
 * these. */
static __always_inline void backlog_dequeue_timed(struct backlog *b, __u32 index, __u32 n,
						  bool gro_empty, __u64 jiffies)
{
	struct backlog_wait *w = bpf_map_lookup_elem(&backlog_waits, &index);
	bool pending = w && wait_is_pending(w);

	backlog_dequeue(b, n, gro_empty, jiffies);
	if (unlikely(pending) && wait_is_over(w, b))
		wait_end(w, b, bpf_ktime_get_ns());
}

/* Counts n frames of tail that the kernel did not queue: a full ring, or a failed redirect. */
static __always_inline void backlog_lose(__u32 map_id, __u32 cpu, __u32 n)
{
	__u32 *queue = bpf_map_lookup_elem(&cpumap_queues, &map_id);
	struct backlog *b = queue ? backlog_of(*queue, cpu) : NULL;

	if (b)
		b->nr_lost += n;
}
