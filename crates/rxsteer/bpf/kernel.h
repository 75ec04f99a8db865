/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * kernel.h: the kernel types that the programs read, with only the fields that are read. CO-RE
 * finds the real offsets at load time.
 */
#pragma once

#include <linux/in6.h>
#include <linux/netfilter/nf_conntrack_common.h>
#include <linux/types.h>
#include <stdbool.h>

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct sched_avg {
	unsigned long runnable_avg; /* 1024 for each task that runs or waits to run */
	unsigned long util_avg;	    /* share of the CPU's time, of 1024 */
};

struct sched_entity {
	struct sched_avg avg;
};

struct task_struct {
	unsigned int __state;
	unsigned int flags;
	int on_rq;
	int pid; /* 0: the idle task of a CPU */
	int tgid;
	unsigned long nvcsw;  /* times that the task went to sleep */
	unsigned long nivcsw; /* times that the task was preempted */
	struct sched_entity se;
	void *worker_private; /* a kthread's struct kthread */
};

struct cfs_rq {
	struct sched_avg avg;
};

struct rq {
	__u64 clock; /* ns; stands still while the CPU is idle */
	struct task_struct *curr;
	struct task_struct *idle;
	struct cfs_rq cfs;
	struct sched_avg avg_rt;
	struct sched_avg avg_dl;
	/* Only if the kernel accounts for the time of interrupts or of a hypervisor. */
	struct sched_avg avg_irq;
	int cpu;
};

struct kthread {
	void *data; /* a cpumap kthread's struct bpf_cpu_map_entry */
};

typedef struct {
	__u32 val;
} kuid_t;

struct user_namespace {
	int level;    /* 0: the initial one */
	kuid_t owner; /* who made it, as the initial one numbers users */
};

struct net {
	struct user_namespace *user_ns;
	__u64 net_cookie; /* no other namespace had or will have it until the next boot */
};

typedef struct {
	struct net *net;
} possible_net_t;

struct sock_common {
	__be32 skc_daddr;
	__be16 skc_dport;
	__u16 skc_num; /* the local port, in host byte order */
	unsigned short skc_family;
	volatile unsigned char skc_state; /* BPF_TCP_*; UDP: established is connected */
	possible_net_t skc_net;
	struct in6_addr skc_v6_daddr;
	__u32 skc_rxhash; /* skb->hash of the last packet; without CONFIG_RPS zero */
	/* SO_INCOMING_CPU, or the CPU of the last packet, but of unconnected UDP sockets; -1: none
	 */
	int skc_incoming_cpu;
};

struct sk_buff_head {
	__u32 qlen;
};

/* A classic program. */
struct sock_fprog_kern {
	__u16 len;
	struct sock_filter *filter;
};

struct bpf_prog {
	struct sock_fprog_kern *orig_prog; /* NULL: it was none */
};

struct sock_reuseport {
	__u16 incoming_cpu;    /* sockets with SO_INCOMING_CPU; since 6.2 */
	struct bpf_prog *prog; /* chooses the socket; NULL: the kernel's hash does */
};

struct sock {
	struct sock_common __sk_common;
	struct sk_buff_head sk_receive_queue;
	__u16 sk_type;
	__u16 sk_protocol;
	__u32 sk_txhash; /* random; UDP draws another one in connect() */
	struct sock_reuseport *sk_reuseport_cb;
	unsigned int sk_ll_usec; /* SO_BUSY_POLL; only with CONFIG_NET_RX_BUSY_POLL */
};

struct tcp_sock {
	__u64 bytes_received;
};

struct udp_sock {
	struct sk_buff_head reader_queue;
};

struct bpf_sock_addr_kern {
	struct sock *sk;
};

struct socket {
	struct sock *sk;
};

struct dst_entry {
	unsigned short flags;
};

struct list_head {
	struct list_head *next;
};

struct net_device {
	int ifindex;
	unsigned short type; /* ARPHRD_* */
	possible_net_t nd_net;
	struct list_head napi_list;
};

