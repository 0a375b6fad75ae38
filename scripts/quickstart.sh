#!/usr/bin/env bash
# The quick start, in a virtual environment that it makes: from raw text to a trained language model.
#   bash scripts/quickstart.sh [CORPUS_DIR] [--optim.steps N …]
# Output goes to ./quickstart of the checkout, or to $QUICKSTART_OUT. Run it again to resume. See: gristmill quickstart --help
set -euo pipefail
root=$(dirname "${BASH_SOURCE[0]}")/..
out=$(realpath -m "${QUICKSTART_OUT:-$root/quickstart}")
corpus=()
if [ $# -gt 0 ] && [[ $1 != -* ]]; then
    corpus=("$(realpath -m "$1")")
    shift
fi
cd "$root"
. scripts/environment.sh train
exec gristmill quickstart ${corpus[@]+"${corpus[@]}"} --out "$out" "$@"
