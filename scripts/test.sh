#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# test.sh [FILTER...]: runs every test and counts what ran.
#
# A test that can't run here appends `NOT RUN: <test>: <reason>` to the file $RXSTEER_NOT_RUN and
# returns. cargo counts it as passed; this script does not.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh build test
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export RXSTEER_NOT_RUN=$dir/not-run
touch "$RXSTEER_NOT_RUN" "$dir/log"
# Tests may run as another user, and must be able to write it.
chmod 755 "$dir"
chmod 666 "$RXSTEER_NOT_RUN"

status=0
builder cargo test --no-run || status=$?
if [ $status = 0 ]; then
    # One at a time: end-to-end tests use and measure the host's CPUs.
    # A file of tests that hangs is a failure, which `timeout` names, and the others still run.
    cargo test --no-fail-fast \
        --config 'target."cfg(all())".runner = ["timeout", "--verbose", "--kill-after=10s", "8m"]' \
        -- --test-threads=1 "$@" 2>&1 | tee "$dir/log" || status=$?
fi

awk -v status=$status -v filter="$*" '
    FILENAME ~ /not-run$/ {
        # A test that is reported for two reasons counts once.
        split($0, part, ": ")
        if (!seen[$0]++) lines[++nr_lines] = $0
        if (!tests[part[2]]++) nr_not_run++
        next
    }
    # test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; ...
    /^test result: / { passed += $4; failed += $6; ignored += $8 }
    # Its last list of failures precedes the result of a file.
    /^failures:$/ { nr_listed = 0 }
    /^    [a-z][a-z0-9_:]*$/ { listed[++nr_listed] = $1 }
    /^test result: FAILED/ { for (i = 1; i <= nr_listed; i++) names[++nr_names] = listed[i] }
    # test NAME ... timeout: sending signal TERM to command '/.../deps/steer-0123456789abcdef'
    /timeout: sending signal TERM to/ {
        test = $1 == "test" ? " in " $2 : ""
        sub(/.*\//, "")
        sub(/-[0-9a-f]+[^0-9a-f]*$/, "")
        hung[++nr_hung] = $0 test
    }
    END {
        print ""
        for (i = 1; i <= nr_lines; i++) print lines[i]
        for (i = 1; i <= nr_names; i++) print "FAILED: " names[i]
        for (i = 1; i <= nr_hung; i++) print "HUNG: " hung[i]
        if (status && !failed && !nr_hung)
            print "cargo test ended with status " status " before it had counted a failure."
        else if (failed)
            print "If other programs use this machine, run these again alone: make test ARGS=NAME"
        if (!status && !(passed + ignored)) {
            print "No test has such a name: " filter
            status = 1
        }
        printf "%d passed, %d failed, %d not run\n",
            passed - nr_not_run, failed, nr_not_run + ignored
        exit status
    }
' "$RXSTEER_NOT_RUN" "$dir/log"
