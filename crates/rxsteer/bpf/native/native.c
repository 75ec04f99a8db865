// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * native.c: the pure C of the data path, compiled for the host, so that tests run the same code as
 * the kernel.
 */
#include <string.h>

#include "core/flow.h"
#include "core/load.h"
#include "native.h"
#include "core/steer.h"

/* ---- flow.h ------------------------------------------------------------- */

enum flow_result native_flow_parse(const void *data, __u32 linear, __u32 len, __u32 options,
				   struct flow_key *key)
{
	return flow_parse(data, (const char *)data + linear, len, options, key);
}

void native_flow_key_ports(struct flow_key *key, const __be32 saddr[4], __be16 source, __be16 dest,
			   __u32 proto)
{
	flow_key_ports(key, saddr, flow_ports(source, dest), proto);
}

void native_flow_key_connection(struct flow_key *key, const __be32 saddr[4], const __be32 daddr[4],
				__be16 source, __be16 dest, __u32 proto)
{
	flow_key_ports(key, saddr, flow_ports(source, dest), proto);
	memcpy(key->daddr, daddr, sizeof(key->daddr));
	flow_key_order(key);
}

__u32 native_flow_hash(const struct flow_key *key, const struct flow_secret *secret)
{
	return flow_hash(key, secret);
}

__u32 native_flow_hashes(const struct flow_key *key, const struct flow_secret *secret, __u32 *own)
{
	return flow_hashes(key, secret, true, own);
}

bool native_flow_has_port(const struct flow_key *key, const __u16 ports[FLOW_INLINE_PORTS])
{
	return flow_has_port(key, ports);
}

__u32 native_flow_tunnel_of(__u8 proto, __u16 dest)
{
	return flow_tunnel_of(proto, dest);
}

/* ---- inputs of steer.h and backlog.h -------------------------------------- */

/* Tests run in threads: each call has its own inputs. */
static _Thread_local struct rx_facts *facts;
static _Thread_local struct backlog *backlogs;
static _Thread_local const struct rps_map *rps_map;

static bool steer_unguarded(void)
{
	return facts->unguarded;
}

static __u64 backlog_limit_of(void)
{
	return facts->limit;
}

static bool backlog_interruptible(const struct backlog *b)
{
	return facts->interruptible >> (b - backlogs) & 1;
}

static bool backlog_off_rq(const struct backlog *b)
{
	return facts->off_rq >> (b - backlogs) & 1;
}

static bool rx_shares_flows(void)
{
	return facts->softnet;
}

static struct softnet_way *rx_way(__u32 queue, __u32 location)
{
	(void)queue;
	return location == RPS_INLINE ? &facts->here : &facts->ways[location & 63];
}

static __u32 rx_softnet_tail(const struct softnet_way *w)
{
	return facts->tails[w == &facts->here ? 64 : w - facts->ways];
}

static __u32 rx_softnet_head(const struct softnet_way *w)
{
	return facts->heads[w == &facts->here ? 64 : w - facts->ways];
}

static bool rx_poll_ended_elsewhere(__u32 queue, __u64 poll)
{
	(void)queue;
	(void)poll;
	return facts->poll_ended_elsewhere;
}

static bool rx_inline_passed(void)
{
	return facts->inline_passed;
}

static bool rx_entered_elsewhere(const struct rx *rx, const struct rps_dev_flow *flow)
{
	(void)rx;
	(void)flow;
	return facts->entered_elsewhere;
}

static __u64 *rx_mixed_at(const struct rx *rx)
{
	(void)rx;
	return &facts->mixed_at;
}

static __u64 rx_mixing(void)
{
	return facts->mixing;
}

static bool rx_polls_ended(const struct rx *rx, __u64 mixing)
{
	(void)rx;
	(void)mixing;
	return facts->polls_ended;
}

static struct backlog *rx_backlog(const struct rx *rx, __u32 cpu)
{
	(void)rx;
	return cpu < facts->nr_cpus ? &backlogs[cpu] : NULL;
}

static bool rx_enqueue(const struct rx *rx, __u32 cpu)
{
	(void)rx;
	if (facts->entries >> cpu & 1)
		return true;
	backlogs[cpu].wanted = 1;
	return false;
}

