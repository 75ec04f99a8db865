/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Everything the two sides share: user space gets these types from the
 * object's BTF (the generated skeleton), never from a copy.
 *
 * Plain C: compiled for the kernel and for the native tests.
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

/* ---- flow keys (flow.h) ------------------------------------------------- */

/*
 * What makes two packets one flow; without padding, as keys are hashed and compared
 * as words. Addresses are in network order; an IPv4
 * address is written as its v4-mapped IPv6 address, so that a v4-mapped socket
 * and the packets it receives have one key.
 *
 * Protocols with ports leave daddr zero: a socket bound to the wildcard address
 * can't know the local address of its datagrams (docs/hash.md).
 */
struct flow_key {
	__be32 saddr[4];
	__be32 daddr[4];
	__be32 ports; /* source port, destination port; or the SPI; or 0 */
	__u32 proto;  /* IPPROTO_*; IPPROTO_FRAGMENT for every IPv6 fragment */
};

/* Why a packet has, or has no, key. Counted per queue: nr_no_flow[]. */
enum flow_result {
	FLOW_KEYED = 0,
	FLOW_TRUNCATED, /* a header ends outside the packet, or lies about it */
	FLOW_UNKNOWN,	/* not IP, or more headers than the parser follows */
	NR_FLOW_RESULTS,
};

/* Tunnels whose inner flow is the key, when asked for (`--tunnels`); flow_tunnel_of() has their
 * ports. */
enum flow_tunnel {
	FLOW_TUNNEL_IPIP = 1 << 0, /* IPIP, 6in4, 4in6, ip6ip6 */
	FLOW_TUNNEL_GRE = 1 << 1,
	FLOW_TUNNEL_VXLAN = 1 << 2,
	FLOW_TUNNEL_GENEVE = 1 << 3,
	FLOW_TUNNEL_GTPU = 1 << 4,
};

/*
 * The secret of the flow hash, drawn once per start: one 64-bit multiplier per
 * 32-bit word of the key, and one addend. Nobody outside can aim at one CPU.
 */
#define FLOW_KEY_WORDS (sizeof(struct flow_key) / sizeof(__u32))
struct flow_secret {
	__u64 addend;
	__u64 multiplier[10]; /* FLOW_KEY_WORDS */
};
_Static_assert(FLOW_KEY_WORDS == 10, "one multiplier per word of the key");

/* ---- steering (steer.h, tables.h) ---------------------------------------- */

/*
 * Where the packets of a flow are processed: a CPU number, meaning the backlog
 * of this queue for that CPU, or one of these.
 */
enum rps_location {
	/* In the NAPI poll that received the packet. A property of the queue's NAPI
	 * instance, not of a CPU: it never runs on two CPUs at once. */
	RPS_INLINE = 0xfffe,
	/* INLINE, and frames that may not move there yet are dropped: how flows leave
	 * a backlog that never drains. Only in an rps_map, never a flow's location. */
	RPS_INLINE_SHED = 0xfffd,
	/* No CPU is known (the kernel's RPS_NO_CPU). Never a flow's location. */
	RPS_NO_CPU = 0xffff,
};

/*
 * The CPUs of one queue: the top bits of the hash choose a slot, the slot a
 * location. An indirection table as network cards have it, so that a single slot
 * can change without touching the others. Written by user space while packets are decided on: any
 * location is a safe one.
 */
#define RPS_MAP_ORDER 10
#define RPS_MAP_SLOTS (1 << RPS_MAP_ORDER)
struct rps_map {
	__u16 location[RPS_MAP_SLOTS];
};

/*
 * Where applications last took or sent data, for the whole host: a cache line's worth of the
 * sock_flow_table (an array's element takes 8 bytes at least). An entry holds the upper bits of the
 * flow's hash and, below them, the CPU's number plus one; zero is no CPU, all ones an application
 * that polls the queue itself. Written by whoever runs the application: a hint, and racy on
 * purpose.
 */
#define RPS_SOCK_FLOW_ORDER 4
struct rps_sock_flow {
	__u32 ents[1 << RPS_SOCK_FLOW_ORDER];
};

/* Who takes datagrams off an unconnected socket. Written by whoever does: a hint as well. */
struct rps_sock_takers {
	__u32 cpu;     /* the last one's */
	__u32 changes; /* of the CPU, each forgotten after RPS_SOCK_SETTLES datagrams without one */
};
#define RPS_SOCK_SETTLES 32
#define RPS_SOCK_CHANGES 8 /* with more, the socket's flows follow nobody */

