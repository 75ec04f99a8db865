#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# install.sh PREFIX PROGRAM...: builds rxsteer or rxlab and puts them into PREFIX/bin, the man pages of
# rxsteer into PREFIX/share/man/man8, completions where shells look for them, and an example of its
# configuration into PREFIX/share/doc/rxsteer.
set -euo pipefail
cd "$(dirname "$0")/.."

prefix=$1
shift
scripts/setup.sh build
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh
for program in "$@"; do
    builder cargo build --release --package "$program"
    install -D -m 755 "${CARGO_TARGET_DIR:-target}/release/$program" "$prefix/bin/$program"
    echo "installed $prefix/bin/$program"
done
if [[ " $* " == *" rxsteer "* ]]; then
    completions=$(mktemp -d)
    trap 'rm -r "$completions"' EXIT
    share=$prefix/share
    "$prefix/bin/rxsteer" man "$share/man/man8" "$completions"
    install -D -m 644 "$completions/rxsteer.bash" "$share/bash-completion/completions/rxsteer"
    install -D -m 644 "$completions/_rxsteer" "$share/zsh/site-functions/_rxsteer"
    install -D -m 644 "$completions/rxsteer.fish" "$share/fish/vendor_completions.d/rxsteer.fish"
    echo "installed $share/man/man8/rxsteer*.8, and completions for bash, zsh and fish"
    install -d "$share/doc/rxsteer"
    "$prefix/bin/rxsteer" check --example >"$share/doc/rxsteer/rxsteer.toml"
    echo "installed $share/doc/rxsteer/rxsteer.toml"
fi
