#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# static.sh x86_64|aarch64: builds rxsteer and rxlab without shared libraries, and prints the folder of the programs,
# target/static/ARCHITECTURE, which also has the list of their components (PROGRAM.cdx.json, CycloneDX). Needs root.
#
# The C library is glibc, in a root folder of Debian (root.sh), since that has the standard library of Rust for both
# architectures, and libelf and zlib as archives. Paths in there are the same on each machine.
set -euo pipefail
shopt -s inherit_errexit

architecture=${1-}
target=$architecture-unknown-linux-gnu
case $architecture in
x86_64 | aarch64) ;;
*)
    echo "usage: static.sh x86_64|aarch64" >&2
    exit 2
    ;;
esac
cd "$(dirname "$0")/.."
if [ "$(id -u)" != 0 ]; then
    echo "static.sh needs root, to change into the root folder." >&2
    exit 1
fi
scripts/setup.sh dist
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh
root=$(scripts/root.sh static)
out=$(realpath -m "${CARGO_TARGET_DIR:-target}")/static
epoch=${SOURCE_DATE_EPOCH:-$(builder git log -1 --format=%ct)}
cargo_home=${CARGO_HOME:-$HOME/.cargo}
mkdir -p "$out"
# Within, nothing is downloaded.
builder cargo fetch --locked --quiet

# As part of the names of environment variables.
environment=${target//-/_}
# libelf and zlib both define crc32(), which is the same function: the linker takes the first one.
# shellcheck disable=SC2016 # expanded inside
unshare --mount bash -euc '
    root=$1 out=$2 cargo_home=$3
    shift 3
    mount -t tmpfs static /mnt
    mkdir -p /mnt/{upper,work,root} /mnt/source/{upper,work}
    mount -t overlay overlay -o "lowerdir=$root,upperdir=/mnt/upper,workdir=/mnt/work" /mnt/root
    mkdir /mnt/root/{source,out,cargo}
    # The lists are written beside each Cargo.toml.
    mount -t overlay overlay -o "lowerdir=$PWD,upperdir=/mnt/source/upper,workdir=/mnt/source/work" /mnt/root/source
    mount --bind "$out" /mnt/root/out
    # Builds of libbpf-sys change its sources there.
    mkdir -p /mnt/registry/{upper,work}
    mount -t overlay overlay -o "lowerdir=$cargo_home/registry,upperdir=/mnt/registry/upper,workdir=/mnt/registry/work" \
        /mnt/root/cargo
    mount --rbind /dev /mnt/root/dev
    mount -t proc proc /mnt/root/proc
    exec chroot /mnt/root env -i PATH=/usr/bin:/bin HOME=/root "$@"
' static "$root" "$out" "$cargo_home" \
    CARGO_HOME=/root/cargo CARGO_NET_OFFLINE=true CARGO_TARGET_DIR=/out CARGO_PROFILE_RELEASE_STRIP=symbols \
    SOURCE_DATE_EPOCH="$epoch" \
    LIBBPF_SYS_LIBRARY_PATH_"$environment"="/usr/lib/$architecture-linux-gnu" \
    CARGO_TARGET_"${environment^^}"_LINKER=/root/linker \
    RUSTFLAGS="-Ctarget-feature=+crt-static -Clink-arg=-l:libzstd.a --remap-path-prefix=/root/cargo=/cargo" \
    sh -c 'echo "exec $0 \"\$@\" -Wl,--allow-multiple-definition" | install -m 755 /dev/stdin /root/linker &&
        sed -i "1i #!/bin/sh" /root/linker && mkdir /root/cargo && ln -s /cargo /root/cargo/registry && cd /source &&
        cargo build --frozen --release --target '"$target"' --features libbpf-sys/static &&
        cargo cyclonedx --quiet --format json --target '"$target"' && cp crates/*/*.cdx.json /out/' "$architecture-linux-gnu-gcc" >&2

# The kernel loads a static program without an interpreter.
for program in rxsteer rxlab; do
    path=$out/$target/release/$program
    if readelf --program-headers "$path" | grep -q INTERP; then
        echo "$path needs shared libraries" >&2
        exit 1
    fi
    install -D "$path" "$out/$architecture/$program"
    mv "$out/$program.cdx.json" "$out/$architecture/"
done
echo "$out/$architecture"
