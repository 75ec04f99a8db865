# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# Sourced: finds cargo, and defines `builder`, which runs a command as the user who owns the build.
#
# Under sudo, cargo is the invoking user's: root's PATH does not have it, and what root built or
# downloaded there the user could not touch again.

as_builder=()
if [ "$(id -u)" = 0 ] && [ -n "${SUDO_USER:-}" ] && [ "$SUDO_USER" != root ]; then
    user_home=$(getent passwd "$SUDO_USER" | cut -d: -f6)
    if [ -x "$user_home/.cargo/bin/cargo" ]; then
        export CARGO_HOME=$user_home/.cargo RUSTUP_HOME=$user_home/.rustup
        export PATH=$CARGO_HOME/bin:$PATH
        # sudo replaces PATH whatever it is asked to keep.
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
