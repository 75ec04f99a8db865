/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The proofs of a thread that never sleeps: the tracepoint xdp_cpumap_kthread alone, while the
 * ring is never empty. One frame is watched, the FRAME'th: is it delivered whenever `head` says
 * so, and does `head` reach it at all?
 *
 * HZ1000: a flush of GRO spares what was held in this jiffy (kernel/bpf/cpumap.c,
 * cpu_map_gro_flush()). Without it a flush takes all, and "GRO empty" is enough.
 * PROGRESS: time goes on, and others always keep GRO busy.
 *
 * "GRO old": at a tracepoint with GRO not empty, mark `dequeued` as it was before the batch, and the
 * jiffy. All up to the mark is in GRO with an age of at most that jiffy, or has gone up. Once a
 * later jiffy has been seen, every flush takes it; and a flush has run when 64 more frames have
 * been handled (the thread counts them itself, NAPI_POLL_WEIGHT), from before the batch whose
 * tracepoint saw the jiffy to before the present one. 64 is the least that is sound.
 *
 * Scaled: batch 8 -> 2 frames, flush after 64 -> 3.
 */
#define BATCH 2
#define FLUSH 3
/* Two marks, each of them seen old, and flushed, a batch late. */
#define BOUND (2 * (FLUSH + 2 * BATCH) + BATCH)
#define MAX (FLUSH + BOUND + BATCH)

mtype = { waiting, held, listed, up }; /* in the ring; GRO's lists; its rx_list; the stack */
mtype where = waiting;
byte age, jiffies;
byte dequeued, head, watched;
bool others; /* GRO holds another's */

byte mark, mark_jiffy, old_at;
bool marked, old;

inline time()
{
#ifdef PROGRESS
	jiffies++
#else
	if
	:: jiffies < 2 -> jiffies++
	:: true
	fi
#endif
}

inline gro_old()
{
	if
	:: !marked -> marked = true; old = false; mark = before; mark_jiffy = jiffies
	:: marked && !old ->
		if
#ifdef NO_JIFFY
		:: true ->
#else
		:: jiffies > mark_jiffy ->
#endif
			old = true; old_at = before
		:: else
		fi
	:: else
	fi;
	if
#ifdef NO_FLUSH_COUNT
	:: marked && old ->
#else
#ifdef NO_WHOLE_FLUSH_COUNT
	:: marked && old && before - old_at >= FLUSH - 1 ->
#else
	:: marked && old && before - old_at >= FLUSH ->
#endif
#endif
		head = mark;
		marked = false
	:: else
	fi
}

inline tracepoint()
{
	before = dequeued;
	dequeued = dequeued + n;
	if
#ifdef NO_GRO_EMPTY
	:: true ->
#else
#ifdef NO_RX_LIST
	:: where != held && !others ->
#else
	:: where != held && where != listed && !others ->
#endif
#endif
#ifdef NO_BEFORE
		head = dequeued;
#else
		head = before;
#endif
		marked = false
	:: else ->
#ifdef NO_GRO_OLD
		skip
#else
		gro_old()
#endif
	fi;
	assert(head < watched || where == up);
#ifdef PROGRESS
	assert(dequeued < watched + BOUND || head >= watched)
#endif
}

inline gro_receive()
{
	if
	:: dequeued >= watched && where == waiting ->
		if
		:: where = held; age = jiffies
		:: where = listed
		:: where = up
		fi
	:: else
	fi;
	if
	:: where == held -> where = listed /* completed by a later packet, or pushed out */
	:: true
	fi;
	if
	:: where == listed -> where = up /* gro_normal_batch reached */
	:: true
	fi;
#ifdef PROGRESS
	others = true
#else
	if
	:: others = true
	:: others = false
	fi
#endif
}

inline gro_flush()
{
	if
#ifdef HZ1000
	:: where == held && age == jiffies
#endif
	:: where == listed -> where = up
#ifdef HZ1000
	:: where == held && age != jiffies -> where = up
#else
	:: where == held -> where = up
#endif
	:: else
	fi
#ifndef HZ1000
	;
	others = false
#endif
}

active proctype kthread()
{
	byte n, before, packets;

	select(watched : 1 .. FLUSH);
	do
	:: dequeued < MAX -> /* nobody watches: one step */
		atomic {
			select(n : 1 .. BATCH);
			time();
			tracepoint();
			time();
			gro_receive();
			time();
			packets = packets + n;
			if
			:: packets >= FLUSH -> gro_flush(); packets = 0
			:: else
			fi;
			n = 0;
			before = 0
		}
	:: dequeued >= MAX -> break
	od
}