/* What a queue's flows do besides what RPS says: bits of rx_queue.policy (docs/policy.md). */
enum rx_policy {
	RX_FOLLOW = 1 << 0, /* applications (RFS) */
	RX_IDLE = 1 << 1,   /* an idle CPU near an application that is busy */
	RX_ADAPT = 1 << 2,  /* stay INLINE while the polling CPU has room */
};

/* Why a flow wants to be where it does. Zero: by the tables alone. */
enum rx_reason {
	RX_TABLES = 0,
	RX_ROOM,     /* INLINE: the polling CPU has room */
	RX_SMALL,    /* INLINE: larger flows leave first */
	RX_NO_GAIN,  /* INLINE: no other CPU could take it on */
	RX_CONSUMER, /* at its application's CPU, where somebody waits for it */
	RX_SPREAD,   /* at the CPU that RPS says, which has room */
	RX_IDLE_CPU, /* at an idle CPU: its application's is busy */
	RX_STAY,     /* where it is: nothing speaks against it, and a move is not free */
	NR_RX_REASONS,
};

/* What becomes of a packet. */
enum rx_verdict {
	RX_PASS,
	RX_REDIRECTED,
	RX_DROP,
};

/* A slot of a queue's dev_flow_table; written only by the queue's NAPI owner. */
struct rps_dev_flow {
	/* At a CPU: frames that had entered the backlog right after the flow's last one.
	 * INLINE: the number of the poll that received it (rx_queue.nr_polls). */
	__u64 last_qtail;
	__u16 location;
	/* The slot is unset unless this is the queue's epoch; zero is no epoch. */
	__u16 epoch;
	/* The flow that used the slot last: all below is its. */
	__u32 hash;
	__u32 nr_packets; /* accepted; wraps */
	__u32 nr_dropped; /* in XDP, for whatever reason; wraps */
	__u32 nr_moves;
	__u32 last_seen; /* jiffies, the low 32 bits */
	/* It may not go on queueing where it is: frames are dropped until it may move. */
	__u8 shed;

	/* Policies that look at the load (policy.h). */
	__u8 reason;   /* enum rx_reason of `wanted` */
	__u8 backoff;  /* it changes its mind once in 2^backoff windows at most */
	__u8 behind;   /* windows for which its application has not waited for anything; 255 or more
			*/
	__u16 wanted;  /* where it wants to be, decided once a window */
	__u16 base;    /* where the tables alone would have it */
	__u32 window;  /* rx_queue.window when it was decided */
	__u32 frames;  /* nr_packets + nr_dropped then */
	__u32 load;    /* frames in the window before that */
	__u32 changed; /* the window in which `wanted` changed last */
	__u32 waits;   /* how often its application had waited when that was last asked */
	__u32 asked;   /* the window in which it was */
};
_Static_assert(sizeof(struct rps_dev_flow) == 64, "a cache line");

/* ---- backlogs (backlog.h) ------------------------------------------------ */

/*
 * The backlog of one queue for one CPU: an entry of the queue's cpumap, that is a
 * ring and a kernel thread bound to the CPU. All counts are frames, 64 bits, and
 * never go back. The two halves are written by different CPUs: a pair of cache
 * lines each (the hardware prefetcher loads lines in pairs).
 */
struct backlog {
	/* Written by the queue's NAPI owner. */
	__u64 tail;	   /* redirected into the ring, lost ones included */
	__u64 tail_limit;  /* tail must stay below; moved on when dequeued is read again */
	__u64 head_asleep; /* delivered of what entered, as proven by a sleeping kthread */
	__u64 nr_dropped;  /* dropped in XDP, ahead of tail: the backlog was full */
	__u64 nr_shed;	   /* dropped in XDP: the flow had to leave and could not yet */
	__u64 nr_lost;	   /* counted in tail, but the kernel did not queue them */
	__u64 nr_decided;  /* dry run: what would have been redirected */
	__u64 wanted;	   /* a flow wants this CPU and the cpumap has no entry for it */
	__u64 closed;	   /* the CPU is offline: nobody may want to be here (by user space) */
	__u64 leaving;	   /* the poll in which a flow could not leave; 0 nobody waits */
	__u64 nr_limited;  /* dropped in XDP: of a large flow, the backlog was half full */
	__u64 crowded;	   /* the window in which a flow last found no room for more; 0 never */
	__u64 pad_producer[4];

