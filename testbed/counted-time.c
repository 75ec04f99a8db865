/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Counted time: the clocks of a guest follow the instructions that its vCPUs execute, and not the
 * clock of the host.
 *
 * A second of the guest is "mips" million instructions of each vCPU that is not halted, however long
 * the host takes for them, and whatever else the host does. vCPUs run in parallel within a quantum:
 * one that has executed its instructions waits until every other one has. So no two vCPUs are
 * further apart than a quantum, and all are equally fast.
 *
 * Switched on by the environment: COUNTED_TIME=mips=2000,quantum=8000,pause=50,copy=12
 *   mips     millions of instructions in a second of the guest
 *   quantum  ns
 *   pause    ns of the instruction PAUSE
 *   copy     bytes per ns of repeated string instructions, by which the kernel copies; 0: no time
 *
 * Lock order: BQL, then counted_lock. A vCPU that waits for the end of a quantum holds neither.
 */

#include "qemu/osdep.h"
#include "qemu/atomic.h"
#include "qemu/cutils.h"
#include "qemu/error-report.h"
#include "qemu/futex.h"
#include "qemu/main-loop.h"
#include "qemu/thread.h"
#include "qemu/timer.h"
#include "hw/core/cpu.h"
#include "system/counted-time.h"

#define VCPUS_MAX 256
#define SPINS 128 /* each a system call: some 0.3 us if nobody else wants the CPU */

typedef struct {
    bool active;         /* not halted: a quantum ends only when this one is through */
    uint32_t quantum;    /* that insns_left belongs to */
    uint32_t through;    /* the last quantum whose instructions are executed */
    int64_t end_ns;      /* of that quantum */
    int64_t left_ns;     /* its time when it was halted last */
    uint32_t futex;      /* changes when a wait is to end */
    bool waiting;
} CountedCPU;

bool counted_time;

static CountedCPU counted_cpus[VCPUS_MAX];
static QemuMutex counted_lock;
static uint32_t quantum = 1; /* wraps */
static int64_t quantum_end_ns;
static int nr_vcpus;
static unsigned nr_active;
static unsigned nr_running; /* of these, not yet through */
static bool ending;         /* somebody runs the timers between two quanta */
static QEMUBH *warp_bh;

static int64_t mips = 2000;
static int64_t quantum_ns = 8000;
static int64_t pause_ns = 50;
static int64_t copy_bytes_per_ns = 12;

static int64_t insns(int64_t ns)
{
    return ns * mips / 1000;
}

static CountedCPU *counted(CPUState *cpu)
{
    return &counted_cpus[cpu->cpu_index];
}

/* Its own time; only for the thread of an active vCPU. */
static int64_t cpu_now_ns(CPUState *cpu)
{
    return counted(cpu)->end_ns - (int64_t)cpu->neg.insns_left * 1000 / mips;
}

int64_t counted_time_ns(void)
{
    CPUState *cpu = current_cpu;

    if (cpu && counted(cpu)->active) {
        return cpu_now_ns(cpu);
    }
    return qatomic_read(&quantum_end_ns) - quantum_ns;
}

/* Of repeated string instructions that move so many bytes. */
int64_t counted_time_insns_of(int64_t bytes)
{
    return copy_bytes_per_ns ? insns(bytes) / copy_bytes_per_ns : 0;
}

void counted_time_charge_pause(CPUState *cpu)
{
    cpu->neg.insns_left -= insns(pause_ns);
}

static bool timers_are_due(void)
{
    return qemu_clock_deadline_ns_all(QEMU_CLOCK_VIRTUAL, QEMU_TIMER_ATTR_ALL) == 0;
}

static void stop_waiting(CountedCPU *c)
{
    qatomic_inc(&c->futex);
    if (qatomic_read(&c->waiting)) {
        qemu_futex_wake(&c->futex, 1);
    }
}

