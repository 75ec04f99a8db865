/* SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef ACCEL_TCG_COUNTED_TIME_H
#define ACCEL_TCG_COUNTED_TIME_H

extern bool counted_time;

void counted_time_init(void);
int64_t counted_time_ns(void);
int64_t counted_time_insns_of(int64_t bytes);
void counted_time_wait(CPUState *cpu);
void counted_time_kick(CPUState *cpu);
void counted_time_interrupt(CPUState *cpu);
void counted_time_join(CPUState *cpu);
void counted_time_leave(CPUState *cpu);
void counted_time_charge_pause(CPUState *cpu);

#endif
