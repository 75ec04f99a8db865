/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * types.h: the types that the kernel side and user space share. User space gets them from the BTF
 * of types.bpf.c (the generated skeleton), never from a copy.
 *
 * Plain C: compiled for the kernel and for the host (native.c).
 */
#pragma once

#include <linux/types.h>

#ifndef __always_inline
#define __always_inline inline __attribute__((always_inline))
#endif
#ifndef likely
#define likely(x)   __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
#endif

/* User space writes and compares these types as bytes: all padding has a name. */
#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wpadded"

/* ---- flow keys (flow.h) ------------------------------------------------- */

/*
 * Packets with equal keys are one flow. There is no padding, because keys are hashed and compared
 * as words. Addresses are in network order; an IPv4 address is written as its v4-mapped IPv6
 * address, so that a v4-mapped socket and the packets it receives have one key.
 *
 * Protocols with ports leave daddr zero: a socket bound to the wildcard address can't know the
 * local address of its datagrams (docs/hash.md).
 */
struct flow_key {
	__be32 saddr[4];
	__be32 daddr[4];
	__be32 ports; /* source port, destination port; or the SPI; or 0 */
	__u32 proto;  /* IPPROTO_*; IPPROTO_FRAGMENT for every IPv6 fragment */
	/* Of a packet in a tunnel, whose socket knows nothing of it: the outermost source address,
	 * and the VNI, the key or the TEID of that tunnel. Otherwise zero. */
	__be32 outer[4];
	__be32 tunnel;
};

/* The latest flow in a slot of a dev_flow_table, and what is seldom needed of the slot. */
struct flow_name {
	struct flow_key key;
	__u32 ifindex; /* of the device that received the flow's first packet */
	/* In softirq mode: the number of the slot's last mixing (rx_mix()); 0: it is not mixed. */
	__u64 mixed_at;
};
_Static_assert(sizeof(struct flow_name) % 8 == 0, "as an array's elements");

/* Whether a packet has a key, or why it has none. Counted per queue: nr_no_flow[]. */
enum flow_result {
	FLOW_KEYED = 0,
	FLOW_TRUNCATED, /* a header ends outside the packet, or is invalid */
	FLOW_UNKNOWN,	/* not IP, or more headers than the parser follows */
	NR_FLOW_RESULTS,
};

/* What the parser does if configured. Tunnels: the key is that of the inner flow (`--tunnels`;
 * their ports are in flow_tunnel_of()). */
enum flow_option {
	FLOW_TUNNEL_IPIP = 1 << 0, /* IPIP, 6in4, 4in6, ip6ip6 */
	FLOW_TUNNEL_GRE = 1 << 1,
	FLOW_TUNNEL_VXLAN = 1 << 2,
	FLOW_TUNNEL_GENEVE = 1 << 3,
	FLOW_TUNNEL_GTPU = 1 << 4,
	FLOW_TUNNEL_ANY = (1 << 5) - 1,
	/* Both directions of a connection have one key (`--hash symmetric`). */
	FLOW_SYMMETRIC = 1 << 5,
};

/* The secret of the flow hash, drawn at each start: a 64-bit multiplier for each 32-bit word of the
 * key, and an addend. Senders don't know it, so they can't direct all their flows at one CPU. */
#define FLOW_KEY_WORDS (sizeof(struct flow_key) / sizeof(__u32))
struct flow_secret {
	__u64 addend;
	__u64 multiplier[15]; /* FLOW_KEY_WORDS */
};
_Static_assert(FLOW_KEY_WORDS == 15, "one multiplier per word of the key");

/* ---- steering (steer.h, tables.h) ---------------------------------------- */

/* Where the packets of a flow are processed: a CPU's number, for this queue's backlog for that CPU,
 * or one of these. */
enum rps_location {
	/* In the NAPI poll that received the packet. A property of the queue's NAPI instance, not
	 * of a CPU: the instance is never polled by two CPUs at once. */
	RPS_INLINE = 0xfffe,
	/* INLINE; frames of flows that may not move there yet are dropped, so that flows leave a
	 * backlog that never drains. Only in an rps_map, never a flow's location. */
	RPS_INLINE_SHED = 0xfffd,
	/* No CPU is known (the kernel's RPS_NO_CPU). Never a flow's location. */
	RPS_NO_CPU = 0xffff,
};

