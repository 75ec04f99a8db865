/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * cpumap.h: the backlogs' maps, and the kernel's side of them: whose a kthread is, what it does,
 * what its GRO holds.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "core/backlog.h"
#include "kernel.h"
#include "types.h"

/* CPUs the kernel can ever have (/sys/devices/system/cpu/possible): the row length of `backlogs`.
 */
const volatile __u32 nr_cpus = 1;

/* Indexed by queue * nr_cpus + cpu; on cache lines of its own, as napi.h says. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct backlog);
} backlogs SEC(".maps");

/* Indexed by queue: the cpumap whose entries are the rings and kthreads. */
struct cpumap {
	__uint(type, BPF_MAP_TYPE_CPUMAP);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
};
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct cpumap);
} cpumaps SEC(".maps");

/* The queue of a cpumap, by map id: how the tracepoints find their way back. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} cpumap_queues SEC(".maps");

/* The backlog of a kthread, by task: filled at its first batch. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, __u64);
	__type(value, struct backlog_id);
} backlog_kthreads SEC(".maps");

/* Backlogs that a flow wants and nobody has made yet: user space makes the cpumap entry. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} backlog_requests SEC(".maps");

/* Only for the skeleton: the type of the ring buffer's records. */
const struct backlog_request backlog_request_type = {};

static __always_inline struct backlog *backlog_of(__u32 queue, __u32 cpu)
{
	__u32 index = queue * nr_cpus + cpu;

	return cpu < nr_cpus ? bpf_map_lookup_elem(&backlogs, &index) : NULL;
}

/*
 * A fresh kthread sets its state once, before its loop, and delivers with that
 * state until it first sleeps: it looks asleep. So its state alone proves nothing
 * before a batch has shown it running; off the run queue it delivers nothing.
 */
static __always_inline bool backlog_sleeping(const struct backlog *b, bool in_loop)
{
	struct task_struct *kthread = (void *)backlog_read(b->kthread);

	/* It has taken nothing: what entered since the entry was made has been lost. */
	if (!kthread)
		return true;
	if (BPF_CORE_READ(kthread, __state) != TASK_INTERRUPTIBLE)
		return false;
	return in_loop || !BPF_CORE_READ(kthread, on_rq);
}

/* Asks user space for the cpumap entry, once. */
static __noinline int backlog_request(__u32 queue, __u32 cpu)
{
	struct backlog_request request = {.queue = queue, .cpu = cpu};
	struct backlog *b = backlog_of(queue, cpu);

	if (!b || b->wanted)
		return 0;
	b->wanted = !bpf_ringbuf_output(&backlog_requests, &request, sizeof(request), 0);
	return 0;
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
	id.index = *queue * nr_cpus + BPF_CORE_READ(entry, cpu);
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
