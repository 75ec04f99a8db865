#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# debtest.sh: builds Debian's packages and checks them: lintian, and in a root folder of their own
# installation, upgrade, removal and purge, which leaves nothing. Needs root.
set -euo pipefail
shopt -s inherit_errexit

if [ "${1-}" != --inside ]; then
    cd "$(dirname "$0")/.."
    [ "$(id -u)" = 0 ] || {
        echo "debtest.sh needs root, to change into the root folder." >&2
        exit 1
    }
    scripts/setup.sh dist
    mapfile -t old < <(scripts/deb.sh)
    version=$(dpkg-deb --field "${old[0]}" Version)
    mapfile -t new < <(scripts/deb.sh "$version+1")
    root=$(scripts/root.sh service)
    lintian --allow-root --fail-on=error,warning "${old[@]}"
    echo "lintian: no errors, no warnings"
    # All that is mounted, and every process, ends with these namespaces.
    exec unshare --mount --pid --net --fork --kill-child \
        "$PWD/scripts/debtest.sh" --inside "$root" "${old[@]}" "${new[@]}"
fi

root=$2
old=("$3" "$4")
new=("$5" "$6")
version=$(dpkg-deb --field "${old[0]}" Version)
[ "${#version}" != 0 ]

mount -t tmpfs debtest /mnt
mkdir /mnt/{upper,work,root}
mount -t overlay overlay -o "lowerdir=$root,upperdir=/mnt/upper,workdir=/mnt/work" /mnt/root
mount -t proc proc /mnt/root/proc
cd /mnt/root

fail() {
    echo "FAILED: $*" >&2
    exit 1
}
inside() {
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive chroot . "$@"
}
# install DEB...
install_debs() {
    cp "$@" tmp/
    inside dpkg --install "${@/#*\//\/tmp/}" >tmp/log 2>&1 || fail "$(cat tmp/log)"
    rm tmp/*.deb tmp/log
}
# The files of the system, but for the packager's own records.
files() {
    find . -xdev \( -path ./var/lib/dpkg -o -path ./var/log -o -path ./var/cache -o -path ./tmp \) -prune \
        -o -print | sort
}
# How the package's state reads in dpkg's records.
state() {
    # shellcheck disable=SC2016 # the names are dpkg's
    inside dpkg-query --show --showformat '${db:Status-Status} ${Version}' rxsteer
}

files >/mnt/before
install_debs "${old[@]}"
[ "$(state)" = "installed $version" ] || fail "state after installation: $(state)"
for program in rxsteer rxlab; do
    [ "$(inside "$program" --version)" = "$program ${version%%+*}" ] || fail "$program does not run"
    [ -e "usr/share/man/man8/$program.8.gz" ] || fail "$program has no man page"
    for completion in bash-completion/completions/"$program" zsh/vendor-completions/_"$program" \
        fish/vendor_completions.d/"$program".fish; do
        [ -s "usr/share/$completion" ] || fail "/usr/share/$completion is missing"
    done
done
inside rxsteer check /usr/share/doc/rxsteer/examples/rxsteer.toml >/dev/null || fail "the example has mistakes"
[ -z "$(ls etc/rxsteer)" ] || fail "/etc/rxsteer is not empty"
enabled=$(inside systemctl is-enabled rxsteer.service) || true
[ "$enabled" = disabled ] || fail "the unit is $enabled; without a configuration it has to be disabled"
echo "installation: the programs run, the unit is disabled"

echo 'devices = ["eth0"]' >etc/rxsteer/rxsteer.toml
install_debs "${new[@]}"
[ "$(state)" = "installed $version+1" ] || fail "state after the upgrade: $(state)"
[ "$(cat etc/rxsteer/rxsteer.toml)" = 'devices = ["eth0"]' ] || fail "the upgrade changed the configuration"
echo "upgrade: $version to $version+1, with the same configuration"

# In the place of rxsteer: a program that writes down its arguments, and one without that command.
for knows in 0 2; do
    printf '#!/bin/sh\necho "$*" >>/tmp/called\nexit %s\n' "$knows" >usr/bin/rxsteer
    rm -f tmp/called
    inside dpkg --remove rxsteer >/dev/null
    case $knows in
    0) expected=$'detach --help\ndetach' ;;
    2) expected='detach --help' ;;
    esac
    [ "$(cat tmp/called)" = "$expected" ] || fail "removal called: $(cat tmp/called)"
    install_debs "${new[@]}"
done
rm tmp/called
inside dpkg --remove rxsteer rxlab >/dev/null
[ "$(state)" = "config-files $version+1" ] || fail "state after removal: $(state)"
[ ! -e usr/bin/rxsteer ] || fail "the program stays after removal"
[ -e etc/rxsteer/rxsteer.toml ] || fail "removal deleted the configuration"
echo "removal: the configuration stays; detached if the program knows how to"

# The control: before it is purged there is something to find.
files | diff /mnt/before - >/mnt/left && fail "nothing was left before the purge"
inside dpkg --purge rxsteer >/dev/null
files | diff /mnt/before - || fail "left after the purge"
echo "purge: nothing is left"
