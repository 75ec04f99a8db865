#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# root.sh NAME: makes a root folder with Debian's base system and some packages, once, and prints its path.
# Needs root. NAME says what for: `service` installs rxsteer and boots.
#
# The folder stays as it is: what changes it mounts an overlay above it.
set -euo pipefail
shopt -s inherit_errexit

name=${1-}
case $name in
service)
    suite=own # of the libraries that packages of this machine need
    packages=(systemd-sysv dbus libelf1 zlib1g iproute2 procps ethtool jq)
    ;;
*)
    echo "usage: root.sh service" >&2
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
# The machine's settings for downloads, such as proxies.
apt-config dump | grep '^Acquire::' >"$root/apt.conf"
mmdebstrap --variant=minbase --mode=root --format=directory --aptopt="$root/apt.conf" \
    --include="$(IFS=, && echo "${packages[*]}")" \
    "$suite" "$root/files" "$debian_state/$suite/debian.sources" \
    >"$root/log" 2>&1 || {
    cat "$root/log" >&2
    exit 1
}
touch "$root/made"
echo "$root/files"
