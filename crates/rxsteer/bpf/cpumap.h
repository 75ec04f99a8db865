/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * cpumap.h: the kernel's side of a backlog: which kthread serves it, what the kthread does, what
 * its GRO holds.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "core/backlog.h"
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

/*
 * A fresh kthread sets its state once, before its loop, and delivers with that
 * state until it first sleeps: it looks asleep. So its state alone proves nothing
 * before a batch has shown it running; off the run queue it delivers nothing.
 */
static __always_inline bool backlog_sleeping(const struct backlog *b, bool in_loop)
{
	struct task_struct *kthread = (void *)backlog_read(b->kthread);

	/* It has dequeued nothing: what entered since the entry was made has been lost. */
	if (!kthread)
		return true;
	if (BPF_CORE_READ(kthread, __state) != TASK_INTERRUPTIBLE)
		return false;
	return in_loop || !BPF_CORE_READ(kthread, on_rq);
}

static __always_inline bool backlog_gro_empty(struct bpf_cpu_map_entry *entry)
{
	if (!bpf_core_field_exists(entry->gro))
		return true;
	return !BPF_CORE_READ(entry, gro.bitmask) && !BPF_CORE_READ(entry, gro.rx_count);
}

/*
 * First batch of a kthread: finds the backlog it serves from its cpumap entry, not
 * from the CPU it runs on (an offline CPU's kthread runs elsewhere).
 */
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

/* The backlog that the current kthread serves, or NULL if the cpumap is not ours. */
static __always_inline struct backlog *backlog_current(__u32 map_id)
{
	__u64 task = bpf_get_current_task();
	struct backlog_id *id = bpf_map_lookup_elem(&backlog_kthreads, &task);

	if (unlikely(!id || id->map_id != map_id)) {
		backlog_learn(map_id);
		id = bpf_map_lookup_elem(&backlog_kthreads, &task);
		if (!id || id->map_id != map_id)
			return NULL;
	}
	return bpf_map_lookup_elem(&backlogs, &id->index);
}

/* The kernel has lost n frames that were counted in tail: the ring was full, or worse. */
static __always_inline void backlog_lose(__u32 map_id, __u32 cpu, __u32 n)
{
	__u32 *queue = bpf_map_lookup_elem(&cpumap_queues, &map_id);
	struct backlog *b = queue ? backlog_of(*queue, cpu) : NULL;

	if (b)
		b->nr_lost += n;
}
