#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# deb.sh [VERSION]: builds Debian's packages of rxsteer and rxlab (dist/debian/) into target/deb/, and prints
# their paths. VERSION is the version to write on them; without it, it is that of Cargo.toml.
#
# DEBFULLNAME and DEBEMAIL, as dch(1) reads them, name the maintainer of packages that are published. The date is that
# of the last commit, or SOURCE_DATE_EPOCH.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "$0")/.."

scripts/setup.sh build dist
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh

own=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml)
version=${1:-$own}
maintainer="${DEBFULLNAME:-The rxsteer authors} <${DEBEMAIL:-maintainers@rxsteer.example}>"
epoch=${SOURCE_DATE_EPOCH:-$(builder git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH=$epoch

out=$(realpath -m "${CARGO_TARGET_DIR:-target}")/deb
source=$out/rxsteer-$version
rm -rf "$source"
mkdir -p "$source/debian"
scripts/install.sh "$source/installed/usr" rxsteer rxlab >&2
cp dist/debian/* "$source/debian/"
cp dist/rxsteer.service "$source/debian/"
cp CHANGELOG.md "$source/"
sed -i "s/@MAINTAINER@/$maintainer/" "$source/debian/control"

# Prints a licence as a field of debian/copyright has it.
licence() {
    sed -e 's/^$/./' -e 's/^/ /' "$1"
}
sed -i -e "/^@MIT@$/{r /dev/stdin
d}" "$source/debian/copyright" < <(licence LICENSE-MIT)
sed -i -e "/^@BSD@$/{r /dev/stdin
d}" "$source/debian/copyright" < <(licence LICENSE-BSD-2-Clause)

cat >"$source/debian/changelog" <<EOF
rxsteer ($version) unstable; urgency=medium

  * Release $version: CHANGELOG.md beside this file has what changed.

 -- $maintainer  $(date -R -u -d "@$epoch")
EOF

(cd "$source" && dpkg-buildpackage --build=binary --no-sign) >"$out/build.log" 2>&1 || {
    cat "$out/build.log" >&2
    exit 1
}
rm -r "$source"
architecture=$(dpkg --print-architecture)
for program in rxsteer rxlab; do
    echo "$out/${program}_${version}_$architecture.deb"
done
