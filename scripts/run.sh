#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# run.sh COMMAND...: builds rxlab and runs one of its commands, as root if possible.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh build "$1"
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh
builder cargo build --release

rxlab=${CARGO_TARGET_DIR:-target}/release/rxlab
# Without a terminal, use sudo only if it needs no password. Without root, rxlab itself prints what
# is missing.
if [ "$(id -u)" != 0 ] && command -v sudo >/dev/null && { [ -t 0 ] || sudo -n true 2>/dev/null; }; then
    echo "Needs root: sudo $rxlab $*" >&2
    exec sudo "$rxlab" "$@"
fi
exec "$rxlab" "$@"
