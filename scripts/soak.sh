#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# soak.sh [HOURS]: runs tests/end_to_end/soak.rs and its control (half a minute) for so many hours, such as 8 or
# 0.1. Needs root. Maps, programs and slabs are counted for the whole machine: leave it alone.
set -euo pipefail
cd "$(dirname "$0")/.."

export RXSTEER_SOAK_HOURS=${1:-8}
scripts/setup.sh build test
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh

builder cargo test -p rxsteer --test end_to_end --no-run
exec cargo test -p rxsteer --test end_to_end -- soak:: --ignored --test-threads=1 --nocapture
