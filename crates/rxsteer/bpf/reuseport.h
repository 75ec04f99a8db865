/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * reuseport.h: SO_REUSEPORT groups in which the CPU that processes a packet chooses the socket. A
 * flow that followed its reader to another CPU would get another socket there, and another reader.
 */
#pragma once

#include <linux/filter.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "kernel.h"

/* Instructions of a classic program in which a read of the CPU is searched. */
#define REUSEPORT_FILTER 16

/* A global function: the verifier follows the loop once. */
__noinline int reuseport_reads_cpu(__u64 filter, __u32 len)
{
	for (__u32 i = 0; i < REUSEPORT_FILTER && i < len; i++) {
		struct sock_filter insn;

		if (bpf_probe_read_kernel(&insn, sizeof(insn), (struct sock_filter *)filter + i))
			break;
		if (insn.code == (BPF_LD | BPF_W | BPF_ABS) &&
		    insn.k == (__u32)(SKF_AD_OFF + SKF_AD_CPU))
			return true;
	}
	return false;
}

/* What an eBPF program goes by is not known: such groups count as others. */
static __always_inline bool sock_is_of_cpu(const struct sock *sk)
{
	const struct sock_reuseport *group = sk->sk_reuseport_cb;
	const struct sock_fprog_kern *classic;
	const struct bpf_prog *prog;

	if (!group)
		return false;
	if (bpf_core_field_exists(group->incoming_cpu)) {
		if (group->incoming_cpu)
			return true;
	} else if (sk->__sk_common.skc_incoming_cpu >= 0) {
		return true;
	}
	prog = group->prog;
	if (!prog)
		return false;
	classic = prog->orig_prog;
	return classic && reuseport_reads_cpu((__u64)BPF_CORE_READ(classic, filter), classic->len);
}
