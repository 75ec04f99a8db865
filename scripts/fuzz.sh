#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# fuzz.sh [FRAMES]: runs the fuzz tests at length: FRAMES packets (1e9) through the parser, natively
# and in the kernel, a hundredth of that under libFuzzer with ASan and UBSan, and a ten-thousandth of
# that as requests to the control socket and as configuration files. Needs root.
set -euo pipefail
cd "$(dirname "$0")/.."

export RXSTEER_FRAMES=${1:-1e9}
scripts/setup.sh build test
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh

programs=(--test native --test end_to_end)
builder cargo test --release -p rxsteer "${programs[@]}" --no-run
exec cargo test --release -p rxsteer "${programs[@]}" -- fuzz --test-threads=1 --nocapture