static __u64 rx_poll_stamp(const struct rx *rx)
{
	if (facts->no_stamp)
		return 0;
	facts->poll_asked = 1;
	return poll_stamp(rx->cpu, facts->nr_polls);
}

static __u32 rx_rps_location(const struct rx *rx, __u32 hash)
{
	(void)rx;
	return rps_location_of(rps_map, hash);
}

static bool rx_gro_empty(const struct rx *rx)
{
	(void)rx;
	return facts->gro_empty;
}

static __u32 rx_sock_flow(const struct rx *rx)
{
	(void)rx;
	return facts->sock_flow;
}

static __u32 rx_cpu_mask(void)
{
	return facts->cpu_mask;
}

static __u32 rx_jiffies(void)
{
	return facts->jiffies;
}

static void rx_flow_new(const struct rx *rx)
{
	(void)rx;
	facts->nr_flows_new++;
}

static void rx_measure_wait(const struct rx *rx, __u32 cpu)
{
	(void)rx;
	(void)cpu;
}

static bool rx_consumer_waits(const struct rx *rx, __u32 cpu)
{
	(void)rx;
	(void)cpu;
	return facts->consumer_waits;
}

static __u32 flow_limit_of(void)
{
	return facts->flow_limit;
}

static struct cpu *cpu_of(__u32 cpu)
{
	return cpu < facts->nr_cpus ? &facts->cpus[cpu] : NULL;
}

static bool cpu_is_idle(__u32 cpu)
{
	return facts->idle >> cpu & 1;
}

static void rx_read_load_apart(const struct rx *rx, __u32 cpu)
{
	(void)rx;
	backlogs[cpu].busy = facts->busy[cpu];
	backlogs[cpu].demand = facts->demand[cpu];
}

static void rx_decide_apart(const struct rx *rx, struct rps_dev_flow *flow)
{
	rx_decide(rx, flow);
}

/* A packet with these inputs. */
static struct rx native_rx(struct rx_facts *f, struct rx_queue *q, struct backlog *b,
			   const struct rps_map *map, __u32 hash, __u32 cpu)
{
	facts = f;
	backlogs = b;
	rps_map = map;
	return (struct rx){
		.q = q,
		.queue = f->queue,
		.hash = hash,
		.sock_hash = hash ^ f->tunnel,
		.cpu = cpu,
		.epoch = q->epoch,
		.segment = f->segment,
	};
}

/* ---- steer.h --------------------------------------------------------------- */

static bool rx_delivered_apart(struct rx *rx, struct rps_dev_flow *flow, bool set, __u64 closed)
{
	return rx_delivered(rx, flow, set, closed);
}

enum rx_verdict native_rx_steer(struct rx_facts *f, struct rx_queue *q, struct backlog *b,
				const struct rps_map *map, struct rps_dev_flow *flow, __u32 hash,
				__u32 cpu)
{
	struct rx rx = native_rx(f, q, b, map, hash, cpu);

	q->nr_received++;
	return f->dry_run ? rx_dry_run(&rx, flow) : rx_steer(&rx, flow);
}

/* ---- policy.h --------------------------------------------------------------- */

__u16 native_rx_usable(struct rx_facts *f, struct backlog *b, __u16 location, __u32 cpu)
{
	struct rx rx = {.cpu = cpu};

	facts = f;
	backlogs = b;
	return rx_usable(&rx, location);
}

__u16 native_rx_base(struct rx_facts *f, struct rx_queue *q, struct backlog *b,
		     const struct rps_map *map, __u32 hash, __u32 cpu, bool *followed)
{
	struct rx rx = native_rx(f, q, b, map, hash, cpu);
	__u16 base;

	base = rx_base(&rx);
	*followed = rx.followed;
	return base;
}

__u16 native_rx_wanted(struct rx_facts *f, struct rx_queue *q, struct backlog *b,
		       const struct rps_map *map, struct rps_dev_flow *flow, __u32 cpu)
{
	struct rx rx = native_rx(f, q, b, map, flow->hash, cpu);

	return rx_wanted(&rx, flow, rx_base(&rx), false);
}

