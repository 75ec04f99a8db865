/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Skb mode: leaving INLINE and leaving a softnet backlog: inline_delivered(), backlog_sleeping(),
 * backlog_dequeue(), rx_delivered_elsewhere() and skb_passed() against process_backlog() and
 * __netif_receive_skb_list_core() in net/core/dev.c.
 *
 * One NAPI instance is polled on two CPUs in turn, as when its interrupt moves: the CPU that gives
 * it up has passed up what it received, but the end of its poll is counted later. A flow is INLINE
 * on the CPU that polls, or goes to a third CPU. There all skbs wait in one queue, twice: for the
 * carrier, and for their device.
 *
 * LOSSES: the queue may be full, at either time. UNSEEN: an skb may be dropped at either time, and
 * nobody counts it (backlog_heal()).
 *
 * DOWN: the third CPU goes offline, while it holds skbs or not. All CPUs stop for that, outside of
 * polls. From then on the kernel leaves skbs for it on the CPU that sends them, and some time later
 * takes those that it held, one by one, to another one, whose polls the model numbers as its own
 * (on_cpuhp_enter(), skb_is_late(), rx_shed()).
 *
 * SHARED: two flows share the slot, and each CPU polls an instance of its own: CPU 0 for the flow
 * that is watched, CPU 1 for the other one (rx_mix(), rx_unmixed()). A backlog may be full: the
 * program drops the skb.
 *
 * SENT, with SHARED: lo. What a CPU receives it has sent itself, through a softnet backlog of its own.
 * Where a packet is sent, in a poll or not, it goes to the third CPU at once if the flow stays there
 * (rxsteer_sent()). That program is attached after the one that receives, and has numbers from
 * before; packets without a number may be on their way. With CAME it is attached long before the
 * model begins.
 */
#include "stack.pml"

#ifndef FRAMES
#define FRAMES 4
#endif
#define CPUS 2
#ifndef POLLS
#define POLLS 3
#endif
#define TARGET CPUS /* the third CPU */

#define stamp_of(cpu) (nr_polls[cpu] + 1)
#define entered(q) (tail[q] - nr_lost[q])
#ifdef SHARED
#define SKBS (FRAMES + OTHERS)
#define ONE_PASS true /* fewer states: the order of skbs stays the same */
#define instance(cpu) cpu
#define is_watched(cpu) (cpu == 0)
#define lock() atomic { !locked -> locked = true }
#define unlock() locked = false
#ifndef OTHERS
#define OTHERS FRAMES /* frames of the other flow */
#endif
#else
#define OTHERS 0
#define SKBS FRAMES
#define ONE_PASS false
#define instance(cpu) 0
#define is_watched(cpu) true
/* One CPU steers at a time. */
#define lock()
#define unlock()
#endif

/* struct backlog, of each CPU that polls */
byte tail[CPUS], nr_lost[CPUS], dequeued[CPUS], head[CPUS], passed_in[CPUS], vanished[CPUS];
/* struct rx_queue, of each CPU that polls */
byte polls[CPUS], last_stamp[CPUS];
/* struct poll_cpu */
byte nr_polls[CPUS + 1], since[CPUS];
/* struct rps_dev_flow */
bool locked, away;
byte last_qtail, queue;
byte mixes, mixed_at;
#ifdef CAME
#define LONG_BEFORE true
#else
#define LONG_BEFORE false
#endif
byte nr_sent[CPUS] = 1, nr_came[CPUS] = 1;
bool sent_epoch[CPUS] = LONG_BEFORE; /* since the program is attached */

/* The kernel's */
byte owner[CPUS]; /* of an instance: 1 + the CPU that polls */
byte polls_left[CPUS] = POLLS, frames_left[CPUS], seq;
chan list[CPUS] = [FRAMES] of { byte };             /* what a poll passes up at once */
#ifdef SENT
/* What a CPU has sent, and not received yet: frame, and its number; 0: it has none. */
chan own[CPUS] = [SKBS] of { byte, byte };
bool attached = LONG_BEFORE;
#endif
chan softnet = [SKBS] of { byte, byte, bool, byte }; /* frame, backlog, for the device, number */
bool target_polls;
#ifdef DOWN
bool down;   /* BACKLOG_DOWN */
bool passed; /* BACKLOG_PASSED */
bool dead;   /* the CPU is offline */
chan left = [SKBS] of { byte }; /* skbs that the kernel has left where they were sent */
#else
#define down false
#define passed false
#define dead false
#endif
bool moved_out, moved_in;

