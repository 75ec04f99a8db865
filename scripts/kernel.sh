#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# kernel.sh SERIES[-amd64]: prints the folder with Debian's cloud kernel of a series (6.1, 7.3): the
# image (vmlinuz) and the modules (lib/modules/), unpacked below target/guest/. With -amd64, Debian's
# kernel for every machine, which has modules that the cloud kernel lacks, such as PPP.
#
# An existing kernel is kept even if Debian has a newer one. The machine's own suites come first,
# since they have the security updates of their series; then later ones.
set -euo pipefail
shopt -s inherit_errexit

series=${1-}
if ! [[ $series =~ ^([0-9]+\.[0-9]+)(-amd64)?$ ]]; then
    echo "usage: kernel.sh SERIES[-amd64] (6.1, 6.12, ..., 6.1-amd64)" >&2
    exit 2
fi
series=${BASH_REMATCH[1]}
flavour=-cloud-amd64
# Before it, the other flavours (cloud, rt) have no digit.
[ -z "${BASH_REMATCH[2]}" ] || flavour='[0-9]-amd64'
cd "$(dirname "$0")/.."
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh
# shellcheck source=scripts/debian.sh
. scripts/debian.sh

cache=$(realpath -m "${CARGO_TARGET_DIR:-target}")/guest
builder mkdir -p "$cache"
folder=$(find "$cache" -maxdepth 1 -name "linux-image-$series.*$flavour" | sort -V | tail -n 1)
if [ -n "$folder" ]; then
    echo "$folder"
    exit
fi
dir=$(builder mktemp -d "$cache/kernel.XXXXXX")
trap 'rm -rf "$dir"' EXIT

# Prints the packages of the newest kernel of the series in these suites, the image's first; none if
# a package is missing: modules of an old kernel may be removed before its image.
#
# Until 6.18 the image's package contains the modules; since 6.19 it depends on one package for the
# kernel and one for the modules.
packages() {
    local apt=("$@") image parts
    for image in $("${apt[@]}" apt-cache search --names-only \
        "^linux-image-${series//./\\.}\.[^ ]*$flavour$" | cut -d' ' -f1 | sort -rV); do
        # Packages in angle brackets don't exist.
        parts=$("${apt[@]}" apt-cache depends "$image" |
            sed -n -E 's/^ *Depends: (<?linux-(binary|modules)-.*)/\1/p')
        if [[ $parts = *\<* ]]; then
            echo "$image: its modules are no longer there." >&2
            continue
        fi
        echo "$image" "$parts"
        return
    done
}

# Downloads the packages by the given apt, if it has any.
download() {
    local apt=("$@") found
    found=$(packages "${apt[@]}")
    [ -n "$found" ] || return
    # shellcheck disable=SC2086 # a list of names
    (cd "$dir" && "${apt[@]}" apt-get -q -o APT::Sandbox::User=root download $found) >&2
    echo "${found%% *}" >"$dir/name"
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

own() {
    # A fresh machine has no package lists, an old one outdated ones.
    download builder || {
        [ -z "$(packages builder)" ] && [ -n "$(apt-cache search --names-only '^linux-image-')" ] &&
            return 1
        as_root apt-get -q update >&2
        download builder
    }
}

own || download debian_apt trixie trixie-backports sid -- ||
    download debian_apt bookworm bookworm-backports experimental -- || {
    echo "Debian has no package linux-image-$series.*$flavour: choose 6.1, 6.12, 6.18 or 7.3." >&2
    exit 1
}

for package in "$dir"/*.deb; do
    builder dpkg-deb -x "$package" "$dir/kernel"
done
shopt -s nullglob
# The location of modules differs by suite.
tree=$(echo "$dir"/kernel/{,usr/}lib/modules/*/kernel)
image=$(find "$dir/kernel" -name 'vmlinuz*')
version=$(basename "$(dirname "$tree")")
builder mkdir -p "$dir/folder/lib/modules"
builder mv "$image" "$dir/folder/vmlinuz"
builder mv "${tree%/kernel}" "$dir/folder/lib/modules/"
tree=$dir/folder/lib/modules/$version/kernel
# All modules are in the guest's memory: only drivers of devices that a guest has are kept, which are also
# those of guest.sh's network cards, and what they depend on.
# $1: a folder below drivers/; $2...: what is kept there.
keep() {
    local folder=$tree/drivers/$1 name
    local unless=()
    shift
    for name in "$@"; do unless+=(! -name "$name"); done
    [ ! -d "$folder" ] || builder find "$folder" -mindepth 1 -maxdepth 1 "${unless[@]}" -exec rm -r {} +
}
keep . net virtio ptp pps dca i2c usb
keep usb core host common
keep i2c algos 'i2c-core*'
keep net/ethernet intel realtek
keep net/ethernet/intel e1000e igb
keep net/ethernet/realtek '8139*'
keep net/usb 'usbnet*' 'cdc_ether*'
builder rm -rf "$tree"/{drivers/net/wireless,fs,sound}
# Busybox would pass a compressed module to the kernel first, which logs an error.
builder find "$tree" -name '*.ko.xz' -exec busybox unxz {} +
builder find "$tree" -name '*.ko.zst' -exec zstd -q -d --rm {} +
builder busybox depmod -b "$dir/folder" "$version"
builder mv "$dir/folder" "$cache/$(<"$dir/name")"
echo "$cache/$(<"$dir/name")"
