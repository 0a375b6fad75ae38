#!/usr/bin/env bash
# The tests, on a machine that has Python and nothing else of ours. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh ftfy,train,test
ruff check .
ruff format --check .
mypy
# in the files' order: by default those of few tests, which are the longest, would come last, on one core
python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
