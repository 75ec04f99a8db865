#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# The part of servicetest.sh that runs under the systemd that it boots. The packages are in /opt, and
# those of a newer version in /opt/newer.
set -euo pipefail
shopt -s inherit_errexit

fail() {
    echo "FAILED: $*"
    journalctl --unit rxsteer --no-pager --lines 30
    rxsteer status --json 2>/dev/null | jq -c ".devices[].queues" || true
    ip -stats link show wan || true
    exit 1
}
trap 'fail "line $LINENO: $BASH_COMMAND"' ERR
trap 'fail "the time is up at line $LINENO: $BASH_COMMAND"' TERM
# shellcheck source=scripts/until.sh
. "$(dirname "$0")/until.sh"
# shellcheck source=scripts/veth.sh
. "$(dirname "$0")/veth.sh"
property() {
    systemctl show --value --property "$1" rxsteer.service
}
expect() {
    local value
    value=$(property "$1")
    [ "$value" = "$2" ] || fail "$1 is \"$value\", not \"$2\""
}
# logged TEXT MATCH...: whether the service has such an entry.
logged() {
    local text=$1
    shift
    journalctl --unit rxsteer --output cat --no-pager "$@" >/opt/entries
    grep -q -- "$text" /opt/entries
}
counter() {
    rxsteer status --json | jq "[.devices[].queues[].$1] | add"
}
make_veth wan

dpkg --install /opt/*.deb >/opt/log 2>&1 || fail "$(cat /opt/log)"
expect ActiveState inactive
expect UnitFileState disabled
echo "installed: the service is neither enabled nor running"

# The control of everything below: a device that does not exist is no start.
echo 'devices = ["no-such-device"]' >/etc/rxsteer/rxsteer.toml
! systemctl start rxsteer 2>/dev/null || fail "it starts without its device"
systemctl stop rxsteer
systemctl reset-failed rxsteer 2>/dev/null || true # forgotten already, if it was not started again
until_true "the journal has the reason" logged no-such-device
echo "a start without the device fails, and the journal says why"

echo 'polcy = "rps"' >/etc/rxsteer/rxsteer.toml
! systemctl start rxsteer 2>/dev/null || fail "it starts with a mistake in its configuration"
expect ActiveState failed
expect ExecMainStatus 2
expect NRestarts 0
systemctl reset-failed rxsteer
echo "a start with a mistake in the configuration is not repeated"

cat >/etc/rxsteer/rxsteer.toml <<'EOF'
devices = ["wan"]
policy = "rps"
rps-cpus = "0-1"
prepare = true
EOF
systemctl start rxsteer || fail "it does not start"
# No waiting here: systemd returns when rxsteer is ready.
rxsteer status >/dev/null || fail "it is called ready before it answers"
[ -n "$(programs)" ] || fail "it is called ready before it steers"
expect ActiveState active
expect Type notify
expect StatusErrno 0
echo "started: ready when it steers"

received() { send && [ "$(counter received)" -ge 1000 ]; }
until_true "1000 frames are received" received
# The first frames only ask for a backlog, which a busy machine makes late.
redirects() { send && [ "$(counter redirected)" -gt 0 ]; }
until_true "frames are redirected" redirects
[ "$(offload)" = off ] || fail "the other end still leaves checksums out"
echo "steers: $(counter received) frames received, $(counter redirected) redirected"

# Entries are found by unit, and by the device that they are about.
until_true "an entry is about wan" logged wan RXSTEER_DEVICE=wan
! logged . RXSTEER_DEVICE=other || fail "an entry is about another device"
echo "journal: entries with the device"

if [ "$(property CanReload)" = yes ]; then
    pid=$(property MainPID)
    sed -i 's/^policy = .*/policy = "off"/' /etc/rxsteer/rxsteer.toml
    systemctl reload rxsteer
    policy_is_off() { rxsteer status | grep -q 'policy off'; }
    until_true "the policy is the new one" policy_is_off
    expect MainPID "$pid"
    expect ActiveState active
    echo "reload: the new configuration, in the same process"
