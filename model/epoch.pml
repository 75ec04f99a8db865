/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A new epoch: what slots mean changes (hash secret, table size, parser options), so that the
 * flow goes from slot 0, which knows where its frames are, to slot 1, which does not.
 *
 * What the other models show is taken for granted here: a backlog proves delivery exactly, and
 * INLINE frames have gone up when a poll has ended and GRO is empty.
 *
 * grace(): no poll that began before is still running. synchronize_rcu() does it, and so does
 * updating an array of maps (kernel/bpf/syscall.c, maybe_wait_bpf_programs()).
 */
#include "stack.pml"

#define FRAMES 4

/* Written by user space */
bool maps_inline;
byte slot_of_flow; /* the meaning */
byte epoch = 1;

/* Written by the program */
bool at_cpu[2];
byte slot_epoch[2], last_qtail[2];
byte polls, polls_delivered, epoch_seen, epoch_poll;

chan backlog = [FRAMES] of { byte };
byte tail, head;
chan gro = [FRAMES] of { byte };
bool in_poll, moved_in_new;
byte frames_left = FRAMES;

/* rx_steer(): its reads of what user space writes may happen in any order, in this one at worst. */
inline xdp()
{
	slot = slot_of_flow;
	now = epoch;
	wants_cpu = false;
	if
	:: !maps_inline -> wants_cpu = true
	:: true
	fi;
	d_step {
		seq++;
		if
		:: empty(gro) && polls - 1 > polls_delivered -> polls_delivered = polls - 1
		:: else
		fi;
		if
		:: epoch_seen != now -> epoch_seen = now; epoch_poll = polls
		:: else
		fi;
		if
		:: slot_epoch[slot] != now -> /* unset: INLINE since the epoch's first frame */
			slot_epoch[slot] = now;
			at_cpu[slot] = false;
#ifdef NO_SETTLE
			last_qtail[slot] = 0
#else
			last_qtail[slot] = epoch_poll
#endif
		:: else
		fi;
		if
		:: at_cpu[slot] && !wants_cpu && head >= last_qtail[slot] -> at_cpu[slot] = false
		:: !at_cpu[slot] && wants_cpu && polls_delivered >= last_qtail[slot] ->
			at_cpu[slot] = true;
			moved_in_new = moved_in_new || now == 2
		:: else
		fi;
		if
		:: at_cpu[slot] -> backlog ! seq; tail++; last_qtail[slot] = tail
		:: else -> gro ! seq; last_qtail[slot] = polls
		fi
	}
}

active proctype napi()
{
	byte slot, now, seq, f;
	bool wants_cpu;
end:
	do
	:: frames_left > 0 ->
		atomic { in_poll = true; polls++; frames_left-- };
		xdp();
		do
		:: frames_left > 0 -> frames_left--; xdp()
		:: break
		od;
		if
		:: atomic { deliver_all(gro, f) }
		:: true
		fi;
		in_poll = false
	od
}

active proctype kthread()
{
	byte f;
end:
	do
	:: atomic { nempty(backlog) -> backlog ? f; deliver(f); head++ }
	od
}

active proctype user()
{
#ifndef NO_RETURN
	maps_inline = true;
#endif
#ifndef NO_GRACE
	!in_poll;
#endif
#ifndef NO_DRAIN
	head == tail;
#endif
	slot_of_flow = 1;
	epoch = 2;
#ifndef NO_GRACE_AFTER
	!in_poll;
#endif
	maps_inline = false
}

#ifdef REACH_MOVE
ltl { [] !moved_in_new }
#endif
