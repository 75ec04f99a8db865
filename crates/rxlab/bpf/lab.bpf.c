// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * lab.bpf.c: the lab's own programs: the packet generator, receivers (pass, drop, cpumap), and
 * programs for measurements. The clients of closed loops are in lab_client.h.
 *
 * "?" in SEC: none is loaded by default, since each user needs only one of them.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <stdbool.h>

#include "core/flow.h"

/* ---- counters of every program that receives ------------------------------ */

#define NR_LAB_QUEUES 64

/* Frames per rx queue. A queue has one NAPI, and each counter a cache line: plain adds are exact.
 */
struct lab_queue {
	__u64 nr_received;
} __attribute__((aligned(64)));

struct lab_queue lab_queues[NR_LAB_QUEUES];

static __always_inline void lab_count(const struct xdp_md *ctx)
{
	__u32 queue = ctx->rx_queue_index;

	if (queue < NR_LAB_QUEUES)
		lab_queues[queue].nr_received++;
}

/* ---- pass: the device as it is, with the cost of an XDP program ----------- */

SEC("?xdp.frags")
int pass(struct xdp_md *ctx)
{
	lab_count(ctx);
	return XDP_PASS;
}

/* ---- drop: the end of the path, to measure the generator alone ------------ */

SEC("?xdp.frags")
int drop(struct xdp_md *ctx)
{
	lab_count(ctx);
	return XDP_DROP;
}

/* ---- cpumap: the usual XDP load balancer, for comparison ------------------ */

#define NR_LAB_CPUS 256

struct {
	__uint(type, BPF_MAP_TYPE_CPUMAP);
	__uint(max_entries, NR_LAB_CPUS);
	__type(key, __u32);
	__type(value, struct bpf_cpumap_val);
} lab_cpumap SEC(".maps");

const volatile __u32 lab_nr_cpus = 1;
const volatile __u32 lab_cpus[NR_LAB_CPUS];

struct lab_vlan {
	__be16 tci;
	__be16 proto;
};

/* Mixes 64 bits into 32: the finalizer of MurmurHash3. */
static __always_inline __u32 lab_mix(__u64 x)
{
	x ^= x >> 33;
	x *= 0xff51afd7ed558ccdULL;
	x ^= x >> 33;
	x *= 0xc4ceb9fe1a85ec53ULL;
	return x >> 32;
}

/* Sum over the 4-tuple, the same in both directions; 0 without ports. */
static __always_inline __u64 lab_tuple(const struct xdp_md *ctx)
{
	const char *data = (const char *)(long)ctx->data;
	const char *data_end = (const char *)(long)ctx->data_end;
	const struct ethhdr *eth = (const void *)data;
	const __be16 *ports;
	__u64 addresses;
	__be16 proto;

	if ((const char *)(eth + 1) > data_end)
		return 0;
	proto = eth->h_proto;
	data = (const char *)(eth + 1);
	if (proto == bpf_htons(ETH_P_8021Q) || proto == bpf_htons(ETH_P_8021AD)) {
		const struct lab_vlan *tag = (const void *)data;

		if ((const char *)(tag + 1) > data_end)
			return 0;
		proto = tag->proto;
		data = (const char *)(tag + 1);
	}
	if (proto == bpf_htons(ETH_P_IP)) {
		const struct iphdr *ip = (const void *)data;

		if ((const char *)(ip + 1) > data_end || ip->ihl != 5)
			return 0;
		if (ip->protocol != IPPROTO_UDP && ip->protocol != IPPROTO_TCP)
			return 0;
		addresses = (__u64)ip->saddr + ip->daddr;
		data = (const char *)(ip + 1);
	} else if (proto == bpf_htons(ETH_P_IPV6)) {
		const struct ipv6hdr *ip = (const void *)data;

		if ((const char *)(ip + 1) > data_end)
			return 0;
		if (ip->nexthdr != IPPROTO_UDP && ip->nexthdr != IPPROTO_TCP)
			return 0;
		addresses = 0;
		for (int i = 0; i < 4; i++)
			addresses +=
				(__u64)ip->saddr.in6_u.u6_addr32[i] + ip->daddr.in6_u.u6_addr32[i];
		data = (const char *)(ip + 1);
	} else {
		return 0;
	}
	ports = (const void *)data;
	if ((const char *)(ports + 2) > data_end)
		return 0;
	return addresses + ((__u64)((__u32)ports[0] + ports[1]) << 40);
}

