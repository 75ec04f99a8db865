#!/bin/busybox sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=dash
#
# guest-tests.sh LIMIT: runs each test of the files in /tests (lines "FILE BINARY") in guest.sh's
# virtual machine, as a separate process for LIMIT seconds at most, except those in /done (lines
# "FILE TEST"). Writes each start and result to the second serial port, separated by tabs: FILE,
# TEST, started|passed|failed|not run, seconds, reason.

limit=$1
tell() {
    printf '%s\t%s\t%s\t%s\t%s\n' "$@" >/dev/ttyS1
}

# Repetitions are slow here; the default is 100.
export RXSTEER_TIMES=10 RXSTEER_UPGRADES=4 RXSTEER_KILLS=3

run() {
    file=$1 binary=$2 test=$3
    : >"$RXSTEER_NOT_RUN"
    tell "$file" "$test" started 0 ""
    start=$(date +%s)
    timeout -s KILL "$limit" "$binary" --exact "$test" --test-threads=1 >/tmp/out 2>&1 </dev/null
    status=$?
    seconds=$(($(date +%s) - start))
    reason=
    if [ $status = 137 ]; then
        state=failed reason="not done after $limit s"
    elif [ $status != 0 ]; then
        state=failed
        reason=$(sed -n -e '/^Error: /{p;q}' -e '/panicked at /{n;p;q}' /tmp/out | tr '\t' ' ')
    elif [ -s "$RXSTEER_NOT_RUN" ]; then
        state="not run"
        reason=$(sed -e 's/^NOT RUN: //' -e "s/^$test: //" "$RXSTEER_NOT_RUN" | sort -u | tr '\n\t' '; ' | sed 's/;$//')
    elif ! grep -q '^test result: ok. 1 passed' /tmp/out; then
        state="not run" reason="cargo test leaves it out, too"
    else
        state=passed
    fi
    echo "$file::$test: $state ($seconds s)${reason:+: $reason}"
    [ "$state" != failed ] || cat /tmp/out
    tell "$file" "$test" "$state" $seconds "$reason"
}

while read -r file binary <&3; do
    for test in $("$binary" --list --format terse | sed -n 's/: test$//p'); do
        grep -qxF "$file $test" /done || run "$file" "$binary" "$test"
    done
done 3</tests