struct sk_buff {
	struct net_device *dev;
	struct sock *sk;
	unsigned int len;
	__u32 hash;
	int skb_iif;		   /* the device that has received it; 0: not yet */
	unsigned long _skb_refdst; /* struct dst_entry *; bit 0: without a reference */
	__u8 active_extensions;	   /* bits of enum skb_ext_id; only with CONFIG_SKB_EXTENSIONS */
};

struct nf_conntrack_zone {
	__u16 id;
};

/* An entry of connection tracking. Its type may be known only once its module is loaded. */
struct nf_conn {
	struct nf_conntrack_zone zone; /* only with CONFIG_NF_CONNTRACK_ZONES */
	unsigned long status;	       /* bits of ip_conntrack_status */
};

struct qdisc_skb_cb {
	unsigned char data[20]; /* cb[] of tc programs */
};

enum skb_ext_id {
	SKB_EXT_SEC_PATH = 1, /* the value is the kernel's; only with CONFIG_XFRM */
};

enum skb_drop_reason {
	SKB_DROP_REASON_CPU_BACKLOG = 1, /* the value is the kernel's */
};

enum cpuhp_state {
	CPUHP_TEARDOWN_CPU = 1, /* the value is the kernel's */
};

struct gro_node { /* since 6.15 */
	unsigned long bitmask;
	__u32 rx_count;
};

struct bpf_cpu_map_entry {
	__u32 cpu;
	int map_id;
	struct gro_node gro; /* since 6.15: before, a cpumap does no GRO */
};

struct napi_struct {
	unsigned long state;
	int weight;
	struct net_device *dev;
	struct gro_node gro; /* since 6.15 */
};

/* A CPU's; the counters only with CONFIG_RPS. */
struct softnet_data {
	unsigned int input_queue_head; /* passed up */
	unsigned int cpu;
	unsigned int input_queue_tail; /* entered */
	struct napi_struct backlog;
};

struct bpf_flow_dissector {
	const struct sk_buff *skb; /* NULL: a frame in memory */
};

struct napi_struct___before_6_15 {
	unsigned long gro_bitmask;
	int rx_count;
};

#pragma clang attribute pop

/* include/linux/sched.h; stable, because /proc and tracers print the values */
#define TASK_RUNNING	   0
#define TASK_INTERRUPTIBLE 1

/* include/linux/sched.h */
#define PF_KTHREAD 0x00200000

/* include/net/dst.h: what a packet brings from its tunnel, not a route */
#define DST_METADATA 0x0080

/* include/uapi/linux/if_arp.h, which BPF programs can't include */
#define ARPHRD_ETHER 1

/* include/linux/netfilter/nf_conntrack_common.h */
#define NFCT_INFOMASK	7UL
#define IP_CT_UNTRACKED 7 /* in the kernel's copy alone */

/* include/linux/socket.h; user space has them in a header of the C library */
#define AF_INET	 2
#define AF_INET6 10

/* include/linux/net.h, on x86-64 and arm64 */
enum sock_type {
	SOCK_STREAM = 1,
	SOCK_DGRAM = 2,
	SOCK_SEQPACKET = 5,
};

/* include/linux/socket.h */
#define MSG_PEEK     2
#define MSG_ERRQUEUE 0x2000

/* include/net/xdp.h, since 6.3 */
enum xdp_rss_hash_type {
	XDP_RSS_L4 = 1 << 3, /* the hash covers the ports too */
};
struct xdp_md;
extern int bpf_xdp_metadata_rx_hash(const struct xdp_md *ctx, __u32 *hash,
				    enum xdp_rss_hash_type *rss_type)
	__attribute__((section(".ksyms"), weak));

/* Since 6.2. */
extern void *bpf_cast_to_kern_ctx(void *obj) __attribute__((section(".ksyms"), weak));
extern void *bpf_rdonly_cast(const void *obj, __u32 btf_id)
	__attribute__((section(".ksyms"), weak));
