#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# imagetest.sh: builds the image of dist/Containerfile, and runs it as dist/kubernetes/daemonset.yaml says, by podman: with
# the network of a namespace that stands for the host's, which has a veth called eth0. Needs root.
#
# Everything that is mounted ends with the namespaces, all processes with the cgroups. The process namespace is
# the host's, since only that has the kernel's threads. The runtime is runc, as on most nodes.
set -euo pipefail
shopt -s inherit_errexit

if [ "${1-}" != --inside ]; then
    cd "$(dirname "$0")/.."
    [ "$(id -u)" = 0 ] || {
        echo "imagetest.sh needs root, to run containers." >&2
        exit 1
    }
    scripts/setup.sh dist image
    folder=$(scripts/static.sh "$(uname -m)")
    # shellcheck source=scripts/cgroups.sh
    . scripts/cgroups.sh
    make_cgroups rxsteer-imagetest
    status=0
    (
        enter_cgroups
        exec timeout --foreground --kill-after=10 15m unshare --mount --net \
            scripts/imagetest.sh --inside "$folder" "$cgroup.$$"
    ) || status=$?
    exit $status
fi

folder=$2
cgroup=$3
container=rxsteer

fail() {
    trap - ERR
    echo "FAILED: $*" >&2
    podman logs "$container" >&2 || true
    exit 1
}
trap 'fail "line $LINENO: $BASH_COMMAND"' ERR
# shellcheck source=scripts/until.sh
. scripts/until.sh
# shellcheck source=scripts/veth.sh
. scripts/veth.sh

# Where podman writes.
for written in /mnt /run /var/lib; do
    mount -t tmpfs imagetest "$written"
done
mkdir /mnt/{cgroup,config,context,tmp}
export HOME=/mnt TMPDIR=/mnt/tmp
# /sys is that of the network namespace.
mount --rbind /sys/fs/cgroup /mnt/cgroup
mount -t sysfs sysfs /sys
mount --rbind /mnt/cgroup /sys/fs/cgroup
mount -t bpf -o mode=0700 bpf /sys/fs/bpf
podman() {
    command podman --storage-driver=vfs --runtime=runc --cgroup-manager=cgroupfs --events-backend=none "$@"
}
ip link set lo up
make_veth eth0
# Of another user; it receives what is sent to port 9.
sysctl -qw net.ipv4.ip_unprivileged_port_start=0
python3 -c '
import os, socket
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.bind(("", 9))
receiver.set_inheritable(True)
os.setgroups([])
os.setuid(65534)
os.execvp("sleep", ["sleep", "infinity"])' &
receiver=$!
# By it the namespace of the other end is found.
ip netns exec far sleep infinity &

# The options of podman that give a container what the manifest gives a pod. What is not known here is an error.
# shellcheck disable=SC2016 # the names are jq's
options_of_pod='
    . as $pod |
    .containers[0] | .securityContext as $security |
    (if $pod.hostNetwork then "--network=host" else error("not the host network") end),
    (if $pod.hostPID then "--pid=host" else empty end),
    "--stop-timeout=\($pod.terminationGracePeriodSeconds)",
    "--user=\($security.runAsUser)",
    "--read-only=\($security.readOnlyRootFilesystem)", "--read-only-tmpfs=false",
    "--security-opt=no-new-privileges=\($security.allowPrivilegeEscalation | not)",
    (if $security.seccompProfile.type == "RuntimeDefault" then empty else error("seccomp") end),
    ($security.capabilities | (.drop[] | "--cap-drop=\(.)"), (.add[] | "--cap-add=\(.)")),
    (.volumeMounts[] | . as $mount | $pod.volumes[] | select(.name == $mount.name) |
        if .configMap then "--volume=/mnt/config:\($mount.mountPath):ro"
        elif .emptyDir.medium == "Memory" then "--tmpfs=\($mount.mountPath)"
        elif .hostPath.type == "CharDevice" then "--volume=\(.hostPath.path):\($mount.mountPath)"
        else error("a volume of another kind") end)'
# manifest KIND FILTER: of the manifest's object of this kind.
manifest() {
    python3 -c 'import json, sys, yaml; json.dump(list(yaml.safe_load_all(sys.stdin)), sys.stdout)' \
        <dist/kubernetes/daemonset.yaml | jq --raw-output ".[] | select(.kind == \"$1\") | $2"
}
pod=.spec.template.spec
manifest DaemonSet "$pod | $options_of_pod" >/mnt/options
manifest DaemonSet "$pod.containers[0].args[]" >/mnt/args
manifest DaemonSet "$pod.containers[0].readinessProbe.exec.command[]" >/mnt/probe
manifest_config=$(manifest ConfigMap '.data["rxsteer.toml"]')
image=$(manifest DaemonSet "$pod.containers[0].image")
mapfile -t options </mnt/options
mapfile -t args </mnt/args
mapfile -t probe </mnt/probe

cp "$folder/rxsteer" "/mnt/context/rxsteer-${image##*:}-linux-$(uname -m)"
podman build --quiet --file dist/Containerfile --build-arg "ARCHITECTURE=$(uname -m)" --tag "$image" /mnt/context >/dev/null
echo "built: $image"

