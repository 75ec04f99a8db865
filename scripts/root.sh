#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# root.sh NAME: makes a root folder with Debian's base system and some packages, once, and prints its path.
# Needs root. NAME says what for: `service` installs rxsteer and boots, `static` builds static programs,
# `arm64` boots in the emulator of another architecture: it has a kernel, and no maintainer script has run.
#
# The folder stays as it is: what changes it mounts an overlay above it.
set -euo pipefail
shopt -s inherit_errexit

name=${1-}
variant=minbase
architectures=$(dpkg --print-architecture)
case $name in
service)
    suite=own # of the libraries that packages of this machine need
    packages=(systemd-sysv dbus libelf1 zlib1g iproute2 procps ethtool jq)
    ;;
static)
    # The only suite with a Rust as new as rxsteer needs, of one version for both architectures.
    suite=sid
    packages=(cargo cargo-cyclonedx rustc rustfmt clang gcc make pkgconf ca-certificates)
    packages+=({libc6-dev,libstd-rust-dev,libelf-dev,zlib1g-dev,libzstd-dev}:{amd64,arm64})
    packages+=(gcc-aarch64-linux-gnu)
    ;;
arm64)
    suite=trixie
    packages=(linux-image-cloud-arm64 busybox-static bash iproute2)
    architectures=arm64
    variant=extract
    ;;
*)
    echo "usage: root.sh service|static|arm64" >&2
    exit 2
    ;;
esac
cd "$(dirname "$0")/.."
scripts/setup.sh dist
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh
# shellcheck source=scripts/debian.sh
. scripts/debian.sh

# shellcheck source=/dev/null
[ "$suite" != own ] || suite=$(. /etc/os-release && echo "${VERSION_CODENAME-}")
root=$(realpath -m "${CARGO_TARGET_DIR:-target}")/root/$name
if [ -e "$root/made" ]; then
    echo "$root/files"
    exit
fi
rm -rf "$root"
mkdir -p "$root"
debian_apt "$suite" -- true
for package in "${packages[@]}"; do
    [[ $package != *:* || ,$architectures, == *,"${package#*:}",* ]] || architectures+=,${package#*:}
done
# The machine's settings for downloads, such as proxies.
apt-config dump | grep '^Acquire::' >"$root/apt.conf"
mmdebstrap --variant=$variant --mode=root --format=directory --aptopt="$root/apt.conf" \
    --architectures="$architectures" --include="$(IFS=, && echo "${packages[*]}")" \
    "$suite" "$root/files" "$debian_state/$suite/debian.sources" \
    >"$root/log" 2>&1 || {
    cat "$root/log" >&2
    exit 1
}
touch "$root/made"
echo "$root/files"
