// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * trace.bpf.c: the tracepoints that count what backlogs and polls have delivered, those that show
 * run queues, and the programs that user space calls.
 */
#include <linux/bpf.h>
#include <linux/errno.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "core/backlog.h"
#include "cpumap.h"
#include "kernel.h"
#include "maps.h"
#include "napi.h"

SEC("tp_btf/xdp_cpumap_kthread")
int BPF_PROG(on_cpumap_kthread, int map_id, unsigned int processed, unsigned int drops)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	const struct backlog_id *id;
	struct backlog *b;
	__u32 index;

	/* An empty batch changes no count; and a thread that is told to end must not be learnt
	 * again. */
	if (!processed)
		return 0;
	id = backlog_current(map_id);
	if (!id)
		return 0;
	index = id->index;
	b = bpf_map_lookup_elem(&backlogs, &index);
	if (!b)
		return 0;
	b->nr_unbuilt += drops;
	poll_delivers();
	if (unlikely(!b->in_loop))
		b->in_loop = BPF_CORE_READ(task, __state) == TASK_RUNNING;
	backlog_dequeue_timed(b, index, processed, backlog_gro_empty((void *)b->entry),
			      bpf_jiffies64());
	return 0;
}

SEC("tp_btf/xdp_cpumap_enqueue")
int BPF_PROG(on_cpumap_enqueue, int map_id, unsigned int processed, unsigned int drops, int to_cpu)
{
	if (unlikely(drops))
		backlog_lose(map_id, to_cpu, drops);
	return 0;
}

SEC("tp_btf/xdp_redirect_err")
int BPF_PROG(on_redirect_err, void *dev, void *prog, void *target, int err, int map_type,
	     __u32 map_id, __u32 index)
{
	/* on_cpumap_enqueue() counts full rings. */
	if (err != -ENOSPC)
		backlog_lose(map_id, index, 1);
	return 0;
}

/* A UDP socket had no room for a packet (trial.h). */
SEC("tp_btf/udp_fail_queue_rcv_skb")
int BPF_PROG(on_udp_full)
{
	struct poll_cpu *poll = poll_of(bpf_get_smp_processor_id());

	if (poll && poll->delivers)
		poll->nr_refused++;
	return 0;
}

SEC("tp_btf/napi_poll")
int BPF_PROG(on_napi_poll, struct napi_struct *napi, int work, int budget)
{
	/* A poll with a budget of 0 is netpoll's, possibly within another poll on this CPU. */
	if (budget)
		napi_polled(napi, work, budget);
	return 0;
}

/* A CPU's number of runnable tasks has changed. Attached only until every CPU has been seen. */
SEC("?tp_btf/sched_update_nr_running_tp")
int BPF_PROG(on_nr_running, struct rq *rq)
{
	__u32 cpu = BPF_CORE_READ(rq, cpu);
	struct cpu *c = bpf_map_lookup_elem(&cpus, &cpu);

	if (c && !c->rq) {
		c->idle = (__u64)BPF_CORE_READ(rq, idle);
		c->rq = (__u64)rq;
	}
	return 0;
}

/* For kernels without that tracepoint; has a cost for each switch. */
SEC("?tp_btf/sched_switch")
int BPF_PROG(on_sched_switch, bool preempt, struct task_struct *prev, struct task_struct *next)
{
	__u32 cpu = bpf_get_smp_processor_id();
	struct cpu *c = bpf_map_lookup_elem(&cpus, &cpu);

	if (c)
		c->running = BPF_CORE_READ(next, pid) != 0;
	return 0;
}

/* ---- called by user space ------------------------------------------------ */

/*
 * Pinned steering brings the programs from here to queue_return() with it: a rxsteer of any version
 * calls those of the version that it replaces, whose maps it can't read. Their names and arguments
 * therefore stay (docs/order.md, "Take-over").
 */

/* Whether all frames that entered the backlog with this index have been delivered. */
SEC("syscall")
int backlog_drained(__u32 *index)
{
	__u32 key = *index;
	struct backlog *b = bpf_map_lookup_elem(&backlogs, &key);

	return b && backlog_asleep(b);
}

/* Whether the first `tail` frames that entered a backlog have been delivered or have vanished,
 * which counts the latter. Only after a grace period since `tail` was read: every poll in which one
 * of them entered has ended then. */
SEC("syscall")
int backlog_settled(struct backlog_flushed *flushed)
{
	__u32 key = flushed->index;
	struct backlog *b = bpf_map_lookup_elem(&backlogs, &key);

	return b && backlog_settle(b, flushed->tail);
}

/* Fills in the number of frames that ever entered the backlog with this index. Returns whether
 * frames of these are queued, or have vanished. */
SEC("syscall")
int backlog_tail(struct backlog_flushed *flushed)
{
	__u32 key = flushed->index;
	struct backlog *b = bpf_map_lookup_elem(&backlogs, &key);

	if (!b)
		return 0;
	flushed->tail = backlog_read(b->tail);
	return flushed->tail != backlog_gone(b);
}

/* Gives all flows of a queue one location, and the queue no policy. */
SEC("syscall")
int queue_return(struct queue_return *wish)
{
	__u32 queue = wish->queue;
	struct rx_queue *q = queue_of(queue);
	struct rps_map *map = bpf_map_lookup_elem(&rps_maps, &queue);
	__u16 location = wish->location;
	int slot;

	if (!q || !map)
		return 0;
	*(volatile __u16 *)&q->policy = 0;
	for (slot = 0; slot < RPS_MAP_SLOTS; slot++)
		*(volatile __u16 *)&map->location[slot] = location;
	return 1;
}

/* Forgets the thread of the backlog with this index: it is going to end, and another may replace
 * it. Only for a closed and drained backlog. The backlog's counts continue. */
SEC("syscall")
int backlog_forget(__u32 *index)
{
	__u32 key = *index;
	struct backlog *b = bpf_map_lookup_elem(&backlogs, &key);
	__u64 kthread;

	if (!b)
		return 0;
	kthread = b->kthread;
	bpf_map_delete_elem(&backlog_kthreads, &kthread);
	b->kthread = b->in_loop = b->old_dequeued = b->wanted = 0;
	return 1;
}

/* The present time in the unit of rps_dev_flow.last_seen. */
SEC("syscall")
int jiffies_now(__u32 *unused)
{
	return bpf_jiffies64();
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
