"""Benchmark: the holdout loss of variants of training beside the default's, at equal tokens, for several seeds.

    python benchmarks/bench_variants.py OUT/tokens [MORE/tokens …] --add "ema: --optim.ema_decay 0.99 --eval.ema true"

A folder of tokens has `train` and `holdout`, as `gristmill run` writes them. Every run has one process of one thread,
and the same sequences in the same order. A variant is a name and options of training/train.py.
"""

import contextlib
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import torch
import tyro

from benchmarks.dedup_tables import markdown
from gristmill.command import run_with_exit_code
from gristmill.config import load_config
from gristmill.errors import UsageError
from training.config import TrainConfig
from training.reporting.metrics_file import METRICS, read_metrics
from training.train import train

DEFAULT = "default"
VARIANTS = {DEFAULT: "", "wsd": "--optim.schedule wsd --optim.cooldown_steps {fifth}", "muon": "--optim.name muon"}


@dataclass(frozen=True)
class Outcome:
    """What a run ends with: the holdout's loss in nats/token and in bits per byte, and the run's seconds."""

    loss: float
    bits: float
    seconds: float


def bench_variants(
    tokens: tyro.conf.Positional[list[Path]],
    variants: list[str] | None = None,
    add: list[str] | None = None,
    steps: int = 1000,
    seeds: list[int] | None = None,
    layers: int = 4,
    width: int = 128,
    seq_len: int = 64,
    batch_size: int = 12,
    lr: float = 1e-3,
    holdout_sequences: int = 0,
    out: Path | None = None,
) -> str:
    """Train each variant on each folder of tokens with each seed, and print a table of the losses.

    Args:
        tokens: Folders with `train` and `holdout`.
        variants: Names of those of ours to train beside the default (wsd, muon); all by default.
        add: More of them, each "NAME: OPTIONS"; {steps} and {fifth} stand for the steps and a fifth of them.
        holdout_sequences: Sequences of the holdout to evaluate; 0: all.
        seeds: Of initial weights and order; 1 and 2 by default.
        out: Folder to keep the runs in: a second call resumes what is not finished. By default they are removed.
    """
    chosen = _chosen(variants, add)
    base = [
        f"--model.layers {layers} --model.width {width} --data.seq_len {seq_len} --data.batch_size {batch_size}",
        f"--optim.steps {steps} --optim.warmup_steps {steps // 20} --optim.lr {lr} --optim.min_lr {lr / 10}",
        f"--eval.every 0 --eval.sample_tokens 0 --eval.sequences {holdout_sequences} --checkpoint.every 0",
        f"--metrics.log_every {max(1, steps // 5)}",
        "--metrics.tensorboard false --device cpu",
    ]
    found: dict[tuple[Path, str], list[Outcome]] = {}
    with TemporaryDirectory() as scratch:
        for folder in tokens:
            for name, options in chosen.items():
                text = " ".join([*base, options.format(steps=steps, fifth=steps // 5)])
                runs = (out or Path(scratch)) / folder.resolve().parent.name / name.replace(" ", "-")
                found[folder, name] = [_run(folder, runs / f"seed-{seed}", text, seed) for seed in seeds or (1, 2)]
    title = f"{steps} steps of {batch_size} x {seq_len} tokens, {layers} layers of width {width}"
    head = (
        "variant",
        *(f"seed {seed}" for seed in seeds or (1, 2)),
        "mean",
        "beside the default",
        "bits per byte",
        "s",
    )
    tables = [
        markdown(f"{folder}: holdout loss after {title}", head, _rows(folder, chosen, found), []) for folder in tokens
    ]
    notes = [f"- {name}: `{options}`" for name, options in chosen.items() if options]
    return "\n".join([*tables, *notes])


def _chosen(variants: Sequence[str] | None, add: Sequence[str] | None) -> dict[str, str]:
    """Options by name, the default first. Raises UsageError for a name that is not known."""
    unknown = [name for name in variants or () if name not in VARIANTS]
    if unknown:
        raise UsageError(f"there is no variant {unknown[0]}; expected {', '.join(VARIANTS)}, or --add 'NAME: OPTIONS'")
    chosen = {DEFAULT: ""} | {name: VARIANTS[name] for name in (VARIANTS if variants is None else variants)}
    for text in add or ():
        name, colon, options = text.partition(":")
        if not colon:
            raise UsageError(f"--add {text!r} has no colon; expected 'NAME: OPTIONS'")
        chosen[name.strip()] = options.strip()
    return chosen


def _run(tokens: Path, out_dir: Path, options: str, seed: int) -> Outcome:
    """One run in this process; what it prints goes to stderr."""
    torch.set_num_threads(1)
    folders = ["--data.train", str(tokens / "train"), "--data.holdout", str(tokens / "holdout")]
    arguments = [*folders, "--out_dir", str(out_dir), "--seed", str(seed), *shlex.split(options)]
    config = load_config(TrainConfig, arguments)
    started = time.monotonic()
    with contextlib.redirect_stdout(sys.stderr):
        train(config)
    last = [record for record in read_metrics(out_dir / METRICS) if record["kind"] == "eval"][-1]
    return Outcome(last["loss"], last["bits_per_byte"], time.monotonic() - started)


def _rows(
    folder: Path, names: Sequence[str] | dict[str, str], found: dict[tuple[Path, str], list[Outcome]]
) -> list[list[str]]:
    reference = mean(outcome.loss for outcome in found[folder, DEFAULT])
    rows = []
    for name in names:
        outcomes = found[folder, name]
        loss = mean(outcome.loss for outcome in outcomes)
        rows.append([
            name, *(f"{outcome.loss:.4f}" for outcome in outcomes), f"{loss:.4f}", f"{loss - reference:+.4f}",
            f"{mean(outcome.bits for outcome in outcomes):.4f}", f"{mean(outcome.seconds for outcome in outcomes):.0f}",
        ])  # fmt: skip
    return rows


if __name__ == "__main__":
    sys.exit(run_with_exit_code(lambda: print(tyro.cli(bench_variants))))
