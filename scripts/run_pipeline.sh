#!/usr/bin/env bash
# The data pipeline, in a virtual environment that it makes: bash scripts/run_pipeline.sh CORPUS OUT [--section.key value …]
# Run it again to resume: only the missing work is done.
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
