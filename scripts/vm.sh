# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash disable=SC2154
#
# Sourced, after cargo.sh: makes the files of a virtual machine below $dir/root, and boots it in the
# emulator $qemu, which the sourcing script sets.
#
# Time is counted in instructions ($COUNTED_TIME, testbed/counted-time.c): a CPU has about a third
# of the speed of a server's, whatever the load of this machine.
#
# The machine has busybox, added files, and guest-init.sh as its first process, which runs
# /run-this.

: "${COUNTED_TIME:=mips=2000,quantum=8000,copy=12}"
export COUNTED_TIME

# Makes $dir, the folder of this run, in folder $1. Removes those of runs that were killed.
vm_dir() {
    local old pid
    builder mkdir -p "$1"
    for old in "$1"/run.[0-9]*.*; do
        pid=${old##*/run.}
        [ -e "/proc/${pid%.*}" ] || rm -rf "$old"
    done
    dir=$(builder mktemp -d "$1/run.$$.XXXXXX")
}

# Fills $dir/root with the files of every machine.
vm_root() {
    mkdir "$dir/root"
    mkdir "$dir/root"/{bin,sbin,dev,etc,proc,run,sys,tmp}
    echo root:x:0:0::/:/bin/sh >"$dir/root/etc/passwd"
    echo root:x:0: >"$dir/root/etc/group"
    cp "$(command -v busybox)" "$dir/root/bin/busybox"
    ln -s /bin/busybox "$dir/root/sbin/modprobe" # what the kernel calls
    cp scripts/guest-init.sh "$dir/root/init"
    local tool path
    for tool in nft wg tc nsd dnsperf nginx wrk; do
        if path=$(PATH=$PATH:/usr/sbin:/sbin command -v $tool); then
            vm_add "$path"
        fi
    done
}

# Copies program $1 and its libraries to the same path, or the program to $2, without debug
# information.
vm_add() {
    local to=${2:-$1}
    mkdir -p "$dir/root/${to%/*}"
    strip --strip-debug -o "$dir/root/$to" "$1"
    # ldd fails on a static program, which has no libraries.
    { ldd "$1" || true; } 2>/dev/null | sed -n 's/[^/]*\(\/[^ ]*\).*/\1/p' |
        xargs -r cp --dereference --parents --target-directory "$dir/root"
}

vm_pack() {
    find "$@" | cpio --create --format newc --owner 0:0 --quiet
}

# vm_boot KERNEL CPUS SOCKETS COMMAND-LINE ARGUMENT...: boots the kernel in folder KERNEL, with CPUs
# below SOCKETS last-level caches, and waits for its end, at most $limit (status 124). ARGUMENT...
# are those of the emulator $qemu. $vm is its process, for a trap to end.
vm_boot() {
    local folder=$1 cpus=$2 sockets=$3 options=$4 status=0 size
    # The counted clock needs no watchdog.
    local clock="tsc=reliable clocksource=tsc no_timer_check nowatchdog rcupdate.rcu_cpu_stall_suppress=1"
    shift 4
    {
        (cd "$folder" && vm_pack lib)
        (cd "$dir/root" && vm_pack .)
    } >"$dir/initramfs"
    # During unpacking the archive and its files are both in memory.
    size=$((2048 + $(stat -c %s "$dir/initramfs") * 3 / 2**20))
    # In the background, since a trap waits for a foreground process. setpriv
    # handles SIGKILL, which runs no trap.
    setpriv --pdeathsig TERM timeout --kill-after=5 "$limit" "$qemu" \
        -L /usr/share/qemu -L /usr/share/seabios \
        -accel "tcg,thread=multi" -cpu "max,l3-cache=on" -m "$size" \
        -smp "cpus=$cpus,sockets=$sockets,cores=$((cpus / sockets)),threads=1" \
        -kernel "$folder/vmlinuz" -initrd "$dir/initramfs" \
        -append "console=ttyS0 quiet mitigations=off oops=panic panic=-1 $clock $options" \
        -display none -monitor none -nic none -no-reboot \
        -serial stdio "$@" </dev/null &
    vm=$!
    wait "$vm" || status=$?
    vm=
    return $status
}
