#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# faults.sh [MINUTES]: runs random schedules of tests/end_to_end/faults/ for so many minutes, such as 60 or 0.5.
# RXSTEER_FAULTS_SEED=N runs one schedule again. Needs root. What is left behind is searched on the
# whole machine: leave it alone.
set -euo pipefail
cd "$(dirname "$0")/.."

export RXSTEER_FAULTS_MINUTES=${1:-60}
scripts/setup.sh build test
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh

builder cargo test -p rxsteer --test end_to_end --no-run
exec cargo test -p rxsteer --test end_to_end -- faults:: --ignored --test-threads=1 --nocapture
