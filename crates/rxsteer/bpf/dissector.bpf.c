// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * dissector.bpf.c: softirq mode. The kernel's own RPS takes a packet to its CPU, and asks this
 * program for which. In the order in which a packet meets it:
 *
 * - get_rps_cpu(): the device's queue has a flow table (rps_flow_cnt), and no mask (rps_cpus).
 * - skb_get_hash(): the packet has no hash yet. rxsteer_dissect() decides, and answers with a key.
 * - rps_sock_flow_table: a hash with an entry goes to the entry's CPU; one without stays INLINE.
 * - enqueue_to_backlog(): that CPU's softnet backlog.
 * - tc ingress, on that CPU: rxsteer_arrive() counts the packet, and clears its hash.
 *
 * Each way from a CPU to another has a key of its own, whose hash has an entry in the kernel's
 * table; two keys have none: that of packets that stay, and that of packets that are dropped at tc
 * ingress, since a dissector can't drop. User space finds the keys, and writes the entries
 * (host/anchors.rs).
 *
 * A packet that comes with a hash is not asked about. Packets of lo and of a veth have that of
 * their socket, and rxsteer_sent() takes it away where they are sent. What comes with a hash all
 * the same is counted (foreign_frames): it stays where the kernel puts it.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "rx.h"

/* The next program decides, or the stack (TCX_NEXT, since 6.6). */
#define TC_NEXT TC_ACT_UNSPEC

static __always_inline bool rx_shares_flows(void)
{
	return true;
}

/* Packets have left GRO when the kernel asks. */
static __always_inline bool rx_gro_empty(const struct rx *rx)
{
	return true;
}

/* A softnet backlog has a key once user space has found one. */
static __always_inline bool rx_enqueue(const struct rx *rx, __u32 cpu)
{
	struct backlog *b = rx_backlog(rx, cpu);

	if (!b)
		return false;
	if (likely(*(volatile __u64 *)&b->way))
		return true;
	backlog_request(rx->queue, cpu);
	return false;
}

/* What hop_delivered() returns. */
enum {
	HOP_DELIVERED = 1 << 0,
	HOP_UNMIXES = 1 << 1,
};

/* A global function, as policy_decide(). */
__noinline int hop_delivered(__u32 queue, __u32 slot, __u32 cpu, bool set, __u64 closed)
{
	struct rx rx = {.queue = queue, .slot = slot, .cpu = cpu};
	struct rps_dev_flow *flow = flow_of(slot);
	bool delivered;

	rx.q = queue_of(queue);
	rx.poll_cpu = poll_of(cpu);
	if (!flow || !rx.q)
		return 0;
	rx.epoch = *(volatile __u16 *)&rx.q->epoch;
	delivered = rx_delivered(&rx, flow, set, closed);
	return (delivered ? HOP_DELIVERED : 0) | (rx.unmixes ? HOP_UNMIXES : 0);
}

static __always_inline bool rx_delivered_apart(struct rx *rx, struct rps_dev_flow *flow, bool set,
					       __u64 closed)
{
	int result = hop_delivered(rx->queue, rx->slot, rx->cpu, set, closed);

	rx->unmixes |= !!(result & HOP_UNMIXES);
	return result & HOP_DELIVERED;
}

/* ---- a table that several CPUs change at once ------------------------------- */

/*
 * Slots are held for some 100 ns, and longer where the hypervisor takes the holder's CPU: then the
 * others wait, as for the kernel's own locks, for 10 ms and more. BPF's locks allow no helpers
 * meanwhile.
 */
#define FLOW_LOCK_TRIES (1 << 20)

struct flow_lock_wait {
	__u32 slot;
	bool locked;
};

static long flow_lock_try(__u32 try, struct flow_lock_wait *wait)
{
	struct rps_dev_flow *flow = flow_of(wait->slot);

	if (!flow)
		return 1;
	if (*(volatile __u32 *)&flow->lock || __sync_lock_test_and_set(&flow->lock, 1))
		return 0;
	wait->locked = true;
	return 1;
}

/* A global function: the verifier follows it once. */
__noinline int flow_lock_waited(__u32 slot)
{
	struct flow_lock_wait wait = {.slot = slot};

	bpf_loop(FLOW_LOCK_TRIES, flow_lock_try, &wait, 0);
	return wait.locked;
}

static __always_inline bool flow_lock(struct rps_dev_flow *flow, __u32 slot)
{
	return likely(!__sync_lock_test_and_set(&flow->lock, 1)) || flow_lock_waited(slot);
}

