# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# Sourced, after cargo.sh: builds the test programs, and lists their tests.

# Prints "PROGRAM FOLDER BINARY" for each test program, separated by tabs: `native`, `repository`,
# `end_to_end`, `lab`, and `rxsteer` and `rxlab`, which are the unit tests of these crates. FOLDER is
# where cargo runs it.
programs() {
    # In cargo's output only test binaries have the profile of a test.
    builder cargo test --no-run --message-format=json-render-diagnostics | sed -n \
        's/.*"manifest_path":"\([^"]*\)\/Cargo.toml","target":.*"name":"\([^"]*\)","src_path".*"test":true},"features".*"executable":"\([^"]*\)".*/\2\t\1\t\3/p' | sort
}

# Reads such lines; prints "PROGRAM FOLDER BINARY NAME" for each test.
tests() {
    local program folder binary all=
    while IFS=$'\t' read -r program folder binary; do
        all+=" $program"
        "$binary" --list --format terse </dev/null |
            sed -n "s,^\(.*\): test$,$program\t$folder\t$binary\t\1,p"
    done
    if [ "$all" != " end_to_end lab native repository rxlab rxsteer" ]; then
        echo "cargo has built other test programs than expected:$all" >&2
        return 1
    fi
}
