#!/bin/busybox sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=dash
#
# guest-init.sh: process 1 of guest.sh's virtual machine. Runs /run-this, writes its exit status to
# the second serial port, and powers off.

# Before those of busybox, which has a tc of its own.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
busybox mount -t proc proc /proc
busybox --install -s /bin

mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
# As udev does: opening it loads the module.
mkdir -p /dev/net && mknod /dev/net/tun c 10 200
mount -t tmpfs tmpfs /run
mount -t bpf -o mode=0700 bpf /sys/fs/bpf
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tracefs tracefs /sys/kernel/tracing
ip link set lo up
stty -F /dev/console -onlcr
# shellcheck disable=SC3045 # busybox's shell has -l
ulimit -l unlimited

caches=$(sort -u /sys/devices/system/cpu/cpu*/cache/index3/shared_cpu_list | tr '\n' ' ')
echo "Linux $(uname -r), CPUs by last-level cache: $caches"

# Drivers of the two network devices; machines of testbed.sh have none.
if [ -s /nics ]; then
    while read -r module; do
        modprobe "$module"
    done </nics
    names() { find /sys/class/net/*/device -prune 2>/dev/null | cut -d / -f 5; }
    # A USB bus is enumerated meanwhile.
    for _ in $(seq 50); do
        [ "$(names | wc -l)" -lt 2 ] || break
        usleep 200000
    done
    RXSTEER_NICS=$(names | tr '\n' ' ')
    export RXSTEER_NICS
fi
sh /run-this
status=$?
echo $status >/dev/ttyS1
poweroff -f
