#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# servicetest.sh: rxsteer.service under a real systemd. Builds the package, boots a root folder with systemd in
# namespaces of its own, and runs servicetest-guest.sh there, which installs, starts, stops, upgrades and removes
# rxsteer. Needs root.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "$0")/.."

if [ "$(id -u)" != 0 ]; then
    echo "servicetest.sh needs root, to boot the root folder." >&2
    exit 1
fi
scripts/setup.sh dist
mapfile -t debs < <(scripts/deb.sh)
version=$(dpkg-deb --field "${debs[0]}" Version)
mapfile -t newer < <(scripts/deb.sh "$version+1")
root=$(scripts/root.sh service)

# systemd-nspawn makes cgroups beside the one that it is in, and leaves them.
# shellcheck source=scripts/cgroups.sh
. scripts/cgroups.sh
make_cgroups rxsteer-servicetest

# Everything that is mounted, and every process, ends with these namespaces.
boot() {
    enter_cgroups
    # shellcheck disable=SC2016 # expanded inside
    exec timeout --foreground --kill-after=10 11m unshare --mount --net --pid --fork --kill-child --mount-proc \
        bash -euc '
            root=$1 guest=$2 newer=$3
            shift 3
            mount -t tmpfs servicetest /mnt
            mount -t tmpfs servicetest /run # where systemd-nspawn writes
            mkdir /mnt/{upper,work,root}
            mount -t overlay overlay -o "lowerdir=$root,upperdir=/mnt/upper,workdir=/mnt/work" /mnt/root
            cp "$@" /mnt/root/opt/
            install -D --target-directory=/mnt/root/opt/newer "$newer"
            install "$guest" /mnt/root/opt/servicetest
            cp "$(dirname "$guest")"/{until,veth}.sh /mnt/root/opt/
            cat >/mnt/root/etc/systemd/system/servicetest.service <<-EOF
		[Unit]
		Wants=multi-user.target
		After=multi-user.target
		[Service]
		Type=oneshot
		TimeoutStartSec=infinity
		ExecStart=/bin/bash -c "timeout --kill-after=10 9m /opt/servicetest; exec systemctl exit \$\$?"
		StandardOutput=file:/opt/output
		StandardError=inherit
		EOF
            status=0
            systemd-nspawn --quiet --directory=/mnt/root --boot --register=no --keep-unit --machine=servicetest \
                --capability=all --system-call-filter="bpf perf_event_open" --console=pipe systemd.unit=servicetest.service </dev/null || status=$?
            cat /mnt/root/opt/output
            exit $status' boot "$root" scripts/servicetest-guest.sh "${newer[0]}" "${debs[@]}"
}
status=0
(boot) || status=$?
exit $status