/* ---- the CPU that polls --------------------------------------------------- */

bool proven;

inline count_poll(cpu)
{
	if
	:: stamp_of(cpu) != last_stamp[cpu] ->
		polls[cpu]++;
		last_stamp[cpu] = stamp_of(cpu)
	:: else
	fi
}

/* The flow is INLINE. What is read is of this CPU, or of one that no longer has the instance. */
inline poll_over(cpu)
{
	d_step {
		count_poll(cpu);
#ifdef NO_BOUNDARY
		proven = true
#else
#ifdef NO_QUEUE
		proven = last_qtail < polls[cpu]
#else
		if
		:: queue == cpu -> proven = last_qtail < polls[cpu]
		:: else -> proven = last_qtail < polls[queue] ||
				    stamp_of(queue) != last_stamp[queue]
		fi
#endif
#endif
	}
}

/* Each line is a step: the third CPU works in between. */
inline passed_up(q)
{
	bool all;
	byte n, stamp;

	proven = false;
	if
	:: head[q] + vanished[q] >= last_qtail -> proven = true
	:: else ->
#ifdef NO_LOST
		n = tail[q];
#else
		n = entered(q);
#endif
#ifdef NO_DEQUEUED
		all = true;
#else
		all = dequeued[q] + vanished[q] == n;
#endif
#ifndef NO_LAST
		/* The flow's last skb, or a later one, not those that entered before a lost one. */
		all = all && n >= last_qtail;
#endif
		stamp = passed_in[q];
#ifdef NO_POLL_ENDED
		proven = all
#else
		proven = all && stamp != stamp_of(TARGET)
#endif
	fi;
	all = false;
	n = 0;
	stamp = 0
}

/* An skb enters the queue of the third CPU, unless that is full. */
inline enqueue(frame, q, device, number)
{
	if
	:: atomic { !dead -> softnet ! frame, q, device, number }
#ifdef DOWN
	:: atomic { dead -> left ! frame }
#endif
#ifdef LOSSES
	:: nr_lost[q]++
#endif
#ifdef UNSEEN
	:: true
#endif
	fi
}

/* Whether the slot's last skb, from another CPU, has been passed up, or is in the queue. */
inline came_before()
{
	if
	:: !since[queue] -> proven = true
#ifdef NO_ENTERED
	:: since[queue] && away -> proven = true
#else
	:: since[queue] && away -> proven = entered(queue) > last_qtail
#endif
	:: else -> proven = last_qtail < polls[queue] ||
			    stamp_of(queue) != last_stamp[queue]
	fi
}

/* Whether all polls have ended in which there may have been an skb when the slot was mixed. */
inline settled()
{
	proven = (!since[0] || since[0] > mixed_at) && (!since[1] || since[1] > mixed_at)
}

inline begin_since(cpu)
{
	if
	:: !since[cpu] -> since[cpu] = mixes + 1
	:: else
	fi
}

/* The next frame of the CPU's flow. */
inline next_frame(cpu, frame)
{
	if
	:: is_watched(cpu) -> seq++; frame = seq
	:: else
	fi
}

#ifdef SENT
#ifdef NO_SENT
#define came_all(cpu) true
#else
#define came_all(cpu) (nr_came[cpu] == nr_sent[cpu])
#endif
#ifdef NO_SENT_QUEUE
#define is_last(cpu) true
#else
#define is_last(cpu) (queue == cpu)
#endif