/* ---- load.h ----------------------------------------------------------------- */

bool native_load_polled(struct rx_queue *q, __u64 start, __u64 now, __u32 over_idle,
			__u32 exhausted, __u32 busy)
{
	return load_polled(q, start, now, over_idle, exhausted, busy);
}

void native_load_measure(struct rx_queue *q)
{
	load_measure(q);
}

/* As queue_polled() (napi.h), of the only queue. */
void native_load_window(struct rx_queue *q, struct rx_trial *t, __u64 nr_refused, __u64 now,
			__u32 tasks, __u32 irq)
{
	struct rx_delivered sum = {
		.bytes = q->load.bytes,
		.nr_received = q->nr_received,
		.nr_refused = nr_refused,
	};

	load_window(q, t, now, tasks, irq);
	if (!(q->policy & RX_ADAPT) || !trial_is_over(t, now))
		return;
	trial_window(t, &sum, now);
	trial_unlock(t);
}

__u32 native_load_share(__u64 part, __u64 whole)
{
	return load_share(part, whole);
}

__u32 native_load_busy(__u32 tasks, __u32 irq)
{
	return load_busy(tasks, irq);
}

__u32 native_load_saturated(void)
{
	return LOAD_SATURATED;
}

__u32 native_load_saturated_by(void)
{
	return LOAD_SATURATED_BY;
}

/* ---- tables.h ----------------------------------------------------------- */

__u16 native_rps_location_of(const struct rps_map *map, __u32 hash)
{
	return rps_location_of(map, hash);
}

__u32 native_flow_slot(__u32 queue, __u32 hash, __u32 shift)
{
	return flow_slot(queue, hash, shift);
}

__u32 native_flow_shared_slot(__u32 queue, __u32 ifindex, __u32 hash, __u32 shift)
{
	return flow_shared_slot(queue, ifindex, hash, shift);
}

__u32 native_sock_flow_entry(__u32 hash, __u16 location, __u32 cpu_mask)
{
	return sock_flow_entry(hash, location, cpu_mask);
}

__u32 native_sock_flow_peer(__u32 cpu_mask)
{
	return sock_flow_peer(cpu_mask);
}

bool native_sock_flow_is_connected(__u32 entry, __u32 cpu_mask)
{
	return sock_flow_is_connected(entry, cpu_mask);
}

__u16 native_sock_flow_location(__u32 entry, __u32 hash, __u32 cpu_mask)
{
	return sock_flow_location(entry, hash, cpu_mask);
}

__u64 native_poll_stamp(__u16 cpu, __u64 nr_polls)
{
	return poll_stamp(cpu, nr_polls);
}

/* ---- backlog.h ------------------------------------------------------------- */

bool native_backlog_asleep(struct rx_facts *f, struct backlog *b, __u32 cpu)
{
	facts = f;
	backlogs = b;
	return backlog_asleep(&b[cpu]);
}

bool native_backlog_settle(struct rx_facts *f, struct backlog *b, __u32 cpu, __u64 flushed)
{
	facts = f;
	backlogs = b;
	return backlog_settle(&b[cpu], flushed);
}

void native_backlog_dequeue(struct backlog *b, __u32 n, __u32 gro_empty, __u64 jiffies)
{
	backlog_dequeue(b, n, gro_empty, jiffies);
}

/* ---- wait.h ----------------------------------------------------------------- */

void native_wait_begin(struct backlog_wait *w, const struct backlog *b, __u64 now)
{
	if (wait_is_due(b) && !wait_is_pending(w))
		wait_begin(w, b, now);
}

bool native_wait_is_pending(const struct backlog_wait *w)
{
	return wait_is_pending(w);
}

void native_wait_end(struct backlog_wait *w, const struct backlog *b, __u64 now)
{
	if (wait_is_over(w, b))
		wait_end(w, b, now);
}

__u32 native_wait_bucket(__u64 ns)
{
	return wait_bucket(ns);
}

__u16 native_poll_stamp_cpu(__u64 stamp)
{
	return poll_stamp_cpu(stamp);
}
