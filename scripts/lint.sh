#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# lint.sh: checks layout, warnings and licences; changes nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh build lint
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh

builder cargo fmt --check
builder cargo clippy --all-targets -- -D warnings

shopt -s nullglob
clang-format --dry-run -Werror crates/*/bpf/*.[ch] crates/*/bpf/*/*.[ch] crates/*/fuzz/*.c
shellcheck scripts/*.sh .ci/run dist/debian/*.{prerm,postrm}

# Every file names its licence, except those that can't hold a comment, and the licences.
files=$(builder git ls-files --cached --others --exclude-standard)
unlicensed=0
while IFS= read -r file; do
    [ -f "$file" ] || continue # deleted, not yet committed
    case $file in
    Cargo.lock | LICENSE* | *.json) continue ;;
    crates/*/bpf/*) licence='(GPL-2.0-only OR BSD-2-Clause)' ;;
    *) licence='MIT OR Apache-2.0' ;;
    esac
    if ! head -n 3 "$file" | grep -qF "SPDX-License-Identifier: $licence"; then
        echo "$file: its first lines lack \"SPDX-License-Identifier: $licence\"" >&2
        unlicensed=1
    fi
done <<<"$files"
exit $unlicensed
