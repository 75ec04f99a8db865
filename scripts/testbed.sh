#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# testbed.sh [--kernel SERIES] [--cpus N] [--sockets N] [--report FILE.json] [--profile]
# [ARGUMENT...]: runs `rxlab bench ARGUMENT...` (default: $usual) in a virtual machine with many
# CPUs and time counted in instructions, and writes the report here. docs/testbed.md explains its
# figures. If the first argument is demo: runs `rxlab ARGUMENT...`, without a report.
#
# --profile also samples each CPU from start to end, and prints the functions that take most of its
# time: choose one case and one mode, and enough seconds to outweigh the start.
#
# Environment: COUNTED_TIME is the machine's speed and costs (testbed/counted-time.c), PREEMPT its
# kernel's preempt=.
set -euo pipefail
shopt -s inherit_errexit

# Default arguments, some 40 minutes for 8 CPUs on two: scenarios for many CPUs, with a case or two
# of each.
usual=(flood ramp firewall rr rpc crr wakeup --rounds 3 --seconds 0.05
    --case "64 connected" --case router --case "TCP_RR, 200" --case "TCP_RR, 500"
    --case "100 flows" --case clients --case packets/s
    --mode "none,kernel-rps (others),kernel-rfs (others),cpumap (others)"
    --mode "rxsteer-rfs,rxsteer")

kernel=6.18
cpus=8
sockets=1
report=many.json
profile=false
limit=6h
# A boot that dies says nothing about the bench: try again.
boots=3
: "${PREEMPT:=none}"

usage() {
    echo "usage: testbed.sh [--kernel 6.18] [--cpus 8] [--sockets 1] [--report FILE.json] [--profile] [ARGUMENT...]" >&2
    exit 2
}
while [ $# -gt 0 ]; do
    case $1 in
    --kernel) kernel=${2-} ;;
    --cpus) cpus=${2-} ;;
    --sockets) sockets=${2-} ;;
    --report) report=${2-} ;;
    --profile)
        profile=true
        shift
        continue
        ;;
    *) break ;;
    esac
    shift 2 || usage
done
if ! [[ $cpus =~ ^[1-9][0-9]*$ && $cpus -ge 2 && $cpus -le 32 ]]; then
    echo "--cpus $cpus: choose 2 to 32." >&2
    exit 2
fi
if ! [[ $sockets =~ ^[1-9][0-9]*$ ]] || [ $((cpus % sockets)) != 0 ]; then
    echo "--sockets $sockets: choose a number by which $cpus CPUs can be divided." >&2
    exit 2
fi
if [[ $report != *.json ]]; then
    echo "--report $report: choose a name that ends with .json." >&2
    exit 2
fi
report=$(realpath -m "$report") # before the folder changes
if ! touch "$report"; then
    exit 1
fi
[ -s "$report" ] || rm -f "$report"

[ $# != 0 ] || set -- "${usual[@]}"
[ "$1" = demo ] || set -- bench --report report.json "$@"

cd "$(dirname "$0")/.."
jobs=(build guest)
! $profile || jobs+=(profile)
scripts/setup.sh "${jobs[@]}"
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh
# shellcheck source=scripts/vm.sh
. scripts/vm.sh

qemu=$(scripts/emulator.sh)
folder=$(scripts/kernel.sh "$kernel")
builder cargo build --release

cache=$(realpath -m "${CARGO_TARGET_DIR:-target}")
vm_dir "$cache/testbed"
vm=
trap '[ -z "$vm" ] || kill "$vm"; wait; rm -rf "$dir"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

vm_root
vm_add "$cache/release/rxlab" /bin/rxlab
! $profile || vm_add "$(command -v perf)" /bin/perf
emulated="$("$qemu" --version | sed -n 's/.*version \([0-9.]*\).*/QEMU \1/p'), counted time: $COUNTED_TIME"
{
    printf 'export RXSTEER_EMULATED=%q\n' "$emulated"
    # On a terminal without cursor control the progress bar prints nothing.
    echo "stty -F /dev/console cols 100"
    # The report has the command line, without a path.
    echo 'cd /tmp'
    # By a timer, since the emulated CPU has no hardware counters.
    ! $profile || printf 'perf record -q -a -e cpu-clock -F 2000 -o /tmp/perf.data '
    printf rxlab
    printf ' %q' "$@"
    printf ' </dev/null\nstatus=$?\n'
    # Base64, since the serial port's terminal alters bytes.
    echo '[ ! -s /tmp/report.json ] || tar -C /tmp -cz report.json | base64 >/dev/ttyS2'
    ! $profile || echo "perf report -q -i /tmp/perf.data --stdio -t '	' --sort cpu,comm,symbol -F sample,cpu,comm,symbol >/dev/ttyS3"
    # shellcheck disable=SC2016 # the guest's
    echo 'exit $status'
} >"$dir/root/run-this"

# Like most performance-tuned hosts, don't zero allocated pages; count wake-ups.
options="preempt=$PREEMPT init_on_alloc=0 schedstats=enable"
start=$SECONDS
for ((boot = 1; boot <= boots; boot++)); do
    echo "Booting Linux ${folder##*/linux-image-} with $cpus CPUs ($COUNTED_TIME)." >&2
    status=0
    vm_boot "$folder" "$cpus" "$sockets" "$options" \
        -serial "file:$dir/status" -serial "file:$dir/report.base64" \
        -serial "file:$dir/profile" || status=$?
    if [ "$status" = 124 ]; then
        echo "The machine did not finish in $limit." >&2
        exit 124
    fi
    status=$(tail -n 1 "$dir/status" | tr -d '\r')
    [ -z "$status" ] || break
    echo "The machine ended before its bench did (boot $boot of $boots)." >&2
done
if [ -z "$status" ]; then
    exit 1
fi
if [ -s "$dir/report.base64" ]; then
    tr -d '\r' <"$dir/report.base64" | base64 -d | builder tar -xz -C "$dir"
    builder cp "$dir/report.json" "$report"
    echo "$((SECONDS - start)) s. Written: $report" >&2
fi
if $profile; then
    tr -d '\r' <"$dir/profile" | awk -f scripts/profile.awk
fi
exit "$status"