# Limits that a container may have in another container too, where none may be raised.
run() { podman run --cgroup-parent="/$cgroup" --ulimit=nofile=1024:1024 --ulimit=nproc=1024:1024 "$@"; }
# A container with the manifest's options, but for those in `without`, and those in `with`.
without=none
with=()
started() {
    local option kept=()
    for option in "${options[@]}"; do
        [[ $option == "$without" ]] || kept+=("$option")
    done
    [ "$without" = none ] || [ "${#kept[@]}" -lt "${#options[@]}" ] || fail "the manifest is without $without"
    podman rm --force --ignore --time 0 "$container" >/dev/null
    run --detach --name "$container" --log-driver=k8s-file "${kept[@]}" "${with[@]}" "$image" "${args[@]}" >/dev/null
}
# config LINE...: the manifest's configuration, with these lines.
config() {
    { echo "$manifest_config" && printf '%s\n' "$@"; } >/mnt/config/rxsteer.toml
}
ready() { podman exec "$container" "${probe[@]}" >/dev/null 2>&1; }
ended() { [ "$(podman inspect --format '{{.State.Status}}' "$container")" = exited ]; }
ready_or_ended() { ready || ended; }
runs() {
    started
    until_true "it is ready" ready_or_ended
    ! ended || fail "it does not run"
}
# refused TEXT: it ends, and says so.
refused() {
    started
    until_true "it ends or runs" ready_or_ended
    ended || fail "it runs without $without"
    logged "$1" || fail "without $without it does not say \"$1\""
}
logged() { [[ $(podman logs "$container" 2>&1) == *"$1"* ]]; }
inside() { podman exec "$container" /usr/bin/rxsteer "$@"; }
counter() { inside status --json | jq "[.devices[].queues[].$1] | add"; }
redirects() { send && [ "$(counter redirected)" -gt 0 ]; }
# What steering adds to the host.
traces() { programs && tc filter show dev eth0 ingress; }
# SIGTERM, on which it ends with 0 within the grace period.
stops() {
    podman stop "$container" >/dev/null
    [ "$(podman inspect --format '{{.State.ExitCode}}' "$container")" = 0 ] || fail "it does not end on SIGTERM"
}
leaves_nothing() {
    stops
    [ -z "$(traces)" ] || fail "left: $(traces)"
}

config
runs
[ -n "$(traces)" ] || fail "no trace while it runs: that nothing is left can't be seen"
leaves_nothing
echo "the manifest: ready, steers, ends on SIGTERM, leaves nothing"

policy=('policy = "rps"' 'rps-cpus = "0-1"')
config "${policy[@]}" 'mode = "softirq"'
runs
until_true "frames are redirected in softirq mode" redirects
leaves_nothing
echo "softirq mode: steers"

config "${policy[@]}" 'prepare = true' 'mode = "native"'
runs
[ "$(offload)" = off ] || fail "the other end still leaves checksums out"
until_true "frames are redirected in native mode" redirects
! logged "is not nice=" || fail "the backlogs' threads are not in their class"
leaves_nothing
until_true "the offload of the other end is on again" offload_is_on
echo "native mode: steers, with the other end prepared"

# With native mode as it is, also where the other end can't be reached.
offloads_off
ethtool --offload eth0 rxvlan off rx-vlan-stag-hw-parse off >/dev/null
config "${policy[@]}" 'mode = "native"' 'backlog-sched = "nice=-5"'
explained() { inside explain "pid:$receiver" >/mnt/explained 2>&1; }
runs
until_true "frames are redirected" redirects
! logged "is not nice=" || fail "the backlogs' threads are not in their class"
explained || fail "a process of another user is not explained: $(cat /mnt/explained)"
stops
for without in "${options[@]}"; do
    case $without in
    --cap-add=SYS_NICE | --pid=host)
        runs
        until_true "frames are redirected" redirects
        logged "is not nice=" || fail "without $without the backlogs' threads are in their class"
        stops
        lost="steers, and the backlogs' threads are not in their class"
        ;;
    --cap-add=SYS_PTRACE | --cap-add=DAC_READ_SEARCH)
        runs
        until_true "frames are redirected" redirects
        ! explained || fail "without $without a process of another user is explained"
        stops
        lost="steers, and does not see the sockets of processes of another user"
        ;;
    --cap-add=*)
        refused "needs the capabilities CAP_${without#*=}: this root is confined"
        lost="refused, with the remedy"
        ;;
    --tmpfs=/run)
        refused "a pod an emptyDir volume"
        lost="refused, with the remedy"
        ;;
    *) continue ;;
    esac
    echo "without $without: $lost"
done

without=none
echo '{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["bpf"], "action": "SCMP_ACT_ERRNO"}]}' >/mnt/seccomp
with=(--security-opt=seccomp=/mnt/seccomp)
refused "a filter of system calls refuses it"
echo "with a filter that refuses bpf(): refused, with the remedy"

config "${policy[@]}" 'pin = true'
with=(--volume=/sys/fs/bpf:/sys/fs/bpf)
runs
until_true "frames are redirected by pinned steering" redirects
program=$(programs)
received=$(counter received)
stops
[ "$(programs)" = "${program:?}" ] || fail "the end of a container ends pinned steering"
came=$(arrived)
more_came() { send && [ "$(arrived)" -ge $((came + 1000)) ]; }
until_true "1000 frames come without a container" more_came
runs
[ "$(programs)" = "$program" ] || fail "a new container replaces pinned steering"
counted() { [ "$(counter received)" -ge $((received + 1000)) ]; } # within a read of the counters
until_true "1000 frames are counted that came without a container" counted
stops
run --rm "${options[@]}" "${with[@]}" "$image" detach >/mnt/detached 2>&1 ||
    fail "detach: $(cat /mnt/detached)"
[ -z "$(traces)" ] || fail "left: $(traces)"
echo "pinned: steering and counters go on over a container's end, the next one takes over"