/*
 * The locations of one queue's flows by RPS: the top bits of the hash select a slot. As in the
 * indirection table of a network card, a single slot can change without the others. User space
 * writes slots while the program reads them: every location is safe under the rule of order.
 */
#define RPS_MAP_ORDER 10
#define RPS_MAP_SLOTS (1 << RPS_MAP_ORDER)
struct rps_map {
	__u16 location[RPS_MAP_SLOTS];
};

/*
 * The CPUs where applications last received or sent data, for the whole host: a cache line of the
 * sock_flow_table (an array's element takes 8 bytes at least). An entry holds the upper bits of the
 * flow's hash and, below them, a bit for flows of unconnected sockets and the CPU's number plus
 * one; zero is no CPU, all ones an application that polls the queue itself. The CPU that runs the
 * application writes the entry, without a lock: a hint.
 */
#define RPS_SOCK_FLOW_ORDER 4
struct rps_sock_flow {
	__u32 ents[1 << RPS_SOCK_FLOW_ORDER];
};

/* One datagram in so many to an unconnected socket replaces the entry of a connected one: the
 * entries of sockets that are no longer used come to an end. */
#define SOCK_FLOW_AGES 1024

/* CPUs that receive datagrams from an unconnected socket. Written without locks: a hint. */
struct rps_sock_takers {
	__u32 cpu; /* of the last datagram */
	/* Changes of the CPU, times RPS_SOCK_SETTLES; one less with each datagram without one. */
	__u32 changes;
};
#define RPS_SOCK_SETTLES 32
#define RPS_SOCK_CHANGES 8 /* with more, the socket's flows follow no thread */

/* What is known of the datagrams that a connected socket has received. Written without locks, and
 * a read that began before connect() counts when it ends: threads that share a socket can make the
 * proof fail (docs/rfs.md, "What remains possible"). */
struct rps_sock_peer {
	__u32 connection; /* sk_txhash, which each connect() draws anew */
	/* Datagrams that the application receives before the first one that certainly came after
	 * that: from the peer. */
	__u32 earlier;
};

/* Whether packets of steered devices reach a network namespace. */
enum netns_reach {
	NETNS_ASKED = 0, /* not known yet: a question to user space */
	NETNS_REACHED,
	NETNS_APART, /* they do not */
};

/* A network namespace whose sockets have used data. */
struct netns_known {
	__u32 reach; /* enum netns_reach; by user space */
	__u32 tid;   /* a thread that did so */
};

/* Bits of rx_queue.policy: locations preferred to that by RPS (docs/policy.md). */
enum rx_policy {
	RX_FOLLOW = 1 << 0, /* the CPU of the application (RFS) */
	RX_IDLE = 1 << 1,   /* an idle CPU near a busy application */
	RX_ADAPT = 1 << 2,  /* INLINE while the polling CPU has room */
};

/* The reason for a flow's wanted location. Zero: the tables alone. */
enum rx_reason {
	RX_TABLES = 0,
	RX_ROOM,      /* INLINE: the polling CPU has room */
	RX_NO_GAIN,   /* INLINE: no other CPU has room for the flow */
	RX_CONSUMER,  /* at its application's CPU: the application keeps up */
	RX_SPREAD,    /* at a CPU of the rps_map, which has room */
	RX_IDLE_CPU,  /* at an idle CPU: the CPU by the tables is busy */
	RX_STAY,      /* at the present location: no reason to leave, and a move has a cost */
	RX_MERGED,    /* INLINE: GRO merges its segments there */
	RX_UNHELPFUL, /* INLINE: it did not help when the queue's flows moved */
	NR_RX_REASONS,
};

/* The program's decision on a packet. */
enum rx_verdict {
	RX_PASS,
	RX_REDIRECTED,
	RX_DROP,
};

