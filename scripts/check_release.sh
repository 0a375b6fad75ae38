#!/usr/bin/env bash
# What a release waits for: every test, the whole certificate, and runs of the pipeline that are killed in every way.
# Usage: bash scripts/check_release.sh CORPUS FOLDER   CORPUS/<source>/**: a few megabytes. FOLDER: for the runs. Two hours.
set -euo pipefail
[ $# = 2 ] || { sed -n '2,3s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
mkdir -p "$2"
corpus=$(realpath "$1") folder=$(realpath "$2")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/test.sh --thorough
. scripts/environment.sh ftfy,train,test,docs
gristmill parity --full
small=--options="--tokenizer.vocab_size 500"
python benchmarks/kill_pipeline.py "$corpus" --folder "$folder/kills" --kills 200 "$small"
GRISTMILL_LEASE_SECONDS=3 python benchmarks/kill_pipeline.py "$corpus" --folder "$folder/shards" --kills 40 --shards 3 "$small"
python benchmarks/chaos_storage.py "$corpus" --folder "$folder/storage" --seeds 20 "$small"
python benchmarks/chaos_ray.py "$corpus" --folder "$folder/ray" --seeds 20 "$small"
python benchmarks/bench_everywhere.py "$corpus" --folder "$folder/everywhere" "$small --max_malformed 0.01"
