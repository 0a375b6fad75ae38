#!/bin/bash
# One training run on several machines that know each other by name: run it on each of them.
#     HEAD=node1 NODES=2 GPUS=8 RUN=llama bash torchrun.sh --config llama.toml --out_dir s3://bucket/llama
# HEAD is the name of one machine. A machine that is lost comes back by the same command, which resumes.
set -eu
exec gristmill torchrun --nnodes="$NODES" --nproc_per_node="$GPUS" --max-restarts="${RESTARTS:-3}" --rdzv_backend=c10d \
    --rdzv_endpoint="$HEAD:${PORT:-29400}" --rdzv_id="${RUN:-run}" -m gristmill_cli.train "$@"
