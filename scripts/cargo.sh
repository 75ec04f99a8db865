# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# Sourced: finds cargo, and defines `builder`, which runs a command as the owner of the build.
#
# Under sudo, cargo is that of the invoking user: root's PATH lacks it, and the user could not
# change files that root has built or downloaded.

as_builder=()
if [ "$(id -u)" = 0 ] && [ -n "${SUDO_USER:-}" ] && [ "$SUDO_USER" != root ]; then
    user_home=$(getent passwd "$SUDO_USER" | cut -d: -f6)
    if [ -x "$user_home/.cargo/bin/cargo" ]; then
        export CARGO_HOME=$user_home/.cargo RUSTUP_HOME=$user_home/.rustup
        export PATH=$CARGO_HOME/bin:$PATH
        # sudo replaces PATH even with -E.
        as_builder=(sudo -E -H -u "$SUDO_USER" env "PATH=$PATH")
    fi
elif ! command -v cargo >/dev/null && [ -x "$HOME/.cargo/bin/cargo" ]; then
    export PATH=$HOME/.cargo/bin:$PATH
fi

if ! command -v cargo >/dev/null; then
    echo "Rust is missing (cargo is not in PATH): get it from https://rustup.rs" >&2
    exit 1
fi

builder() {
    "${as_builder[@]}" "$@"
}
