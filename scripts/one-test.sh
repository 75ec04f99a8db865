#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# one-test.sh SECONDS FOLDER TEST: runs a test as a process of its own, for so many seconds at most, and
# prints its result, separated by tabs: PROGRAM, NAME, passed|failed|hung|not run|alone, seconds, reason.
#
# TEST is a line of programs.sh's tests(). What the test prints is in FOLDER/PROGRAM.NAME. A test that
# can't run here writes the reason to the file $RXSTEER_NOT_RUN and returns; so does one that has to run
# alone while $RXSTEER_TOGETHER is set. cargo counts both as passed; this script does not, and an ignored
# test is not run either.
#
# Runs on the host, and in busybox's shell in guest.sh's virtual machine.

limit=$1
tab=$(printf '\t')
IFS=$tab read -r program folder binary name <<END
$3
END
out=$2/$program.$name
RXSTEER_NOT_RUN=$out.not-run
export RXSTEER_NOT_RUN
: >"$RXSTEER_NOT_RUN"
# A test may run as another user, and must be able to write it.
chmod 666 "$RXSTEER_NOT_RUN"

# Hundredths of a second.
now() {
    read -r uptime rest </proc/uptime
    echo "${uptime%.*}${uptime#*.}"
}

start=$(now)
cd "$folder" || exit 1
# timeout makes a process group, which the signals for this one do not reach.
pid=
trap '[ -z "$pid" ] || kill "$pid"; wait; exit 1' INT TERM HUP
timeout -k 10 "$limit" "$binary" --exact "$name" --test-threads=1 >"$out" 2>&1 </dev/null &
pid=$!
wait "$pid"
status=$?
duration=$(($(now) - start))

reason=
case $status in
0)
    state=passed
    if [ -s "$RXSTEER_NOT_RUN" ]; then
        state="not run"
        ! grep -q '^ALONE: ' "$RXSTEER_NOT_RUN" || state=alone
        reason=$(sed -E 's/^[A-Z ]+: ([^:]|::)*: //' "$RXSTEER_NOT_RUN" | sort -u | tr '\n\t' '; ' | sed 's/;$//')
    elif grep -q '^test result: ok. 0 passed; 0 failed; 1 ignored' "$out"; then
        state="not run" reason=$(sed -n 's/^test .* ignored, //p' "$out")
    elif ! grep -q '^test result: ok. 1 passed' "$out"; then
        state=failed reason="it ended without a result"
    fi
    ;;
*)
    state=failed
    reason=$(sed -n -e '/^Error: /{p;q}' -e '/panicked at /{n;p;q}' "$out" | tr '\t' ' ')
    : "${reason:=exit status $status}"
    # busybox's timeout has the status of the test that it ended.
    if [ $duration -ge $((limit * 100)) ]; then
        state=hung reason="not done after $limit s"
    fi
    ;;
esac
printf '%s\t%s\t%s\t%d.%02d\t%s\n' \
    "$program" "$name" "$state" $((duration / 100)) $((duration % 100)) "$reason"
