#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# guest.sh [--kernel SERIES[,SERIES...]] [--cpus N] [--nic NIC] [--timeout TIME] [--resume] [TEST [FILTER...]]:
# runs tests in a virtual machine with another kernel and more CPUs, half of them below each of two
# last-level caches.
#
# NIC is the model of the machine's two network devices: virtio (default), virtio-plain (no offloads),
# virtio-4 (four queues), e1000e, igb, vmxnet3, rtl8139 or usb. All but virtio take Debian's kernel for every machine.
#
# --resume skips the results of an earlier run without TEST on the same kernels.
#
# TEST is a file or folder of a crate's tests/*/ (rfs), or `lib` for rxsteer's unit tests; FILTER a part of a
# test's name. The exit status is 1 if a test fails. Without TEST, all tests that use the kernel run on
# every kernel, and a table shows the results. The emulator is that of emulator.sh.
set -euo pipefail
shopt -s inherit_errexit

# The test files that load BPF programs or make network namespaces.
end_to_end=(verifier flow symmetric steer tc esp rfs nat sock_flow explain busy_poll poll napi advise doctor lifetime reload mode pin panic hotplug starved vanished
    softirq softirq_devices no_harm skb_metadata vanished_skbs patterns loopback prepare device_gone drivers
    unsteered idle rx_hash auto gaps fuzz_kernel fuzz_input backlog idle_backlogs client lab peer
    reorder overload bench servers control)
# Attempts to boot again after the guest has died.
boots_again=3
# Seconds for one test of a table. Some tests wait 90 s for a condition, more than once.
test_limit=300

kernels=
cpus=
limit=
nic=virtio
resume=false
usage() {
    echo "usage: guest.sh [--kernel SERIES] [--cpus N] [--nic NIC] [--timeout 10m] [--resume] [TEST [FILTER...]]" >&2
    exit 2
}
while [ $# -gt 0 ]; do
    case $1 in
    --kernel) kernels=${2-} ;;
    --cpus) cpus=${2-} ;;
    --timeout) limit=${2-} ;;
    --nic) nic=${2-} ;;
    --resume)
        resume=true
        shift
        continue
        ;;
    -*) usage ;;
    *) break ;;
    esac
    shift 2 || usage
done
test=${1-}
if [ -n "$test" ]; then
    shift
    kernels=${kernels:-6.12} cpus=${cpus:-8} limit=${limit:-10m}
else
    kernels=${kernels:-6.1,6.12,6.18,7.3} cpus=${cpus:-4} limit=${limit:-3h}
fi
IFS=, read -r -a kernels <<<"$kernels"
# The cloud kernel has no other drivers.
[ "$nic" = virtio ] || [[ ${kernels[0]} = *-amd64 ]] || kernels=("${kernels[@]/%/-amd64}")
[[ $cpus =~ ^[1-9][0-9]*$ ]] || usage
[ -z "$test" ] || [ ${#kernels[@]} = 1 ] || usage

cd "$(dirname "$0")/.."
scripts/setup.sh build guest
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh
# shellcheck source=scripts/programs.sh
. scripts/programs.sh
# shellcheck source=scripts/vm.sh
. scripts/vm.sh

target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
qemu=$(scripts/emulator.sh)
cache=$target/guest
builder mkdir -p "$cache/results"
vm_dir "$cache"
vm=
results=
# The guest's results are kept for --resume.
collect() {
    [ -n "$results" ] || return 0
    [ -e "$dir/status" ] || return 0
    sed 's/\r//g' "$dir/status" | grep $'\t' >>"$results" || true
    : >"$dir/status"
}
trap '[ -z "$vm" ] || kill "$vm"; wait; collect; rm -rf "$dir"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

files=("${end_to_end[@]}")
[ -z "$test" ] || files=("$test")
vm_root
# The tests of these files, in the order of the files, whose names have one of the FILTERs.
programs | tests | awk -F '\t' -v files="${files[*]}" -v filters="$*" '
    BEGIN { n = split(files, file, " "); nr_filters = split(filters, filter, " ") }
    {
        name = $1 == "rxsteer" ? "lib" : $1 == "rxlab" ? "" : $4
        sub(/::.*/, "", name)
        for (i = nr_filters; i && !index($4, filter[i]);) i--
        if (i || !nr_filters) lines[name] = lines[name] $0 "\n"
    }
    END { for (i = 1; i <= n; i++) printf "%s", lines[file[i]] }
' >"$dir/root/tests"
if ! [ -s "$dir/root/tests" ]; then
    echo "No test has such a name: $test $*" >&2
    exit 1
fi
cut -f 2 "$dir/root/tests" | sort -u | (cd "$dir/root" && sed 's,^/,,' | xargs mkdir -p)
cut -f 3 "$dir/root/tests" | sort -u >"$dir/binaries"
while read -r binary; do
    vm_add "$binary"
done <"$dir/binaries"
cp scripts/guest-tests.sh "$dir/root/guest-tests"
cp scripts/one-test.sh "$dir/root/one-test"
# Tests run these programs, which cargo places beside the folder of test binaries.
for program in rxsteer rxlab; do
    vm_add "$target/debug/$program"
done
cp -r --parents "$PWD/crates/rxsteer/tests/fixtures" "$dir/root"
echo "exec sh /guest-tests $test_limit" >"$dir/root/run-this"

# Two network devices, joined by a hub of the emulator, which warns that the hub has no network of the host.
# They need none.
hub=(-netdev "hubport,id=end0,hubid=0" -netdev "hubport,id=end1,hubid=0")
device() { nics+=("${hub[@]}" -device "$1,netdev=end0${2-}" -device "$1,netdev=end1${3-}"); }
nics=()
case $nic in
virtio) device virtio-net-pci,romfile= ;;
virtio-plain)
    device virtio-net-pci,romfile=,csum=off,guest_csum=off,guest_tso4=off,guest_tso6=off,guest_ufo=off,mrg_rxbuf=off
    ;;
