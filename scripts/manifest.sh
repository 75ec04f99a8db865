#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# manifest.sh: checks dist/kubernetes/ against Kubernetes' schemas, which a Python package brings along.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh dist
# shellcheck source=scripts/cargo.sh
. scripts/cargo.sh

tools=$(realpath -m "${CARGO_TARGET_DIR:-target}")/tools/kubernetes
if [ ! -x "$tools/bin/kubernetes-validate" ]; then
    builder python3 -m venv "$tools"
    builder "$tools/bin/pip" install --quiet --disable-pip-version-check kubernetes-validate==1.37.0
fi
validate() {
    builder "$tools/bin/kubernetes-validate" --strict --quiet "$@"
}
validate dist/kubernetes/*.yaml

# The control: a misspelt key is found.
wrong=$(builder mktemp --suffix=.yaml)
trap 'rm "$wrong"' EXIT
sed 's/hostNetwork:/hostNetwrk:/' dist/kubernetes/daemonset.yaml >"$wrong"
if validate "$wrong" >/dev/null 2>&1; then
    echo "the check of the manifest finds nothing: a misspelt key passes" >&2
    exit 1
fi
echo "dist/kubernetes/: valid"