static __always_inline void flow_unlock(struct rps_dev_flow *flow)
{
	__u32 before = __sync_lock_test_and_set(&flow->lock, 0);

	asm volatile("" : : "r"(before));
}

/* Decides; `*cpu` is the flow's location if its verdict is RX_REDIRECTED. */
static __always_inline enum rx_verdict hop_decide(struct rx *rx, __u32 *cpu)
{
	struct rps_dev_flow *flow = rx_flow(rx);
	enum rx_verdict verdict;

	if (!flow)
		return RX_PASS;
	if (unlikely(!flow_lock(flow, rx->slot))) {
		struct backlog *b = rx_backlog(rx, rx->cpu);

		/* Where the flow is, is not known: it could overtake. */
		if (config.dry_run || !b) {
			rx->q->nr_inline++;
			return RX_PASS;
		}
		b->nr_shed++;
		return RX_DROP;
	}
	verdict = config.dry_run ? rx_dry_run(rx, flow) : rx_steer(rx, flow);
	*cpu = flow->location;
	flow_unlock(flow);
	return verdict;
}

/* ---- the kernel's question --------------------------------------------------- */

/* A field of the kernel's. Before Linux 6.2 a program can't load from there. */
#define kern_read(from, field)                                                                     \
	(bpf_ksym_exists(bpf_cast_to_kern_ctx) ? (from)->field : BPF_CORE_READ(from, field))

static __always_inline const struct sk_buff *dissected(struct __sk_buff *ctx)
{
	/* At run time the context's address is that of the kernel's. */
	struct bpf_flow_dissector *kern =
		bpf_ksym_exists(bpf_cast_to_kern_ctx) ? bpf_cast_to_kern_ctx(ctx) : (void *)ctx;

	return kern_read(kern, skb);
}

/* Whether the packet has been in an IPsec packet. */
static __always_inline bool skb_is_decrypted(const struct sk_buff *skb)
{
	return bpf_core_enum_value_exists(enum skb_ext_id, SKB_EXT_SEC_PATH) &&
	       kern_read(skb, active_extensions) &
		       1 << bpf_core_enum_value(enum skb_ext_id, SKB_EXT_SEC_PATH);
}

/* Whether the packet has a route; what a tunnel with metadata hands up has none of this kind. */
static __always_inline bool skb_is_routed(const struct sk_buff *skb)
{
	unsigned long refdst = kern_read(skb, _skb_refdst);
	struct dst_entry *dst = (void *)(refdst & ~1UL);

	return dst && !(BPF_CORE_READ(dst, flags) & DST_METADATA);
}

/*
 * Whether the device has just received the packet. Where it is sent by a device without a link
 * header, it may have lost its route, and looks alike (fq_codel, WireGuard). The stack notes the
 * device that has received a packet, and tunnels take the note away (skb_scrub_packet()). The
 * sender's socket stays with a packet until the stack of its receiver has it; that of a received
 * one belongs to another namespace, or is a tun device's own, of no family.
 */
static __always_inline bool skb_is_received(const struct sk_buff *skb, struct net_device *dev,
					    __u32 ifindex)
{
	__u32 iif = kern_read(skb, skb_iif);
	struct sock *sk = kern_read(skb, sk);

	if (likely(!iif && !sk))
		return true;
	/* Again, at tc ingress, or since IPsec has decrypted it. */
	if (unlikely(iif == ifindex))
		return skb_is_decrypted(skb);
	if (kern_read(dev, type) == ARPHRD_ETHER)
		return true;
	return !iif && (!BPF_CORE_READ(sk, __sk_common.skc_family) ||
			BPF_CORE_READ(sk, __sk_common.skc_net.net) != kern_read(dev, nd_net.net));
}

/* How often a device was taken out of softirq_devices. Counted by user space. */
__u64 softirq_forgotten;

/* The kind of a device (enum softirq_device); 0: it is not in softirq mode. Packets mostly come by
 * the device of the last one: poll_cpu.device has its ifindex, its kind, and the count of
 * softirq_forgotten before it was looked up. */
static __always_inline __u32 softirq_device_of(struct poll_cpu *poll, __u32 ifindex)
{
	__u64 device = (*(volatile __u64 *)&softirq_forgotten << 2 & 0xffffffff) << 32 | ifindex;
	__u32 *kind;

	if (likely((poll->device & ~(3ULL << 32)) == device))
		return poll->device >> 32 & 3;
	kind = bpf_map_lookup_elem(&softirq_devices, &ifindex);
	if (!kind)
		return 0;
	poll->device = device | (__u64)(*kind & 3) << 32;
	return *kind & 3;
}