/* A slot of a queue's dev_flow_table; written only by the queue's NAPI owner, or in softirq mode by
 * the CPU that holds its lock. */
struct rps_dev_flow {
	/* At a CPU: frames that had entered the backlog right after the flow's last one, or in
	 * softirq mode its number (softnet_way.nr). INLINE: the number of the poll that received
	 * the flow's last frame (rx_queue.nr_polls); in softirq mode softnet_inline(). */
	__u64 last_qtail;
	__u16 location;
	/* The slot is unset unless this is the queue's epoch; zero is no epoch. */
	__u16 epoch;
	/* The flow that has the slot, and its counters since it has it (rx_own()). */
	__u32 hash;
	__u32 nr_packets; /* accepted; wraps */
	__u32 nr_dropped; /* in XDP, for any reason; wraps */
	__u32 nr_moves;
	__u32 last_seen; /* jiffies, the low 32 bits */
	/* Frames are dropped until the flow may leave its backlog (rx_shed()). */
	__u8 shed;

	/* For policies that depend on the load (policy.h). */
	__u8 reason;	/* enum rx_reason of `wanted` */
	__u16 wanted;	/* the wanted location, decided once per window */
	__u16 base;	/* the location by the tables alone */
	__u8 may_leave; /* load_may_leave() when it was decided */
	__u8 merging;	/* what GRO makes of its segments INLINE (flow_note_segment()) */
	__u32 window;	/* rx_load.window then */
	/* nr_packets + nr_dropped then, less packets of other flows since. */
	__u32 frames;
	__u32 load;    /* frames in the window before that */
	__u32 changed; /* the window in which `wanted` changed last */

	/* For a table that several queues share (softirq mode). */
	__u32 lock;    /* a program changes the slot */
	__u16 queue;   /* that of the flow's last packet */
	__u16 decider; /* that of `window`; its packets decide where the flow wants to be */
};
_Static_assert(sizeof(struct rps_dev_flow) == 64, "a cache line");

/* ---- backlogs (backlog.h) ------------------------------------------------ */

/*
 * The backlog of one queue for one CPU: an entry of the queue's cpumap, that is a ring and a kernel
 * thread bound to the CPU. All counts are frames, 64 bits, and never decrease. The two halves are
 * written by different CPUs: a pair of cache lines each (the hardware prefetcher loads lines in
 * pairs).
 */
struct backlog {
	/* Written by the queue's NAPI owner. */
	__u64 tail;	   /* redirected into the ring, lost ones included */
	__u64 tail_limit;  /* tail stays below; computed again when tail reaches it */
	__u64 head_asleep; /* delivered, by proof "asleep" */
	__u64 nr_dropped;  /* dropped in XDP, not in tail: the backlog was full */
	__u64 nr_shed;	   /* dropped in XDP: the flow had to leave and could not yet */
	__u64 nr_lost;	   /* counted in tail, but the kernel did not queue them */
	__u64 nr_decided;  /* dry run: frames that would have been redirected */
	__u64 wanted;	   /* the cpumap's entry for this CPU has been requested */
	__u64 closed;	   /* enum backlog_closed: no flow may want it; by others, atomically */
	__u64 leaving;	   /* poll in which a flow could not leave; 0: no flow waits */
	__u64 nr_limited;  /* dropped in XDP: the flow was large, the backlog half full */
	/* Counted in tail, but the driver dropped them before the kernel saw them
	 * (backlog_settle()); by user space too: each value is a lower bound. */
	__u64 nr_vanished;
	/* The CPU's load in window `looked` - 1 (rx_read_load_apart()). */
	__u32 looked;
	__u32 busy;
	__u32 demand;
	__u32 left; /* share of the CPU's time of flows that left it in that window */
	__u64 way;  /* softirq mode: hash and key of its way, by user space; 0: not made yet */
	__u64 pad_producer;

