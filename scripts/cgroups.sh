# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# Sourced: cgroups of a script's own. What it starts makes others below them, and may leave them.
#
# make_cgroups NAME: makes them, and deletes them at the end, and those of runs that were killed.
# enter_cgroups: moves the calling shell there.

make_cgroups() {
    cgroup=$1
    # Of processes; the others belong to a controller each, in which a new cgroup may not be ready for use.
    mapfile -t hierarchies < <(awk '$3 == "cgroup2" || $4 ~ /name=systemd/ { print $2 }' /proc/self/mounts)
    delete_cgroups
    trap delete_cgroups EXIT
    local hierarchy
    for hierarchy in "${hierarchies[@]}"; do
        mkdir "$hierarchy/$cgroup.$$"
    done
}

enter_cgroups() {
    local hierarchy
    for hierarchy in "${hierarchies[@]}"; do
        # Also from a subshell.
        echo "$BASHPID" >"$hierarchy/$cgroup.$$/cgroup.procs"
    done
}

delete_cgroups() {
    local hierarchy old owner
    while read -r hierarchy; do
        for old in "$hierarchy/$cgroup".*; do
            owner=${old##*.}
            if [ -d "$old" ] && { [ "$owner" = $$ ] || [ ! -e "/proc/$owner/cgroup" ]; }; then
                delete_cgroup "$old"
            fi
        done
    done < <(awk '$3 ~ /^cgroup2?$/ { print $2 }' /proc/self/mounts)
}

# With the processes that are left in it or below.
delete_cgroup() {
    local pids
    for _ in {1..100}; do
        mapfile -t pids < <(find "$1" -name cgroup.procs -exec cat {} + 2>/dev/null)
        [ "${#pids[@]}" = 0 ] || kill -KILL "${pids[@]}" 2>/dev/null || true
        find "$1" -depth -type d -exec rmdir {} + 2>/dev/null || true
        [ -d "$1" ] || return 0
        sleep 0.1
    done
    echo "left: $1" >&2
}
