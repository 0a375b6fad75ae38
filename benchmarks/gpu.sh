#!/usr/bin/env bash
# All that only a GPU shows, in one Markdown report, in under ten minutes and without a network:
#   bash benchmarks/gpu.sh [--wheels FOLDER] [options of benchmarks/bench_gpu.py]
# Needs Python 3.11 or later (PYTHON names it) with torch 2.11 or later; FOLDER holds wheels of what else is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
if [ "${1:-}" = --wheels ]; then
    folder="${2:?--wheels needs a folder}"
    shift 2
    "$python" -m venv --system-site-packages .venv-gpu
    # the project's own requirements, without torch, which is there
    requirements="$("$python" -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*[r.replace(" ", "") for r in project["dependencies"]], "safetensors", "pytest")')"
    # shellcheck disable=SC2086  # words, each one requirement
    .venv-gpu/bin/python -m pip install --quiet --no-index --find-links "$folder" $requirements
    .venv-gpu/bin/python -m pip install --quiet --no-index --find-links "$folder" transformers ||
        echo "transformers is not in $folder: its models are not compared"
    python=.venv-gpu/bin/python
fi
PYTHONPATH="$PWD" exec "$python" benchmarks/bench_gpu.py "$@"
