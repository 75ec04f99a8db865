/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Softirq mode: a flow changes its CPU by the kernel's own hop, enqueue_to_backlog() and process_backlog()
 * in net/core/dev.c, and the counters of a softnet backlog are the proof: input_queue_tail, read before a
 * packet of this CPU enters, covers all that this CPU has sent there before (softnet_passed()), and
 * input_queue_head follows what has been passed up.
 *
 * Without NAPI the packets of a flow come where they are sent, by a thread that changes its CPU between two
 * packets, and INLINE is the softnet backlog of that CPU. With NAPI an instance is polled on two CPUs in
 * turn, and INLINE is what the poll passes up.
 *
 * LOST: somebody overwrites the entry of the hash, once. Packets then stay where INLINE ones are, until user
 * space writes it again (hop_is_late(), BACKLOG_MISDIRECTED).
 *
 * LOSSES: a softnet backlog may be full.
 *
 * SHARED: two flows share the slot, that of CPU 1 is another one (rx_mix(), rx_unmixed()). With NAPI each CPU polls
 * an instance of its own. Without NAPI a poll may end between any two packets: that of another device does, or
 * user space settles it (Datapath::settle_mixings()). FULL: the program may drop a packet that finds no room
 * (rx_admit()).
 *
 * DOWN: the third CPU goes offline. on_cpuhp_enter() sets BACKLOG_DOWN, and then all CPUs stop, outside of
 * softirqs. From then on the kernel leaves packets for that CPU on the CPU that sends them. Later dev_cpu_dead()
 * moves the packets that wait there, one by one, to the softnet backlog of another CPU. input_queue_head counts
 * such a packet when it has been moved, not when it has been passed up: the counters prove nothing meanwhile.
 * User space waits until the account says that all packets have come (Leaving::look()). It then sets
 * BACKLOG_PASSED, and clears BACKLOG_DOWN after that (Datapath::leave_cpu()).
 */
#include "stack.pml"

#ifndef FRAMES
#define FRAMES 3
#endif
#ifndef OTHERS
#define OTHERS 0
#endif
#define CPUS 2
#define TARGET CPUS
#define INLINE 3
#define NOWHERE 4
#ifndef RING
#define RING 2
#endif
#ifndef NOISE
#define NOISE 1
#endif
#ifndef POLLS
#define POLLS 3
#endif
#define SKBS (FRAMES + OTHERS + NOISE)
#define way(cpu, to) ((cpu) * 3 + (to))
#define stamp_of(cpu) (nr_polls[cpu] + 1)
#ifdef SHARED
#define is_watched(cpu) (cpu == 0)
#define source(cpu) cpu /* the flow that comes there, and its NAPI instance */
#define lock() atomic { !locked -> locked = true }
#define unlock() locked = false
#else
#define is_watched(cpu) true
#define source(cpu) 0
#define lock()
#define unlock()
#endif

/* The kernel's, of each CPU */
byte tail[3], head[3];
chan softnet0 = [SKBS] of { byte, bool }; /* frame; it was sent elsewhere */
chan softnet1 = [SKBS] of { byte, bool };
chan softnet2 = [SKBS] of { byte, bool };
byte frames_left[CPUS], seq;
byte noise = NOISE;
bool sending; /* the thread that sends */
#ifdef NAPI
byte owner[CPUS]; /* of an instance: 1 + the CPU that polls */
byte polls_left[CPUS] = POLLS;
chan list[CPUS] = [FRAMES + NOISE] of { byte, bool };
#endif

/* struct softnet_way: from a CPU to another */
byte nr[CPUS * 3], tails[CPUS * 3 * RING];
/* struct poll_cpu, rx_queue */
byte nr_polls[3], since[CPUS], polls[CPUS], last_stamp[CPUS];
/* struct rps_dev_flow */
bool locked;
#ifdef NAPI
byte location = INLINE;
#else
byte location = 0;
#endif
byte queue, last_nr, last_poll, mixes, mixed_at;
#ifdef LOST
bool lost, flagged;
#else
#define lost false
#define flagged false
#endif
#ifdef DOWN
bool down;   /* BACKLOG_DOWN */
bool passed; /* BACKLOG_PASSED */
bool dead;   /* the third CPU is offline */
bool in_softirq[3];
byte held; /* the account: packets for the third CPU that have not come yet */
#define begin(cpu) in_softirq[cpu] = true
#define end(cpu) in_softirq[cpu] = false
#define count_sent(to) held = held + (to == TARGET)
#define count_gone(to) held = held - (to == TARGET)
#else
#define down false
#define passed false
#define dead false
#define begin(cpu)
#define end(cpu)
#define count_sent(to) skip
#define count_gone(to) skip
#endif
bool moved_out, moved_in;
bool proven;

