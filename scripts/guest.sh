#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# guest.sh [--kernel SERIES[,SERIES...]] [--cpus N] [--timeout TIME] [--resume] [TEST [FILTER...]]:
# runs tests in a virtual machine with another kernel and more CPUs, half of them below each of two
# last-level caches.
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
    skb skb_devices skb_metadata vanished_skbs patterns loopback prepare device_gone virtio
    unsteered idle rx_hash auto gaps fuzz_kernel fuzz_input backlog idle_backlogs client lab peer
    reorder overload bench control)
# Attempts to boot again after the guest has died.
boots_again=3
# Seconds for one test of a table. Some tests wait 90 s for a condition, more than once.
test_limit=300

kernels=
cpus=
limit=
resume=false
usage() {
    echo "usage: guest.sh [--kernel SERIES] [--cpus N] [--timeout 10m] [--resume] [TEST [FILTER...]]" >&2
    exit 2
}
while [ $# -gt 0 ]; do
    case $1 in
    --kernel) kernels=${2-} ;;
    --cpus) cpus=${2-} ;;
    --timeout) limit=${2-} ;;
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
    program=$(realpath -m "${binary%/*}/../$program")
    [ ! -x "$program" ] || vm_add "$program"
done
cp -r --parents "$PWD/crates/rxsteer/tests/fixtures" "$dir/root"
echo "exec sh /guest-tests $test_limit" >"$dir/root/run-this"

# Two virtio_net devices, joined by a hub of the emulator, which warns that the hub has no network
# of the host. They need none.
virtio=()
for end in 0 1; do
    virtio+=(-netdev "hubport,id=end$end,hubid=0" -device "virtio-net-pci,netdev=end$end,romfile=")
done

# Boots the kernel in folder $1 once. The last line of $dir/status is the guest's exit status, if it
# finished; other lines are its results. Returns 124 on time-out.
boot() {
    local status=0
    cp "$dir/done" "$dir/root/done"
    : >"$dir/status"
    vm_boot "$1" "$cpus" $((cpus % 2 ? 1 : 2)) "" -serial "file:$dir/status" "${virtio[@]}" ||
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
