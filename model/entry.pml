/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A cpumap entry is made anew, since its CPU was offline and its thread is no longer bound. Two
 * threads, each with its ring, on one backlog's counters (kernel/bpf/cpumap.c,
 * __cpu_map_entry_replace(), __cpu_map_entry_free()). A thread that is stopped runs once more,
 * with an empty batch and its tracepoint, which must not be mistaken for the next thread's.
 *
 * LOSSES: the kernel loses any frame; the first thread has been in its loop.
 *
 * GRO is left out (backlog.pml has it). The flow is in the backlog or elsewhere, which delivers at
 * once; so does a redirect that finds no entry.
 */
#include "stack.pml"

#ifndef FRAMES
#define FRAMES 4
#endif
#define NONE 2
#define INTERRUPTIBLE true
#define RUNNING false

/* struct backlog */
byte tail, dequeued, head, head_asleep, nr_lost;
byte kthread = NONE; /* by task: the thread whose state is asked */
bool in_loop;
bool known[2];       /* backlog_kthreads */

bool closed;         /* nobody wants it */
byte last_qtail;
bool away, used_new;

/* The kernel's */
byte entry = 0; /* in the cpumap */
bool state[2], on_rq[2], stop[2], gone[2];
chan bulk0 = [2 * FRAMES] of { byte };
chan bulk1 = [FRAMES] of { byte };
chan ring0 = [2 * FRAMES] of { byte };
chan ring1 = [FRAMES] of { byte };
bool in_poll;

/*
 * backlog_asleep(), by the owner and, for the drain, by user space while the owner runs. Hence the
 * order: in_loop first, for a wake-up in between would make a fresh thread look like an old one;
 * nr_lost before tail, or the losses of later frames would be subtracted.
 */
inline asleep(ok)
{
	ok = false;
#ifndef NO_IN_LOOP_FIRST
	looping = in_loop;
#endif
#ifdef NO_LOST_FIRST
	t = tail;
	lost = nr_lost;
#else
	lost = nr_lost;
	t = tail;
#endif
	if
	:: kthread != NONE && dequeued + lost == t ->
		k = kthread;
		if
		:: k != NONE && state[k] == INTERRUPTIBLE ->
#ifdef NO_IN_LOOP_FIRST
			looping = in_loop;
#endif
			ok = looping || !on_rq[k]
		:: else
		fi
	:: else
	fi;
	d_step { looping = false; lost = 0; k = 0 }
}

inline wake(k)
{
	d_step {
		if
		:: !gone[k] -> state[k] = RUNNING; on_rq[k] = true
		:: else
		fi
	}
}

active proctype napi()
{
	byte seq, f, t, k, e, lost, lost_now;
	bool ok, wants_away, looping;

#ifdef LOSSES
end_idle:
	(known[0] && !on_rq[0]); /* it sleeps in its loop */
#endif
	do
	:: seq < FRAMES ->
		in_poll = true;
		do
		:: seq < FRAMES ->
			seq++;
			wants_away = true;
			if
#ifdef NO_CLOSE
			:: wants_away = false
#else
			:: !closed -> wants_away = false
#endif
			:: true
			fi;
			if
			:: !away && wants_away ->
				if
				:: head >= last_qtail || head_asleep >= last_qtail -> away = true
				:: else ->
					asleep(ok);
					if
					:: ok -> away = true; head_asleep = tail - nr_lost
					:: else
					fi
				fi
			:: away && !wants_away -> away = false
			:: else
			fi;
			e = entry;
			d_step {
				if
				:: away || e == NONE -> away = true; deliver(seq)
				:: else ->
					tail++;
					last_qtail = tail - nr_lost;
					if
					:: e == 0 -> bulk0 ! seq
					:: else -> bulk1 ! seq; used_new = true
					fi
				fi
			};
#ifdef LOSSES
			if
			:: !away && e == 0 -> d_step { tail++; bulk0 ! 0 } /* another flow's */
			:: true
			fi
#endif
		:: seq > 0 -> break
		od;
		if
		:: nempty(bulk0) ->
			do
			:: nempty(bulk0) -> d_step { bulk0 ? f; ring0 ! f; f = 0 }
#ifdef LOSSES
			:: nempty(bulk0) -> d_step { bulk0 ? f; lost_now++; f = 0 }
#endif
			:: empty(bulk0) -> break
			od;
			nr_lost = nr_lost + lost_now;
			lost_now = 0;
			wake(0)
		:: empty(bulk0)
		fi;
		if
		:: nempty(bulk1) ->
			do
			:: nempty(bulk1) -> d_step { bulk1 ? f; ring1 ! f; f = 0 }
			:: empty(bulk1) -> break
			od;
			wake(1)
		:: empty(bulk1)
		fi;
		in_poll = false
	:: seq == FRAMES -> break
	od
}

proctype cpumap(byte id; chan ring)
{
	byte f, n, before;

	state[id] = INTERRUPTIBLE;
	do
	:: !stop[id] || nempty(ring) ->
		if
		:: empty(ring) ->
			state[id] = INTERRUPTIBLE;
			if
			:: empty(ring) ->
				atomic {
					if
					:: stop[id] -> state[id] = RUNNING /* kthread_stop() is a signal */
					:: !stop[id] && state[id] == INTERRUPTIBLE -> on_rq[id] = false
					:: else
					fi
				};
end_asleep:			(state[id] == RUNNING)
			:: nempty(ring) -> state[id] = RUNNING
			fi
		:: nempty(ring)
		fi;
		d_step {
			n = 0;
			if
			:: nempty(ring) -> ring ? f; n = 1
			:: empty(ring)
			fi
		};
		if
#ifndef NO_EMPTY
		:: n == 0 /* nothing to count */
		:: n > 0 ->
#else
		:: true ->
#endif
			d_step { /* backlog_learn() */
				if
				:: !known[id] -> known[id] = true; kthread = id
				:: else
				fi
			};
			d_step { before = dequeued; dequeued = dequeued + n };
			d_step { in_loop = in_loop || state[id] == RUNNING; head = before }
		fi;
		d_step {
			if
			:: n > 0 -> deliver(f)
			:: else
			fi;
			f = 0; n = 0; before = 0
		}
	:: stop[id] && empty(ring) -> break
	od;
	atomic { state[id] = RUNNING; on_rq[id] = false; gone[id] = true }
}

init
{
	byte t, k, seen, lost;
	bool ok, looping;

	atomic {
		on_rq[0] = true;
#ifdef LOSSES
		kthread = 0; known[0] = true; in_loop = true;
#endif
		run cpumap(0, ring0)
	};
	if
	:: true /* its CPU goes, and comes back */
	:: goto stays
	fi;
#ifndef NO_CLOSE
	closed = true;
#endif
#ifndef NO_DRAIN
end_unused:
	(kthread != NONE);
again:
	asleep(ok);
	if
	:: ok ->
		seen = t;
		if
		:: seen - lost > head_asleep -> head_asleep = seen - lost
		:: else
		fi
	:: else -> goto again
	fi;
#ifndef NO_GRACE
	!in_poll; /* a program that was about to enter has entered */
	if
	:: tail != seen -> goto again
	:: else
	fi;
#endif
#endif
	entry = NONE;
	!in_poll; /* queue_rcu_work() */
	atomic { stop[0] = true; wake(0) };
#ifndef NO_RESET
	d_step { kthread = NONE; in_loop = false; known[0] = false };
#endif
	atomic { on_rq[1] = true; run cpumap(1, ring1); entry = 1 };
	closed = false;
stays:
	skip
}

#ifdef REACH_NEW
ltl { [] !(used_new) }
#endif