SEC("?xdp.frags")
int cpumap(struct xdp_md *ctx)
{
	__u32 slot = ((__u64)lab_mix(lab_tuple(ctx)) * lab_nr_cpus) >> 32;

	lab_count(ctx);
	if (slot >= NR_LAB_CPUS)
		return XDP_ABORTED;
	return bpf_redirect_map(&lab_cpumap, lab_cpus[slot], XDP_PASS);
}

/* ---- generator: run by BPF_PROG_TEST_RUN with live frames ----------------- */

#define GENERATOR_TEMPLATE_LEN 256

/* The first bytes of each payload. */
struct generator_stamp {
	__be64 seq;  /* of the generator, from 0 */
	__be32 flow; /* among those of all generators; in `first` that of flow 0 */
	__be32 generator;
};

/*
 * Fields of the template that vary between frames. Offsets are in bytes from the start of the
 * frame; 0: there is no such field. Masks are powers of two less one.
 */
struct generator_layout {
	__u32 template_len; /* bytes of the template, all headers included */
	__u32 ipv4;	    /* IPv4 header, to fill in its checksum */
	__u32 saddr;	    /* the low 32 bits of the source address */
	__u32 ports;	    /* UDP or TCP header; 0: all frames equal the template */
	__u32 tcp_seq;	    /* sequence number of a TCP header */
	__u32 checksum;	    /* of UDP or TCP */
	__u32 stamp;	    /* after all headers */
	__u32 payload_len;  /* bytes, by which TCP sequence numbers advance */
	__u32 first_seq;    /* of every TCP flow */
	__u32 push;	    /* the last segment of a TCP run has PSH */
	__u32 nr_flows;
	__u32 run;		      /* consecutive frames of one flow */
	__u32 saddr_mask;	      /* flow & mask is added to the source address */
	__u32 saddr_shift;	      /* flow >> shift is added to the source port */
	__u32 dport_mask;	      /* flow & mask is added to the destination port */
	__u32 flood;		      /* frames of flow nr_flows after each frame of the others */
	struct generator_stamp first; /* stamp of the first frame */
};

const volatile struct generator_layout generator_layout = {.nr_flows = 1, .run = 1};
/* Checksum fields hold the folded sum of all constant words of their coverage, not inverted. */
const volatile __u8 generator_template[GENERATOR_TEMPLATE_LEN];

/*
 * A paced generator sends generator_burst frames every generator_burst_ns; 0: no pacing. The
 * program paces instead of the caller: each test_run creates a page pool, and freeing thousands
 * of them per second keeps the kernel busy.
 */
const volatile __u64 generator_burst_ns = 0;
const volatile __u32 generator_burst = 1;
__u64 generator_due; /* time of the next burst, ns of bpf_ktime_get_ns() */
__u32 generator_credit;

/* Frames sent, and their limit. Frames not due yet are dropped, back into their page pool. */
__u64 generator_nr_sent;
__u64 generator_nr_refused; /* template and frame don't fit each other */
__u64 generator_limit;

/* The next flow, frames sent of its run, and completed rounds over all flows. */
__u32 generator_flow;
__u32 generator_step;
__u32 generator_round;

