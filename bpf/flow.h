/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * flow.h: from the bytes of a packet to its flow key and hash.
 *
 * Plain C without helpers, maps or a clock (types.h).
 */
#pragma once

#include "types.h"

static __always_inline enum flow_result flow_parse(const void *data, const void *data_end,
						   __u32 len, __u32 tunnels, struct flow_key *key)
{
	(void)data, (void)data_end, (void)len, (void)tunnels, (void)key;
	return FLOW_UNKNOWN;
}

static __always_inline __u32 flow_hash(const struct flow_key *key, const struct flow_secret *secret)
{
	(void)key, (void)secret;
	return 0;
}
