"""Command: compile all kernels of the data pipeline, so that no later command has to wait for them."""

import io
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import get_args

import msgspec

from dedup.generate_duplicate_pairs import generate_duplicate_pairs
from dedup.minhash.schemes import Hash
from dedup.minhash.signatures import Sketch, signatures
from dedup.remove_spans import remove_spans
from gristmill.engine.execution.call import Call
from gristmill.engine.execution.local import LocalExecutor
from gristmill.engine.options import RunOptions
from gristmill_cli.run import run
from gristmill_cli.run_config import Dedup, Mix, RunConfig, Tokenizer
from gristmill_cli.stages.pipeline import STAGES
from preprocessing.quality.recipe import load_recipe
from preprocessing.quality.words import WordSplitter
from preprocessing.train_scorer import train_scorer

_TEXT = "the mill grinds grain and bread is baked from flour in an oven by those who rise early ё é ß "


def compile_kernels() -> None:
    """Compile all kernels of the data pipeline, which takes about half a minute, once per installation.

    Without this command, each kernel is compiled when it is first needed. It runs a pipeline on a small generated
    corpus.
    """
    start = time.perf_counter()
    print("compiling kernels (once per installation, about half a minute) …", file=sys.stderr, flush=True)
    with LocalExecutor(workers=2) as executor:
        list(executor.run([Call(_run_pipeline, {}), Call(_sign_with_other_families, {}), Call(_train_scorer, {})]))
    print(f"compiled in {time.perf_counter() - start:.0f} s", file=sys.stderr)


def _run_pipeline() -> None:
    """Run the stages that use kernels, in this process."""
    with tempfile.TemporaryDirectory() as name, redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
        folder = Path(name)
        out = folder / "out"
        documents = [_TEXT[i % 7 :] * (5 + i % 40) for i in range(120)] * 2
        corpus = _write_corpus(folder / "corpus", documents)
        quiz = _write_corpus(folder / "quiz", [_TEXT])
        config = RunConfig(
            corpus,
            out,
            workers=1,
            mix=Mix(weights={"made_up": 1.0}),
            tokenizer=Tokenizer(vocab_size=400, exact=False),
        )
        for stage in STAGES:
            config = replace(config, **stage.kernel_options(quiz))
        run(config)
        dedup = Dedup(verify="none", exact=False)
        run(replace(config, out=folder / "inexact", dedup=dedup, until="generate_duplicates_dict"))
        load_recipe("gopher").judge(_TEXT * 4, WordSplitter())
        options = RunOptions(workers=1, quiet=True)
        remove_spans(corpus, folder / "spans", options=options)
        generate_duplicate_pairs(out / "minhash", folder / "duplicate_pairs.txt", options=options)


def _write_corpus(corpus: Path, texts: list[str]) -> Path:
    (corpus / "made_up").mkdir(parents=True)
    lines = msgspec.json.Encoder().encode_lines({"text": text} for text in texts)
    (corpus / "made_up/a.jsonl").write_bytes(lines)
    return corpus


def _train_scorer() -> None:
    """Train a model, which then scores what was held out."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        positive = _write_corpus(folder / "positive", [f"{_TEXT}{i}" for i in range(40)])
        negative = _write_corpus(folder / "negative", [f"{i}{_TEXT}" for i in range(40)])
        train_scorer(positive, negative, folder / "model.bin", dim=2, bucket=10, holdout=0.5)


def _sign_with_other_families() -> None:
    for hash in get_args(Hash)[1:]:
        signatures([_TEXT], Sketch(hash))