inline count_poll(cpu)
{
	if
	:: stamp_of(cpu) != last_stamp[cpu] -> polls[cpu]++; last_stamp[cpu] = stamp_of(cpu)
	:: else
	fi
}

/* Whether all packets of the slot have been passed up. */
inline passed_up(cpu)
{
	if
	:: location == INLINE ->
		count_poll(cpu);
		if
		:: queue == cpu -> proven = last_poll < polls[cpu]
		:: else -> proven = last_poll < polls[queue] || stamp_of(queue) != last_stamp[queue]
		fi
	:: else ->
		if
		:: nr[way(queue, location)] == last_nr ->
#ifdef NO_NOW
			proven = head[location] >= tails[way(queue, location) * RING + last_nr % RING]
#else
			proven = head[location] >= tail[location]
#endif
		:: else ->
#ifdef NO_LATER
			proven = head[location] >= tails[way(queue, location) * RING + last_nr % RING]
#else
			proven = head[location] >= tails[way(queue, location) * RING + (last_nr + 1) % RING]
#endif
		fi
#ifdef NO_HEAD
		; proven = true
#endif
#ifndef NO_DISTRUST
		/* A packet that the head counts may wait on another CPU. */
		; proven = proven && !(location == TARGET && down)
#endif
	fi
}

/* Whether the slot's last packet, from another CPU, has been passed up or is in the softnet backlog. */
inline came_before()
{
	if
	:: !since[queue] -> proven = true
	:: since[queue] && location != INLINE -> proven = nr[way(queue, location)] > last_nr
	:: else -> proven = last_poll < polls[queue] || stamp_of(queue) != last_stamp[queue]
	fi
#ifdef NO_ENTERED
	; proven = true
#endif
}

inline settled()
{
	proven = (!since[0] || since[0] > mixed_at) && (!since[1] || since[1] > mixed_at)
}

inline enqueue(cpu, to, frame)
{
	if
	:: atomic { to == 0 -> softnet0 ! frame, false; tail[0]++ }
	:: atomic { to == 1 -> softnet1 ! frame, false; tail[1]++ }
	:: atomic { to == 2 && !lost && !dead -> softnet2 ! frame, false; tail[2]++ }
#if defined(LOST) || defined(DOWN)
#ifdef NAPI
	:: atomic { to == 2 && (lost || dead) -> list[cpu] ! frame, true }
#else
	:: atomic { to == 2 && (lost || dead) && cpu == 0 -> softnet0 ! frame, true; tail[0]++ }
	:: atomic { to == 2 && (lost || dead) && cpu == 1 -> softnet1 ! frame, true; tail[1]++ }
#endif
#endif
#ifdef LOSSES
	:: count_gone(to)
#endif
	fi
}

/* rxsteer_arrive(), and the stack. `late`: the packet was sent to the third CPU, and this is another one. */
inline arrive(cpu, frame, late)
{
	count_gone((late -> TARGET : cpu));
#ifdef LOST
	flagged = flagged || late;
#endif
	if
#if !defined(NO_LATE) && (defined(LOST) || defined(DOWN))
	:: late && !down && head[2] < tail[2] /* It is dropped. */
#endif
	:: else -> deliver(frame)
	fi;
	late = false
}

#define closed (flagged || down || passed)

/* rx_shed(). BACKLOG_PASSED sheds too: user space may have set it since rx_steer() looked. */
#ifdef NO_SHED
#define sheds false
#else
#ifdef NO_SHED_PASSED
#define sheds (flagged || down)
#else
#define sheds closed
#endif
#endif

