// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * poll.bpf.c: counts of the polls of applications: packets found, time spent, and the time that a
 * wake-up takes if an application sleeps instead.
 *
 * User space puts the observed processes into the map, then attaches.
 */
#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "busy_poll.h"
#include "kernel.h"
#include "types.h"

/* NAPI_STATE_IN_BUSY_POLL: busy_poll.h. */
const volatile __u64 napi_state_in_busy_poll = 0;

/* By process. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct busy_poll);
} busy_polls SEC(".maps");

/* The latest poll on a CPU, if its wait may continue. */
struct wait {
	__u64 ns;
	__u64 nr_sleeps; /* of the thread, until then */
	__u32 tid;
	__u32 pad;
};
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct wait);
} waits SEC(".maps");

/* A thread that polls. */
struct poll_thread {
	__u64 woken;	   /* when, ns; 0: the thread runs or sleeps */
	__u64 nr_switches; /* from the thread to others, until then */
};
struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct poll_thread);
} poll_threads SEC(".maps");

/* Returns the time from the wait's previous poll to this one, 0 for its first poll. A poll that
 * finds packets ends the wait. */
static __always_inline __u64 wait_polled(bool found)
{
	__u32 tid = bpf_get_current_pid_tgid();
	struct task_struct *task = (void *)bpf_get_current_task();
	__u64 nr_sleeps = BPF_CORE_READ(task, nvcsw);
	__u64 now = bpf_ktime_get_ns();
	__u64 ns = 0;
	__u32 zero = 0;
	struct wait *wait = bpf_map_lookup_elem(&waits, &zero);

	if (!wait)
		return 0;
	if (wait->tid == tid && wait->nr_sleeps == nr_sleeps)
		ns = now - wait->ns;
	else
		bpf_task_storage_get(&poll_threads, bpf_get_current_task_btf(), NULL,
				     BPF_LOCAL_STORAGE_GET_F_CREATE);
	wait->tid = found ? 0 : tid;
	wait->nr_sleeps = nr_sleeps;
	wait->ns = now;
	return ns;
}

SEC("tp_btf/napi_poll")
int BPF_PROG(on_napi_poll, struct napi_struct *napi, int work, int budget)
{
	__u32 pid = bpf_get_current_pid_tgid() >> 32;
	struct busy_poll *polls;

	/* A poll with a budget of 0 is netpoll's. */
	if (!budget || !napi_busy_polled(napi, budget, napi_state_in_busy_poll))
		return 0;
	polls = bpf_map_lookup_elem(&busy_polls, &pid);
	if (!polls)
		return 0;
	polls->nr_polls++;
	polls->nr_found += work > 0;
	polls->nr_packets += work > 0 ? work : 0;
	polls->ns += wait_polled(work > 0);
	return 0;
}

static __always_inline __u64 nr_switches(const struct task_struct *task)
{
	return task->nvcsw + task->nivcsw;
}

SEC("tp_btf/sched_waking")
int BPF_PROG(on_sched_waking, struct task_struct *task)
{
	struct poll_thread *thread = bpf_task_storage_get(&poll_threads, task, NULL, 0);

	if (!thread)
		return 0;
	thread->woken = bpf_ktime_get_ns();
	thread->nr_switches = nr_switches(task);
	return 0;
}

SEC("tp_btf/sched_switch")
int BPF_PROG(on_sched_switch, bool preempt, struct task_struct *prev, struct task_struct *next)
{
	struct poll_thread *thread = bpf_task_storage_get(&poll_threads, next, NULL, 0);
	struct busy_poll *polls;
	__u32 pid;
	__u64 ns;

	if (likely(!thread) || !thread->woken)
		return 0;
	ns = bpf_ktime_get_ns() - thread->woken;
	thread->woken = 0;
	/* The thread was woken before it slept, and has run meanwhile. */
	if (thread->nr_switches != nr_switches(next))
		return 0;
	pid = next->tgid;
	polls = bpf_map_lookup_elem(&busy_polls, &pid);
	if (!polls)
		return 0;
	polls->nr_woken++;
	polls->woken_ns += ns;
	if (!polls->shortest_ns || ns < polls->shortest_ns)
		polls->shortest_ns = ns;
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
