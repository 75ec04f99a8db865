/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * busy_poll.h: who polls: an interrupt's softirq or thread, or an application for its own packets.
 */
#pragma once

#include "kernel.h"

/* The bit of napi_struct.state that says so; the enum has no name by which CO-RE could find it.
 * 0: the kernel has no busy polling. */
const volatile __u64 napi_state_in_busy_poll = 0;

/* Whether the poll that has just ended was an application's: at the tracepoint napi_poll. */
static __always_inline bool napi_busy_polled(const struct napi_struct *napi)
{
	return napi->state & napi_state_in_busy_poll;
}
