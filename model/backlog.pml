/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Leaving a backlog: backlog_delivered(), backlog_asleep(), backlog_settle(), backlog_dequeue() in bpf/core/backlog.h and rx_settle() in bpf/core/steer.h against
 * bq_flush_to_queue() and cpu_map_kthread_run() in kernel/bpf/cpumap.c.
 *
 * The flow is in the backlog or elsewhere. Elsewhere delivers at once: no other location can
 * overtake earlier, so what holds here holds for INLINE and for every other backlog.
 *
 * KERNEL: 601 the tracepoint fires after a batch has gone up; 612 before; 615 before, and the
 * thread has GRO, which holds packets until the ring is empty or FLUSH frames have come.
 * LOSSES: the kernel may lose any frame at the flush of the bulk queue.
 * VANISH: the driver may drop any frame that the program has redirected, and nothing reports it.
 *
 * Scaled: bulk queue 8 -> 2 frames, batch 8 -> 1, flush after 64 -> 2.
 */
#ifndef KERNEL
#define KERNEL 615
#endif
#ifndef FRAMES
#define FRAMES 4
#endif
#define BULK 2
#define BATCH 1
#define FLUSH 2

#include "stack.pml"

#define INTERRUPTIBLE true
#define RUNNING false

/* struct backlog */
byte tail, nr_lost, nr_vanished, head_asleep; /* the producer's */
bool leaving, leaving_now;       /* a flow waits; since this poll */
byte dequeued, head;                /* the thread's */
bool known, in_loop;             /* the thread has dequeued a batch; and was seen running */

/* The kernel's */
bool state = RUNNING;
bool on_rq = true;
chan bulk = [BULK] of { byte };
chan ring = [FRAMES] of { byte };
#if KERNEL >= 615
chan hash = [FRAMES] of { byte }; /* GRO's lists */
chan rx_list = [FRAMES] of { byte };
#endif
bool moved_out; /* for the controls of reachability */
bool moved_in;

/* ---- the XDP program, and the flush of its bulk queue -------------------- */

bool away;       /* the flow is elsewhere */
byte last_qtail;
bool proven;

/* Each line is a step: the thread runs in between. */
inline asleep()
{
	bool dequeued_all, interruptible;

	proven = false;
#ifdef NO_TAKEN_FIRST
	interruptible = known && state == INTERRUPTIBLE;
	dequeued_all = dequeued + nr_vanished == tail - nr_lost;
#else
#ifdef NO_TAKEN
	dequeued_all = true;
#else
#ifdef NO_LOST
	dequeued_all = dequeued + nr_vanished == tail;
#else
	dequeued_all = dequeued + nr_vanished == tail - nr_lost;
#endif
#endif
#ifdef NO_STATE
	interruptible = known;
#else
	interruptible = known && state == INTERRUPTIBLE;
#endif
#endif
	if
	:: dequeued_all && interruptible ->
#ifdef NO_IN_LOOP
		proven = true
#else
		proven = in_loop || !on_rq
#endif
	:: else
	fi
}

/* Proof "blocked". Only the owner's way; user space has a grace period instead of polls. */
inline settle()
{
	bool interruptible, blocked;
	byte n;

	interruptible = known && state == INTERRUPTIBLE;
#ifdef NO_ON_RQ
	blocked = interruptible;
#else
	blocked = interruptible && !on_rq;
#endif
	if
	:: blocked ->
		n = dequeued;
		d_step {
			if
			:: tail - nr_lost > n + nr_vanished -> nr_vanished = tail - nr_lost - n
			:: else
			fi;
			head_asleep = tail - nr_lost;
			proven = true;
			n = 0
		}
	:: else
	fi
}

inline prove()
{
	if
	:: head + nr_vanished >= last_qtail || head_asleep >= last_qtail -> proven = true
	:: else ->
		asleep();
		if
		:: proven -> head_asleep = tail - nr_lost
		:: else ->
#ifndef NO_SETTLE
			if
#ifdef NO_FLUSHED
			:: true -> settle()
#else
			:: leaving && !leaving_now -> settle()
#endif
			:: else
			fi;
#endif
			if
			:: proven
			:: else -> leaving = true; leaving_now = true
			fi
		fi
	fi
}

/* The thread may take each frame as soon as it is in the ring. */
inline flush()
{
	byte lost = 0;
	do
	:: nempty(bulk) ->
		bulk ? frame;
		if
		:: ring ! frame
#ifdef LOSSES
		:: lost++
#endif
		fi
	:: empty(bulk) -> break
	od;
	nr_lost = nr_lost + lost
}

