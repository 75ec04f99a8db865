/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * lab_client.h: clients of closed loops in the lab: flows with one request under way each, on a
 * persistent connection (client), or on a new connection per request (client_connect).
 */
#pragma once

#define NR_CLIENT_FLOWS 1024

/*
 * Latency buckets: one per ns below 128 ns, 64 per power of two above, so at most 1.6 % wide; up to
 * 2^36 ns (69 s).
 */
#define CLIENT_BUCKET_BITS 6
#define CLIENT_NS_BITS	   36
#define NR_CLIENT_BUCKETS  ((CLIENT_NS_BITS - CLIENT_BUCKET_BITS + 1) << CLIENT_BUCKET_BITS)

/*
 * Flow i has the address saddr + (i & mask) and the port sport + (i >> shift), as in the generator.
 * With a connection per request, a flow uses a range of 1 << port_bits ports in order.
 */
struct client_layout {
	__u32 saddr; /* host byte order, as the ports */
	__u32 saddr_mask;
	__u32 saddr_shift;
	__u32 port_bits;
	__u32 nr_flows;
	__u16 sport;
	__u16 dport;
	__u8 proto; /* IPPROTO_UDP, IPPROTO_TCP */
};

enum client_step {
	CLIENT_SYN_SENT, /* waits for the SYN-ACK */
	CLIENT_ASKED,	 /* has acknowledged it with the request; waits for the reply */
	CLIENT_CLOSING,	 /* has acknowledged the reply with a FIN; waits for the server's */
};

struct client_flow {
	__u64 sent_ns;	/* last transmission, bpf_ktime_get_ns(); 0: nothing under way */
	__u64 begun_ns; /* client_connect: time of the SYN */
	__u32 seq;	/* TCP: of the last segment sent */
	__u32 ack;	/* TCP: next sequence number expected */
	__u32 port;	/* client_connect: offset in the flow's range */
	enum client_step step;
	/* The final acknowledgement of the last connection is still to be sent. */
	bool owes;
	__u32 owed_port;
	__u32 owed_seq;
	__u32 owed_ack;
};

const volatile struct client_layout client_layout;
struct client_flow client_flows[NR_CLIENT_FLOWS];
__u64 client_buckets[NR_CLIENT_BUCKETS]; /* latencies */
__u64 client_nr_clipped;		 /* beyond the last bucket, and counted there */
bool client_stopping;			 /* replies are counted, but no longer answered */

static __always_inline __u32 client_bucket(__u64 ns)
{
	__u32 exponent = 0;

	if (ns >= 1ULL << CLIENT_NS_BITS) {
		__sync_fetch_and_add(&client_nr_clipped, 1);
		return NR_CLIENT_BUCKETS - 1;
	}
	for (__u32 bits = 32; bits; bits >>= 1) {
		if (ns >> exponent >> bits)
			exponent += bits;
	}
	if (exponent <= CLIENT_BUCKET_BITS)
		return ns;
	exponent -= CLIENT_BUCKET_BITS;
	return (exponent << CLIENT_BUCKET_BITS) + (ns >> exponent);
}

/* The sum of all buckets is the number of replies. */
static __always_inline void client_count(__u64 since, __u64 now)
{
	__u32 bucket = client_bucket(now - since);

	if (bucket < NR_CLIENT_BUCKETS)
		__sync_fetch_and_add(&client_buckets[bucket], 1);
}

/* Swapping source and destination leaves one's complement sums unchanged. */
static __always_inline void client_swap(struct ethhdr *eth, struct iphdr *ip)
{
	__u8 mac[ETH_ALEN];
	__be32 address = ip->saddr;

	__builtin_memcpy(mac, eth->h_source, ETH_ALEN);
	__builtin_memcpy(eth->h_source, eth->h_dest, ETH_ALEN);
	__builtin_memcpy(eth->h_dest, mac, ETH_ALEN);
	ip->saddr = ip->daddr;
	ip->daddr = address;
}

/*
 * Turns a reply into the next request, with the same payload. A flow's state has one writer: the
 * NAPI that runs this.
 */