/* With softirqs off. Any packet may have to be decided on. */
inline send(cpu)
{
	byte frame, n;

	next_frame(cpu, frame);
	if
	:: attached ->
#ifndef NO_SENT_FIRST
		d_step {
			if
			:: !sent_epoch[cpu] -> sent_epoch[cpu] = true; nr_sent[cpu]++
			:: else
			fi
		};
#endif
#ifndef NO_SENT_SINCE
		begin_since(cpu);
#endif
		lock();
		d_step {
			if
			:: away && came_all(cpu) && is_last(cpu) ->
				tail[cpu]++;
				last_qtail = entered(cpu);
				queue = cpu;
				n = tail[cpu]
			:: else
			fi;
			unlock()
		}
	:: true
	fi;
	if
	:: n -> enqueue(frame, cpu, ONE_PASS, n)
	:: else ->
		d_step {
			if
			:: attached -> nr_sent[cpu]++; n = nr_sent[cpu]
			:: else
			fi
		};
		own[cpu] ! frame, n
	fi;
	d_step { frame = 0; n = 0 }
}
#endif

inline steer(cpu, frame)
{
	byte q;
	bool unmixes, no_room, closed;

	begin_since(cpu);
	lock();
	d_step {
		closed = down || passed;
		proven = true;
#ifdef SHARED
#ifndef NO_MIXED
		if
		:: queue != cpu -> came_before()
		:: else
		fi;
#endif
		if
		:: !proven -> mixes++; mixed_at = mixes
		:: else
		fi
#endif
	};
	if
	:: true -> /* it wants to be where it is not */
		proven = true;
		if
		:: mixed_at && !(away && passed) ->
#ifndef NO_SETTLED
			settled();
#endif
			if
#ifdef NO_STAY
			:: proven -> mixed_at = 0
#else
			:: proven && !away -> mixed_at = 0
			/* This one enters after all of them. */
			:: proven && away -> proven = false; unmixes = true
#endif
			:: else
			fi
		:: else
		fi;
		if
		:: proven ->
#ifdef NO_QUEUE
			q = cpu;
#else
			q = queue;
#endif
			if
			:: away && passed -> proven = true
			:: away && !passed -> passed_up(q)
			:: else -> poll_over(cpu)
			fi
		:: else
		fi;
		if
		:: proven && away -> away = false; moved_in = moved_out
		:: proven && !away && !closed -> away = true; moved_out = true
		:: else
		fi
	:: !closed || !away
	fi;
#ifdef SHARED
	if
	:: no_room = true
	:: true
	fi;
#endif
	d_step {
		q = 0;
		proven = false;
#ifdef NO_UNMIX_LAST
		if
		:: unmixes -> mixed_at = 0; unmixes = false
		:: else
		fi;
#endif
#ifndef NO_DOWN
		no_room = no_room || closed;
#endif
		if
		:: away && no_room
		:: away && !no_room ->
			tail[cpu]++;
			last_qtail = entered(cpu);
			queue = cpu;
			q = tail[cpu];
			if
			:: unmixes -> mixed_at = 0
			:: else
			fi
		:: else ->
			count_poll(cpu);
			last_qtail = polls[cpu];
			queue = cpu;
			list[cpu] ! frame
		fi;
		unmixes = false;
		no_room = false;
		closed = false;
		unlock()
	};
	if
	:: q -> enqueue(frame, cpu, ONE_PASS, tail[cpu])
	:: else
	fi;
	d_step { q = 0; frame = 0 }
}

proctype polling(byte cpu)
{
	byte f, number;

	do
	:: atomic { owner[instance(cpu)] == 0 && polls_left[instance(cpu)] > 0 ->
		    owner[instance(cpu)] = cpu + 1; polls_left[instance(cpu)]-- };
		do
#ifdef SENT
		:: atomic { nempty(own[cpu]) -> own[cpu] ? f, number };
			steer(cpu, f);
			d_step {
				if
				:: number -> nr_came[cpu] = number; number = 0
				:: else
				fi
			}
		:: atomic { frames_left[cpu] > 0 -> frames_left[cpu]-- };
			send(cpu)
#else
		:: atomic { frames_left[instance(cpu)] > 0 -> frames_left[instance(cpu)]--; next_frame(cpu, f) };
			steer(cpu, f)
#endif
		:: atomic { nempty(list[cpu]) -> list[cpu] ? f; deliver(f); f = 0 }
		:: break
		od;
		atomic { deliver_all(list[cpu], f); f = 0; owner[instance(cpu)] = 0 };
		/* Another CPU may poll already. */
		d_step { nr_polls[cpu]++; since[cpu] = 0 }
#ifdef SENT
	:: atomic { frames_left[cpu] > 0 -> frames_left[cpu]-- };
		send(cpu)
#endif
	:: owner[instance(cpu)] == 0 && polls_left[instance(cpu)] == 0 -> break
	od
}

