/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A flow that has to leave a backlog which it keeps full by itself: each frame that enters moves
 * its last_qtail on. Shedding (drops while it is held) lets `head` catch up.
 */
#define LIMIT 4
#define ROUNDS 20
#define BOUND (LIMIT + 3)

byte tail, dequeued, head, last_qtail, nr, dequeued_since, arrivals;
bool marked, away;

inline arrive()
{
	if
	:: head >= last_qtail -> away = true
	:: else ->
		if
#ifndef NO_SHED
		:: marked
#endif
		:: else ->
			if
			:: tail - dequeued >= LIMIT -> marked = true
			:: else -> tail++; last_qtail = tail
			fi
		fi
	fi
}

active proctype flow()
{
	tail = LIMIT; /* it is full, and wants away from now on */
	last_qtail = tail;
	do
	:: nr < ROUNDS && !away ->
		nr++;
		arrivals = 0;
		do /* at least as many come as are dequeued */
		:: arrivals < 2 && !away -> arrive(); arrivals++
		:: arrivals > 0 -> break
		od;
		head = dequeued; dequeued++; /* a batch of one, "GRO empty" */
		assert(nr < BOUND || away)
	:: else -> break
	od
}
