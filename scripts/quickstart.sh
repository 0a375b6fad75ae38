#!/usr/bin/env bash
# From raw text to a trained language model, on a machine that has Python and nothing else of ours:
#   bash scripts/quickstart.sh [CORPUS_DIR] [--optim.steps N …]
# Without a corpus it gathers one from what the machine has: Python's library, packages, licences, man pages.
# Everything is written to ./quickstart (or $OUT); run it again and it goes on where it stopped.
set -euo pipefail
out=$(realpath -m "${OUT:-$(dirname "${BASH_SOURCE[0]}")/../quickstart}")
corpus=$out/corpus
if [ $# -gt 0 ] && [[ $1 != --* ]]; then
    corpus=$(realpath -m "$1")
    shift
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh train

say() { printf '\n== %s\n' "$1"; }

if [ "$corpus" = "$out/corpus" ]; then
    say "1. a corpus of what this machine has"
    python -m gristmill_cli.harvest_corpus "$corpus"
else
    say "1. the corpus $corpus"
fi

say "2. from documents to tokens"
gristmill run scripts/quickstart.toml --corpus "$corpus" --out "$out/data"

say "3. from tokens to a model: two processes"
OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 training/train.py --config scripts/quickstart_model.toml \
    --data.train "$out/data/tokens/train" --data.holdout "$out/data/tokens/holdout" --out_dir "$out/model" "$@"

say "4. what became of every document"
gristmill funnel "$out/data"

say "5. what the model learned"
gristmill plot "$out/model"

cat <<END

corpus      $corpus
data        $out/data          (funnel.json, tokens/, tokenizer/, and what each stage wrote)
model       $out/model         (checkpoints/, metrics.jsonl, summary.json, loss.svg)
TensorBoard tensorboard --logdir $out/model
END
