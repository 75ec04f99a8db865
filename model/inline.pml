/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Leaving INLINE: polls of one NAPI instance on two CPUs, against net/core/dev.c and
 * net/core/gro.c. The flow is INLINE or elsewhere, and elsewhere delivers at once.
 *
 * A poll counts when its stamp, (CPU, polls ended on that CPU), differs from the last one's. All
 * that was INLINE in earlier polls has been delivered once the present owner sees GRO empty: its
 * lists, and the rx_list too. The latter is passed up at the end of each poll, but within a poll
 * it takes what GRO held from earlier polls and has just completed.
 *
 * The tracepoint napi_poll fires after the driver gave the instance up, when another CPU may
 * poll already; and, with a budget of 0, for netpoll, in the middle of a poll.
 */
#include "stack.pml"

#define CPUS 2
#define FRAMES 4
#define POLLS 4

/* struct rx_queue and its flow */
byte polls, polls_delivered, last_stamp, last_qtail;
bool away;
byte nr_polls[CPUS]; /* struct poll_cpu */

/* The kernel's */
byte owner; /* 1 + the CPU that polls */
byte polls_left = POLLS, frames_left = FRAMES, seq;
byte tracing; /* polls that have ended and not been traced */
chan driver = [FRAMES] of { byte }; /* what a driver batches within a poll */
chan hash = [FRAMES] of { byte };
chan rx_list = [FRAMES] of { byte };
bool moved_out, moved_in;

inline count_poll(cpu)
{
	byte stamp;
#ifdef NO_CPU
	stamp = nr_polls[0] + nr_polls[1] + 1;
#else
	stamp = nr_polls[cpu] * CPUS + cpu + 1;
#endif
	if
	:: stamp != last_stamp -> polls++; last_stamp = stamp
	:: else
	fi;
	stamp = 0
}

inline see_gro()
{
	if
#ifdef NO_GRO
	:: true ->
#else
#ifdef NO_RX_LIST
	:: empty(hash) ->
#else
#ifdef NO_HASH
	:: empty(rx_list) ->
#else
	:: empty(hash) && empty(rx_list) ->
#endif
#endif
#endif
#ifdef NO_POLL_BEFORE
		polls_delivered = polls
#else
		polls_delivered = polls - 1
#endif
	:: else
	fi
}

inline to_rx_list(f)
{
	do
	:: nempty(hash) -> hash ? f; rx_list ! f
	:: empty(hash) -> break
	od
}

/* One packet, if the driver has batched any. */
inline gro_receive(f)
{
	if
	:: nempty(driver) ->
		driver ? f;
		if
		:: hash ! f
		:: to_rx_list(other); rx_list ! f; other = 0
		fi
	:: empty(driver)
	fi;
	f = 0
}

/* Only the instance's owner runs it, and what it reads is its own CPU's: one step. */
inline xdp(cpu)
{
	seq++;
	count_poll(cpu);
	if
	:: !away ->
		if
		:: see_gro();
			if
#ifdef NO_BOUNDARY
			:: polls_delivered >= last_qtail || (empty(hash) && empty(rx_list)) ->
#else
			:: polls_delivered >= last_qtail ->
#endif
				away = true;
				moved_out = true
			:: else
			fi
		:: true
		fi
	:: away -> /* its frames there have been delivered */
		if
		:: away = false; moved_in = true
		:: true
		fi
	fi;
	if
	:: away -> deliver(seq)
	:: else -> last_qtail = polls; driver ! seq
	fi
}

/* All that the driver batched, and the rx_list; GRO's lists if it likes. */
inline flush()
{
	do
	:: nempty(driver) -> gro_receive(f)
	:: empty(driver) -> break
	od;
	if
	:: to_rx_list(f)
	:: true
	fi;
	deliver_all(rx_list, f);
	f = 0
}

proctype cpu(byte id)
{
	byte f, other;

	do
	:: atomic { owner == 0 && polls_left > 0 -> owner = id + 1; polls_left-- };
polling:
		do
		:: atomic { frames_left > 0 -> frames_left--; xdp(id) }
		:: atomic { nempty(driver) -> gro_receive(f) }
		:: atomic { nempty(hash) -> to_rx_list(f); f = 0 } /* pushed out by another flow's */
		:: atomic { nempty(rx_list) -> deliver_all(rx_list, f); f = 0 }
#ifdef NO_BUDGET
		:: polls_left > 0 -> polls_left--; nr_polls[id]++ /* netpoll */
#endif
		:: break
		od;
		if
		:: atomic { flush(); tracing++; owner = 0 };
			d_step { nr_polls[id]++; tracing-- } /* another CPU may poll already */
		:: polls_left > 0 -> /* the budget is used up: it keeps the instance */
			atomic { polls_left--; nr_polls[id]++; flush() };
			goto polling
		fi
	:: owner == 0 && polls_left == 0 -> break
	od
}

init
{
	byte f, other;

	atomic { run cpu(0); run cpu(1) };
	/* Not by never moving: in a later poll, with GRO flushed, the flow may leave. */
	(polls_left == 0 && owner == 0 && tracing == 0);
	atomic {
		to_rx_list(f);
		deliver_all(rx_list, f);
		count_poll(0);
		see_gro();
		assert(away || polls_delivered >= last_qtail)
	}
}

#ifdef REACH_OUT
ltl { [] !moved_out }
#endif
#ifdef REACH_BACK
ltl { [] !(moved_out && moved_in) }
#endif
