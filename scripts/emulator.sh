#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# emulator.sh: prints the path of the emulator with counted time (testbed/). Builds it first if it
# is missing or its sources have changed: QEMU from Debian's source package with testbed/qemu.patch,
# below target/testbed/.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "$0")/.."

suite=trixie
version=10.0
meson=1.8.1

scripts/setup.sh emulator
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh
# shellcheck source=scripts/debian.sh
. scripts/debian.sh

cache=$(realpath -m "${CARGO_TARGET_DIR:-target}")/testbed
emulator=$cache/qemu/qemu-system-x86_64
ours=$(cat testbed/* scripts/emulator.sh | sha256sum)
if [ -x "$emulator" ] && [ "$(cat "$cache/qemu/ours" 2>/dev/null)" = "$ours" ]; then
    echo "$emulator"
    exit
fi

builder mkdir -p "$cache"
dir=$(builder mktemp -d "$cache/build.XXXXXX")
trap 'rm -rf "$dir"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# step WORDS COMMAND...: prints WORDS; prints the end of the command's output if it fails.
step() {
    echo "Emulator: $1." >&2
    shift
    "$@" >"$dir/log" 2>&1 || {
        tail -n 30 "$dir/log" >&2
        return 1
    }
}

source_package() {
    local package
    package=$(debian_apt "$suite" -- apt-cache showsrc qemu |
        sed -n "s/^Version: \(.*:$version\..*\)/\1/p" | sort -V | tail -n 1)
    if [ -z "$package" ]; then
        echo "Debian's $suite has no source package of QEMU $version." >&2
        return 1
    fi
    (cd "$dir" && debian_apt "$suite" -- apt-get -q source --download-only "qemu=$package")
    builder dpkg-source -x "$dir"/qemu_*.dsc "$dir/source"
}

# Without firmware, which comes from Debian's packages.
patch_source() {
    builder cp testbed/counted-time.c "$dir/source/accel/tcg/"
    builder cp testbed/counted-time.h "$dir/source/include/system/"
    builder patch --strip 1 --directory "$dir/source" <testbed/qemu.patch
    builder tee "$dir/source/pc-bios/meson.build" <<<"roms = []"
}

configure() {
    builder python3 -m venv "$dir/venv"
    builder "$dir/venv/bin/pip" install --quiet "meson==$meson"
    builder mkdir "$dir/source/build"
    (cd "$dir/source/build" && PATH="$dir/venv/bin:$PATH" builder ../configure \
        --python="$dir/venv/bin/python3" --target-list=x86_64-softmmu --without-default-features \
        --enable-tcg --enable-fdt=system)
}

step "gets the source of QEMU $version (150 MB)" source_package
step "patches it" patch_source
step "configures it" configure
step "builds it, several minutes" builder ninja -C "$dir/source/build" qemu-system-x86_64
builder mkdir -p "$cache/qemu"
builder mv "$dir/source/build/qemu-system-x86_64" "$emulator"
builder tee "$cache/qemu/ours" <<<"$ours" >/dev/null
echo "$emulator"
