#!/usr/bin/env bash
# All that only a GPU shows, in one Markdown report, in under ten minutes and without a network:
#   bash benchmarks/gpu.sh [--wheels FOLDER] [options of benchmarks/bench_gpu.py]
# With NODES or GPUS, of several GPUs on one node or more, the same command on each: the options of bench_cluster.py.
#   NODES=2 GPUS=8 HEAD=node1 bash benchmarks/gpu.sh --out report.md
# Needs Python 3.11 or later (PYTHON names it) with torch 2.11 or later; FOLDER holds wheels of what else is missing.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
require_torch() {
    if ! "$python" -c 'import torch' 2> /dev/null; then
        echo "error: $python cannot import torch; name one that can: PYTHON=/path/to/python bash benchmarks/gpu.sh" >&2
        exit 2
    fi
}
if [ "${1:-}" = --wheels ]; then
    folder="${2:?--wheels needs a folder}"
    shift 2
    if ! compgen -G "$folder/*.whl" > /dev/null; then
        echo "error: there are no wheels (*.whl) in $folder; fill it with pip download, or leave --wheels out" >&2
        exit 2
    fi
    require_torch
    venv="$root/.venv-gpu"
    "$python" -m venv --system-site-packages "$venv"
    # where $python is of a virtual environment itself, its packages are not the system's
    site='import sysconfig; print(sysconfig.get_path("purelib"))'
    "$python" -c "$site" > "$("$venv/bin/python" -c "$site")/packages-of-python.pth"
    # the project's own requirements, without torch, which is there
    requirements="$("$python" -c 'import sys, tomllib; project = tomllib.load(open(sys.argv[1], "rb"))["project"]
print(*[r.replace(" ", "") for r in project["dependencies"]], "safetensors", "pytest")' "$root/pyproject.toml")"
    # shellcheck disable=SC2086  # words, each one requirement
    "$venv/bin/python" -m pip install --quiet --no-index --find-links "$folder" $requirements
    "$venv/bin/python" -m pip install --quiet --no-index --find-links "$folder" transformers ||
        echo "transformers is not in $folder: its models are not compared"
    python="$venv/bin/python"
else
    require_torch
fi
export PYTHONPATH="$root"
if [ -n "${NODES:-}${GPUS:-}" ]; then
    exec "$python" -m torch.distributed.run --nnodes="${NODES:-1}" --nproc_per_node="${GPUS:-1}" --rdzv_backend=c10d \
        --rdzv_endpoint="${HEAD:-localhost}:${PORT:-29400}" --rdzv_id=gristmill-bench "$root/benchmarks/bench_cluster.py" "$@"
fi
exec "$python" "$root/benchmarks/bench_gpu.py" "$@"
