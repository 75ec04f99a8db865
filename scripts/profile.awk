# SPDX-License-Identifier: MIT OR Apache-2.0
#
# What `perf report -t TAB --sort cpu,symbol -F sample,cpu,symbol` found, as a list for each CPU: the
# functions that take most of the time in which it was not idle, in per cent of that.
BEGIN { FS = " *\t"; most = 14 }
NF >= 3 {
    cpu = $2 + 0
    samples[cpu] += $1
    last = cpu > last ? cpu : last
    if ($3 ~ /safe_halt|default_idle|intel_idle|mwait_idle/) next
    busy[cpu] += $1
    name = $3
    sub(/^\[.\] /, "", name)
    function_[cpu, ++nr[cpu]] = name
    count[cpu, nr[cpu]] = $1
}
END {
    for (cpu = 0; cpu <= last; cpu++) {
        if (!samples[cpu]) continue
        printf "\nCPU %d, not idle in %d of %d samples\n", cpu, busy[cpu], samples[cpu]
        for (line = 1; line <= most && line <= nr[cpu]; line++) {
            best = 0
            for (i = 1; i <= nr[cpu]; i++)
                if (count[cpu, i] > (best ? count[cpu, best] : 0)) best = i
            if (!best) break
            printf "  %5.1f %%  %s\n", 100 * count[cpu, best] / busy[cpu], function_[cpu, best]
            count[cpu, best] = 0
        }
    }
}
