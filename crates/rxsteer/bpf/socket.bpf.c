// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * socket.bpf.c: writes the sock_flow_table when applications receive and send data.
 *
 * An entry moves other people's packets if it is not this flow's. So only data that was received
 * counts: TCP and SCTP, and what is sent there, on connections that the peer has answered; of UDP
 * what is received. And only in the namespaces of netns.h.
 *
 * Not seen: splice and zero-copy reads, accept (docs/rfs.md).
 */
#include <linux/bpf.h>
#include <linux/in.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "core/flow_key.h"
#include "core/tables.h"
#include "kernel.h"
#include "maps.h"
#include "netns.h"
#include "reuseport.h"
#include "socket.h"

/* net.core.busy_read, in us: the value of sockets that have asked for nothing. Set by user space.
 */
__u32 host_busy_read;

/*
 * Whether the application has asked that a read that finds no data polls the queue for a while
 * (SO_BUSY_POLL). The host's value is no such request: all sockets inherit it, those that never
 * poll too. If such a socket does poll, its packets are received on its CPU, and are INLINE anyway.
 */
static __always_inline bool sock_polls(const struct sock *sk)
{
	if (!bpf_core_field_exists(sk->sk_ll_usec))
		return false;
	return sk->sk_ll_usec && sk->sk_ll_usec != *(volatile __u32 *)&host_busy_read;
}

/* The states of TCP that follow an answer of the peer; those of SCTP have the same numbers. */
#define SOCK_ANSWERED                                                                              \
	(1 << BPF_TCP_ESTABLISHED | 1 << BPF_TCP_FIN_WAIT1 | 1 << BPF_TCP_FIN_WAIT2 |              \
	 1 << BPF_TCP_CLOSE_WAIT | 1 << BPF_TCP_LAST_ACK | 1 << BPF_TCP_CLOSING)

static __always_inline bool sock_is_datagram(const struct sock *sk)
{
	return sk->sk_type == SOCK_DGRAM;
}

/* Whether the peer of this stream has answered. */
static __always_inline bool sock_is_answered(const struct sock *sk)
{
	return (sk->sk_type == SOCK_STREAM || sk->sk_type == SOCK_SEQPACKET) &&
	       1 << sk->__sk_common.skc_state & SOCK_ANSWERED;
}

/*
 * For a datagram that a connected socket has just received: whether it came from the peer.
 * connect() leaves in the queue what came from others, and nothing later comes from them: those
 * that are in the queue when the first datagram is received do not count, nor does that one.
 */
static __always_inline bool sock_hears_peer(struct sock *sk)
{
	struct rps_sock_peer *peer =
		bpf_sk_storage_get(&sock_peers, sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);

	if (!peer)
		return false;
	if (peer->connection != sk->sk_txhash) {
		peer->earlier = sk->sk_receive_queue.qlen +
				BPF_CORE_READ((struct udp_sock *)sk, reader_queue.qlen) + 1;
		peer->connection = sk->sk_txhash;
		return false;
	}
	if (peer->earlier)
		peer->earlier--;
	return !peer->earlier;
}

/* Whether packets of the steered devices reach the socket's namespace. `sk` and `peer`: as in
 * sock_flow_record(). */
static __always_inline bool sock_is_reached(const struct sock *sk, struct bpf_sock_addr *peer)
{
	const struct net *net = NULL;

	if (!peer) {
		/* Without a test of sk, after which the verifier of 6.1 knows a NULL here. */
		net = sk->__sk_common.skc_net.net;
		return netns_is_reached(net->net_cookie, net);
	}
	if (sk)
		net = sk->__sk_common.skc_net.net;
	return netns_is_reached(bpf_get_netns_cookie(peer), net);
}

/*
 * Records this CPU as that of the flow's application, or INLINE if the application polls. The entry
 * is written only if it differs, because all CPUs share its cache line (rps_record_sock_flow() in
 * the kernel). `sk` is NULL where the kernel does not show it. `peer`: the flow is that of a
 * datagram to an unconnected socket, by this context; otherwise NULL.
 */
static __always_inline void sock_flow_record(__u32 hash, struct sock *sk, bool polls,
					     struct bpf_sock_addr *peer)
{
	__u16 location = polls ? RPS_INLINE : bpf_get_smp_processor_id();
	__u32 mask = config.sock_flow_cpu_mask;
	__u32 value = sock_flow_entry(hash, location, mask) | (peer ? sock_flow_peer(mask) : 0);
	__u32 *entry = sock_flow_entry_of(hash);
	__u64 *consumer;
	__u32 before;

