#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# dist.sh: builds what is published into target/dist/: the sources, Debian's packages, static programs, and for
# each of the latter a list of its components; with checksums. Needs root.
#
# Everything is that of the last commit, and so are the dates, unless SOURCE_DATE_EPOCH gives another one.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "$0")/.."
if [ "$(id -u)" != 0 ]; then
    echo "dist.sh needs root, to change into root folders." >&2
    exit 1
fi
scripts/setup.sh build dist
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh

changed=$(builder git status --porcelain)
if [ -n "$changed" ]; then
    printf 'Files differ from the last commit, which is what would be published as source:\n%s\n' "$changed" >&2
    exit 1
fi
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml)
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(builder git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
out=$(realpath -m "${CARGO_TARGET_DIR:-target}")/dist
rm -rf "$out"
mkdir -p "$out"

scripts/manifest.sh
builder git archive --prefix="rxsteer-$version/" HEAD | gzip --no-name --best >"$out/rxsteer-$version.tar.gz"
for architecture in x86_64 aarch64; do
    folder=$(scripts/static.sh "$architecture")
    for program in rxsteer rxlab; do
        name=$program-$version-linux-$architecture
        install "$folder/$program" "$out/$name"
        install -m 644 "$folder/$program.cdx.json" "$out/$name.cdx.json"
    done
done
mapfile -t debs < <(scripts/deb.sh)
cp "${debs[@]}" "$out/"
(cd "$out" && sha256sum -- * >SHA256SUMS)

# What can be run here has to say its version, and the sources have to be complete.
said=$("$out/rxsteer-$version-linux-$(uname -m)" --version)
if [ "$said" != "rxsteer $version" ]; then
    echo "the static program says \"$said\"" >&2
    exit 1
fi
unpacked=$(mktemp -d)
trap 'rm -r "$unpacked"' EXIT
tar --extract --file "$out/rxsteer-$version.tar.gz" --directory "$unpacked"
chmod 755 "$unpacked"
(cd "$unpacked/rxsteer-$version" && builder cargo metadata --locked --offline --format-version 1 >"$unpacked/metadata")
cat "$out/SHA256SUMS"
