# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Makes a list for each CPU from `perf report -t TAB --sort cpu,comm,symbol -F
# sample,cpu,comm,symbol`: the functions that take most of its busy time, in per cent of that. The
# bench's first thread, which switches the modes, is not measured and left out.
BEGIN { FS = " *\t"; most = 14 }
$3 ~ /^rxlab$/ || NF < 4 { next }
{
    cpu = $2 + 0
    samples[cpu] += $1
    last = cpu > last ? cpu : last
    if ($4 ~ /safe_halt|default_idle|intel_idle|mwait_idle/) next
    busy[cpu] += $1
    name = $4
    sub(/^\[.\] /, "", name)
    if (!((cpu, name) in count)) names[cpu, ++nr[cpu]] = name
    count[cpu, name] += $1
}
END {
    for (cpu = 0; cpu <= last; cpu++) {
        if (!samples[cpu]) continue
        printf "\nCPU %d, not idle in %d of %d samples\n", cpu, busy[cpu], samples[cpu]
        for (line = 1; line <= most && line <= nr[cpu]; line++) {
            best = ""
            for (i = 1; i <= nr[cpu]; i++)
                if (best == "" || count[cpu, names[cpu, i]] > count[cpu, best]) best = names[cpu, i]
            if (!count[cpu, best]) break
            printf "  %5.1f %%  %s\n", 100 * count[cpu, best] / busy[cpu], best
            count[cpu, best] = 0
        }
    }
}