/* rx_redirect() and bq_enqueue() */
inline enqueue(frame_in)
{
	if
	:: full(bulk) -> flush() /* without a wake-up: that comes when the poll ends */
	:: else
	fi;
	if
	:: leaving && !leaving_now -> /* the first to enter in this poll */
		leaving = false;
		asleep();
		if
		:: proven -> head_asleep = tail - nr_lost
		:: else ->
#ifdef NO_SETTLE
			skip
#else
			settle()
#endif
		fi
	:: else
	fi;
	if
	:: d_step { tail++; bulk ! frame_in }
#ifdef VANISH
	:: tail++
#endif
	fi
}

inline wake()
{
	d_step { state = RUNNING; on_rq = true }
}

active proctype napi()
{
	byte frame, nr, seq;
	bool wants_away;

	do
	:: nr < FRAMES ->
		nr++;
		if
		:: enqueue(0) /* another flow's, in the same backlog */
		:: seq++;
			if
			:: wants_away = false
			:: wants_away = true
			fi;
			if
			:: !away && wants_away ->
				prove();
				if
				:: proven -> away = true; moved_out = true
				:: else
				fi
			:: away && !wants_away -> away = false; moved_in = true
			:: else
			fi;
			if
			:: away -> d_step { deliver(seq) }
			:: else ->
				enqueue(seq);
#ifdef NO_QTAIL
				last_qtail = tail - 1 - nr_lost
#else
				last_qtail = tail - nr_lost
#endif
			fi
		fi;
		if
		:: true -> flush(); wake(); leaving_now = false /* the poll ends */
		:: true
		fi
	:: nr == FRAMES -> break
	od;
	flush();
	wake();
	leaving_now = false;
	/* Not by never moving: when all is quiet, the flow may leave, with its second packet at the
	 * latest. */
	(!on_rq);
	prove();
	leaving_now = false;
	prove();
	assert(proven || !known) /* never woken before its frames were lost: the next one does it */
}

/* ---- the thread ---------------------------------------------------------- */

#if KERNEL >= 615
inline gro_receive(frame)
{
	if
	:: frame == 0
	:: frame > 0 -> hash ! frame          /* held, or merged */
	:: frame > 0 ->                         /* completes what is held of its flow */
		do
		:: nempty(hash) -> hash ? f; rx_list ! f
		:: empty(hash) -> break
		od;
		rx_list ! frame
	fi;
	if
	:: deliver_all(rx_list, f)              /* gro_normal_batch reached */
	:: true
	fi
}

inline gro_flush()
{
	do
	:: nempty(hash) -> hash ? f; rx_list ! f
	:: empty(hash) -> break
	od;
	f = 0;
	deliver_all(rx_list, f)
}

#endif

inline tracepoint()
{
	d_step { before = dequeued; dequeued = dequeued + n; known = true };
	d_step {
		in_loop = in_loop || state == RUNNING;
#if KERNEL >= 615
#ifndef NO_GRO_EMPTY
		if
#ifdef NO_RX_LIST
		:: empty(hash) ->
#else
		:: empty(hash) && empty(rx_list) ->
#endif
#endif
#endif
#ifdef NO_BEFORE
			head = before + n
#else
			head = before
#endif
#if KERNEL >= 615 && !defined(NO_GRO_EMPTY)
		:: else
		fi
#endif
	}
}

active proctype kthread()
{
	byte frame, n, i, before, packets, f;
	byte batch[BATCH];
	bool ring_empty;

	state = INTERRUPTIBLE; /* once, before the loop */
	do
	:: true ->
		if
		:: empty(ring) ->
			state = INTERRUPTIBLE;
			if
			:: empty(ring) ->
				atomic {
					if
					:: state == INTERRUPTIBLE -> on_rq = false
					:: else
					fi
				};
end_asleep:			(state == RUNNING)
			:: nempty(ring) -> state = RUNNING
			fi
		:: nempty(ring)
		fi;
		d_step {
			n = 0;
			do
			:: n < BATCH && nempty(ring) -> ring ? frame; batch[n] = frame; n++
			:: else -> break
			od;
			frame = 0
		};
#if KERNEL >= 612
		tracepoint();
#endif
		i = 0;
		do
		:: i < n ->
#if KERNEL >= 615
			atomic { gro_receive(batch[i]); f = 0 }
#else
			d_step { deliver(batch[i]) }
#endif
			;
			d_step { batch[i] = 0; i++ }
		:: i == n -> break
		od;
		i = 0;
#if KERNEL < 612
		tracepoint();
#endif
#if KERNEL >= 615
		packets = packets + n;
		ring_empty = empty(ring);
		if
		:: packets >= FLUSH || ring_empty ->
			atomic { gro_flush() };
			packets = 0
		:: else
		fi;
#endif
		d_step { n = 0; before = 0; ring_empty = false }
	od
}

#ifdef REACH_OUT
ltl { [] !moved_out }
#endif
#ifdef REACH_BACK
ltl { [] !(moved_out && moved_in) }
#endif