	if (!entry)
		return;
	before = *(volatile __u32 *)entry;
	if (before == value)
		return;
	if (peer && sock_flow_is_connected(before, mask) && bpf_get_prandom_u32() % SOCK_FLOW_AGES)
		return;
	if (!peer && sock_is_datagram(sk) && !sock_hears_peer(sk))
		return;
	if (!sock_is_reached(sk, peer))
		return;
	*(volatile __u32 *)entry = value;
	consumer = sock_flow_consumer_of(hash);
	if (consumer)
		*(volatile __u64 *)consumer = bpf_get_current_task();
}

/* Removes the CPU from the entry of a flow with a closed socket: late packets would still go there.
 * The flow's hash bits stay, for `rxsteer explain`. */
static __always_inline void sock_flow_reset(__u32 hash, const struct sock *sk)
{
	__u32 mask = config.sock_flow_cpu_mask;
	__u32 *entry = sock_flow_entry_of(hash);

	if (entry && sock_flow_location(*entry, hash, mask) != RPS_NO_CPU &&
	    netns_is_reached(sk->__sk_common.skc_net.net->net_cookie, NULL))
		*(volatile __u32 *)entry = sock_flow_entry(hash, RPS_NO_CPU, mask);
}

/* The key of the packets that a connected socket receives. False for unconnected sockets, and for
 * protocols other than IP. */
static __always_inline bool sock_flow_key(const struct sock *sk, struct flow_key *key)
{
	const struct sock_common *common = &sk->__sk_common;
	__be32 ports = flow_ports(common->skc_dport, flow_swap16(common->skc_num));

	if (!common->skc_dport)
		return false;
	switch (common->skc_family) {
	case AF_INET:
		flow_key_ports4(key, common->skc_daddr, ports, sk->sk_protocol);
		return true;
	case AF_INET6:
		flow_key_ports(key, common->skc_v6_daddr.in6_u.u6_addr32, ports, sk->sk_protocol);
		return true;
	}
	return false;
}

/*
 * The hash of these packets at the steered device. The socket keeps that of its last packet
 * (skb_tell_flow()), and has none before: then its addresses are all that is known, which are the
 * packets' own without NAT. The hash of packets from elsewhere, as from loopback, is that of no
 * steered flow.
 */
static __always_inline bool sock_flow_hash(const struct sock *sk, __u32 *hash)
{
	struct flow_key key;

	if (!sock_flow_key(sk, &key))
		return false;
	*hash = config.follow_nat ? sk->__sk_common.skc_rxhash : 0;
	if (!*hash)
		*hash = flow_hash(&key, &config.flow_secret);
	return true;
}

static __always_inline void sock_used(struct sock *sk)
{
	__u32 hash;

	if (sock_flow_hash(sk, &hash))
		sock_flow_record(hash, sk, sock_polls(sk), NULL);
}

/* The call has returned `ret`. */
static __always_inline void sock_received(struct sock *sk, int ret, int flags)
{
	if (ret <= 0 || flags & (MSG_PEEK | MSG_ERRQUEUE))
		return;
	if (sock_is_datagram(sk) || sock_is_answered(sk))
		sock_used(sk);
}

static __always_inline void sock_sent(struct sock *sk, int ret)
{
	if (ret > 0 && sock_is_answered(sk))
		sock_used(sk);
}

/* Whether the entry may be this socket's, which is about to close. A connection that both ends have
 * closed has no state any more. */
static __always_inline bool sock_had_peer(const struct sock *sk, const struct rps_sock_peer *peer)
{
	if (sock_is_datagram(sk))
		return peer && peer->connection == sk->sk_txhash && !peer->earlier;
	return sock_is_answered(sk) ||
	       (sk->sk_protocol == IPPROTO_TCP && sk->__sk_common.skc_state == BPF_TCP_CLOSE &&
		BPF_CORE_READ((struct tcp_sock *)sk, bytes_received));
}

static __always_inline void sock_closed(const struct sock *sk, const struct rps_sock_peer *peer)
{
	__u32 hash;

	if (sock_had_peer(sk, peer) && sock_flow_hash(sk, &hash))
		sock_flow_reset(hash, sk);
}

/* recvmsg and all calls that end in it: read, recvmmsg, io_uring. The program runs after the call,
 * which may have slept and woken up on another CPU. */
SEC("tp_btf/sock_recv_length")
int BPF_PROG(on_sock_recv, struct sock *sk, int ret, int flags)
{
	sock_received(sk, ret, flags);
	return 0;
}

SEC("tp_btf/sock_send_length")
int BPF_PROG(on_sock_send, struct sock *sk, int ret, int flags)
{
	sock_sent(sk, ret);
	return 0;
}

