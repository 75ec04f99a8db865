#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# setup.sh JOB...: installs the packages that the jobs need (build, test, guest, emulator, lint,
# demo, bench, servers, profile, dist, image, docs).
#
# Silent if none is missing. On Debian and Ubuntu missing packages are listed, with the reason, and
# installed; elsewhere they are listed, and the build stops if it needs them.
set -euo pipefail

clang=${CLANG:-clang}
missing=()  # lines "PACKAGE<tab>REASON"
fatal=false # something the job can't do without is among them

have() { command -v "$1" >/dev/null 2>&1; }
have_header() { echo "#include <$1>" | cc -E - >/dev/null 2>&1; }

# Debian has the runtime of sanitizers and fuzzers in a package for each version of clang.
have_fuzzer() {
    local out status=0
    out=$(mktemp)
    echo 'int LLVMFuzzerTestOneInput(const char *p, unsigned long n) { return !p && n; }' |
        "$clang" -fsanitize=fuzzer,address -x c -o "$out" - >/dev/null 2>&1 || status=1
    rm -f "$out"
    return $status
}
fuzzer_package() {
    local major name
    major=$("$clang" -dumpversion 2>/dev/null | cut -d. -f1)
    for name in "libclang-rt-$major-dev" "libclang-common-$major-dev"; do
        if ! have apt-cache || [ -n "$(apt-cache show "$name" 2>/dev/null)" ]; then
            break
        fi
    done
    echo "$name"
}

# need PACKAGE REASON PROBE...: PACKAGE is missing unless PROBE succeeds.
need() {
    local package=$1 reason=$2
    shift 2
    if ! "$@"; then
        missing+=("$package"$'\t'"$reason")
        fatal=true
    fi
}
# want: as need, for packages that the job can do without.
want() {
    local before=$fatal
    need "$@"
    fatal=$before
}

have_library() { pkg-config --exists "$1" 2>/dev/null; }
have_yaml() { python3 -c 'import yaml' 2>/dev/null; }
have_venv() { python3 -c 'import venv, ensurepip' 2>/dev/null; }
have_build_tools() { have cc && have make; }

# Only root runs it, and only root's PATH is sure to include its folder.
want_nft() { want nftables "makes the firewall of the demo and the benchmark" have_sbin nft; }
have_sbin() { PATH=$PATH:/usr/sbin:/sbin have "$1"; }

