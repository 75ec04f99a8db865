#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# install.sh PREFIX: builds rxsteer and puts it into PREFIX/bin.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh build
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh
builder cargo build --release
install -D -m 755 "${CARGO_TARGET_DIR:-target}/release/rxsteer" "$1/bin/rxsteer"
echo "installed $1/bin/rxsteer"
