#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Sourced by tests: waits without a guess of how long. They have fail().

# until_true WHAT COMMAND...: waits for the command to succeed, at most 5 min.
until_true() {
    local what=$1 end=$((SECONDS + 300))
    shift
    until "$@"; do
        [ "$SECONDS" -lt "$end" ] || fail "not within 5 min: $what"
        sleep 1
    done
}