SEC("?xdp.frags")
int client(struct xdp_md *ctx)
{
	char *data = (char *)(long)ctx->data, *data_end = (char *)(long)ctx->data_end;
	struct ethhdr *eth = (struct ethhdr *)data;
	struct iphdr *ip = (struct iphdr *)(eth + 1);
	struct tcphdr *tcp = (struct tcphdr *)(ip + 1);
	__be16 *ports = (__be16 *)(ip + 1), port;
	struct client_flow *state;
	__u32 flow, len;
	__u64 now, sum;
	__be32 seq;

	if ((char *)(ports + 2) > data_end || eth->h_proto != bpf_htons(ETH_P_IP) || ip->ihl != 5)
		return XDP_PASS;
	if (ip->protocol != client_layout.proto || ports[0] != bpf_htons(client_layout.dport))
		return XDP_PASS;
	flow = (__u32)(bpf_ntohs(ports[1]) - client_layout.sport) << client_layout.saddr_shift;
	flow += bpf_ntohl(ip->daddr) - client_layout.saddr;
	if (flow >= NR_CLIENT_FLOWS || flow >= client_layout.nr_flows)
		return XDP_PASS;
	state = &client_flows[flow];
	if (client_layout.proto == IPPROTO_TCP) {
		if ((char *)(tcp + 1) > data_end)
			return XDP_DROP;
		len = bpf_ntohs(ip->tot_len) - sizeof(*ip) - tcp->doff * 4;
		/* Drop bare acknowledgements, and retransmissions of replies already answered. */
		if (!len || tcp->rst || bpf_ntohl(tcp->seq) != state->ack)
			return XDP_DROP;
		state->ack += len;
		state->seq = bpf_ntohl(tcp->ack_seq);
	}
	now = bpf_ktime_get_ns();
	if (state->sent_ns)
		client_count(state->sent_ns, now);
	if (client_stopping) {
		state->sent_ns = 0;
		return XDP_DROP;
	}
	state->sent_ns = now;
	if (client_layout.proto == IPPROTO_TCP) {
		seq = tcp->seq;
		tcp->seq = tcp->ack_seq;
		tcp->ack_seq = bpf_htonl(state->ack);
		sum = (__u16)~tcp->check + (__u64)(__u32)~seq + tcp->ack_seq;
		tcp->check = generator_checksum(sum);
	}
	client_swap(eth, ip);
	port = ports[0];
	ports[0] = ports[1];
	ports[1] = port;
	return XDP_TX;
}

/*
 * Turns a received frame into the next segment of a connection, without options and with `len`
 * bytes of zeros. `ports`: source and destination port of the segment.
 */
static __always_inline int client_send(struct xdp_md *ctx, __u32 ports, __u32 seq, __u32 ack,
				       __be32 flags, __u32 len)
{
	const __u32 headers = sizeof(struct ethhdr) + sizeof(struct iphdr) + sizeof(struct tcphdr);
	__u16 segment = sizeof(struct tcphdr) + len;
	__be16 total = bpf_htons(sizeof(struct iphdr) + segment);
	int surplus = (int)(ctx->data_end - ctx->data) - (int)(headers + len);
	char *data, *data_end;
	struct ethhdr *eth;
	struct iphdr *ip;
	__be32 *words;
	__u64 sum;

	if (bpf_xdp_adjust_tail(ctx, -surplus))
		return XDP_ABORTED;
	data = (char *)(long)ctx->data;
	data_end = (char *)(long)ctx->data_end;
	if (data + headers + len > data_end)
		return XDP_ABORTED;
	eth = (struct ethhdr *)data;
	ip = (struct iphdr *)(eth + 1);
	words = (__be32 *)(ip + 1);
	if (len)
		data[headers] = 0;
	client_swap(eth, ip);
	sum = (__u16)~ip->check + (__u32)(__u16)~ip->tot_len + total;
	ip->tot_len = total;
	ip->check = generator_checksum(sum);
	words[0] = bpf_htonl(ports);
	words[1] = bpf_htonl(seq);
	words[2] = bpf_htonl(ack);
	words[3] = flags | bpf_htonl(5U << 28 | 0xffff); /* header length in words; window */
	sum = (__u64)ip->saddr + ip->daddr + bpf_htonl((__u32)IPPROTO_TCP << 16 | segment);
	sum += (__u64)words[0] + words[1] + words[2] + words[3];
	words[4] = 0;
	((struct tcphdr *)words)->check = generator_checksum(sum);
	return XDP_TX;
}