inline steer(cpu, frame)
{
	byte wanted, to;
	bool unmixes, no_room, left;

	if
	:: !since[cpu] -> since[cpu] = mixes + 1
	:: else
	fi;
	lock();
	if
#ifdef NAPI
	:: wanted = INLINE
#else
	:: wanted = cpu
#endif
	:: !closed -> wanted = TARGET
	fi;
#ifdef FULL
	if
	:: true
	:: no_room = true
	fi;
#endif
#ifdef DOWN
	/* rx_closed() */
	left = location == TARGET && passed;
#endif
	skip;
	d_step {
#if defined(SHARED) && !defined(NO_MIXED)
		proven = true;
		if
		:: queue != cpu -> came_before()
		:: else
		fi;
		if
		:: !proven -> mixes++; mixed_at = mixes
		:: else
		fi;
#endif
		proven = wanted != location;
		if
		:: proven && mixed_at && !left ->
#ifndef NO_SETTLED
			settled();
#endif
			if
			:: proven && location == INLINE -> mixed_at = 0
			/*
			 * This packet enters after all of them. The slot's last packet is no proof: a packet of
			 * another slot may have followed it before those of the other CPU entered, and the tail
			 * that was read before that packet does not cover these.
			 */
#ifdef NO_STAY
			:: proven && location != INLINE -> mixed_at = 0
#else
			:: proven && location != INLINE -> proven = false; unmixes = true
#endif
			:: else
			fi
		:: else
		fi;
		if
		:: proven && !left -> passed_up(cpu)
		:: else
		fi;
#ifdef NO_UNMIX_LAST
		if
		:: unmixes -> mixed_at = 0
		:: else
		fi;
#endif
		if
		:: proven -> to = wanted
		:: !proven && location == TARGET && wanted != location && sheds -> to = NOWHERE
		:: else -> to = location
		fi;
		if
		:: to == TARGET && no_room -> to = NOWHERE
		:: else
		fi;
		if
		:: to != NOWHERE && to != location ->
			moved_in = moved_out && location == TARGET;
			location = to;
			moved_out = moved_out || location == TARGET
		:: else
		fi;
		if
		:: to == NOWHERE
		:: to == INLINE -> count_poll(cpu); last_poll = polls[cpu]
		:: to != INLINE && to != NOWHERE ->
			count_sent(to);
			nr[way(cpu, to)]++;
			last_nr = nr[way(cpu, to)];
			tails[way(cpu, to) * RING + last_nr % RING] = tail[to];
			if
			:: unmixes -> mixed_at = 0
			:: else
			fi
		fi;
		if
		:: to != NOWHERE -> queue = cpu
		:: else
		fi;
		proven = false; wanted = 0; unmixes = false; no_room = false; left = false;
		unlock();
		skip
	};
	if
#ifdef NAPI
	:: to == INLINE -> list[cpu] ! frame, false
#endif
	:: to == NOWHERE
	:: to != INLINE && to != NOWHERE -> enqueue(cpu, to, frame)
	fi;
	d_step { to = 0; frame = 0 }
}

/* A packet of another slot. */
inline others(cpu)
{
	if
	:: d_step {
		!down && !passed ->
		count_sent(TARGET);
		nr[way(cpu, TARGET)]++;
		tails[way(cpu, TARGET) * RING + nr[way(cpu, TARGET)] % RING] = tail[TARGET]
	   };
		enqueue(cpu, TARGET, 0)
	:: down || passed
	fi
}

/* process_backlog(): the head follows when a part is done. */
inline backlog(cpu, queue_of, frame, late, done)
{
	atomic { queue_of ? frame, late; arrive(cpu, frame, late); frame = 0; done++ };
	do
	:: atomic { nempty(queue_of) -> queue_of ? frame, late; arrive(cpu, frame, late); frame = 0; done++ }
	:: atomic { done -> head[cpu] = head[cpu] + done; done = 0 }
	:: !done -> break
	od
}

inline ended(cpu)
{
	atomic {
#ifdef NAPI
		nr_polls[cpu]++;
#endif
		since[cpu] = 0;
		end(cpu)
	}
}

