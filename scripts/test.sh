#!/usr/bin/env bash
# The tests, on a machine that has Python and nothing else of ours. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh ftfy,train,test
ruff check .
ruff format --check .
mypy
python -m pytest -n 2 --dist loadfile "$@"
