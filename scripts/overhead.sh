#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# overhead.sh: what a release build of the daemon takes itself: CPU time, memory, time to start
# (crates/rxsteer/tests/end_to_end/overhead.rs). Needs root.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh build
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh

builder cargo build --release --package=rxsteer --package=rxlab
builder cargo test --package=rxsteer --test end_to_end --no-run
RXSTEER_PROGRAM=$(realpath "${CARGO_TARGET_DIR:-target}/release/rxsteer")
export RXSTEER_PROGRAM
exec cargo test --package=rxsteer --test end_to_end -- overhead:: --ignored --nocapture
