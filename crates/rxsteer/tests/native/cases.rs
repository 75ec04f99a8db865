// SPDX-License-Identifier: MIT OR Apache-2.0
//! Configuration of the property tests.

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use rxlab::testing::short_or_long;

/// Random cases, different in each execution, a quarter of them in `make test`; failures are not stored in
/// a file.
pub fn config(cases: u32) -> Config {
    Config {
        cases: short_or_long(cases.div_ceil(4), cases),
        failure_persistence: None,
        max_shrink_iters: 20_000,
        ..Config::default()
    }
}

/// Values of a strategy that are the same in every execution.
pub fn fixed<S: Strategy>(strategy: S) -> impl Iterator<Item = S::Value> {
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(config(1), rng);
    std::iter::repeat_with(move || strategy.new_tree(&mut runner).unwrap().current())
}
