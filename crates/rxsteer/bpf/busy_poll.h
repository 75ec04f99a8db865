/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * busy_poll.h: distinguishes polls by an application, for its own packets, from those by softirq or
 * a kernel thread. struct busy_poll counts the former.
 */
#pragma once

#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "kernel.h"

/* A process's polls, and the wake-ups of its polling threads. */
struct busy_poll {
	__u64 nr_polls;
	__u64 nr_found;	   /* of these, polls that found packets, for any socket */
	__u64 nr_packets;  /* packets found */
	__u64 ns;	   /* from the end of a wait's first poll to the end of its last poll */
	__u64 nr_woken;	   /* wake-ups of threads that slept */
	__u64 woken_ns;	   /* time from waking these threads until they ran */
	__u64 shortest_ns; /* the shortest of these times; 0: none */
};

/*
 * Whether the poll that has just ended was an application's; for the tracepoint napi_poll. In the
 * last poll of a wait the bit is already cleared (busy_poll_stop()), but the budget is still the
 * application's: 8 packets, or SO_BUSY_POLL_BUDGET, whereas other polls have the instance's weight
 * as their budget. Since 6.19 a kernel thread may poll continuously with the same bit, for all
 * sockets.
 *
 * in_busy_poll is that bit of napi_struct.state. User space finds its value, because the enum has
 * no name by which CO-RE could find it; 0 if the kernel has no busy polling.
 */
static __always_inline bool napi_busy_polled(const struct napi_struct *napi, int budget,
					     __u64 in_busy_poll)
{
	if (!(napi->state & in_busy_poll) && budget == napi->weight)
		return false;
	return !(bpf_get_current_task_btf()->flags & PF_KTHREAD);
}