static __always_inline __u16 generator_checksum(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

/* Makes up for delays of up to 1 ms: more would turn the rate into a flood. */
static __always_inline bool generator_is_due(void)
{
	const __u64 millisecond = 1000000;
	__u64 now;

	if (!generator_burst_ns)
		return true;
	if (!generator_credit) {
		now = bpf_ktime_get_ns();
		if (now < generator_due)
			return false;
		if (now - generator_due > millisecond)
			generator_due = now - millisecond;
		generator_due += generator_burst_ns;
		generator_credit = generator_burst;
	}
	generator_credit--;
	return true;
}

/*
 * Pages are recycled and keep the contents of the last use, so all headers are rewritten.
 */
SEC("?xdp")
int generator(struct xdp_md *ctx)
{
	__u32 flow = generator_flow, step = generator_step, len = generator_layout.template_len;
	__u64 seq = generator_nr_sent, sum = 0;
	bool flood = seq % (generator_layout.flood + 1);
	struct generator_stamp *stamp;
	char *data, *data_end;
	__be16 *ports;
	__be32 *saddr;

	if (seq >= generator_limit || !generator_is_due())
		return XDP_DROP;
	if (flood)
		flow = generator_layout.nr_flows;
	if (!len || len > GENERATOR_TEMPLATE_LEN)
		goto refuse;
	if (bpf_xdp_store_bytes(ctx, 0, (void *)generator_template, len))
		goto refuse;
	if (!generator_layout.ports)
		goto out;

	data = (char *)(long)ctx->data;
	data_end = (char *)(long)ctx->data_end;
	stamp = (struct generator_stamp *)(data + generator_layout.stamp);
	if ((char *)(stamp + 1) > data_end)
		goto refuse;
	/* All headers are before the stamp. */
	saddr = (__be32 *)(data + generator_layout.saddr);
	ports = (__be16 *)(data + generator_layout.ports);
	*saddr = bpf_htonl(bpf_ntohl(*saddr) + (flow & generator_layout.saddr_mask));
	ports[0] = bpf_htons(bpf_ntohs(ports[0]) + (flow >> generator_layout.saddr_shift));
	ports[1] = bpf_htons(bpf_ntohs(ports[1]) + (flow & generator_layout.dport_mask));
	stamp->seq = bpf_cpu_to_be64(seq);
	stamp->flow = bpf_htonl(bpf_ntohl(generator_layout.first.flow) + flow);
	stamp->generator = generator_layout.first.generator;

	if (generator_layout.ipv4) {
		struct iphdr *ip = (struct iphdr *)(data + generator_layout.ipv4);

		ip->check = generator_checksum((__u64)ip->check + *saddr);
	}
	if (generator_layout.tcp_seq) {
		struct tcphdr *tcp = (struct tcphdr *)ports;
		__u32 nr_before = generator_round * generator_layout.run + step;

		tcp->seq = bpf_htonl(generator_layout.first_seq +
				     nr_before * generator_layout.payload_len);
		sum += tcp->seq;
		if (generator_layout.push && step + 1 == generator_layout.run) {
			tcp->psh = 1;
			sum += bpf_htons(0x0008);
		}
	}
	if (generator_layout.checksum) {
		__sum16 *check = (__sum16 *)(data + generator_layout.checksum);

		sum += (__u64)*check + *saddr + ports[0] + ports[1];
		sum += (stamp->seq & 0xffffffff) + (stamp->seq >> 32);
		sum += (__u64)stamp->flow + stamp->generator;
		*check = generator_checksum(sum);
		if (!*check && !generator_layout.tcp_seq)
			*check = 0xffff; /* RFC 768: zero means no checksum */
	}

out:
	generator_nr_sent = seq + 1;
	if (flood)
		return XDP_TX;
	generator_step = step + 1;
	if (generator_step >= generator_layout.run) {
		generator_step = 0;
		generator_flow = flow + 1;
		if (generator_flow >= generator_layout.nr_flows) {
			generator_flow = 0;
			generator_round++;
		}
	}
	return XDP_TX;

refuse:
	generator_nr_refused++;
	return XDP_ABORTED;
}

#include "lab_client.h"

/* ---- witness: the order in which a device hands frames to the stack -------- */

#define NR_WITNESS_FLOWS 65536

/* Offset of the stamp, as in generator_layout. */
const volatile __u32 witness_stamp = 0;

/*
 * Also takes from each packet the receive queue and the hash of its device. A redirected packet has
 * neither; a device with several transmit queues selects one by them (skb_tx_hash() in
 * net/core/dev.c), or else by the kernel's own hash of the flow.
 */
const volatile __u32 witness_forgets = 0;

/*
 * Records receive queue 0 with each packet that comes from a NAPI poll, as drivers of network cards
 * do. A veth does not record it for frames (xdp_build_skb_from_frame() in net/core/xdp.c).
 */
const volatile __u32 witness_records = 0;

/* Next sequence number expected, by flow. */
__u64 witness_next[NR_WITNESS_FLOWS];
__u64 witness_nr_seen;
__u64 witness_nr_reordered;

/*
 * At a device's tc ingress, on the delivering CPU, before any protocol. Packets of a flow that are
 * delivered one after the other are seen in order, on any CPUs; concurrent deliveries are the
 * errors to detect. TC_ACT_UNSPEC: other programs at the hook run too.
 */
SEC("?tc")
int witness(struct __sk_buff *skb)
{
	struct generator_stamp stamp;
	__u64 *next, seq;
	__u32 flow;

	/* skb_record_rx_queue() adds one; redirected packets have no NAPI id. */
	if (witness_records && skb->napi_id)
		skb->queue_mapping = 1;
	if (witness_forgets) {
		skb->queue_mapping = 0;
		bpf_set_hash_invalid(skb);
	}
	if (bpf_skb_load_bytes(skb, witness_stamp, &stamp, sizeof(stamp)))
		return TC_ACT_UNSPEC;
	flow = bpf_ntohl(stamp.flow);
	if (flow >= NR_WITNESS_FLOWS)
		return TC_ACT_UNSPEC;
	__sync_fetch_and_add(&witness_nr_seen, 1);
	seq = bpf_be64_to_cpu(stamp.seq);
	next = &witness_next[flow];
	if (seq < *next)
		__sync_fetch_and_add(&witness_nr_reordered, 1);
	else
		*next = seq + 1;
	return TC_ACT_UNSPEC;
}

/* ---- slow: makes each packet costly ---------------------------------------- */

/* Time for a packet, ns. */
const volatile __u64 slow_ns = 0;

#define SLOW_LOOPS (1 << 20)

static long slow_over(__u32 index, void *end)
{
	return bpf_ktime_get_ns() >= *(__u64 *)end;
}

/* At a device's tc ingress, on the delivering CPU. */
SEC("?tc")
int slow(struct __sk_buff *skb)
{
	__u64 end = bpf_ktime_get_ns() + slow_ns;

	bpf_loop(SLOW_LOOPS, slow_over, &end, 0);
	return TC_ACT_UNSPEC;
}

/* ---- stamped: packets with given time stamps ------------------------------- */

/* A device of the network namespace from which the program is called. */
const volatile __u32 stamped_ifindex = 0;

/* Called with a packet and its time stamps (BPF_PROG_TEST_RUN): gives the device a copy, as if it
 * had received it. The copy has the same skb_shared_info, and thus the hardware's time stamp. */
SEC("?tc")
int stamped(struct __sk_buff *skb)
{
	return bpf_clone_redirect(skb, stamped_ifindex, BPF_F_INGRESS);
}

/* At the egress of a veth: a wire carries no hash. */
SEC("?tc")
int wire(struct __sk_buff *skb)
{
	bpf_set_hash_invalid(skb);
	return TC_ACT_UNSPEC;
}

/* ---- filter: of a packet socket ----------------------------------------------- */

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} no_programs SEC(".maps");