/* Takes what a new quantum gives. Called with the lock held, by the vCPU's own thread. */
static bool refill(CPUState *cpu)
{
    CountedCPU *c = counted(cpu);

    if (c->quantum == quantum) {
        return false;
    }
    cpu->neg.insns_left += insns((int64_t)(uint32_t)(quantum - c->quantum) * quantum_ns);
    c->quantum = quantum;
    c->end_ns = quantum_end_ns;
    return true;
}

/*
 * Ends quanta while nobody has to execute anything in them. Called with the lock held, which is
 * dropped while timers run.
 */
static void end_quantum(bool have_bql)
{
    while (nr_active && !nr_running && !ending) {
        ending = true;
        if (timers_are_due()) {
            qemu_mutex_unlock(&counted_lock);
            if (!have_bql) {
                bql_lock();
            }
            qemu_clock_run_timers(QEMU_CLOCK_VIRTUAL);
            if (!have_bql) {
                bql_unlock();
            }
            qemu_mutex_lock(&counted_lock);
        }
        ending = false;
        if (nr_running) {
            return;
        }
        quantum++;
        qatomic_set(&quantum_end_ns, quantum_end_ns + quantum_ns);
        for (int i = 0; i < nr_vcpus; i++) {
            CountedCPU *c = &counted_cpus[i];

            if (c->active) {
                nr_running++;
                stop_waiting(c);
            }
        }
    }
}

/*
 * Whether a wait ends within some microseconds. A host that is a guest itself takes longer to wake a
 * thread on an idle CPU than a quantum lasts; so one thread stays awake, behind those that have
 * something to execute.
 */
static bool soon(CountedCPU *c, uint32_t futex)
{
    static int nr_awake;
    bool changed = false;

    if (qatomic_fetch_inc(&nr_awake) == 0) {
        for (int i = 0; i < SPINS && !changed; i++) {
            sched_yield();
            changed = qatomic_read(&c->futex) != futex;
        }
    }
    qatomic_dec(&nr_awake);
    return changed;
}

/* Its instructions of this quantum are executed: waits for the next one, or for a kick. */
void counted_time_wait(CPUState *cpu)
{
    CountedCPU *c = counted(cpu);

    qemu_mutex_lock(&counted_lock);
    refill(cpu);
    while (cpu->neg.insns_left < 0 && !qatomic_read(&cpu->exit_request)) {
        uint32_t futex = qatomic_read(&c->futex);

        if (c->through != quantum) {
            c->through = quantum;
            nr_running--;
        }
        end_quantum(false);
        if (!refill(cpu)) {
            qemu_mutex_unlock(&counted_lock);
            if (!soon(c, futex)) {
                qatomic_set(&c->waiting, true);
                smp_mb();
                if (!qatomic_read(&cpu->exit_request)) {
                    qemu_futex_wait(&c->futex, futex);
                }
                qatomic_set(&c->waiting, false);
            }
            qemu_mutex_lock(&counted_lock);
            refill(cpu);
        }
    }
    qemu_mutex_unlock(&counted_lock);
}

/* Lets a vCPU that waits do something else. */
void counted_time_kick(CPUState *cpu)
{
    if (counted_time) {
        smp_mb();
        stop_waiting(counted(cpu));
    }
}

/*
 * Called with the lock held. "left": of the quantum's instructions; the rest is of the next. Never more than
 * it had when it was halted: its clock does not go back, whoever wakes it.
 */
static void activate(CPUState *cpu, int64_t left)
{
    CountedCPU *c = counted(cpu);

    left = MIN(left, insns(quantum_end_ns - c->left_ns));
    c->active = true;
    nr_vcpus = MAX(nr_vcpus, cpu->cpu_index + 1);
    c->quantum = quantum;
    c->end_ns = quantum_end_ns;
    cpu->neg.insns_left = left;
    nr_active++;
    if (left > 0) {
        c->through = quantum - 1;
        nr_running++;
    } else {
        c->through = quantum;
    }
}