else
    echo "reload: NOT RUN, the unit has no ExecReload"
fi

expect WatchdogUSec 30s
sign=$(property WatchdogTimestampMonotonic)
newer() { [ "$(property WatchdogTimestampMonotonic)" -gt "$sign" ]; }
until_true "a sign of life" newer
# A process that is stopped gives none.
mkdir -p /run/systemd/system/rxsteer.service.d
printf '[Service]\nWatchdogSec=3\n' >/run/systemd/system/rxsteer.service.d/short.conf
systemctl daemon-reload
systemctl restart rxsteer || fail "it does not start"
pid=$(property MainPID)
kill -STOP "$pid"
restarted() { [ "$(property NRestarts)" -ge 1 ] && [ "$(property ActiveState)" = active ]; }
until_true "a restart by the watchdog" restarted
[ "$(property MainPID)" != "$pid" ] || fail "the process is the same"
until_true "the journal says why" logged 'Watchdog timeout'
[ -n "$(programs)" ] || fail "it does not steer after the restart"
# A busy machine may keep a process from running for 3 s.
rm -r /run/systemd/system/rxsteer.service.d
systemctl daemon-reload
echo "watchdog: signs of life; a process that stands still is replaced, and steers"

systemctl stop rxsteer
expect ActiveState inactive
expect Result success
expect ExecMainStatus 0
[ -z "$(programs)" ] || fail "a program is left at wan"
until_true "the offload of the other end is on again" offload_is_on
! pgrep -x rxsteer >/dev/null || fail "a process is left: $(pgrep -ax rxsteer)"
[ "$(ls /run/rxsteer)" = lock ] || fail "left: $(ls -R /run/rxsteer)"
answers() { [[ "$(ip netns exec far bash -c 'exec 3>/dev/tcp/198.18.0.1/9' 2>&1)" == *refused* ]]; }
until_true "the host answers without rxsteer" answers
echo "stopped: no program, no process, offloads as before"

# Softirq mode writes its settings through mounts of its own. In a network namespace of its own
# systemd-nspawn makes not only the mount of sysfs read-only, but the file system.
mount -o remount,rw /sys
sed -i 's/^policy = .*/policy = "rps"/; s/^prepare = .*/mode = "softirq"/' /etc/rxsteer/rxsteer.toml
systemctl start rxsteer || fail "it does not start in softirq mode"
until_true "frames are redirected in softirq mode" redirects
systemctl stop rxsteer
sed -i 's/^mode = .*/prepare = true/' /etc/rxsteer/rxsteer.toml
echo "softirq mode: steers"

# With the default policy, flows follow applications on unconnected sockets too.
sed -i '/^policy/d' /etc/rxsteer/rxsteer.toml
start=$(date +%s)
systemctl start rxsteer || fail "it does not start"
until_true "the journal says that it steers" logged 'steering wan' --since "@$start"
! logged 'not followed' --since "@$start" || fail "the unit refuses what following needs"
echo "follows applications: nothing that it needs is refused"
pid=$(property MainPID)
dpkg --install /opt/rxsteer_*.deb >/opt/log 2>&1 || fail "$(cat /opt/log)"
expect ActiveState active
[ "$(property MainPID)" != "$pid" ] || fail "the old program runs after an upgrade"
echo "upgraded: the running service was restarted"

dpkg --remove rxsteer >/dev/null
[ -z "$(programs)" ] || fail "a program is left at wan after removal"
! pgrep -x rxsteer >/dev/null || fail "removal leaves the process"
dpkg --purge rxsteer rxlab >/dev/null
[ ! -e /etc/rxsteer ] || fail "/etc/rxsteer is left after the purge"
[ "$(systemctl show --value --property LoadState rxsteer)" = not-found ] || fail "the unit is left"
echo "removed while it steered: nothing is left"