	/* Written by the kthread, on any CPU. */
	__u64 dequeued;	  /* dequeued from the ring */
	__u64 head;	  /* delivered, by the proofs "GRO empty" and "GRO old" */
	__u64 nr_unbuilt; /* dequeued, but no memory for the skb */
	__u64 kthread;	  /* struct task_struct *; 0: no batch yet */
	__u64 in_loop;	  /* a batch ran in TASK_RUNNING: the kthread's state is valid */
	__u64 entry;	  /* struct bpf_cpu_map_entry * */
	/* Proof "GRO old" (backlog_age_gro()). */
	__u64 old_dequeued; /* `dequeued` when the proof began; 0: not begun */
	__u64 old_jiffies;  /* the time then */
	__u64 old_flush;    /* `dequeued` after a flush in a later jiffy; 0: unknown */
	__u64 pad_consumer[7];
};
_Static_assert(sizeof(struct backlog) == 256, "two pairs of cache lines");

/* Tails that a way remembers; a power of two. */
enum {
	SOFTNET_TAILS = 8,
};

/*
 * Packets that a CPU puts into the softnet backlog of another one, or passes up INLINE, which
 * without NAPI is a softnet backlog too (softnet.h). Written by the CPU that receives.
 */
struct softnet_way {
	__u64 nr;      /* packets so far */
	__u64 softnet; /* struct softnet_data * of that CPU; by user space; 0: unknown */
	__u32 tails[SOFTNET_TAILS]; /* by packet: input_queue_tail before it entered */
	__u64 pad[2];
};
_Static_assert(sizeof(struct softnet_way) == 64, "a cache line");

/* Devices in softirq mode (softirq_devices). */
enum softirq_device {
	SOFTIRQ_POLLED = 1,
	SOFTIRQ_UNPOLLED, /* a tun device without NAPI */
	SOFTIRQ_LOOPBACK,
};

/* Source and destination port of the keys (dissector.bpf.c). */
enum {
	HOP_PORT = 7,
};

/* A hash by which the kernel takes a packet to another CPU (dissector.bpf.c). */
struct hop_hash {
	__u32 hash;  /* 0: none */
	__u32 index; /* in `backlogs` */
	__u32 cpu;
	__u32 pad;
};

/* How the time that frames wait in a backlog is sampled (wait.h). */
enum wait_sample {
	WAIT_EVERY = 64,   /* one frame in so many; a power of two */
	WAIT_BUCKETS = 21, /* of times below 2, 4 ... 2^20 us, and longer ones */
};

/* The times that frames wait in a backlog. */
struct backlog_wait {
	/* The latest sample; written by the queue's NAPI owner. */
	__u64 nr_begun;
	__u64 number; /* frames that are dequeued before the sample's */
	__u64 since;  /* ns of the monotonic clock */
	__u64 losses; /* wait_losses() then */
	__u64 pad_producer[4];

	/* Written by what dequeues the frames. */
	__u64 nr_ended;
	__u64 nr_left_out; /* of nr_ended: frames were lost meanwhile */
	__u64 ns;	   /* sum of the samples that were not left out */
	__u64 nr[WAIT_BUCKETS];
};
_Static_assert(sizeof(struct backlog_wait) == 256, "two pairs of cache lines");

/* Bits of backlog.closed: reasons why no flow may want a backlog. */
enum backlog_closed {
	BACKLOG_OFFLINE = 1 << 0, /* its CPU is offline, or was and it has not drained since */
	BACKLOG_IDLE = 1 << 1,	  /* it is being taken down */
	BACKLOG_STALLED = 1 << 2, /* its frames wait, and none is dequeued */
	/* Softirq mode: its CPU is about to go offline, or is, and what it held may not have been
	 * passed up elsewhere yet: nothing may enter (on_cpuhp_enter()). */
	BACKLOG_DOWN = 1 << 3,
	/* After that, by user space: all of it has been, or a second has passed. */
	BACKLOG_PASSED = 1 << 4,
	/* Its CPU went offline, and it has not drained for a second: frames of flows that can't
	 * leave it yet are dropped (rx_shed()). */
	BACKLOG_SHED = 1 << 5,
	BACKLOG_OUTSIDE = 1 << 6, /* its CPU is not in the queue's mask (`--rps-cpus`) */
	/* Softirq mode: a packet has come to another CPU. Nothing may enter until user space has
	 * written the kernel's entry again. */
	BACKLOG_MISDIRECTED = 1 << 7,
};