/* For kernels before 6.3, which lack the two tracepoints: the calls of IP sockets, after their end,
 * through a trampoline that not every host allows. */
SEC("?fexit/inet_recvmsg")
int BPF_PROG(on_inet_recv, struct socket *sock, void *msg, unsigned long size, int flags, int ret)
{
	sock_received(sock->sk, ret, flags);
	return 0;
}

SEC("?fexit/inet6_recvmsg")
int BPF_PROG(on_inet6_recv, struct socket *sock, void *msg, unsigned long size, int flags, int ret)
{
	sock_received(sock->sk, ret, flags);
	return 0;
}

SEC("?fexit/inet_sendmsg")
int BPF_PROG(on_inet_send, struct socket *sock, void *msg, unsigned long size, int ret)
{
	sock_sent(sock->sk, ret);
	return 0;
}

SEC("?fexit/inet6_sendmsg")
int BPF_PROG(on_inet6_send, struct socket *sock, void *msg, unsigned long size, int ret)
{
	sock_sent(sock->sk, ret);
	return 0;
}

SEC("?fentry/inet_release")
int BPF_PROG(on_inet_release, struct socket *sock)
{
	struct sock *sk = sock->sk;

	if (sk)
		sock_closed(sk, bpf_sk_storage_get(&sock_peers, sk, NULL, 0));
	return 0;
}

/* The socket's last reference is gone; its peer's address is still known. */
SEC("cgroup/sock_release")
int on_sock_release(struct bpf_sock *ctx)
{
	/* The context itself does not show the local port here. */
	if (bpf_ksym_exists(bpf_cast_to_kern_ctx))
		sock_closed(bpf_cast_to_kern_ctx(ctx),
			    bpf_sk_storage_get(&sock_peers, ctx, NULL, 0));
	return 1;
}

/* Whether threads on several CPUs receive from the socket in turn. A flow that followed each of
 * them would move with almost every packet. */
static __always_inline bool sock_is_shared(struct bpf_sock *sk)
{
	struct rps_sock_takers *takers =
		bpf_sk_storage_get(&sock_takers, sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	const __u32 most = (RPS_SOCK_CHANGES + 1) * RPS_SOCK_SETTLES;
	__u32 cpu = bpf_get_smp_processor_id();

	if (!takers)
		return false;
	if (takers->cpu != cpu) {
		takers->cpu = cpu;
		if (takers->changes < most)
			takers->changes += RPS_SOCK_SETTLES;
	} else if (takers->changes) {
		takers->changes--;
	}
	return takers->changes > RPS_SOCK_CHANGES * RPS_SOCK_SETTLES;
}

/* The ports of a datagram that an application receives with the sender's address: the only hook
 * that knows the flow of an unconnected socket. The programs above see connected sockets. */
static __always_inline bool peer_ports(struct bpf_sock_addr *ctx, __be32 *ports,
				       struct sock **kern_sk, bool *polls)
{
	struct bpf_sock *sk = ctx->sk;

	if (!sk || sk->dst_port)
		return false;
	*kern_sk = NULL;
	*polls = false;
	if (bpf_ksym_exists(bpf_cast_to_kern_ctx)) {
		struct bpf_sock_addr_kern *kern = bpf_cast_to_kern_ctx(ctx);

		*kern_sk = kern->sk;
		*polls = sock_polls(kern->sk);
		if (sock_is_of_cpu(kern->sk))
			return false;
	}
	/* With busy polling, INLINE serves every thread of a shared socket. */
	if (!*polls && sock_is_shared(sk))
		return false;
	*ports = flow_ports(ctx->user_port, flow_swap16(sk->src_port));
	return true;
}

SEC("cgroup/recvmsg4")
int on_udp4_recv(struct bpf_sock_addr *ctx)
{
	struct flow_key key;
	struct sock *sk;
	__be32 ports;
	bool polls;

	if (peer_ports(ctx, &ports, &sk, &polls)) {
		flow_key_ports4(&key, ctx->user_ip4, ports, ctx->protocol);
		sock_flow_record(flow_hash(&key, &config.flow_secret), sk, polls, ctx);
	}
	return 1;
}

SEC("cgroup/recvmsg6")
int on_udp6_recv(struct bpf_sock_addr *ctx)
{
	struct flow_key key;
	struct sock *sk;
	__be32 saddr[4];
	__be32 ports;
	bool polls;

	if (peer_ports(ctx, &ports, &sk, &polls)) {
		for (int i = 0; i < 4; i++)
			saddr[i] = ctx->user_ip6[i];
		flow_key_ports(&key, saddr, ports, ctx->protocol);
		sock_flow_record(flow_hash(&key, &config.flow_secret), sk, polls, ctx);
	}
	return 1;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
