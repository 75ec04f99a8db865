#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# arm64.sh: rxsteer on arm64, in an emulated machine with Debian's kernel: builds the static programs, and runs
# arm64-guest.sh there. Needs root, for static.sh.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "$0")/.."
scripts/setup.sh build dist
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh
# shellcheck source=scripts/vm.sh
. scripts/vm.sh

programs=$(scripts/static.sh aarch64)
files=$(scripts/root.sh arm64)
vm_dir "$(realpath -m "${CARGO_TARGET_DIR:-target}")/guest"
trap 'rm -rf "$dir"' EXIT

root=$dir/root
mkdir -p "$root"/{dev,proc,run,sys,tmp,usr/bin,usr/lib,usr/sbin}
for folder in bin lib sbin; do
    ln -s "usr/$folder" "$root/$folder"
done
cp "$programs"/* "$files"/usr/bin/{bash,busybox,ip} "$root/usr/bin/"
cp -r "$files/usr/lib/aarch64-linux-gnu" "$files"/usr/lib/ld-linux-aarch64.so.1 "$root/usr/lib/"
find "$files/usr/lib/modules" -name veth.ko.xz -exec xz --decompress --stdout {} \; >"$root/veth.ko"
install scripts/arm64-guest.sh "$root/init"
cp scripts/until.sh "$root/"
(cd "$root" && vm_pack .) >"$dir/initramfs"

# -nic none: no network of the host. The machine ends itself; a panic ends it too.
timeout --foreground --kill-after=5 20m qemu-system-aarch64 -M virt -cpu max -accel tcg,thread=multi -smp 2 -m 2048 \
    -kernel "$files"/boot/vmlinuz-* -initrd "$dir/initramfs" -append "console=ttyAMA0 quiet panic=-1" \
    -display none -monitor none -nic none -no-reboot -serial stdio </dev/null | sed --unbuffered 's,\r,,g' | tee "$dir/log"
grep -qx 'exit status 0' "$dir/log"