/* Identifies the backlog that a kthread serves. */
struct backlog_id {
	__u32 index; /* in `backlogs` */
	__u32 map_id;
};

/* Argument of backlog_settled() and backlog_tail(). */
struct backlog_flushed {
	__u32 index; /* in `backlogs` */
	__u32 pad;
	__u64 tail;
};

/* Argument of queue_return(). */
struct queue_return {
	__u32 queue;
	__u32 location; /* enum rps_location */
};

/* The `queue` of a record that asks for no backlog: there is a question about a network namespace
 * (netns_known). */
enum backlog_request_of {
	BACKLOG_REQUEST_NETNS = 0xffffffff,
};

/* The ring buffer's record: a flow of `queue` wants `cpu`, and there is no backlog yet. */
struct backlog_request {
	__u32 queue;
	__u32 cpu;
};

/* ---- receive queues ------------------------------------------------------ */

/* The unit of shares, and the time in which load is counted (load.h). */
enum load_unit {
	LOAD_WHOLE = 1024, /* 1, as a share */
	/* Length of a window: shorter than applications notice, long enough for counts. */
	LOAD_WINDOW_MS = 10,
};

#define LOAD_WINDOW_NS (LOAD_WINDOW_MS * 1000000ULL)

/* Whether the CPU that polls a queue has room. */
enum rx_pressure {
	RX_RELAXED = 0, /* for all of the queue's flows, or it does not help that they move */
	RX_FULL,	/* not for more flows */
	RX_SATURATED,	/* hardly any time is left */
	RX_POLLED,	/* an application polls for its own packets: it has no time for others */
};

/* The load of a queue, by window (load.h); written by its NAPI owner. Shares are of 1024. */
struct rx_load {
	__u64 window_start; /* ns of the monotonic clock */
	__u64 poll_ns;	    /* in this window, spent in the queue's polls */
	__u64 others_ns;    /* in this window, spent in other queues' polls by the same CPU */
	__u64 over_idle_ns; /* of both, in polls that interrupted the idle task */
	/* poll_cpu.poll_ns and over_idle_ns of `cpu` at the end of the last window: they include
	 * the polls of other queues. */
	__u64 cpu_poll_ns;
	__u64 cpu_over_idle_ns;
	__u64 window_received; /* rx_queue.nr_received when the window began */
	__u64 window_here;     /* load_here() when the window began */
	__u32 window;	       /* the number of this window */
	__u32 nr_polls;	       /* in this window */
	__u32 nr_exhausted;    /* of these, those that used up their budget */
	__u32 received;	       /* frames in the last window */
	__u32 inline_ns;       /* cost of a frame INLINE, in 1/16 ns; 0: not known yet */
	__u32 saturated;       /* by window, the last one in bit 0 (load_may_leave()) */
	__u32 cpu;	       /* that ended the last window */
	__u16 pressure;	       /* enum rx_pressure */
	__u16 poll_share;      /* of the CPU's time, spent in polls in the last window */
	__u16 busy_share;      /* of the CPU's time, not idle */
	__u16 busy_polled;     /* applications' share of the polls, of 1024; a decaying average */
	__u32 nr_busy_polls;   /* of nr_polls, those of applications */
	__u32 polled_for; /* 1 + window of the last packet for an application that polls; 0: none */
	__u32 kept;	  /* windows for which it is relaxed since it does not help that flows move
			     (trial.h) */
	__u64 bytes;	  /* of packets that were not dropped */
	__u64 pad_end;
};
_Static_assert(sizeof(struct rx_load) == 128, "a pair of cache lines");

/*
 * One receive queue. Written by its NAPI owner, except for the last group.
 *
 * received = inline + sum(no_flow) + sum over backlogs(tail + dropped + shed + limited)
 */
