#!/usr/bin/env bash
# The whole data pipeline: bash scripts/run_pipeline.sh CORPUS OUT [--section.key value …]
# Kill it anywhere and run it again: only what is missing is done.
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: bash scripts/run_pipeline.sh CORPUS OUT [--section.key value …]" >&2
    exit 2
fi
corpus=$(realpath -m "$1") out=$(realpath -m "$2")
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh train
exec gristmill run --corpus "$corpus" --out "$out" "$@"
