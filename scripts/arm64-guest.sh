#!/usr/bin/busybox sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# Process 1 of arm64.sh's machine, which it runs as bash: rxsteer examines the host, steers a veth, and stops.
if [ -z "${BASH_VERSION-}" ]; then
    # Busybox has an ip and a bash of its own.
    export PATH=/usr/bin:/usr/sbin
    busybox mount -t proc proc /proc
    /usr/bin/busybox --install -s /usr/sbin
    mount -t sysfs sysfs /sys
    mount -t devtmpfs devtmpfs /dev
    mount -t tmpfs tmpfs /run
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    /usr/bin/bash "$0"
    echo "exit status $?"
    poweroff -f
fi
set -euo pipefail

# The sum of a counter of `rxsteer status` over the queues.
counter() {
    rxsteer status --json | tr ',' '\n' | sed -n "s/.*\"$1\": *\([0-9]*\).*/\1/p" | awk '{ sum += $1 } END { print sum + 0 }'
}
fail() {
    echo "FAILED: $*"
    exit 1
}
# shellcheck source=scripts/until.sh
. "$(dirname "$0")/until.sh"

insmod /veth.ko
ip netns add far
ip link add wan type veth peer name far netns far
ip address add 198.18.0.1/24 dev wan
ip link set lo up
ip link set wan up
ip -netns far address add 198.18.0.2/24 dev far
ip -netns far link set far up
echo "Linux $(uname -r) on $(uname -m), $(rxsteer --version)"
rxsteer doctor

rxsteer run wan --prepare --policy rps --rps-cpus 0-1 &
answers() { rxsteer status >/dev/null 2>&1; }
until_true "it steers" answers
# 200 flows of 5 datagrams. Nobody listens, and the sender is told.
ip netns exec far bash -c 'for flow in {1..200}; do
    exec 3>/dev/udp/198.18.0.1/9
    for _ in {1..5}; do echo >&3 || true; done
done' 2>/dev/null
steered() { [ "$(counter redirected)" -gt 0 ] && [ "$(counter received)" -ge 500 ]; } 2>/dev/null
until_true "frames are redirected" steered
rxsteer status
kill %1
wait %1
[ "$(ip -details link show wan | grep -c xdp)" = 0 ] || exit 1
echo "stopped: no program is left"
