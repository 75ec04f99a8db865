/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * netns.h: the network namespaces that may have entries in the sock_flow_table. The key of a flow
 * does not contain the namespace, and whoever has one can send himself data from any address: only
 * sockets of namespaces that packets of the steered devices reach are recorded.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "kernel.h"
#include "maps.h"
#include "types.h"

/* The cookie of the network namespace of the steered devices. Set by user space. */
__u64 devices_netns;

/* Increases with each question in `netnses`. */
__u64 nr_netns_asked;

/*
 * Whether root has made the namespace: the user namespace that owns it is the initial one, or one
 * that root has made, as for a container with other user ids. In others, users have the
 * privileges to make up what they receive; nobody is asked about these.
 */
static __always_inline bool netns_is_roots(const struct net *net)
{
	const struct user_namespace *owner = net->user_ns;

	return !owner->level || !owner->owner.val;
}

/* Whether packets of the steered devices reach the namespace; `net` is NULL where the kernel does
 * not show it. */
static __always_inline bool netns_is_reached(__u64 cookie, const struct net *net)
{
	struct netns_known asked = {};
	struct netns_known *known;

	if (cookie == *(volatile __u64 *)&devices_netns)
		return true;
	known = bpf_map_lookup_elem(&netnses, &cookie);
	if (known)
		return *(volatile __u32 *)&known->reach == NETNS_REACHED;
	if (!net || !netns_is_roots(net))
		return false;
	asked.tid = BPF_CORE_READ((struct task_struct *)bpf_get_current_task(), pid);
	if (!bpf_map_update_elem(&netnses, &cookie, &asked, BPF_NOEXIST)) {
		struct backlog_request wake = {.queue = BACKLOG_REQUEST_NETNS};

		__sync_fetch_and_add(&nr_netns_asked, 1);
		bpf_ringbuf_output(&backlog_requests, &wake, sizeof(wake), 0);
	}
	return false;
}