/*
 * A connection per request, as netperf's TCP_CRR: SYN; the request with the acknowledgement of the
 * SYN-ACK; FIN with the acknowledgement of the reply, so that no server socket is left in
 * TIME_WAIT; in response to the server's FIN, the SYN of the next connection. Each received frame
 * is turned into one frame, so the final acknowledgement is sent in response to the acknowledgement
 * of the next connection's request. The kernel sends that at once, since it begins each connection
 * with quick acknowledgements (tcp_event_data_recv()). A server that misses the final
 * acknowledgement repeats its FIN, which is then acknowledged.
 */
SEC("?xdp.frags")
int client_connect(struct xdp_md *ctx)
{
	char *data = (char *)(long)ctx->data, *data_end = (char *)(long)ctx->data_end;
	struct ethhdr *eth = (struct ethhdr *)data;
	struct iphdr *ip = (struct iphdr *)(eth + 1);
	struct tcphdr *tcp = (struct tcphdr *)(ip + 1);
	__u32 flow, port, ports, range, seq, ack, len;
	struct client_flow *state;
	__u64 now;

	if ((char *)(tcp + 1) > data_end || eth->h_proto != bpf_htons(ETH_P_IP) || ip->ihl != 5)
		return XDP_PASS;
	if (ip->protocol != IPPROTO_TCP || tcp->source != bpf_htons(client_layout.dport))
		return XDP_PASS;
	range = 1U << client_layout.port_bits;
	port = bpf_ntohs(tcp->dest) - client_layout.sport;
	flow = port >> client_layout.port_bits << client_layout.saddr_shift;
	flow += bpf_ntohl(ip->daddr) - client_layout.saddr;
	if (flow >= NR_CLIENT_FLOWS || flow >= client_layout.nr_flows)
		return XDP_PASS;
	state = &client_flows[flow];
	ports = (__u32)bpf_ntohs(tcp->dest) << 16 | client_layout.dport;
	port &= range - 1;
	seq = bpf_ntohl(tcp->seq);
	ack = bpf_ntohl(tcp->ack_seq);
	len = bpf_ntohs(ip->tot_len) - sizeof(*ip) - tcp->doff * 4;
	if (tcp->rst || !tcp->ack)
		return XDP_DROP;
	if (port != state->port || !state->sent_ns) {
		if (!tcp->fin)
			return XDP_DROP;
		return client_send(ctx, ports, ack, seq + len + 1, TCP_FLAG_ACK, 0);
	}
	now = bpf_ktime_get_ns();

	switch (state->step) {
	case CLIENT_SYN_SENT:
		if (!tcp->syn || ack != state->seq + 1)
			return XDP_DROP;
		state->sent_ns = now;
		state->seq = ack;
		state->ack = seq + 1;
		state->step = CLIENT_ASKED;
		return client_send(ctx, ports, ack, seq + 1, TCP_FLAG_ACK | TCP_FLAG_PSH, 1);

	case CLIENT_ASKED:
		if (tcp->syn || tcp->fin || seq != state->ack || ack != state->seq + 1)
			return XDP_DROP;
		if (!len) {
			if (!state->owes)
				return XDP_DROP;
			state->owes = false;
			ports += (state->owed_port - port) << 16;
			return client_send(ctx, ports, state->owed_seq, state->owed_ack,
					   TCP_FLAG_ACK, 0);
		}
		client_count(state->begun_ns, now);
		state->sent_ns = now;
		state->seq = ack;
		state->ack = seq + len;
		state->step = CLIENT_CLOSING;
		return client_send(ctx, ports, ack, seq + len, TCP_FLAG_ACK | TCP_FLAG_FIN, 0);

	case CLIENT_CLOSING:
		if (!tcp->fin || len || seq != state->ack || ack != state->seq + 1)
			return XDP_DROP;
		if (client_stopping) {
			state->sent_ns = 0;
			return client_send(ctx, ports, ack, seq + 1, TCP_FLAG_ACK, 0);
		}
		state->owes = true;
		state->owed_port = port;
		state->owed_seq = ack;
		state->owed_ack = seq + 1;
		state->port = (port + 1) & (range - 1);
		ports += (state->port - port) << 16;
		state->seq = now; /* any initial sequence number does */
		state->begun_ns = now;
		state->sent_ns = now;
		state->step = CLIENT_SYN_SENT;
		return client_send(ctx, ports, state->seq, 0, TCP_FLAG_SYN, 0);
	}
	return XDP_ABORTED;
}
