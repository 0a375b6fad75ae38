"""What bench_scaling measures: the stages of a run, as the run calls them, and commands that read a corpus themselves.

A stage of a run reads what the stages before it left in the bucket, their records included. A command reads files that
no stage wrote.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.scaling_store import BUCKET, CountingStore
from benchmarks.scaling_tasks import SLICE_BYTES
from dedup.generate_exact_pairs import generate_exact_pairs
from dedup.to_hash import to_hash
from gristmill.engine.options import RunOptions
from gristmill_cli.run_config import Mix, RunConfig
from gristmill_cli.stages.pipeline import context_of, plan_stages
from preprocessing.filter import filter as find_short
from preprocessing.mix import mix
from preprocessing.normalize_text import normalize_text
from preprocessing.tokenize_corpus import tokenize_corpus
from preprocessing.train_tokenizer import train_tokenizer

SOURCES = 5
RAW = BUCKET / "raw"
RUN = RunConfig(RAW, BUCKET / "run", mix=Mix(weights={"s0": 1.5}), keep=("train_text",))
RUN_STAGES = MappingProxyType({stage.name: stage for stage in plan_stages(RUN)})
FIRST_STAGE = next(iter(RUN_STAGES))
CLEAN = BUCKET / "clean"
TOKENIZER = BUCKET / "tokenizer/tokenizer.model"
_DUP = BUCKET / "dup"
_COPIES = _DUP / "duplicate_pairs_exact.parquet"
_DUPLICATES = _DUP / "duplicates.parquet"
_SHORT = BUCKET / "filtered.pickle"
_ALL = sys.maxsize


def _sign(options: RunOptions) -> None:
    to_hash("all", CLEAN, BUCKET / "minhash", 0, "0", 0, _ALL, skip=_COPIES, options=options)


def _decide(options: RunOptions) -> None:
    mix(CLEAN, BUCKET / "mix", _DUPLICATES, _SHORT, "s0=1.5", options=options)


COMMANDS: MappingProxyType[str, Callable[[RunOptions], Any]] = MappingProxyType(
    {
        "gristmill normalize": lambda options: normalize_text(RAW, CLEAN, options=options),
        "gristmill filter": lambda options: find_short(CLEAN, _SHORT, 0, "all", 200, options),
        "gristmill exact-pairs": lambda options: generate_exact_pairs(
            CLEAN, _COPIES.with_suffix(".txt"), options=options
        ),
        "gristmill sign": _sign,
        "gristmill decide": _decide,
        "gristmill train-tokenizer": lambda options: train_tokenizer(CLEAN, TOKENIZER.parent, options=options),
        "gristmill tokenize": lambda options: tokenize_corpus(CLEAN, TOKENIZER, BUCKET / "tokens", options),
    }
)
STAGES = (*RUN_STAGES, *COMMANDS)
_READS: MappingProxyType[str, tuple[Path, ...]] = MappingProxyType(  # besides the corpus
    {
        "gristmill sign": (_COPIES,),
        "gristmill decide": (_DUPLICATES, _SHORT),
        "gristmill tokenize": (TOKENIZER,),
    }
)


def call_stage(name: str, options: RunOptions) -> None:
    """Call a stage as `gristmill run` does, or a command."""
    if name in RUN_STAGES:
        stage = RUN_STAGES[name]
        stage.call(context_of(RUN, stage, options))
    else:
        COMMANDS[name](options)


def corpus_names(slices: int) -> list[str]:
    """Return the names of the files of a corpus, one for each slice, in order."""
    return sorted(f"s{number % SOURCES}/{number:07}.jsonl" for number in range(slices))


def make_corpus(name: str, files: Sequence[str]) -> CountingStore:
    """Return a store with what the first stage of a run reads, or a command: a corpus with these files."""
    store = CountingStore()
    for path in _READS.get(name, ()):
        store.add(path, SLICE_BYTES)
    is_raw = name in (FIRST_STAGE, "gristmill normalize")
    folder = RAW if is_raw else CLEAN
    for file in files:
        store.add(folder / file, SLICE_BYTES)
    return store
