#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# test.sh [FILTER...]: runs every test, or those with such a part in their names, and counts them.
#
# Several run at once: each has network namespaces of its own. Those that need the CPUs for themselves or
# change the host say so, with in_lab!(alone: WHY), and run one after the other when the others have ended.
# RXSTEER_LONG=1 gives tests their long forms.
#
# An end-to-end test that failed is run once more, alone: other programs may have had its CPUs. If it
# passes, it is listed. A failure of order is final: a packet was overtaken, whatever the load was. Tests
# print how many were, as "reordered: 3" or "overtaken_at_socket: 3".
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "$0")/.."

scripts/setup.sh build test
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh
# shellcheck source=scripts/programs.sh
. scripts/programs.sh

# Tests at once: they compute most of the time, and wait for the rest.
jobs=$((2 * $(nproc)))
# Seconds for one test. Some wait 90 s for a condition, more than once.
limit=300
[ -z "${RXSTEER_LONG:-}" ] || limit=1800

dir=$(mktemp -d)
# The process group of the tests that run.
group=
trap '[ -z "$group" ] || { kill -- "-$group"; wait "$group"; } 2>/dev/null; rm -rf "$dir"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
# Tests may run as another user, and write there.
mkdir "$dir/out"
chmod 755 "$dir" "$dir/out"

# Runs the tests of the lines that it reads, $1 at once; shows the results, and appends them to file $2.
# A test without a result is found at the end.
run() {
    set -m
    {
        { xargs -r -d '\n' -P "$1" -n 1 scripts/one-test.sh "$limit" "$dir/out" || true; } |
            tee -a "$2" | show
    } &
    group=$!
    set +m
    wait "$group"
    group=
}
show() {
    local program name state seconds reason
    while IFS=$'\t' read -r program name state seconds reason; do
        [ "$state" != alone ] || continue
        echo "$program $name: $state ($seconds s)${reason:+: $reason}"
        [[ $state != failed && $state != hung ]] || sed 's/^/    /' "$dir/out/$program.$name"
    done
}
# The lines of $dir/tests whose tests are in the lines that it reads, "PROGRAM<tab>NAME".
named() {
    awk -F '\t' 'NR == FNR { named[$1, $2] = 1; next } ($1, $4) in named' - "$dir/tests"
}

programs >"$dir/programs"
tests <"$dir/programs" |
    awk -F '\t' -v filters="$*" '
        BEGIN { n = split(filters, filter, " ") }
        { for (i = n; i && !index($4, filter[i]);) i-- }
        i || !n
    ' >"$dir/tests"
if ! [ -s "$dir/tests" ]; then
    echo "No test has such a name: $*" >&2
    exit 1
fi

touch "$dir/results" "$dir/again"
RXSTEER_TOGETHER=1 run "$jobs" "$dir/results" <"$dir/tests"
awk -F '\t' -v OFS='\t' '$3 == "alone" { print $1, $2 }' "$dir/results" | named >"$dir/alone"
run 1 "$dir/results" <"$dir/alone"

# Unit tests and native tests fail for a reason that another run does not take away.
while IFS=$'\t' read -r program name _; do
    grep -qE '(reordered|overtaken[a-z_]*): [1-9]' "$dir/out/$program.$name" || printf '%s\t%s\n' "$program" "$name"
done < <(awk -F '\t' '$3 == "failed" && $1 ~ /^(end_to_end|lab)$/' "$dir/results") | named >"$dir/repeated"
[ ! -s "$dir/repeated" ] || echo "Once more, alone:"
run 1 "$dir/again" <"$dir/repeated"

awk -F '\t' '
    { test = $1 " " $2 }
    FILENAME ~ /again$/ { if ($3 == "passed") again[test] = 1; next }
    FILENAME ~ /tests$/ { test = $1 " " $4; if (!(test in ended)) lost[++nr_lost] = "FAILED: " test ": no result"; next }
    $3 != "alone" { ended[test] = 1 }
    $3 == "passed" { passed++ }
    $3 == "not run" { not_run++; print "NOT RUN: " test ": " $5 }
    $3 == "failed" && test in again { passed++; late[++nr_late] = test }
    $3 == "failed" && !(test in again) { lost[++nr_lost] = "FAILED: " test }
    $3 == "hung" { lost[++nr_lost] = "HUNG: " test }
    END {
        for (i = 1; i <= nr_late; i++) print "PASSED WHEN RUN AGAIN: " late[i]
        for (i = 1; i <= nr_lost; i++) print lost[i]
        if (nr_lost) print "If other programs use this machine, run these again alone: make test ARGS=NAME"
        printf "%d passed, %d failed, %d not run\n", passed, nr_lost, not_run
        exit nr_lost > 0
    }
' "$dir/again" "$dir/results" "$dir/tests"