	/* Written by the kthread, on whatever CPU it runs. */
	__u64 dequeued;	  /* dequeued from the ring */
	__u64 head;	  /* delivered, as proven by GRO's lists */
	__u64 nr_unbuilt; /* dequeued, but no memory for the skb */
	__u64 kthread;	  /* struct task_struct *; 0 until its first batch */
	__u64 in_loop;	  /* a batch has shown it running: its state can be trusted */
	__u64 entry;	  /* struct bpf_cpu_map_entry * */
	/* What GRO may still hold although it is never empty: backlog_age_gro(). */
	__u64 old_dequeued; /* dequeued, when the proof began; 0 while there is none */
	__u64 old_jiffies;  /* and the time then */
	__u64 old_flush;    /* dequeued, when a later jiffy was seen; 0 not yet */
	__u64 pad_consumer[7];
};
_Static_assert(sizeof(struct backlog) == 256, "two pairs of cache lines");

/* Identifies the backlog that a kthread serves. */
struct backlog_id {
	__u32 index; /* in `backlogs` */
	__u32 map_id;
};

/* "A flow of `queue` wants `cpu`, and there is no backlog yet": the ring buffer's record. */
struct backlog_request {
	__u32 queue;
	__u32 cpu;
};

/* ---- receive queues ------------------------------------------------------ */

/* Shares of something, and the time in which load is counted (load.h). */
enum load_unit {
	LOAD_WHOLE = 1024,   /* all of it */
	LOAD_WINDOW_MS = 10, /* a window: short beside what an application would notice, long enough
			      to count in */
};

/* rx_load.leaving: nobody may leave. */
enum load_leaving {
	LOAD_NOBODY = 0xffffffff,
};

/* Whether the CPU that polls a queue has room. */
enum rx_pressure {
	RX_RELAXED = 0, /* for all of the queue's flows */
	RX_FULL,	/* not for more than it has */
	RX_SATURATED,	/* hardly any time is left */
	RX_POLLED,	/* an application polls for its own packets: it has time for no others */
};

/*
 * The load of a queue, window by window (policy.h); written when its polls end, by its NAPI owner.
 * Shares are of 1024.
 */
struct rx_load {
	__u64 window_start; /* ns of the monotonic clock */
	__u64 poll_ns;	    /* in this window, spent in the queue's polls */
	__u64 others_ns;    /* in this window, spent in other queues' polls by the same CPU */
	__u64 over_idle_ns; /* of both, while nobody else wanted the CPU */
	/* The CPU that ended the last window, and its poll_cpu.poll_ns and over_idle_ns then: other
	 * queues' polls count, too. */
	__u64 cpu_poll_ns;
	__u64 cpu_over_idle_ns;
	__u64 window_received; /* rx_queue.nr_received when the window began */
	__u64 window_here;     /* and of these, those that had not gone elsewhere */
	__u32 window;	       /* the number of this window */
	__u32 nr_polls;	       /* in this window */
	__u32 nr_exhausted;    /* of these, those that used up their budget */
	__u32 received;	       /* frames in the last window */
	__u32 inline_ns;       /* what a frame costs INLINE, in 1/16 ns; 0 not known yet */
	__u32 largest;	       /* flow seen in this window: frames in a window */
	__u32 leaving;	       /* flows of so many frames in a window may leave */
	__u16 pressure;	       /* enum rx_pressure */
	__u16 poll_share;      /* of the CPU's time, spent in polls in the last window */
	__u16 busy_share;      /* of the CPU's time, not idle */
	__u16 police;	       /* of large flows' INLINE frames, dropped */
	__u32 cpu;
	__u64 nr_limited; /* frames dropped so */
	__u64 moving_ns;  /* what the flows cost in a window that changed their minds lately */
	__u32 nr_waiting; /* times that one would have left in this window, and waits for these */
	__u32 window_limited; /* nr_limited when the window began; wraps */
};
_Static_assert(sizeof(struct rx_load) == 128, "a pair of cache lines");

/*
 * One receive queue. Written by its NAPI owner, except for the last group.
 *
 * received = inline + limited + sum(no_flow) + sum over backlogs(tail + dropped + shed + limited)
 */
