// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * native.c: the pure C of the data path, compiled for the host, so that the
 * tests run what the kernel runs.
 */
#include "flow.h"
#include "tables.h"

/* ---- flow.h ------------------------------------------------------------- */

enum flow_result native_flow_parse(const void *data, __u32 linear, __u32 len, __u32 tunnels,
				   struct flow_key *key)
{
	return flow_parse(data, (const char *)data + linear, len, tunnels, key);
}

void native_flow_key_ports(struct flow_key *key, const __be32 saddr[4], __be16 source, __be16 dest,
			   __u32 proto)
{
	flow_key_ports(key, saddr, flow_ports(source, dest), proto);
}

void native_flow_key_ports4(struct flow_key *key, __be32 saddr, __be16 source, __be16 dest,
			    __u32 proto)
{
	flow_key_ports4(key, saddr, flow_ports(source, dest), proto);
}

__u32 native_flow_hash(const struct flow_key *key, const struct flow_secret *secret)
{
	return flow_hash(key, secret);
}

/* ---- tables.h ----------------------------------------------------------- */

__u16 native_rps_location_of(const struct rps_map *map, __u32 hash)
{
	return rps_location_of(map, hash);
}

__u16 native_sock_flow_cpu(__u32 entry, __u32 hash, __u32 cpu_mask)
{
	return sock_flow_cpu(entry, hash, cpu_mask);
}

__u16 native_poll_stamp_cpu(__u64 stamp)
{
	return poll_stamp_cpu(stamp);
}
