#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# install.sh PREFIX PROGRAM...: builds rxsteer or rxlab and puts them into PREFIX/bin, their man pages into
# PREFIX/share/man/man8, completions where shells look for them, and an example of rxsteer's
# configuration into PREFIX/share/doc/rxsteer.
set -euo pipefail
cd "$(dirname "$0")/.."

prefix=$1
shift
share=$prefix/share
scripts/setup.sh build
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh
completions=$(mktemp -d)
trap 'rm -r "$completions"' EXIT
builder cargo build --release "${@/#/--package=}"
for program in "$@"; do
    install -D -m 755 "${CARGO_TARGET_DIR:-target}/release/$program" "$prefix/bin/$program"
    echo "installed $prefix/bin/$program"
    "$prefix/bin/$program" man "$share/man/man8" "$completions"
    install -D -m 644 "$completions/$program.bash" "$share/bash-completion/completions/$program"
    install -D -m 644 "$completions/_$program" "$share/zsh/site-functions/_$program"
    install -D -m 644 "$completions/$program.fish" "$share/fish/vendor_completions.d/$program.fish"
    echo "installed $share/man/man8/$program*.8, and completions for bash, zsh and fish"
done
if [[ " $* " == *" rxsteer "* ]]; then
    install -d "$share/doc/rxsteer"
    "$prefix/bin/rxsteer" check --example >"$share/doc/rxsteer/rxsteer.toml"
    echo "installed $share/doc/rxsteer/rxsteer.toml"
fi
