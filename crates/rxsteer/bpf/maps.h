/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * maps.h: the data path's maps and constants. Each object has all of them: user space creates those
 * of trace.bpf.c, and the tables of flows, and gives them to the other objects
 * (datapath/shared.rs).
 *
 * User space maps all arrays but sock_flow_consumers and poll_cpus into its memory. The elements of
 * an array with BPF_F_MMAPABLE also begin on a page; without the flag they begin anywhere in a
 * cache line.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "types.h"

const volatile struct rx_config config = {};

/* ---- receive queues, indexed by their number over all devices ------------- */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct rx_queue);
} rx_queues SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct rps_map);
} rps_maps SEC(".maps");

/* Frames that the program of a device has passed because they came from another device or queue, by
 * the number of the device's first queue. Written by all CPUs. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} foreign_frames SEC(".maps");

/* The cpumap: its entries are the queue's rings and kthreads. */
struct cpumap {
	__uint(type, BPF_MAP_TYPE_CPUMAP);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
};
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct cpumap);
} cpumaps SEC(".maps");

/* ---- flows ---------------------------------------------------------------- */

/* The dev_flow_tables of all queues, one after the other: flow_slot(). */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct rps_dev_flow);
} dev_flow_tables SEC(".maps");

/* The latest flow in each slot of the dev_flow_tables. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct flow_name);
} flow_names SEC(".maps");

/* One element. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct rx_mixings);
} mixings SEC(".maps");

/* One element. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct rx_trial);
} trials SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct rps_sock_flow);
} sock_flow_table SEC(".maps");

/* The threads that last stored a location in the entries of the sock_flow_table, by the entry's
 * index: struct task_struct *, without a reference. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} sock_flow_consumers SEC(".maps");

/* For connected datagram sockets, as sock_takers. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct rps_sock_peer);
} sock_peers SEC(".maps");

/* For unconnected sockets; the kernel frees an element with its socket. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct rps_sock_takers);
} sock_takers SEC(".maps");

/* Network namespaces by cookie (netns.h). User space follows the links between namespaces
 * (host/reach.rs), and answers. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, struct netns_known);
} netnses SEC(".maps");

/* ---- backlogs ------------------------------------------------------------- */

/* Indexed by queue * nr_cpus + cpu. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct backlog);
} backlogs SEC(".maps");

/* Indexed as `backlogs`. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct backlog_wait);
} backlog_waits SEC(".maps");

/* Softirq mode: by the CPU that receives * (nr_cpus + 1) + the CPU of the softnet backlog; nr_cpus
 * stands for INLINE. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct softnet_way);
} softnet_ways SEC(".maps");

/* Softirq mode: by the low bits of the hash. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct hop_hash);
} hop_hashes SEC(".maps");

/* The slot of this hash, which may be another's. */
static __always_inline struct hop_hash *hop_at(__u32 hash)
{
	__u32 slot = hash & config.hop_mask;

	return bpf_map_lookup_elem(&hop_hashes, &slot);
}

/* Devices in softirq mode, by ifindex. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u32);
} softirq_devices SEC(".maps");

/* The backlog of a kthread, by task; entered at the kthread's first batch. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, __u64);
	__type(value, struct backlog_id);
} backlog_kthreads SEC(".maps");

/* The queue of a cpumap, by map id: the tracepoints have only the id. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} cpumap_queues SEC(".maps");

/* Records of struct backlog_request. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} backlog_requests SEC(".maps");

/* ---- CPUs, indexed by their number ---------------------------------------- */

/* Each element is written only on its own CPU. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct poll_cpu);
} poll_cpus SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct cpu);
} cpus SEC(".maps");

/* ---- lookups ---------------------------------------------------------------- */

/* They take numbers by value: struct rx stays in registers while no helper gets its address. */
static __always_inline struct rx_queue *queue_of(__u32 queue)
{
	return bpf_map_lookup_elem(&rx_queues, &queue);
}

static __always_inline struct rps_dev_flow *flow_of(__u32 slot)
{
	return bpf_map_lookup_elem(&dev_flow_tables, &slot);
}

static __always_inline struct flow_name *name_of(__u32 slot)
{
	return bpf_map_lookup_elem(&flow_names, &slot);
}

static __always_inline struct poll_cpu *poll_of(__u32 cpu)
{
	return bpf_map_lookup_elem(&poll_cpus, &cpu);
}