struct rx_queue {
	__u64 nr_received;
	__u64 nr_inline;
	__u64 nr_no_flow[NR_FLOW_RESULTS]; /* by enum flow_result; [0] stays 0 */
	__u64 nr_rx_hash;		   /* frames steered by the device's hash */
	__u64 nr_moves;			   /* flows that changed location */
	__u64 nr_held; /* frames of flows that wanted to move and could not yet */
	__u64 napi;    /* struct napi_struct *, learnt after a poll; 0: unknown */
	/* INLINE is a backlog too, with polls as its frames (rx_poll()). */
	__u64 poll;	       /* stamp of the latest poll counted by rx_poll() */
	__u64 nr_polls;	       /* polls counted, the latest included */
	__u64 polls_delivered; /* all packets of the polls up to this number have been delivered */
	__u64 first_poll;      /* last_qtail of unset slots in first_epoch (rx_first_poll()) */
	__u16 leaving;	       /* a flow waits to leave INLINE: polls_delivered is needed */
	__u16 first_epoch;
	__u32 pad;
	__u64 nr_inline_ports; /* of nr_inline: frames of flows that stay there by their ports */

	/* Written by user space. */
	__u32 ifindex; /* 0: a queue of softirq mode, which is no device's */
	__u16 epoch;   /* changes with the meaning of the dev_flow_table's slots */
	__u16 policy;  /* bits of enum rx_policy; 0: RPS alone */

	struct rx_load load;
};
_Static_assert(sizeof(struct rx_queue) == 256, "two pairs of cache lines");

/* What all queues have delivered. */
struct rx_delivered {
	__u64 bytes; /* of packets that were not dropped */
	__u64 nr_received;
	__u64 nr_refused; /* packets that a UDP socket had no room for */
};

/*
 * Whether it helps that flows move (trial.h). One for all queues: they share the CPUs, and packets
 * of a flow may come to several of them. Any queue writes the times of the load; whoever has the
 * lock writes the others.
 */
struct rx_trial {
	__u64 loaded_at; /* ns: the end of the last window of a queue under load */
	__u64 moved_at;	 /* ns: of one whose packets went to other CPUs */
	__u32 lock;
	__u32 windows; /* of this stretch */
	__u32 left;    /* stretches until the next question */
	__u32 pause;   /* `left` after the last answer; 0: no question was answered */
	__u16 stay;    /* the last answer: flows stay INLINE */
	__u16 asks; /* number of this stretch in a question, from 1; odd: the opposite is tried */
	__s32 lead; /* pairs of the question that moving has won, less those it has lost */
	__u64 window_start; /* ns */
	/* The present stretch: its beginning, in ns, and the counts then. */
	__u64 since;
	struct rx_delivered before;
	/* Bytes per 2^20 ns: of the last stretch in which flows moved or stayed, and the sums over
	 * the stretches of the present question. */
	__u64 moving;
	__u64 staying;
	__u64 sum_moving;
	__u64 sum_staying;
	/* The last answer: when, in ns, 0: none; and the averages that it was given by. */
	__u64 answered_at;
	__u64 answer_moving;
	__u64 answer_staying;
};

/* The present poll on a CPU, and counts of those that have ended there. */
struct poll_cpu {
	__u64 nr_polls;	    /* polls of any NAPI instance that have ended on this CPU */
	__u32 queue;	    /* 1 + the queue of the present poll; 0: not known */
	__u32 over_idle;    /* the poll interrupted the idle task */
	__u64 start;	    /* of this poll: ns of the monotonic clock; 0: not timed */
	__u64 poll_ns;	    /* spent in polls of steered queues */
	__u64 over_idle_ns; /* of poll_ns, in polls that interrupted the idle task */
	__u64 unpolled;	    /* the present packet came in no poll (receive_ended()) */
	/* Softirq mode: the mixing before which the present poll's first packet came; 0: none came.
	 */
	__u64 since;
	__u64 softnet; /* struct softnet_data *, learnt from a poll of the softnet backlog */
	/* The device of the last packet that the kernel has asked about (softirq_device_of()). */
	__u64 device;
	__u64 netns;	  /* struct net * of the devices in softirq mode, learnt; 0: not yet */
	__u64 delivers;	  /* this poll passes up packets of a queue */
	__u64 nr_refused; /* of them, those that a UDP socket had no room for */
	__u64 jiffies;	  /* at `start` */
	__u64 pad[3];
};
_Static_assert(sizeof(struct poll_cpu) == 128, "a pair of cache lines: CPUs write their own");