/* Whether the device is of the network namespace in which softirq mode runs: the initial
 * namespace's dissector is asked about all. */
static __always_inline bool dissected_here(struct poll_cpu *poll, struct net_device *dev)
{
	struct net *net = kern_read(dev, nd_net.net);

	if (likely((__u64)net == poll->netns))
		return true;
	if (kern_read(net, net_cookie) != config.netns)
		return false;
	poll->netns = (__u64)net;
	return true;
}

/*
 * The kind of the device (enum softirq_device), if the question is get_rps_cpu()'s about a device
 * of ours; else 0. The packet has just been received, and begins with its network header. Others
 * ask too: about packets that are sent, which have a route or a link header, about those that have
 * a hash, and for headers alone, without the flag of skb_get_hash() (a tun device). lo's keep the
 * route of their sender.
 */
static __always_inline __u32 dissected_on(const struct sk_buff *skb,
					  const struct bpf_flow_keys *keys, __u32 *ifindex)
{
	struct poll_cpu *poll = poll_of(bpf_get_smp_processor_id());
	struct net_device *dev;
	__u32 kind;

	if (!skb || !(keys->flags & BPF_FLOW_DISSECTOR_F_STOP_AT_FLOW_LABEL) || keys->nhoff ||
	    !poll || kern_read(skb, hash))
		return 0;
	dev = kern_read(skb, dev);
	*ifindex = kern_read(dev, ifindex);
	kind = softirq_device_of(poll, *ifindex);
	if (!kind || (kind != SOFTIRQ_LOOPBACK && skb_is_routed(skb)) ||
	    !skb_is_received(skb, dev, *ifindex))
		return 0;
	return dissected_here(poll, dev) ? kind : 0;
}

static __always_inline int dissector_answer(struct bpf_flow_keys *keys, __be32 key)
{
	keys->thoff = 20;
	keys->addr_proto = ETH_P_IP;
	keys->n_proto = bpf_htons(ETH_P_IP);
	keys->ip_proto = IPPROTO_UDP;
	keys->ipv4_src = keys->ipv4_dst = key;
	keys->sport = keys->dport = bpf_htons(HOP_PORT);
	return BPF_OK;
}

/*
 * Notes that a packet comes in no poll. A tun device without NAPI instances delivers packets one by
 * one, in the call that writes them, with softirqs off (tun_rx_batched() and tun_xdp_one() in
 * drivers/net/tun.c).
 */
static __always_inline void hop_note_unpolled(const struct sk_buff *skb, const struct rx *rx)
{
	struct net_device *dev = kern_read(skb, dev);

	/* It may have got NAPI since it is steered. */
	if (rx->poll_cpu && kern_read(dev, napi_list.next) == &dev->napi_list)
		rx->poll_cpu->unpolled = 1;
}

/* The verdict on a packet, by the result of the parser. */
static __always_inline enum rx_verdict hop_verdict(struct rx *rx, enum flow_result result,
						   const struct flow_key *key, __u32 *cpu)
{
	if (unlikely(result != FLOW_KEYED)) {
		rx_count_no_flow(rx, result);
		return RX_PASS;
	}
	return rx_keyed(rx, key) ? hop_decide(rx, cpu) : RX_PASS;
}

/* As rx_follow() (rx.bpf.c), for a packet of this length that begins with the header of this
 * ethertype. */
__noinline int dissect_follow(struct __sk_buff *ctx, struct flow_key *key, __u32 type, __u32 len)
{
	struct flow_cursor c = {(void *)(long)ctx->data, (void *)(long)ctx->data_end, 0, len};

	return key ? flow_walk(&c, type, config.flow_options, key) : FLOW_UNKNOWN;
}

