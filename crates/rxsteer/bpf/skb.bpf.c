// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * skb.bpf.c: the program of skb mode, at the tc ingress of all its devices: after GRO. Devices
 * whose packets begin with the IP header have a second copy of it.
 *
 * The way of an skb to another CPU: this program redirects it to the carrier's ingress; kernel RPS
 * of the carrier puts it into the CPU's softnet backlog; there the carrier's program
 * (carrier.bpf.c) redirects it to the ingress of its device, where this program sees it a second
 * time, counts it as passed up, and passes it on.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "rx.h"
#include "skb.h"
#include "skb_flow.h"

/* The next program decides, or the stack (TCX_NEXT, since 6.6). */
#define SKB_NEXT TC_ACT_UNSPEC

static __always_inline bool rx_shares_flows(void)
{
	return true;
}

/* Each CPU has a softnet backlog. */
static __always_inline bool rx_enqueue(const struct rx *rx, __u32 cpu)
{
	return true;
}

/* Packets at tc ingress have left GRO, and are delivered before the poll ends. */
static __always_inline bool rx_gro_empty(const struct rx *rx)
{
	return true;
}

static __always_inline bool skb_parse(struct rx *rx, struct __sk_buff *skb, struct flow_key *key)
{
	enum flow_result result = skb_flow(skb, key);
	bool steered = false;

	if (likely(result == FLOW_KEYED))
		steered = rx_keyed(rx, key);
	else
		rx_count_no_flow(rx, result);
	if (config.follow_nat)
		skb_tell_flow(skb, result, key, rx->sock_hash);
	return steered;
}

/* As rxsteer_rx_hash (rx.bpf.c): the hash of the device, or of the socket of this host that has
 * sent the packet. */
static __always_inline bool skb_hashed(struct rx *rx, struct __sk_buff *skb)
{
	struct flow_key key = {.ports = skb->hash};

	if (!config.device_hash || !key.ports)
		return false;
	rx->q->nr_rx_hash++;
	rx->hash = rx->sock_hash = flow_hash(&key, &config.flow_secret);
	/* The socket keeps it. */
	if (config.follow_nat)
		skb_set_hash(skb, rx->hash);
	return true;
}

/*
 * A table that several CPUs change at once. Slots are held for some 100 ns, and longer where the
 * hypervisor takes the holder's CPU: then the others wait, as for the kernel's own locks, for 10 ms
 * and more. BPF's locks allow no helpers meanwhile.
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

/* Sends the skb to the location of its flow, another CPU. */
static __always_inline int skb_hop(struct __sk_buff *skb, const struct rx *rx, __u32 cpu,
				   __u32 device)
{
	/* With the carrier's queue_mapping, this one selects the CPU. */
	skb_mark(skb, rx->cpu << 24 | cpu << 16 | (__u16)skb->queue_mapping, device, rx->number);
	if (!skb->hash)
		skb_set_hash(skb, rx->hash);
	/* The carrier's receive queue, by number plus one. */
	skb->queue_mapping = cpu + 1;
	return bpf_redirect(config.carrier, BPF_F_INGRESS);
}

static __always_inline int skb_steer(struct __sk_buff *skb, struct rx *rx)
{
	struct rps_dev_flow *flow = rx_flow(rx);
	enum rx_verdict verdict;
	__u16 location;

	if (!flow)
		return SKB_NEXT;
	if (unlikely(!flow_lock(flow, rx->slot))) {
		struct backlog *b = rx_backlog(rx, rx->cpu);

		/* Where the flow is, is not known: it could overtake. */
		if (config.dry_run || !b) {
			rx->q->nr_inline++;
			return SKB_NEXT;
		}
		b->nr_shed++;
		return TC_ACT_SHOT;
	}
	verdict = config.dry_run ? rx_dry_run(rx, flow) : rx_steer(rx, flow);
	location = flow->location;
	flow_unlock(flow);
	switch (verdict) {
	case RX_REDIRECTED:
		return skb_hop(skb, rx, location, skb->ifindex);
	case RX_DROP:
		return TC_ACT_SHOT;
	default:
		return SKB_NEXT;
	}
}

/* An skb that has changed its CPU: all that this CPU's backlog had before it has been passed up. If
 * its CPU has gone offline, the kernel has moved those here that had been at the carrier
 * (skb_is_late()). */
static __always_inline void skb_passed(struct __sk_buff *skb)
{
	__u32 cpu = bpf_get_smp_processor_id();
	__u32 way = skb->cb[SKB_WAY], number = skb->cb[SKB_NUMBER];
	__u32 index = skb_backlog(way);
	struct backlog *b = bpf_map_lookup_elem(&backlogs, &index);
	struct poll_cpu *poll = poll_of(cpu);

	skb_unmark(skb);
	if (!b || !poll)
		return;
	/* Before the count (backlog_sleeping()). */
	b->passed_in = poll_stamp(cpu, poll->nr_polls);
	if (unlikely(wait_is_sampled(number)))
		backlog_dequeue_timed(b, index, 1, true, 0);
	else
		backlog_dequeue(b, 1, true, 0);
	if (likely(skb_target(way) == cpu))
		backlog_heal(b, number);
}

