/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * busy_poll.h: who polls: an interrupt's softirq or thread, or an application for its own packets.
 */
#pragma once

#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "kernel.h"

/*
 * Whether the poll that has just ended was an application's: at the tracepoint napi_poll. The bit
 * is gone already in the last poll of a wait (busy_poll_stop()), which still has the application's
 * budget: 8 packets, or SO_BUSY_POLL_BUDGET, where others have the instance's weight. A kernel
 * thread may poll without a pause, too, with the same bit (6.19): for everybody.
 *
 * in_busy_poll is that bit of napi_struct.state, found by user space, since the enum has no name by
 * which CO-RE could find it; 0 where the kernel has no busy polling.
 */
static __always_inline bool napi_busy_polled(const struct napi_struct *napi, int budget,
					     __u64 in_busy_poll)
{
	if (!(napi->state & in_busy_poll) && budget == napi->weight)
		return false;
	return !(bpf_get_current_task_btf()->flags & PF_KTHREAD);
}