/*
 * An interrupt for another vCPU; with the BQL. Active from now on, not from when its thread runs: so
 * that is nothing that the guest could see.
 */
void counted_time_interrupt(CPUState *cpu)
{
    CPUState *sender = current_cpu;
    int64_t left = 0;

    if (!counted_time) {
        return;
    }
    qemu_mutex_lock(&counted_lock);
    if (sender && sender != cpu && counted(sender)->active && !ending) {
        left = sender->neg.insns_left;
    }
    if (!counted(cpu)->active) {
        activate(cpu, left);
        end_quantum(true);
    }
    qemu_mutex_unlock(&counted_lock);
}

/* It is going to execute instructions; with or without the BQL. */
void counted_time_join(CPUState *cpu)
{
    if (!counted_time || qatomic_read(&counted(cpu)->active)) {
        return;
    }
    qemu_mutex_lock(&counted_lock);
    /* An interrupt may have come first: it has the BQL, and perhaps not the caller. */
    if (!counted(cpu)->active) {
        activate(cpu, 0);
    }
    qemu_mutex_unlock(&counted_lock);
}

/*
 * It is halted; with the BQL. Afterwards it may no longer be: the timers that run now can be its own, and an
 * interrupt from its own thread wakes nobody.
 */
void counted_time_leave(CPUState *cpu)
{
    CountedCPU *c = counted(cpu);

    if (!counted_time || !c->active) {
        return;
    }
    qemu_mutex_lock(&counted_lock);
    c->left_ns = cpu_now_ns(cpu);
    c->active = false;
    nr_active--;
    if (c->through != quantum) {
        nr_running--;
    }
    end_quantum(true);
    if (!nr_active) {
        qemu_bh_schedule(warp_bh);
    }
    qemu_mutex_unlock(&counted_lock);
}

/* All vCPUs are halted: goes on to the next timer at once. In the main loop, with the BQL. */
static void warp(void *opaque)
{
    int64_t deadline;

    qemu_mutex_lock(&counted_lock);
    if (nr_active) {
        qemu_mutex_unlock(&counted_lock);
        return;
    }
    deadline = qemu_clock_deadline_ns_all(QEMU_CLOCK_VIRTUAL, QEMU_TIMER_ATTR_ALL);
    if (deadline > 0) {
        qatomic_set(&quantum_end_ns, quantum_end_ns + deadline);
    }
    qemu_mutex_unlock(&counted_lock);
    if (deadline >= 0) {
        qemu_clock_run_timers(QEMU_CLOCK_VIRTUAL);
        qemu_bh_schedule(warp_bh);
    }
}

static void parse(const char *text)
{
    g_auto(GStrv) options = g_strsplit(text, ",", 0);

    for (char **option = options; *option; option++) {
        g_auto(GStrv) pair = g_strsplit(*option, "=", 2);
        const struct {
            const char *name;
            int64_t *value;
            int64_t min;
        } known[] = {
            { "mips", &mips, 1 },
            { "quantum", &quantum_ns, 100 },
            { "pause", &pause_ns, 0 },
            { "copy", &copy_bytes_per_ns, 0 },
        };
        bool found = false;

        for (size_t i = 0; pair[0] && pair[1] && i < ARRAY_SIZE(known); i++) {
            if (g_str_equal(pair[0], known[i].name)) {
                found = !qemu_strtoi64(pair[1], NULL, 10, known[i].value) &&
                        *known[i].value >= known[i].min;
            }
        }
        if (!found) {
            error_report("COUNTED_TIME: '%s' is no option", *option);
            exit(2);
        }
    }
}

void counted_time_init(void)
{
    const char *text = getenv("COUNTED_TIME");

    if (!text) {
        return;
    }
    parse(text);
    qemu_mutex_init(&counted_lock);
    quantum_end_ns = quantum_ns;
    warp_bh = qemu_bh_new(warp, NULL);
    counted_time = true;
    qemu_clock_is_counted = true;
}