probe() {
    missing=()
    fatal=false
    case $1 in
    build)
        need build-essential "a C compiler and make, for libbpf, which becomes part of rxsteer" \
            have_build_tools
        need clang "compiles the BPF programs" have "$clang"
        need pkg-config "finds the libraries below" have pkg-config
        need libelf-dev "libbpf reads object files with it" have_header libelf.h
        need zlib1g-dev "libbpf reads object files with it" have_header zlib.h
        ;;
    test)
        want "$(fuzzer_package)" "runs the fuzz targets of the packet parser" have_fuzzer
        want prometheus "has promtool, which checks the metrics (its server is not used)" have promtool
        want spin "checks the model of the rule of order" have spin
        want ethtool "carries out what doctor recommends" have ethtool
        want strace "shows the system calls that the service unit has to allow" have strace
        want systemd "has systemd-analyze, which judges the service unit" have systemd-analyze
        want_nft
        ;;
    guest)
        need seabios "is the virtual machine's firmware" test -e /usr/share/seabios/bios-256k.bin
        need qemu-system-data "has more of it" test -e /usr/share/qemu/linuxboot_dma.bin
        need busybox-static "is all that the machine has besides what is measured or tested" have busybox
        need cpio "packs the machine's files" have cpio
        want_nft
        want iproute2 "has tc, by which programs are attached before Linux 6.6" have tc
        want wireguard-tools "sets up WireGuard devices" have wg
        ;;
    emulator)
        need build-essential "a C compiler, for the emulator" have_build_tools
        need dpkg-dev "unpacks its source package" have dpkg-source
        need patch "makes its clocks count instructions" have patch
        need ninja-build "builds it" have ninja
        need python3-venv "runs its build" have_venv
        need pkg-config "finds the libraries below" have pkg-config
        need libglib2.0-dev "it uses" have_library glib-2.0
        need libfdt-dev "it uses" have_header libfdt.h
        need zlib1g-dev "it uses" have_header zlib.h
        ;;
    lint)
        need clang-format "checks the layout of the C files" have clang-format
        need git "lists the files for the check of licences" have git
        need shellcheck "checks the scripts" have shellcheck
        ;;
    demo | bench)
        want_nft
        ;;
    servers)
        # A job of its own: these packages also start their servers.
        want nsd "is a server that the benchmark measures" have_sbin nsd
        want nginx-light "is another one" have_sbin nginx
        want dnsperf "asks nsd" have dnsperf
        want wrk "asks nginx" have wrk
        ;;
    dist)
        need debhelper "puts files where Debian has them, and writes maintainer scripts" have dh
        need dpkg-dev "builds packages" have dpkg-buildpackage
        need fakeroot "lets packages have files of root" have fakeroot
        need lintian "judges packages" have lintian
        need mmdebstrap "makes the root folders in which packages are tested" have mmdebstrap
        need systemd-container "boots them" have systemd-nspawn
        need binutils "tells whether a program is static" have readelf
        need jq "adds to the lists of their components" have jq
        need qemu-system-arm "emulates an arm64 machine" have qemu-system-aarch64
        need cpio "packs its files" have cpio
        need xz-utils "unpacks a module of its kernel" have xz
        need python3-venv "runs the check of the Kubernetes manifest" have_venv
        ;;
    image)
        need podman "builds the image, and runs it" have podman
        need runc "starts containers for podman" have_sbin runc
        need python3-yaml "reads the manifest" have_yaml
        need iproute2 "makes the network of the test" have ip
        need ethtool "looks at offloads" have ethtool
        ;;
    docs)
        need python3-venv "gets mdbook, which makes the book" have_venv
        ;;
    profile)
        need linux-perf "samples what the virtual machine's CPUs execute" have perf
        ;;
    *)
        echo "usage: setup.sh build|test|guest|emulator|lint|demo|bench|servers|profile|dist|image|docs ..." >&2
        exit 2
        ;;
    esac
}

show_missing() {
    local line
    for line in "${missing[@]}"; do
        printf '  %-20s %s\n' "${line%%$'\t'*}" "${line#*$'\t'}" >&2
    done
}

as_root=()
if [ "$(id -u)" != 0 ]; then
    as_root=(sudo)
fi

install_missing() {
    local packages=("${missing[@]%%$'\t'*}")
    local install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive
        apt-get install --yes --no-install-recommends "${packages[@]}")
    if [ "${#as_root[@]}" != 0 ] && ! have sudo; then
        echo "To install them, run as root: apt-get install ${packages[*]}" >&2
        return 1
    fi
    echo "Installing them with: ${as_root[*]:+${as_root[*]} }apt-get install ${packages[*]}" >&2
    # A fresh machine has no package lists, an old one outdated ones.
    "${install[@]}" </dev/null >&2 || {
        "${as_root[@]}" apt-get update </dev/null >&2
        "${install[@]}" </dev/null >&2
    }
}

for job in "$@"; do
    probe "$job"
    [ "${#missing[@]}" = 0 ] && continue
    echo "To $job, this machine lacks these packages:" >&2
    show_missing
    if have apt-get; then
        install_missing || true
        probe "$job"
        [ "${#missing[@]}" = 0 ] && continue
        echo "Still missing:" >&2
        show_missing
    else
        echo "(These are Debian's names; install what your distribution calls them.)" >&2
    fi
    if $fatal; then
        exit 1
    fi
done