struct rx_queue {
	__u64 nr_received;
	__u64 nr_inline;
	__u64 nr_no_flow[NR_FLOW_RESULTS]; /* by enum flow_result; [0] stays 0 */
	__u64 nr_rx_hash;		   /* frames steered by the device's hash */
	__u64 nr_moves;			   /* flows that changed location */
	__u64 nr_held;			   /* frames whose flow wanted to move and could not yet */
	__u64 napi; /* struct napi_struct *, learnt after a poll; 0 unknown */
	/* INLINE is a backlog too, whose frames are counted by polls. */
	__u64 poll;	       /* names the latest poll that processed a frame INLINE */
	__u64 nr_polls;	       /* such polls, the latest included */
	__u64 polls_delivered; /* all that these received has been delivered */
	__u64 first_poll;      /* that of first_epoch's first frame */
	__u16 first_epoch;
	__u16 busy_polled;   /* the part of polls that applications did, lately, of 1024 */
	__u32 leaving;	     /* a flow waits to leave: see to polls_delivered */
	__u32 nr_busy_polls; /* in this window: of load.nr_polls */
	__u32 polled_for; /* 1 + the window in which an application polled for a packet; 0 never */

	/* Written by user space. */
	__u32 ifindex;
	__u16 epoch;  /* new whenever the slots of the dev_flow_table mean something else */
	__u16 policy; /* bits of enum rx_policy; RPS alone if 0 */

	struct rx_load load;
};
_Static_assert(sizeof(struct rx_queue) == 256, "two pairs of cache lines");

/* What runs on a CPU right now: which queue's poll, and how many polls ended here. */
struct poll_cpu {
	__u64 nr_polls;	    /* polls of any NAPI instance that have ended on this CPU */
	__u32 queue;	    /* 1 + the queue whose program ran since; 0 none */
	__u32 over_idle;    /* this poll took nobody's time: it came while the CPU was idle */
	__u64 start;	    /* of this poll: ns of the monotonic clock; 0 unless it is timed */
	__u64 poll_ns;	    /* spent in polls of our queues */
	__u64 over_idle_ns; /* of that, while nobody else wanted the CPU */
	__u64 pad_line[3];
};

/* ---- CPUs (cpu.h) --------------------------------------------------------- */

/* CPUs among which an idle one is looked for, at most: each look is a read of another CPU's line.
 */
#define CPU_NEAR 16

/* What is known of a CPU, by its number. Written by user space, but for `rq` and `running`. */
struct cpu {
	__u64 rq;      /* struct rq *, learnt from the scheduler; 0 unknown */
	__u64 idle;    /* its idle task: struct task_struct * */
	__u32 running; /* without `rq`: something else than the idle task runs here */
	__u32 nr_near;
	__u16 near[CPU_NEAR]; /* where else to process what is for this CPU, the nearest first */
	__u64 pad_line;
};
_Static_assert(sizeof(struct cpu) == 64, "a cache line");

/* ---- constants (maps.h) --------------------------------------------------- */

/* What a program is loaded with: known to the verifier and the JIT. */
struct rx_config {
	struct flow_secret flow_secret;
	__u64 backlog_limit;	       /* frames a backlog may hold (docs/backlog.md) */
	__u64 napi_state_in_busy_poll; /* the bit of napi_struct.state; 0 no busy polling */
	__u32 nr_cpus;		  /* that the kernel can ever have: the row length of backlogs */
	__u32 flow_limit;	  /* a flow with a larger part of its queue's frames, of 1024, is
				     shed first; 0 none is */
	__u32 flow_shift;	  /* 32 - log2(rps_flow_cnt) */
	__u32 flow_tunnels;	  /* to look into: bits of enum flow_tunnel */
	__u32 sock_flow_mask;	  /* rps_sock_flow_entries - 1 */
	__u32 sock_flow_cpu_mask; /* the bits of an entry that hold a CPU (tables.h) */
	__u8 dry_run;		  /* decide and count, process every packet as without rxsteer */
	/* The rule of order switched off, everything else as it is: the control of every test that
	 * counts overtaken packets. No command sets it for a device that is not the lab's. */
	__u8 unguarded;

	/* The device's, for the XDP program alone. */
	/* It runs behind GRO, on what a poll has already taken out of it, and what it passes goes
	 * up before the poll ends. */
	__u8 generic;
	__u8 pad;
	__u32 ifindex;
	__u32 queue_base; /* its queues are queue_base to queue_base + nr_rx_queues - 1 */
	__u32 nr_rx_queues;
	__u32 pad_end;
};

/* ---- busy polling (poll.bpf.c) -------------------------------------------- */

/* A process's polls, and the wake-ups of its threads that poll. */
struct busy_poll {
	__u64 nr_polls;
	__u64 nr_found;	   /* of these, that found packets, of whomever */
	__u64 nr_packets;  /* so many */
	__u64 ns;	   /* from the end of a wait's first poll to that of its last */
	__u64 nr_woken;	   /* threads that slept and were given a CPU again */
	__u64 woken_ns;	   /* what that took since somebody woke them */
	__u64 shortest_ns; /* of these; 0 none */
};
