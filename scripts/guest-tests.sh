#!/bin/busybox sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=dash
#
# guest-tests.sh SECONDS: runs the tests of the file /tests (lines of programs.sh's tests()) in guest.sh's
# virtual machine, one after the other, each for so many seconds at most, except those in /done (lines
# "PROGRAM NAME"). Writes each start and result to the second serial port, as one-test.sh prints it, or
# with the state "started". Fails if a test fails.

tab=$(printf '\t')
failed=0
while read -r line <&3; do
    IFS=$tab read -r program _ _ name <<END
$line
END
    ! grep -qxF "$program $name" /done || continue
    printf '%s\t%s\tstarted\t0\t\n' "$program" "$name" >/dev/ttyS1
    result=$(sh /one-test "$1" /tmp "$line")
    echo "$result" | tee /dev/ttyS1
    case $result in
    *"${tab}passed${tab}"* | *"${tab}not run${tab}"*) sed -n 's/^.*note: /    /p' "/tmp/$program.$name" ;;
    *)
        failed=1
        cat "/tmp/$program.$name"
        ;;
    esac
done 3</tests
exit $failed