/* The kernel clears skb->cb before each run of a filter that may use it, as one with tail calls may
 * (bpf_prog_run_clear_cb() in include/linux/filter.h). */
SEC("?socket")
int filter(struct __sk_buff *skb)
{
	bpf_tail_call(skb, &no_programs, 0);
	return skb->len;
}

/* ---- empty: the cost of running any XDP program ---------------------------- */

SEC("?xdp.frags")
int empty(struct xdp_md *ctx)
{
	return XDP_PASS;
}

/* ---- vary: changes the flow of a packet before each run -------------------- */

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} vary_target SEC(".maps");

const volatile __u32 vary_nr_flows = 1; /* at most 2^24: the host part of 10.0.0.0/8 */
const volatile __u32 vary_step = 1;	/* coprime: each flow once per round */
__u32 vary_flow;

/* The packet must be IPv4, and the target must ignore its checksums. */
SEC("?xdp.frags")
int vary(struct xdp_md *ctx)
{
	struct iphdr *ip = (struct iphdr *)((char *)(long)ctx->data + sizeof(struct ethhdr));
	__u32 flow = vary_flow;

	if ((char *)(ip + 1) > (char *)(long)ctx->data_end)
		return XDP_ABORTED;
	ip->saddr = bpf_htonl(0x0a000000 + flow);
	flow += vary_step;
	vary_flow = flow >= vary_nr_flows ? flow - vary_nr_flows : flow;
	bpf_tail_call(ctx, &vary_target, 0);
	return XDP_ABORTED;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
