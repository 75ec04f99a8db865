// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * native.c: the pure C of the data path, compiled for the host, so that the
 * tests and the simulator run what the kernel runs.
 */
#include "flow.h"

enum flow_result native_flow_parse(const void *data, __u32 len, __u32 tunnels, struct flow_key *key)
{
	return flow_parse(data, (const char *)data + len, len, tunnels, key);
}

__u32 native_flow_hash(const struct flow_key *key, const struct flow_secret *secret)
{
	return flow_hash(key, secret);
}
