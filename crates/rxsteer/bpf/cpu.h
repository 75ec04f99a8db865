/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * cpu.h: the load of CPUs, read from the scheduler's run queues. The address of a run queue has to
 * be learnt once; reading the run queue costs the scheduler nothing.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "kernel.h"
#include "core/load.h"
#include "maps.h"
#include "types.h"

static __always_inline struct cpu *cpu_of(__u32 cpu)
{
	return bpf_map_lookup_elem(&cpus, &cpu);
}

/* The CPU's run queue, or NULL while its address is unknown. */
static __always_inline struct rq *cpu_rq(const struct cpu *c)
{
	return c ? (struct rq *)c->rq : NULL;
}

static __always_inline bool cpu_is_idle(__u32 cpu)
{
	const struct cpu *c = cpu_of(cpu);
	struct rq *rq = cpu_rq(c);

	if (!c)
		return false;
	if (!rq)
		return !*(volatile __u32 *)&c->running;
	return (__u64)BPF_CORE_READ(rq, curr) == c->idle;
}

/*
 * Half-lives of the scheduler's averages since an idle CPU had its last task: the kernel leaves the
 * averages as they were then. By the clocks of run queues: that of this CPU, which runs and hence
 * ticks, and that of the idle one, which stands still.
 */
static __always_inline __u32 cpu_idle_for(__u32 cpu)
{
	struct rq *here = cpu_rq(cpu_of(bpf_get_smp_processor_id()));
	struct rq *rq = cpu_rq(cpu_of(cpu));
	__s64 age;

	if (!here || !rq || !cpu_is_idle(cpu))
		return 0;
	age = BPF_CORE_READ(here, clock) - BPF_CORE_READ(rq, clock);
	return age > 0 ? age / LOAD_HALF_LIFE_NS : 0;
}

/*
 * Share of the time that interrupts leave in which the CPU runs tasks, by PELT with its half-life
 * of 32 ms. That of an idle CPU is out of date (cpu_idle_for()). The scheduler counts what the
 * fastest CPU would need; a CPU that is never idle shows up to LOAD_WHOLE, whatever its capacity.
 */
static __always_inline __u32 cpu_tasks(__u32 cpu)
{
	const struct cpu *c = cpu_of(cpu);
	struct rq *rq = cpu_rq(c);

	if (!rq)
		return cpu_is_idle(cpu) ? 0 : LOAD_WHOLE;
	return load_share(BPF_CORE_READ(rq, cfs.avg.util_avg) + BPF_CORE_READ(rq, avg_rt.util_avg) +
				  BPF_CORE_READ(rq, avg_dl.util_avg),
			  c->capacity);
}

/* Share of the CPU's time for interrupts and for the hypervisor; 0 if the kernel does not account
 * for that time. */
static __always_inline __u32 cpu_irq(__u32 cpu)
{
	const struct cpu *c = cpu_of(cpu);
	struct rq *rq = cpu_rq(c);

	if (!rq || !bpf_core_field_exists(rq->avg_irq))
		return 0;
	return load_share(BPF_CORE_READ(rq, avg_irq.util_avg), c->capacity);
}

static __always_inline __u32 cpu_busy(__u32 cpu)
{
	return load_decayed(load_busy(cpu_tasks(cpu), cpu_irq(cpu)), cpu_idle_for(cpu));
}

static __always_inline __u32 cpu_demand(__u32 cpu, const struct backlog *b)
{
	struct task_struct *kthread = b ? (void *)b->kthread : NULL;
	struct rq *rq = cpu_rq(cpu_of(cpu));
	__u64 demand, own = 0;

	if (!rq)
		return cpu_busy(cpu);
	demand = BPF_CORE_READ(rq, cfs.avg.runnable_avg);
	if (kthread)
		own = BPF_CORE_READ(kthread, se.avg.runnable_avg);
	return demand > own ? load_decayed(demand - own, cpu_idle_for(cpu)) : 0;
}
