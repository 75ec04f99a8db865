// SPDX-License-Identifier: MIT OR Apache-2.0
//! The share of time in which a CPU is not idle, from the scheduler's averages.

use super::world::WHOLE;
use crate::cases::{config, fixed};
use proptest::prelude::*;
use rxsteer::datapath::native::{load_busy, load_share};

/// A CPU's capacity, and the utilisation by tasks and by interrupts in the scheduler's unit.
fn utilisation() -> impl Strategy<Value = [u32; 3]> {
    let parts = |capacity| (Just(capacity), 0..=capacity, 0..=capacity);
    (1..=WHOLE).prop_flat_map(parts).prop_map(<[u32; 3]>::from)
}

/// A utilisation as a share of the CPU's time.
fn share(utilisation: u32, capacity: u32) -> u32 {
    load_share(utilisation.into(), capacity.into())
}

/// Whether `busy` is effective_cpu_util() of the kernel as a share of the CPU's time, except for
/// the rounding down of two shares and their product.
fn is_the_kernels(busy: u32, [capacity, tasks, irq]: [u32; 3]) -> bool {
    let [capacity, tasks, irq] = [capacity, tasks, irq].map(f64::from);
    let effective = irq + tasks * (capacity - irq) / capacity;
    let difference = effective / capacity * f64::from(WHOLE) - f64::from(busy);
    (-1e-6..3.0).contains(&difference)
}

proptest! {
    #![proptest_config(config(3000))]

    #[test]
    fn a_cpu_is_as_busy_as_the_scheduler_says(utilisation in utilisation()) {
        let [capacity, tasks, irq] = utilisation;
        let busy = load_busy(share(tasks, capacity), share(irq, capacity));
        prop_assert!(is_the_kernels(busy, utilisation), "{}", busy);
    }
}

/// The control: neither the sum nor shares of the fastest CPU's time are.
#[test]
fn other_formulas_differ() {
    let wrong = |busy: fn([u32; 3]) -> u32| {
        let mut cases = fixed(utilisation()).take(100);
        cases.any(|utilisation| !is_the_kernels(busy(utilisation), utilisation))
    };
    assert!(wrong(|[capacity, tasks, irq]| {
        WHOLE.min(share(tasks, capacity) + share(irq, capacity))
    }));
    assert!(wrong(|[_, tasks, irq]| load_busy(tasks, irq)));
}

#[test]
fn interrupts_leave_the_rest_to_tasks() {
    for tasks in [0, 1, 300, WHOLE] {
        assert_eq!(load_busy(tasks, 0), tasks);
        assert_eq!(load_busy(tasks, WHOLE), WHOLE);
        assert_eq!(load_busy(tasks, WHOLE / 2), WHOLE / 2 + tasks / 2);
    }
}

/// What the scheduler shows of a CPU that is never idle exceeds a small CPU's capacity.
#[test]
fn a_small_cpu_has_less_time() {
    assert_eq!(
        [223, 446, 1024].map(|util| share(util, 446)),
        [512, 1024, 1024]
    );
}
