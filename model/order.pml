/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The rule of order itself: INLINE and two backlogs, a flow that wants another of them at any
 * time, and full backlogs: a held flow of one is marked, and its frames are dropped. Delivery is proven exactly; how, is the other models' matter.
 */
#include "stack.pml"

#define FRAMES 4
#define LIMIT 2
#define INLINE 2

byte location = INLINE, wanted, last_qtail, seq;
byte tail[3], head[3]; /* INLINE counts frames too */
bool marked;
chan backlog0 = [LIMIT] of { byte };
chan backlog1 = [LIMIT] of { byte };
chan poll = [FRAMES] of { byte };
bool moved[9];

inline enqueue(queue)
{
	if
	:: nfull(queue) -> queue ! seq; tail[location]++; last_qtail = tail[location]
	:: full(queue) -> marked = marked || location != wanted
	fi
}

active proctype napi()
{
	do
	:: seq < FRAMES ->
		d_step { seq++; wanted = 0 };
		if
		:: wanted = 0
		:: wanted = 1
		:: wanted = INLINE
		fi;
		atomic {
			if
			:: location == wanted -> marked = false
#ifdef NO_RULE
			:: location != wanted ->
#else
			:: location != wanted && head[location] >= last_qtail ->
#endif
				moved[location * 3 + wanted] = true;
				location = wanted;
				marked = false
			:: else
			fi;
			if
			:: marked
			:: else ->
				if
				:: location == 0 -> enqueue(backlog0)
				:: location == 1 -> enqueue(backlog1)
				:: location == INLINE -> enqueue(poll)
				fi
			fi
		}
	:: seq == FRAMES -> break
	od
}

proctype stack(byte at; chan queue)
{
	byte f;
end:
	do
	:: atomic { nempty(queue) -> queue ? f; deliver(f); head[at]++; f = 0 }
	od
}

init
{
	atomic { run stack(0, backlog0); run stack(1, backlog1); run stack(INLINE, poll) }
}

#ifdef REACH_INLINE_0
ltl { [] !moved[6] }
#endif
#ifdef REACH_INLINE_1
ltl { [] !moved[7] }
#endif
#ifdef REACH_0_INLINE
ltl { [] !moved[2] }
#endif
#ifdef REACH_0_1
ltl { [] !moved[1] }
#endif
#ifdef REACH_1_INLINE
ltl { [] !moved[5] }
#endif
#ifdef REACH_1_0
ltl { [] !moved[3] }
#endif
