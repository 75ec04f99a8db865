/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * netns.h: the network namespaces that may have entries in the sock_flow_table. The key of a flow
 * does not contain the namespace: whoever can connect sockets with chosen addresses could write the
 * entry of any flow, and every user can do that in a namespace of his own.
 */
#pragma once

#include <bpf/bpf_helpers.h>

#include "kernel.h"

/* The inode number of the network namespace of the steered devices. Set by user space. */
__u32 devices_netns;

/*
 * Whether root has made the namespace: the user namespace that owns it is the initial one, or one
 * that root has made, as for a container with other user ids. The devices' own namespace is always
 * believed.
 */
static __always_inline bool netns_is_believed(const struct net *net)
{
	const struct user_namespace *owner = net->user_ns;

	return !owner->level || !owner->owner.val ||
	       net->ns.inum == *(volatile __u32 *)&devices_netns;
}
