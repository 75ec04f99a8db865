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
x86_64) debian=amd64 ;;
aarch64) debian=arm64 ;;
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

# Both linkers in both builds: one of them links build scripts, which another linker would have built anew.
linkers=()
for machine in x86_64 aarch64; do
    variable=${machine}_unknown_linux_gnu
    linkers+=("CARGO_TARGET_${variable^^}_LINKER=$machine-linux-gnu-gcc"
        "LIBBPF_SYS_LIBRARY_PATH_$variable=/usr/lib/$machine-linux-gnu")
done
# libelf and zlib both define crc32(), which is the same function: the linker takes the first one.
flags=(-Ctarget-feature=+crt-static -Clink-arg=-l:libzstd.a '-Clink-arg=-Wl,--allow-multiple-definition'
    --remap-path-prefix=/root/cargo=/cargo)
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
    "${linkers[@]}" \
    RUSTFLAGS="${flags[*]}" \
    sh -euc 'mkdir /root/cargo && ln -s /cargo /root/cargo/registry && cd /source
        cargo build --frozen --release --target "$1" --features libbpf-sys/static
        # The date of the lists. The programs have none, and would be built anew for each.
        SOURCE_DATE_EPOCH=$2 cargo cyclonedx --quiet --format json --spec-version 1.5 --target "$1"
        cp crates/*/*.cdx.json /out/' build "$target" "$epoch" >&2

# What Cargo does not know: the archives of these packages of Debian.
archives=$(dpkg-query --admindir="$root/var/lib/dpkg" --show --showformat '${source:Package} ${source:Version}\n' \
    {libc6-dev,libstd-rust-dev,libelf-dev,zlib1g-dev,libzstd-dev}:$debian)
components=$(jq --raw-input --compact-output 'split(" ") | {
    type: "library", "bom-ref": "debian:\(.[0])", name: .[0], version: .[1],
    purl: "pkg:deb/debian/\(.[0])@\(.[1] | @uri)?arch=source"
}' <<<"$archives")

# The kernel loads a static program without an interpreter.
for program in rxsteer rxlab; do
    path=$out/$target/release/$program
    if readelf --program-headers "$path" | grep -q INTERP; then
        echo "$path needs shared libraries" >&2
        exit 1
    fi
    install -D "$path" "$out/$architecture/$program"
    jq --slurpfile archives <(echo "$components") '.components += $archives' "$out/$program.cdx.json" \
        >"$out/$architecture/$program.cdx.json"
    rm "$out/$program.cdx.json"
done
echo "$out/$architecture"
