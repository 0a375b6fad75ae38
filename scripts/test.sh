#!/usr/bin/env bash
# Style, types and tests, in a virtual environment that it makes. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh ftfy,train,test,docs
# A browser for the tests of pages, which are skipped without one: Debian's packages, where they may be installed.
if ! command -v chromedriver >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -q && apt-get install -y -q --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1 ||
        echo "note: apt-get did not install chromium: tests of pages in a browser are skipped"
fi
ruff check .
ruff format --check .
mypy --num-workers 2
# Hundreds of processes are started, three tests at once: each reads the modules' bytecode, and has one thread.
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS=1
python -m gristmill_cli compile  # or each of the three compiles the kernels that its tests need
# In the order of the files: by default, files with few tests come last, and those take longest.
python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