/* ---- the CPU that skbs are sent to ---------------------------------------- */

inline pass_up(frame, q, number)
{
	byte before;

#ifdef NO_PASSED_FIRST
	d_step { before = dequeued[q]; dequeued[q]++ }
	passed_in[q] = stamp_of(TARGET);
#else
	passed_in[q] = stamp_of(TARGET);
	d_step { before = dequeued[q]; dequeued[q]++ }
#endif
#ifdef NO_BEFORE
	head[q] = before + 1;
#else
	head[q] = before;
#endif
	d_step {
#ifdef NO_NUMBER
		before = tail[q];
#else
		before = number;
#endif
#ifndef NO_HEAL
		if
		:: before > dequeued[q] + nr_lost[q] + vanished[q] ->
			vanished[q] = before - dequeued[q] - nr_lost[q]
		:: else
		fi
#endif
	};
	atomic { deliver(frame) };
	before = 0
}

active proctype target()
{
	byte f, q, n;
	bool device;

end:	do
	:: atomic { !dead && nempty(softnet) -> softnet ? f, q, device, n; target_polls = true };
next:
		if
		:: device -> pass_up(f, q, n)
		:: else -> enqueue(f, q, true, n)
		fi;
		if
		:: softnet ? f, q, device, n -> goto next
		:: true
		fi;
		atomic { nr_polls[TARGET]++; target_polls = false; f = 0; q = 0; n = 0; device = false }
	od
}

#ifdef DOWN
/* dev_cpu_dead(): each skb is taken in a softirq of its own. */
inline take(frame, q, device, number)
{
	if
	:: device -> pass_up(frame, q, number)
#ifdef NO_LATE
	:: !device -> pass_up(frame, q, number)
#else
	:: !device -> nr_lost[q]++
#endif
	fi;
	atomic { nr_polls[TARGET]++; frame = 0; q = 0; number = 0; device = false }
}

active proctype kernel()
{
	byte f, q, n;
	bool device;

	down = true;
	atomic { !owner[0] && !owner[1] && !target_polls -> dead = true };
	do
	:: nempty(softnet) -> softnet ? f, q, device, n; take(f, q, device, n)
	:: nempty(left) -> atomic { left ? f; deliver(f); f = 0 }
	:: empty(softnet) -> break
	od;
	passed = true;
end:	do
	:: nempty(left) -> atomic { left ? f; deliver(f); f = 0 }
	od
}
#endif

init
{
	atomic {
		frames_left[0] = FRAMES;
		frames_left[1] = OTHERS;
		run polling(0);
		run polling(1)
	};
#ifdef SENT
	attached = true;
#endif
	/* This process and those before it are left. */
	(_nr_pr == _pid + 1 && empty(softnet) && !target_polls);
#ifdef DOWN
	(passed && empty(left));
#endif
#ifdef SENT
	/* User space settles what was sent after the last poll. */
	since[0] = 0;
	since[1] = 0;
#endif
	/* Not by never moving: where nothing waits any more, the flow may leave. */
	settled();
	assert(proven);
	if
#ifdef DOWN
	:: away
#else
	:: away ->
		/* Its last skb may have been lost; the next one that is not lost is the proof. */
		atomic { tail[queue]++; last_qtail = entered(queue); softnet ! 0, queue, true, tail[queue] };
		(empty(softnet) && !target_polls);
		passed_up(queue)
#endif
	:: else -> poll_over(1 - queue)
	fi;
	assert(proven)
}

#ifdef REACH_OUT
ltl { [] !moved_out }
#endif
#ifdef REACH_BACK
ltl { [] !(moved_out && moved_in) }
#endif