virtio-4)
    # Only a tap device has queues. A bridge joins both, in a network namespace of the emulator.
    cat >"$dir/up" <<'END'
#!/bin/sh
exec ip link set "$1" master hub up
END
    cat >"$dir/emulator" <<END
#!/bin/sh
exec unshare --net sh -c 'ip link add hub type bridge && ip link set hub up && exec "\$0" "\$@"' "$qemu" "\$@"
END
    chmod +x "$dir/up" "$dir/emulator"
    qemu=$dir/emulator
    hub=()
    for end in 0 1; do
        hub+=(-netdev "tap,id=end$end,queues=4,script=$dir/up,downscript=no")
    done
    device virtio-net-pci,romfile=,mq=on,vectors=10
    ;;
e1000e | rtl8139 | vmxnet3) device "$nic,romfile=" ;;
igb)
    # With a SATA controller, the firmware waits for a disk.
    nics=(-machine "q35,sata=off")
    for end in 0 1; do
        nics+=(-device "pcie-root-port,id=port$end,chassis=$end,slot=$end")
    done
    device igb,romfile= ,bus=port0 ,bus=port1
    ;;
usb)
    nics=(-device qemu-xhci)
    device usb-net
    ;;
*) usage ;;
esac
case $nic in
virtio*) printf '%s\n' virtio_pci virtio_net ;;
rtl8139) echo 8139cp ;;
usb) printf '%s\n' xhci_pci cdc_ether ;;
*) echo "$nic" ;;
esac >"$dir/root/nics"

# Boots the kernel in folder $1 once. The last line of $dir/status is the guest's exit status, if it
# finished; other lines are its results. Returns 124 on time-out.
boot() {
    local status=0
    cp "$dir/done" "$dir/root/done"
    : >"$dir/status"
    vm_boot "$1" "$cpus" $((cpus % 2 ? 1 : 2)) "" -serial "file:$dir/status" "${nics[@]}" ||
        status=$?
    # The second port has only results: the kernel also writes to the first.
    return $status
}

# Reports the test during which the guest died, from its results in file $1; the second time, the
# test counts as failed.
died_with() {
    local results=$1 last
    last=$(awk -F '\t' '{ state = $3; test = $1 "\t" $2 } END { if (state == "started") print test }' \
        "$results")
    [ -n "$last" ] || return 0
    echo "It died during ${last/$'\t'/::}." >&2
    if [ "$(grep -cF "$last"$'\t'started "$results")" -gt 1 ]; then
        printf '%s\tfailed\t0\tthe guest died during it, twice\n' "$last" >>"$results"
    fi
}

# Runs the tests on a kernel; writes results to file $2, and returns their status.
run() {
    local series=$1 folder boots=0 status told
    results=$2
    folder=$(scripts/kernel.sh "$series") || return 1
    touch "$results"
    # Tests that were running when the earlier run ended start again.
    if $resume; then sed -i $'/\tstarted\t/d' "$results"; else : >"$results"; fi
    while :; do
        awk -F '\t' '$3 != "started" { print $1 " " $2 }' "$results" >"$dir/done"
        status=0
        boot "$folder" || status=$?
        told=$(tail -n 1 "$dir/status" | tr -d '\r')
        collect
        if [ "$status" = 124 ]; then
            echo "The guest did not finish in $limit." >&2
            return 124
        fi
        status=$told
        if [[ $status =~ ^[0-9]+$ ]]; then
            echo "Linux ${folder##*/linux-image-}, $cpus CPUs: exit status $status"
            return "$status"
        fi
        echo "The guest with Linux $series ended before its tests did." >&2
        died_with "$results"
        [ $((boots++)) -lt "$boots_again" ] || return 1
        echo "It is booted again ($boots of $boots_again times)." >&2
    done
}

if [ -n "$test" ]; then
    status=0
    run "${kernels[0]}" "$dir/results" || status=$?
    exit $status
fi
ended=0
for kernel in "${kernels[@]}"; do
    echo "Linux $kernel, $cpus CPUs: $(wc -l <"$dir/root/tests") tests."
    run "$kernel" "$cache/results/$kernel" || ended=1
done
echo
table=0
(cd "$cache/results" && awk -v files="${end_to_end[*]}" -f "$OLDPWD/scripts/guest-table.awk" \
    "${kernels[@]}") || table=$?
exit $((ended || table))