/* Mixings of slots, in softirq mode (rx_mix()). */
struct rx_mixings {
	__u64 nr;      /* so far; written by the programs of all CPUs */
	__u64 settled; /* all polls have ended that began before this one; by user space */
};

/* ---- CPUs (cpu.h) --------------------------------------------------------- */

/* Most CPUs among which an idle one is searched: each check reads another CPU's cache line. */
#define CPU_NEAR 16

/* Facts about a CPU, by its number. User space writes `nr_near`, `capacity` and `near`, the XDP
 * program `given`, the scheduler's tracepoints the others. */
struct cpu {
	__u64 rq;      /* struct rq *, learnt from the scheduler; 0: unknown */
	__u64 idle;    /* the CPU's idle task: struct task_struct * */
	__u32 running; /* without `rq`: another task than the idle task runs */
	__u16 nr_near;
	__u16 capacity;	      /* speed, of 1024: that of the host's fastest CPU */
	__u16 near[CPU_NEAR]; /* other CPUs for the packets of this one, the nearest first */
	/* Share of its time given to flows in this half-life of the scheduler's averages
	 * (cpu_given()); written by the programs of all queues, without a lock: a hint. */
	__u32 given;
	__u32 given_at;
};
_Static_assert(sizeof(struct cpu) == 64, "a cache line");

/* ---- constants (maps.h) --------------------------------------------------- */

/* The most ports whose UDP flows always stay INLINE (`--inline-ports`). */
enum flow_inline {
	FLOW_INLINE_PORTS = 16,
};

/* Constants of a loaded program, known to the verifier and the JIT. */
struct rx_config {
	struct flow_secret flow_secret;
	__u64 backlog_limit;	       /* frames a backlog may hold (docs/backlog.md) */
	__u64 napi_state_in_busy_poll; /* bit of napi_struct.state; 0: no busy polling */
	__u32 nr_cpus;		       /* CPU ids: the row length of `backlogs` */
	/* Share of a queue's frames, of 1024, above which a flow is large; 0: no flow is. */
	__u32 flow_limit;
	__u32 flow_shift;		       /* 32 - log2(rps_flow_cnt) */
	__u32 flow_options;		       /* bits of enum flow_option */
	__u32 sock_flow_mask;		       /* rps_sock_flow_entries - 1 */
	__u32 sock_flow_cpu_mask;	       /* the bits of an entry that hold a CPU (tables.h) */
	__u16 inline_ports[FLOW_INLINE_PORTS]; /* the list ends with the first 0 */
	__u8 dry_run; /* decide and count, process every packet as without rxsteer */
	/* The rule of order is off: the control of every test that counts overtaken packets. No
	 * command sets this for a device outside the lab. */
	__u8 unguarded;
	/* Each skb's hash is that of its flow; sockets keep it, whatever NAT does on the way. */
	__u8 follow_nat;

	/* For the XDP program alone: facts about its device. */
	__u8 gro; /* GRO merges TCP segments that the program passes */
	/* Softirq mode: the program serves several devices. A queue is a CPU that receives, and all
	 * of these queues share the first one's dev_flow_table. */
	__u8 pad[4];
	__u32 ifindex;	  /* not in softirq mode */
	__u32 queue_base; /* the queues are queue_base to queue_base + nr_rx_queues - 1 */
	__u32 nr_rx_queues;
	/* Softirq mode: keys of hashes that take a packet nowhere, and these: INLINE, and dropped
	 * at tc ingress. Keys are IPv4 addresses (dissector.bpf.c). */
	__be32 inline_key;
	__be32 drop_key;
	__u32 inline_hash;
	__u32 drop_hash;
	__u32 hop_mask; /* elements of `hop_hashes` - 1 */
	__u64 netns;	/* the cookie of the devices' network namespace */
};

#pragma GCC diagnostic pop