/* A field of the kernel's skb. Before Linux 6.2 a program can't load from there. */
#define skb_read(kern, field)                                                                      \
	(bpf_ksym_exists(bpf_cast_to_kern_ctx) ? (kern)->field : BPF_CORE_READ(kern, field))

/*
 * Whether the stack would not find a packet's entry in connection tracking again: those with NAT,
 * by a packet that is translated already, and those of zones. Others it finds by the packet's
 * headers.
 */
static __noinline bool nfct_is_lost(unsigned long nfct)
{
	struct nf_conn *ct = (void *)(nfct & ~NFCT_INFOMASK);

	if ((nfct & NFCT_INFOMASK) == IP_CT_UNTRACKED)
		return true;
	/* Unknown: it may have NAT. */
	if (!bpf_core_field_exists(ct->status))
		return true;
	if (bpf_core_field_exists(ct->zone) && BPF_CORE_READ(ct, zone.id))
		return true;
	return BPF_CORE_READ(ct, status) & IPS_NAT_MASK;
}

/* Whether a redirect would lose what the packet carries beside its headers: the verdict of IPsec,
 * SKB_EXT_SEC_PATH, the tunnel that it came from, or its entry in connection tracking
 * (skb_scrub_packet() in net/core/skbuff.c). */
static __always_inline bool skb_has_more(struct __sk_buff *skb)
{
	/* At run time the context's address is that of the kernel's skb. */
	struct sk_buff *kern =
		bpf_ksym_exists(bpf_cast_to_kern_ctx) ? bpf_cast_to_kern_ctx(skb) : (void *)skb;
	struct dst_entry *dst;
	unsigned long nfct;

	if (bpf_core_enum_value_exists(enum skb_ext_id, SKB_EXT_SEC_PATH) &&
	    skb_read(kern, active_extensions) >>
			    bpf_core_enum_value(enum skb_ext_id, SKB_EXT_SEC_PATH) &
		    1)
		return true;
	if (bpf_core_field_exists(kern->_nfct)) {
		nfct = skb_read(kern, _nfct);
		if (unlikely(nfct) && nfct_is_lost(nfct))
			return true;
	}
	dst = (void *)(skb_read(kern, _skb_refdst) & ~1UL);
	return dst && BPF_CORE_READ(dst, flags) & DST_METADATA;
}

/*
 * Notes that a packet comes in no poll. A tun device without NAPI instances delivers packets one by
 * one, in the call that writes them, with softirqs off (tun_rx_batched() and tun_xdp_one() in
 * drivers/net/tun.c).
 */
static __always_inline void skb_note_unpolled(struct __sk_buff *skb, struct poll_cpu *poll)
{
	struct net_device *dev;

	if (!poll)
		return;
	/* It may have got NAPI since it is steered. */
	if (bpf_ksym_exists(bpf_cast_to_kern_ctx)) {
		dev = ((struct sk_buff *)bpf_cast_to_kern_ctx(skb))->dev;
		if (dev->napi_list.next != &dev->napi_list)
			return;
	}
	poll->unpolled = 1;
}

static __always_inline int skb_receive(struct __sk_buff *skb, struct rx *rx)
{
	struct flow_key key;

	if (!rx_begin(rx, skb->ifindex, bpf_get_smp_processor_id()))
		return SKB_NEXT;
	if (config.unpolled)
		skb_note_unpolled(skb, rx->poll_cpu);
	if (unlikely(skb_has_more(skb))) {
		rx->q->nr_inline++;
		return SKB_NEXT;
	}
	if (!skb_hashed(rx, skb) && !skb_parse(rx, skb, &key))
		return SKB_NEXT;
	return skb_steer(skb, rx);
}

/*
 * A packet that this CPU has sent has come through its softnet backlog, and so have all that were
 * sent there before, also those from before this program was attached. Kernel RPS of lo, or a CPU
 * that goes offline, takes packets to other CPUs: they prove nothing.
 */
static __always_inline void skb_came(const struct rx *rx, __u32 way, __u32 number, int verdict)
{
	if (!rx->q || !rx->poll_cpu || way >> 24 != rx->cpu)
		return;
	rx->poll_cpu->nr_came = number;
	if (verdict == TC_ACT_REDIRECT)
		rx->q->sent_jiffies = rx_jiffies();
}

SEC("tc")
int rxsteer_skb(struct __sk_buff *skb)
{
	__u32 way = skb->cb[SKB_WAY], number = skb->cb[SKB_NUMBER];
	bool sent = false;
	struct rx rx = {};
	int verdict;

	if (skb_is_marked(skb->cb)) {
		if (!skb_is_sent(skb->cb)) {
			skb_passed(skb);
			return SKB_NEXT;
		}
		skb_unmark(skb);
		sent = config.loopback;
	}
	verdict = skb_receive(skb, &rx);
	if (sent)
		skb_came(&rx, way, number, verdict);
	return verdict;
}