SEC("flow_dissector")
int rxsteer_dissect(struct __sk_buff *ctx)
{
	const struct sk_buff *skb = dissected(ctx);
	struct bpf_flow_keys *keys = ctx->flow_keys;
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u32 ifindex = 0, cpu = 0, kind = dissected_on(skb, keys, &ifindex);
	enum flow_result result = FLOW_KEYED;
	struct backlog *b;
	struct flow_key key;
	struct rx rx = {};
	__u16 type;

	if (!kind || !rx_begin(&rx, ifindex, bpf_get_smp_processor_id(), kern_read(skb, len)))
		return BPF_FLOW_DISSECTOR_CONTINUE;
	type = bpf_ntohs(keys->n_proto);
	if (!flow_plain_network(data, data_end, type, config.flow_options, &key)) {
		key = (struct flow_key){};
		result = dissect_follow(ctx, &key, type, kern_read(skb, len));
	}
	if (unlikely(kind == SOFTIRQ_UNPOLLED))
		hop_note_unpolled(skb, &rx);
	switch (hop_verdict(&rx, result, &key, &cpu)) {
	case RX_REDIRECTED:
		b = rx_backlog(&rx, cpu);
		return dissector_answer(keys, b ? (__u32)b->way : config.inline_key);
	case RX_DROP:
		rx.q->load.bytes -= kern_read(skb, len);
		return dissector_answer(keys, config.drop_key);
	default:
		return dissector_answer(keys, config.inline_key);
	}
}

/* ---- where packets are sent ---------------------------------------------------- */

/* At the egress of lo, and of a veth's other end: takes the hash of the sender's socket away, so
 * that the kernel asks. */
SEC("tc")
int rxsteer_sent(struct __sk_buff *skb)
{
	bpf_set_hash_invalid(skb);
	return TC_NEXT;
}

/* ---- where the packet has come ------------------------------------------------ */

/*
 * The packet has come to another CPU than it was sent to: somebody has overwritten the entry of its
 * hash. It overtakes nothing if all has been passed up there. Those of a CPU that goes offline the
 * kernel moves itself, in order.
 */
static __always_inline bool hop_is_late(__u32 index)
{
	__u32 queue = index / config.nr_cpus;
	struct softnet_way *w = rx_way(queue, index % config.nr_cpus);

	return w && !config.unguarded && !rx_way_passed(w);
}

/* Has user space write the kernel's entry again; 0 if it will. */
static __noinline int hop_renew(__u32 index)
{
	struct backlog_request request = {
		.queue = index / config.nr_cpus,
		.cpu = index % config.nr_cpus,
	};

	return bpf_ringbuf_output(&backlog_requests, &request, sizeof(request), 0);
}

static __noinline int hop_arrived(struct __sk_buff *skb, __u32 index, __u32 cpu)
{
	struct backlog *b = bpf_map_lookup_elem(&backlogs, &index);

	bpf_set_hash_invalid(skb);
	if (!b)
		return TC_NEXT;
	if (unlikely(cpu != bpf_get_smp_processor_id()) && !(b->closed & BACKLOG_DOWN)) {
		if (!(__sync_fetch_and_or(&b->closed, BACKLOG_MISDIRECTED) & BACKLOG_MISDIRECTED) &&
		    hop_renew(index))
			__sync_fetch_and_and(&b->closed, ~(__u64)BACKLOG_MISDIRECTED);
		if (hop_is_late(index)) {
			__sync_fetch_and_add(&b->nr_lost, 1);
			return TC_ACT_SHOT;
		}
	}
	backlog_dequeue_timed(b, index, 1, true, 0);
	return TC_NEXT;
}

SEC("tc")
int rxsteer_arrive(struct __sk_buff *skb)
{
	__u32 hash = skb->hash;
	struct hop_hash *hop;

	if (hash == config.drop_hash)
		return TC_ACT_SHOT;
	if (hash && hash != config.inline_hash) {
		hop = hop_at(hash);
		if (hop && likely(hop->hash == hash)) {
			poll_delivers();
			return hop_arrived(skb, hop->index, hop->cpu);
		}
		rx_foreign();
	} else if (hash) {
		poll_delivers();
	}
	/* Sockets keep a packet's hash, and their system calls write it into the kernel's table. */
	bpf_set_hash_invalid(skb);
	return TC_NEXT;
}

/* ---- called by user space ------------------------------------------------------ */

/*
 * Whether a softnet backlog has passed up all that it held. What had entered before, and was not
 * counted afterwards, has vanished: its device was deleted or set down, or another program has
 * dropped it. The argument's tail was read before a grace period: these packets have entered.
 */
SEC("syscall")
int hop_settled(struct backlog_flushed *flushed)
{
	__u32 index = flushed->index;
	struct backlog *b = bpf_map_lookup_elem(&backlogs, &index);
	struct softnet_way *w = rx_way(index / config.nr_cpus, index % config.nr_cpus);

	if (!b || !w || !rx_way_passed(w))
		return 0;
	backlog_vanished(b, flushed->tail);
	return 1;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
