#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# test.sh [FILTER...]: runs every test and counts what ran.
#
# A test that can't run here appends `NOT RUN: <test>: <reason>` to the file $RXSTEER_NOT_RUN and
# returns. cargo counts it as passed; this script does not.
#
# An end-to-end test that failed is run once more, alone: other programs may have had its CPUs. If it
# passes, it is listed. A failure of order is final: a packet was overtaken, whatever the load was.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh build test
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export RXSTEER_NOT_RUN=$dir/not-run
touch "$RXSTEER_NOT_RUN" "$dir/log" "$dir/again"
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

# A file's name, from: Running tests/steer.rs (target/debug/deps/steer-0123456789abcdef)
# shellcheck disable=SC2016 # awk's $
file_of='
    $1 == "Running" {
        file = $2 == "unittests" ? "" : $2
        sub(/^tests\//, "", file)
        sub(/(\/main)?\.rs$/, "", file)
    }
'
# Lines "FILE TEST" for the tests that failed and may be run once more.
repeatable() {
    awk "$file_of"'
        # ---- a_test stdout ----
        /^---- .* stdout ----$/ { test = $2; failed[++nr_failed] = file " " test }
        /^failures:$/ { test = "" }
        !file || (test && /overtak/) { final[nr_failed] = 1 }
        END { for (i = 1; i <= nr_failed; i++) if (!final[i]) print failed[i] }
    ' "$dir/log"
}
if [ $status != 0 ]; then
    repeatable >"$dir/repeatable"
    while read -r file test; do
        cargo test --test "$file" -- --test-threads=1 --exact "$test" </dev/null 2>&1 |
            tee "$dir/once-more" || true
        if grep -q "^test $test \.\.\. ok$" "$dir/once-more"; then
            echo "$file $test" >>"$dir/again"
        fi
    done <"$dir/repeatable"
fi

awk -v status=$status -v filter="$*" "$file_of"'
    FILENAME ~ /again$/ { again[$0] = 1; nr_again++; next }
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
    /^test result: FAILED/ { for (i = 1; i <= nr_listed; i++) names[++nr_names] = file " " listed[i] }
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
        for (i = 1; i <= nr_names; i++)
            print (names[i] in again ? "PASSED WHEN RUN AGAIN: " : "FAILED: ") names[i]
        for (i = 1; i <= nr_hung; i++) print "HUNG: " hung[i]
        passed += nr_again
        failed -= nr_again
        if (nr_again && !failed && !nr_hung)
            status = 0
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
' "$dir/again" "$RXSTEER_NOT_RUN" "$dir/log"
