#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# guest.sh [--kernel VERSION] [--cpus N] [--timeout TIME] TEST [FILTER...]: runs tests in a virtual
# machine that has another kernel and more CPUs, half of them under each of two last-level caches.
#
# TEST is a file of tests/ without its .rs, `lib` for the unit tests, or the path of a test binary.
# The tests' exit status is this script's. Every instruction is emulated: this shows behaviour, and
# tells nothing about time.
set -euo pipefail
shopt -s inherit_errexit

kernel=6.12
cpus=8
limit=10m
usage() {
    echo "usage: guest.sh [--kernel 6.1|6.12] [--cpus N] [--timeout 10m] TEST [FILTER...]" >&2
    exit 2
}
while [ $# -gt 0 ]; do
    case $1 in
    --kernel) kernel=${2-} ;;
    --cpus) cpus=${2-} ;;
    --timeout) limit=${2-} ;;
    -*) usage ;;
    *) break ;;
    esac
    shift 2 || usage
done
[[ -n ${1-} && $cpus =~ ^[1-9][0-9]*$ ]] || usage
test=$1
shift
[[ $test != */* ]] || test=$(realpath -e "$test") # before the folder changes

cd "$(dirname "$0")/.."
scripts/setup.sh build guest
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh

cache=$(realpath -m "${CARGO_TARGET_DIR:-target}")/guest
builder mkdir -p "$cache"
dir=$(builder mktemp -d "$cache/run.XXXXXX")
vm=
trap '[ -z "$vm" ] || kill "$vm"; wait; rm -rf "$dir"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

# Downloads the newest kernel of the series that apt knows.
download() {
    local package
    package=$(apt-cache search --names-only "^linux-image-${kernel//./\\.}\.[^ ]*-cloud-amd64$" |
        cut -d' ' -f1 | sort -V | tail -n 1)
    [ -n "$package" ] &&
        (cd "$dir" && builder apt-get -q -o APT::Sandbox::User=root download "$package") >&2
}

# Prints the folder with the kernel: the one that is there, even if apt has a newer one by now.
kernel_folder() {
    local folder
    folder=$(find "$cache" -maxdepth 1 -name "linux-image-$kernel.*" | sort -V | tail -n 1)
    if [ -z "$folder" ]; then
        # A fresh machine has no package lists, an old one stale ones.
        download || {
            as_root apt-get -q update >&2
            download
        } || {
            echo "apt has no package linux-image-$kernel.*-cloud-amd64." >&2
            return 1
        }
        folder=$(echo "$dir"/linux-image-*.deb)
        builder dpkg-deb -x "$folder" "$dir/kernel"
        folder=$cache/$(basename "${folder%%_*}")
        # Busybox would hand the kernel a compressed module before it unpacks it, and that complains.
        builder find "$dir/kernel" -name '*.ko.xz' -exec busybox unxz {} +
        builder busybox depmod -b "$dir/kernel" "${folder##*/linux-image-}"
        builder mv "$dir/kernel" "$folder"
    fi
    echo "$folder"
}

# Prints the path of the test binary, built first if TEST is not one.
binary() {
    local target=(--test "$test")
    case $test in
    */*)
        echo "$test"
        return
        ;;
    lib) target=(--lib) ;;
    esac
    # Of what is built for it, only the test itself has the profile of a test.
    builder cargo test --no-run "${target[@]}" --message-format=json-render-diagnostics |
        sed -n 's/.*"test":true},"features".*"executable":"\([^"]*\)".*/\1/p'
}

# Puts a program and its libraries where they are here, without what only a debugger reads.
add_program() {
    mkdir -p "$dir/root/${1%/*}"
    strip --strip-debug -o "$dir/root/$1" "$1"
    # A static one has none, and ldd fails.
    { ldd "$1" || true; } 2>/dev/null | sed -n 's/[^/]*\(\/[^ ]*\).*/\1/p' |
        xargs -r cp --dereference --parents --target-directory "$dir/root"
}

pack() {
    find "$@" | cpio --create --format newc --owner 0:0 --quiet
}

folder=$(kernel_folder)
binary=$(binary)

mkdir "$dir/root"
mkdir "$dir/root"/{bin,sbin,dev,proc,run,sys,tmp}
cp "$(command -v busybox)" "$dir/root/bin/busybox"
ln -s /bin/busybox "$dir/root/sbin/modprobe" # what the kernel calls
cp scripts/guest-init.sh "$dir/root/init"
add_program "$binary"
# Cargo has it beside the folder of the test binaries, and tests run it.
rxsteer=$(realpath -m "${binary%/*}/../rxsteer")
[ ! -x "$rxsteer" ] || add_program "$rxsteer"
nft=$(PATH=$PATH:/usr/sbin:/sbin command -v nft) && add_program "$nft"
cp -r --parents "$PWD/tests/fixtures" "$dir/root"
# As cargo runs it.
printf 'cd %q && exec %q --test-threads=1' "$PWD" "$binary" >"$dir/root/test"
[ $# = 0 ] || printf ' %q' "$@" >>"$dir/root/test"

{
    (cd "$folder" && pack lib)
    (cd "$dir/root" && pack .)
} >"$dir/initramfs"

sockets=$((cpus % 2 ? 1 : 2))
qemu=(qemu-system-x86_64 -accel "tcg,thread=multi" -cpu "max,l3-cache=on" -m 2048
    -smp "cpus=$cpus,sockets=$sockets,cores=$((cpus / sockets)),threads=1"
    -kernel "$folder"/boot/vmlinuz-* -initrd "$dir/initramfs"
    -append "console=ttyS0 quiet mitigations=off oops=panic panic=-1"
    -display none -monitor none -nic none -no-reboot
    # The second port is for the status alone: the kernel writes to the first what it likes.
    -serial stdio -serial "file:$dir/status")
# In the background, since a trap waits for what is in the foreground. After SIGKILL there is no trap.
setpriv --pdeathsig TERM timeout --kill-after=5 "$limit" "${qemu[@]}" </dev/null &
vm=$!
status=0
wait "$vm" || status=$?
vm=
if [ $status = 124 ]; then
    echo "The guest did not finish in $limit." >&2
    exit 124
fi
status=$(tr -d '\r\n' <"$dir/status")
if [ -z "$status" ]; then
    echo "The guest ended before its tests did." >&2
    exit 1
fi
echo "Linux ${folder##*/linux-image-}, $cpus CPUs: exit status $status"
exit "$status"