proctype receiving(byte cpu)
{
	byte f, done;
	bool late;

end:	do
#ifdef NAPI
	:: atomic { !owner[source(cpu)] && polls_left[source(cpu)] ->
		    owner[source(cpu)] = cpu + 1; polls_left[source(cpu)]--;
		    begin(cpu) };
		do
		:: atomic { frames_left[source(cpu)] ->
			    frames_left[source(cpu)]--;
			    if
			    :: is_watched(cpu) -> seq++; f = seq
			    :: else
			    fi };
			steer(cpu, f)
		:: atomic { nempty(list[cpu]) -> list[cpu] ? f, late; arrive(cpu, f, late); f = 0 }
		:: atomic { noise -> noise-- };
			others(cpu)
		:: break
		od;
		do
		:: atomic { nempty(list[cpu]) -> list[cpu] ? f, late; arrive(cpu, f, late); f = 0 }
		:: atomic { empty(list[cpu]) -> owner[source(cpu)] = 0; break }
		od;
		ended(cpu)
#else
	/* With softirqs off. The thread's next packet is sent after this one. */
	:: atomic { frames_left[source(cpu)] && !(is_watched(cpu) && sending) ->
		    frames_left[source(cpu)]--;
		    begin(cpu);
		    if
		    :: is_watched(cpu) -> sending = true; seq++; f = seq
		    :: else
		    fi };
		steer(cpu, f);
		atomic {
			if
			:: is_watched(cpu) -> sending = false
			:: else
			fi;
			end(cpu)
		}
	:: atomic { noise -> noise--; begin(cpu) };
		others(cpu);
		end(cpu)
#ifdef SHARED
	:: atomic { since[cpu] -> ended(cpu) }
#endif
#endif
#if !defined(NAPI) || defined(DOWN)
	:: atomic { cpu == 0 && nempty(softnet0) -> begin(0) };
		backlog(0, softnet0, f, late, done);
		ended(0)
	:: atomic { cpu == 1 && nempty(softnet1) -> begin(1) };
		backlog(1, softnet1, f, late, done);
		ended(1)
#endif
	od
}

active proctype target()
{
	byte f, done;
	bool late;

end:	do
	:: atomic { !dead && nempty(softnet2) -> begin(TARGET) };
		backlog(2, softnet2, f, late, done);
		end(TARGET)
	od
}

#ifdef DOWN
active proctype kernel()
{
	byte f;
	bool late, to_1;

#ifndef NO_DOWN
	down = true;
#endif
	atomic { !in_softirq[0] && !in_softirq[1] && !in_softirq[TARGET] -> dead = true };
	/* dev_cpu_dead(), which runs on one of the other CPUs. */
	if
	:: to_1 = true
	:: true
	fi;
	do
	:: atomic { softnet2 ? f, late ->
		    if
		    :: to_1 -> softnet1 ! f, true; tail[1]++
		    :: !to_1 -> softnet0 ! f, true; tail[0]++
#ifdef LOSSES
		    :: count_gone(TARGET)
#endif
		    fi;
		    f = 0 };
		head[2]++
	:: empty(softnet2) -> break
	od
}

active proctype leaving()
{
end:	do
#ifdef NO_HELD
	/* The counters alone. */
	:: down && dead && head[2] >= tail[2] ->
#else
	:: down && dead && !held ->
#endif
		passed = true;
		down = false
	od
}
#endif

#ifdef LOST
active proctype thief()
{
	lost = true
}

/* After a grace period all that has been decided before has come. */
active proctype user_space()
{

end:	do
	:: flagged ->
#ifndef NO_GRACE
#ifdef NAPI
		(!owner[0]);
#endif
		(!sending);
#endif
		atomic { lost = false; flagged = false }
	od
}
#endif

init
{
	atomic {
		frames_left[0] = FRAMES;
		frames_left[1] = OTHERS;
		run receiving(0);
		run receiving(1)
	};
	/* Not by never moving: where nothing waits any more, the flow may leave. */
	timeout;
	since[0] = 0; since[1] = 0;
	d_step {
		settled();
		if
		:: proven -> passed_up(1 - queue)
		:: else
		fi
	};
	assert(proven || flagged || (location == TARGET && passed))
}

#ifdef REACH_OUT
ltl { [] !moved_out }
#endif
#ifdef REACH_BACK
ltl { [] !(moved_out && moved_in) }
#endif
