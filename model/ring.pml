/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The limit and the ring: backlog_full() in bpf/backlog.h against include/linux/ptr_ring.h, which
 * gives consumed slots back in batches. Below the limit, the kernel never drops.
 *
 * Scaled: bulk queue 8 -> 2 frames, batch 8 -> 2, slots given back 16 -> 4 at a time. So the ring
 * needs 3 slots more than the limit, and has 4 (16, where 15 are needed).
 */
#define LIMIT 3
#define GIVEN_BACK 4
#ifdef NO_SLACK
#define SIZE (LIMIT + GIVEN_BACK - 2)
#else
#define SIZE (LIMIT + GIVEN_BACK)
#endif
#define BULK 2
#define BATCH 2
#define FRAMES 16

byte tail, dequeued, tail_limit;
byte bulk;     /* frames in the bulk queue */
byte queued;   /* frames in the ring */
byte consumed; /* slots whose frame has gone and that are not given back */

inline flush()
{
	d_step {
		do
		:: bulk > 0 ->
			assert(queued + consumed < SIZE); /* or the kernel drops */
			queued++;
			bulk--
		:: bulk == 0 -> break
		od
	}
}

active proctype napi()
{
	do
	:: tail < FRAMES ->
		if
#ifndef NO_LIMIT
		:: tail >= tail_limit ->
			tail_limit = dequeued + LIMIT;
			if
			:: tail >= tail_limit -> goto dropped
			:: else
			fi
#endif
		:: else
		fi;
		if
		:: bulk == BULK -> flush()
		:: else
		fi;
		d_step { tail++; bulk++ };
dropped:
		if
		:: flush()
		:: true
		fi
	:: tail == FRAMES -> break
	od;
	flush()
}

active proctype kthread()
{
	byte n;
end:
	do
	:: queued > 0 ->
		n = 0;
		do
		:: n < BATCH && queued > 0 ->
			d_step {
				queued--;
				consumed++;
				n++;
				if
				:: consumed == GIVEN_BACK -> consumed = 0
				:: else
				fi
			}
		:: n > 0 -> break
		od;
		dequeued = dequeued + n
	od
}