# With `pin`, what steering needs is set for good.
until_true "the offload of the other end is on again" offload_is_on
offloads_off
mountpoint -q /sys/fs/bpf || mount -t bpf -o mode=0700 bpf /sys/fs/bpf
# start_pinned WHERE: installs the package, and starts it with `pin = WHERE`.
start_pinned() {
    dpkg --install /opt/rxsteer_*.deb >/opt/log 2>&1 || fail "$(cat /opt/log)"
    printf 'devices = ["wan"]\npolicy = "rps"\nrps-cpus = "0-1"\npin = %s\n' "$1" >/etc/rxsteer/rxsteer.toml
    systemctl start rxsteer || fail "it does not start with pin = $1"
    until_true "frames are redirected with pin = $1" redirects
}
pins() { find /sys/fs/bpf/rxsteer /sys/fs/bpf/own -type f 2>/dev/null || true; }

start_pinned true
program=$(programs)
received=$(counter received)
redirected=$(counter redirected)
systemctl stop rxsteer
expect ActiveState inactive
expect Result success
! pgrep -x rxsteer >/dev/null || fail "a process is left: $(pgrep -ax rxsteer)"
[ "$(programs)" = "$program" ] || fail "a stop ends pinned steering"
came=$(arrived)
more_came() { send && [ "$(arrived)" -ge $((came + 1000)) ]; }
until_true "1000 frames come without a process" more_came
systemctl start rxsteer || fail "it does not take pinned steering over"
[ "$(programs)" = "$program" ] || fail "a start replaces pinned steering"
counted() { [ "$(counter received)" -ge $((received + 1000)) ]; } # within a read of the counters
until_true "1000 frames are counted that came without a process, after $received" counted
more_redirects() { send && [ "$(counter redirected)" -gt "$redirected" ]; }
until_true "more frames are redirected" more_redirects
echo "pinned: steering and counters go on over a stop"

received=$(counter received)
pid=$(property MainPID)
dpkg --install /opt/newer/rxsteer_*.deb >/opt/log 2>&1 || fail "$(cat /opt/log)"
expect ActiveState active
[ "$(property MainPID)" != "$pid" ] || fail "the old program runs after an upgrade"
[ "$(programs)" = "$program" ] || fail "an upgrade replaces pinned steering"
[ "$(counter received)" -ge "$received" ] || fail "counters begin anew after an upgrade"
echo "pinned: a newer version takes over"

# removed WHAT: removes the package, which has to end pinned steering.
removed() {
    dpkg --remove rxsteer >/opt/log 2>&1 || fail "$(cat /opt/log)"
    [ -z "$(programs)" ] || fail "a program is left at wan after removal, $1: $(cat /opt/log)"
    [ -z "$(pins)" ] || fail "left after removal, $1: $(pins)"
    ! pgrep -x rxsteer >/dev/null || fail "removal leaves the process, $1"
    [ ! -e /run/rxsteer ] || fail "left after removal, $1: $(ls -R /run/rxsteer)"
}
removed "while it runs"
grep -q 'every flow in order' /opt/log || fail "removal did not return flows: $(cat /opt/log)"
start_pinned true
systemctl stop rxsteer
removed "after a stop"
start_pinned '"/sys/fs/bpf/own"'
[[ "$(pins)" == /sys/fs/bpf/own/* ]] || fail "pinned elsewhere: $(pins)"
removed "with a folder of its own"
# Flows can't be returned without this program.
start_pinned true
systemctl stop rxsteer
find /sys/fs/bpf/rxsteer -name queue_return -delete
removed "with a damaged pin"
grep -q 'may overtake' /opt/log || fail "the damaged pin was not noticed: $(cat /opt/log)"
# The control: a package that detaches nothing leaves the program.
start_pinned true
sed -i 's/^ *rxsteer detach ||.*/:/' /var/lib/dpkg/info/rxsteer.prerm
dpkg --remove rxsteer >/opt/log 2>&1
[ -n "$(programs)" ] || fail "removal without detach ends steering too: the check above can't fail"
dpkg --install /opt/rxsteer_*.deb >/opt/log 2>&1 || fail "$(cat /opt/log)"
removed "once more"
dpkg --purge rxsteer >/dev/null
[ ! -e /etc/rxsteer ] || fail "/etc/rxsteer is left after the purge"
echo "pinned: removal detaches, in order or else by force"
