# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Makes a table from the results of guest-tests.sh, one file per kernel with the name of its series:
# files of tests (-v files=, separated by spaces) by kernels, and the names of tests that failed or did
# not run. Fails if a test failed or a file was not reached.
BEGIN {
    FS = "\t"
    for (k = 1; k < ARGC; k++) kernels[k] = ARGV[k]
    nr_kernels = ARGC - 1
    nr_files = split(files, file, " ")
}
{
    # A test's name begins with its file, except those of the unit tests.
    of = $1 == "rxsteer" ? "lib" : $2
    sub(/::.*/, "", of)
}
# A test that was started, without a result so far.
$3 == "started" { open[FILENAME, $1, $2] = 1; next }
{
    delete open[FILENAME, $1, $2]
    state = $3 == "hung" ? "failed" : $3
    nr[FILENAME, of, state]++
    if (state != "passed") names[FILENAME, state] = names[FILENAME, state] "\n- `" $1 " " $2 "`: " $5
}
END {
    head = "| test file |"
    rule = "|---|"
    for (k = 1; k <= nr_kernels; k++) {
        head = head " " kernels[k] " |"
        rule = rule "---|"
    }
    print head "\n" rule
    for (f = 1; f <= nr_files; f++) {
        row = "| " file[f] " |"
        for (k = 1; k <= nr_kernels; k++) {
            cell = nr[kernels[k], file[f], "passed"] + 0 " passed"
            if (n = nr[kernels[k], file[f], "failed"]) { cell = cell ", " n " failed"; failed = 1 }
            if (n = nr[kernels[k], file[f], "not run"]) cell = cell ", " n " NOT RUN"
            if (cell == "0 passed") {
                cell = "NOT RUN"
                failed = 1
            }
            row = row " " cell " |"
        }
        print row
    }
    for (key in open) {
        split(key, part, SUBSEP)
        names[part[1], "failed"] = names[part[1], "failed"] "\n- `" part[2] " " part[3] "`: " \
            "the guest ended during it"
        failed = 1
    }
    for (k = 1; k <= nr_kernels; k++) {
        if (names[kernels[k], "failed"]) print "\nFailed on " kernels[k] ":\n" names[kernels[k], "failed"]
        if (names[kernels[k], "not run"]) print "\nNOT RUN on " kernels[k] ":\n" names[kernels[k], "not run"]
    }
    exit failed
}