/* ---- lo's egress ------------------------------------------------------------ */

/*
 * Whether the mark of a packet that is sent would not come to the ingress with it alone: a queueing
 * discipline of lo clears it, and where the kernel splits the packet behind the egress, each
 * segment has it. Those of tunnels are split, and all if segmentation is switched off
 * (netif_skb_features() in net/core/dev.c).
 */
static __always_inline bool skb_mark_is_lost(struct __sk_buff *skb)
{
	struct skb_shared_info *shared;
	struct sk_buff *kern;

	/* The kernel knows it since 6.2, and a program at the egress since 6.6. */
	if (!bpf_ksym_exists(bpf_cast_to_kern_ctx))
		return true;
	kern = bpf_cast_to_kern_ctx(skb);
	if (unlikely(kern->dev->qdisc->enqueue))
		return true;
	if (!skb->gso_size)
		return false;
	shared = (void *)(kern->head + kern->end);
	return (__u64)BPF_CORE_READ(shared, gso_type) << NETIF_F_GSO_SHIFT & ~kern->dev->features ||
	       skb->len >= kern->dev->gso_max_size;
}

/*
 * Whether packets may leave for another CPU at the egress: all that this CPU has sent by way of its
 * softnet backlog have been decided on, and in this jiffy the policy has redirected one of them.
 * So each jiffy has a packet that is received, by which polls are timed and windows end, and flows
 * that stay INLINE cost nothing here.
 */
static __always_inline bool sent_is_open(const struct rx_queue *q, const struct poll_cpu *poll)
{
	if (q->sent_jiffies != rx_jiffies())
		return false;
	return poll->nr_came == poll->nr_sent || steer_unguarded();
}

/* Closes the way until a packet that is sent after this one has come: takes a number that no packet
 * has. */
static __always_inline void sent_close(struct poll_cpu *poll)
{
	poll->nr_sent++;
}

/* Enters the packet into the backlog where its flow stays, and sets `rx->number` and `cpu`;
 * otherwise its verdict is RX_PASS. */
static __always_inline enum rx_verdict skb_stay_away(struct rx *rx, struct rps_dev_flow *flow,
						     __u32 *cpu)
{
	enum rx_verdict verdict = RX_PASS;

	if (flow->location == RPS_INLINE)
		return RX_PASS;
	poll_note_mixing(rx->poll_cpu);
	if (!flow_lock(flow, rx->slot))
		return RX_PASS;
	if (rx_stays_away(rx, flow)) {
		rx->q->nr_received++;
		*cpu = flow->location;
		verdict = rx_redirect(rx, flow, *cpu);
	}
	flow_unlock(flow);
	return verdict;
}

static __always_inline int skb_send_away(struct __sk_buff *skb, struct rx *rx)
{
	struct rps_dev_flow *flow;
	enum flow_result result;
	struct flow_key key;
	__u32 cpu = 0;

	result = skb_flow(skb, &key);
	if (result != FLOW_KEYED || !rx_keyed(rx, &key) || skb_has_more(skb))
		return SKB_NEXT;
	rx->slot = rx_slot(rx);
	flow = flow_of(rx->slot);
	if (!flow)
		return SKB_NEXT;
	switch (skb_stay_away(rx, flow, &cpu)) {
	case RX_REDIRECTED:
		if (config.follow_nat)
			skb_tell_flow(skb, result, &key, rx->sock_hash);
		return skb_hop(skb, rx, cpu, skb->ifindex | SKB_EGRESS);
	case RX_DROP:
		return TC_ACT_SHOT;
	default:
		return SKB_NEXT;
	}
}

/*
 * lo puts what it sends into the softnet backlog of the sender's CPU, and a softirq takes it to the
 * ingress. Packets of flows that stay at another CPU leave before that, as by kernel RPS; the other
 * CPU sends them through lo. All others are decided on at the ingress.
 */
SEC("tc")
int rxsteer_sent(struct __sk_buff *skb)
{
	struct rx rx = {};
	int verdict = SKB_NEXT;

	if (skb_is_marked(skb->cb) || !rx_in(&rx, skb->ifindex, bpf_get_smp_processor_id()))
		return SKB_NEXT;
	rx.poll_cpu = poll_of(rx.cpu);
	if (!rx.poll_cpu)
		return SKB_NEXT;
	/* Before this program was attached lo has sent packets without a number. */
	if (unlikely(rx.poll_cpu->sent_epoch != rx.epoch)) {
		rx.poll_cpu->sent_epoch = rx.epoch;
		sent_close(rx.poll_cpu);
	}
	if (unlikely(skb_mark_is_lost(skb))) {
		sent_close(rx.poll_cpu);
		return SKB_NEXT;
	}
	if (sent_is_open(rx.q, rx.poll_cpu))
		verdict = skb_send_away(skb, &rx);
	if (verdict == SKB_NEXT)
		skb_mark_sent(skb, rx.poll_cpu, rx.cpu);
	return verdict;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
