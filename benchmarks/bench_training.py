"""Benchmark: training throughput, utilisation (of the measured peak of a matmul), memory and pipeline bubbles.

    python benchmarks/bench_training.py                            nanoGPT's CPU configuration, GPT-2 and Llama
    python benchmarks/bench_training.py --peer ../nanoGPT          the same, in turns with nanoGPT
    python benchmarks/bench_training.py --layouts                  every layout of two processes

Tokens are random. `taskset -c 1 python …` pins it to one core.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import json

import numpy as np
import torch
import tyro
from rich.console import Group

from benchmarks.training_tables import PEER, TrainingRun, layout_table, pipeline_table, speed_table
from gristmill.command import run_with_exit_code
from gristmill.config import load_config
from gristmill.errors import UsageError
from gristmill.io.token_shards import Manifest, ShardRecord, TokenizerRecord, TokenShardWriter, token_dtype
from training.config import TrainConfig
from training.parallel.pipeline.schedules import SCHEDULES

REPOSITORY = Path(__file__).resolve().parents[1]
VOCABULARY = 65  # characters of tinyshakespeare
# No evaluation, samples or TensorBoard
_SHORT = ["--eval.sequences", "1", "--eval.sample_tokens", "0", "--metrics.tensorboard", "false"]
# Name in the table: [parallel] options. two_processes adds the pipeline schedules.
LAYOUTS = {
    "dp 2": {"dp": 2},
    **{f"dp 2, ZeRO-{zero}": {"dp": 2, "zero": zero} for zero in (1, 2, 3)},
    "tp 2": {"tp": 2},
    "tp 2, sequence parallel": {"tp": 2, "sequence_parallel": True},
}


def bench_training(
    configs: tyro.conf.Positional[list[Path]] = [  # noqa: B006  the default that tyro shows
        REPOSITORY / "configs/nanogpt_cpu.toml",
        REPOSITORY / "configs/nanogpt_cpu_llama.toml",
    ],
    steps: int = 60,
    rounds: int = 2,
    peer: Path | None = None,
    layouts: bool = False,
    only: str = "",
    threads: int = 1,
    options: list[str] = [],  # noqa: B006
) -> Group:
    """Time training; configurations run in separate processes, in turns, so that other load affects all equally.

    Args:
        configs: TOML files of training configurations.
        steps: Steps per run; the first tenth is not counted.
        rounds: Runs of each configuration.
        peer: A checkout of nanoGPT with data/shakespeare_char prepared, run at the first configuration's sizes.
        layouts: Run the first configuration with two processes in each layout, instead of each with one process.
        only: Run only layouts whose name contains this, and the run with one process.
        threads: Threads per process.
        options: Trainer options as key=value: compile=true precision=bf16 parallel.micro_batches=4.
    """
    if steps < 2 or rounds < 1:
        raise UsageError(f"--steps {steps} --rounds {rounds}: give at least 2 steps and 1 round")
    changes = dict(_parse_option(option) for option in options)
    with TemporaryDirectory() as name:
        folder = Path(name)
        arguments = ["--data.train", str(folder / "tokens"), "--data.holdout", str(folder / "tokens"), *_SHORT]
        first = load_config(TrainConfig, ["--config", str(configs[0]), *arguments, *_flags(changes), "--out_dir", name])
        largest = max(_tokens_per_step(path, [*arguments, *_flags(changes)]) for path in configs)
        write_tokens(folder / "tokens", 2 * largest + 1)
        runs = [TrainingRun(PEER, peer)] if peer is not None and not layouts else []
        runs += two_processes(configs[0], first, only) if layouts else one_process(configs, first.device)
        for number in range(rounds):
            for run in runs:
                reports = (
                    [run_peer(run.path, first, steps, threads)]
                    if run.name == PEER
                    else run_ours(run, [*arguments, *_flags(changes)], steps, threads, folder / f"{run.name} {number}")
                )
                run.rounds.append(reports)
    if layouts:
        return Group(layout_table(runs), pipeline_table([run for run in runs if run.options.get("parallel.pp")]))
    return Group(speed_table(runs))


def one_process(configs: Sequence[Path], device: str) -> list[TrainingRun]:
    """Each configuration with one process; with several GPUs, also nn.DataParallel on all of them."""
    runs = [TrainingRun(path.stem, path) for path in configs]
    if device != "cpu" and torch.cuda.device_count() > 1:
        runs.append(TrainingRun(f"{configs[0].stem}, nn.DataParallel", configs[0], implementation="DataParallel"))
    return runs


def two_processes(path: Path, config: TrainConfig, only: str) -> list[TrainingRun]:
    """One process, then two in each layout; pipelines have the most micro-batches up to 8 that divide the batch."""
    micro_batches = max(n for n in range(1, 9) if config.data.batch_size % n == 0)
    runs = [TrainingRun("one process", path)]
    for name, layout in LAYOUTS.items():
        runs.append(TrainingRun(name, path, {f"parallel.{key}": value for key, value in layout.items()}, 2))
    for schedule in SCHEDULES:
        options: dict[str, Any] = {"pp": 2, "schedule": schedule, "micro_batches": micro_batches}
        runs.append(
            TrainingRun(f"pp 2, {schedule}", path, {f"parallel.{key}": value for key, value in options.items()}, 2)
        )
    return runs[:1] + [run for run in runs[1:] if only in run.name]


def run_ours(run: TrainingRun, arguments: list[str], steps: int, threads: int, folder: Path) -> list[dict[str, Any]]:
    """Train once; return the reports of the processes by rank."""
    folder.mkdir()
    given = ["--config", str(run.path), *arguments, *_flags(run.options), "--out_dir", str(folder / "run")]
    task = json.dumps({"arguments": given, "steps": steps, "report": str(folder), "implementation": run.implementation})
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={run.processes}"]
    worker = [str(REPOSITORY / "benchmarks/training_worker.py"), task]
    _output_of([sys.executable, *(launcher if run.processes > 1 else []), *worker], Path.cwd(), threads, run.name)
    return [_without_warm_up(json.loads((folder / f"{rank}.json").read_text())) for rank in range(run.processes)]


def run_peer(folder: Path, config: TrainConfig, steps: int, threads: int) -> dict[str, Any]:
    """Run nanoGPT's train.py at a configuration's sizes; read the iteration times that it prints."""
    data_file = folder / "data/shakespeare_char/train.bin"
    if not data_file.is_file():
        raise UsageError(f"--peer {folder}: give a checkout of nanoGPT with {data_file}, which its prepare.py writes")
    model, data, optim = config.model.resolve(VOCABULARY, config.data.seq_len), config.data, config.optim
    values = {
        "device": "cpu", "compile": False, "dtype": "float32", "eval_iters": 1, "eval_interval": 10 * steps,
        "log_interval": 1, "block_size": data.seq_len, "batch_size": data.batch_size, "n_layer": model.layers,
        "n_head": model.heads, "n_embd": model.width, "dropout": 0.0, "max_iters": steps,
        "lr_decay_iters": optim.steps, "learning_rate": optim.lr, "min_lr": optim.final_lr,
    }  # fmt: skip
    command = [sys.executable, "train.py", "config/train_shakespeare_char.py"]
    output = _output_of([*command, *(f"--{key}={value}" for key, value in values.items())], folder, threads, PEER)
    times = [float(found) / 1000 for found in re.findall(r"^iter \d+: .*time ([\d.]+)ms", output, re.MULTILINE)]
    if len(times) < steps:
        raise UsageError(f"--peer {folder}: its train.py printed {len(times)} iterations, not {steps}")
    return _without_warm_up({"seconds": times[:steps], "tokens_per_step": data.batch_size * data.seq_len})


def write_tokens(folder: Path, count: int, vocabulary: int = VOCABULARY) -> None:
    """Write random tokens as one document."""
    dtype = token_dtype(vocabulary)
    with TokenShardWriter(folder / "random", dtype) as shard:
        shard.add(np.random.default_rng(1).integers(0, vocabulary, count))
    record = ShardRecord("random", 1, shard.tokens, shard.tokens, shard.sha256, shard.idx_sha256)
    Manifest(TokenizerRecord("none", "none", vocabulary, 0), dtype.name, [record], {}).save(folder)


def _output_of(command: list[str], folder: Path, threads: int, name: str) -> str:
    """Run a command; return its standard output. Raises UsageError with the end of its standard error if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"{name} failed:\n{done.stderr[-2000:]}\nits configuration may not fit this machine")
    return done.stdout


def _without_warm_up(found: dict[str, Any]) -> dict[str, Any]:
    """Drop the first tenth of the steps from a report."""
    skipped = -(-len(found["seconds"]) // 10)
    return found | {key: found[key][skipped:] for key in ("seconds", "busy") if key in found}


def _tokens_per_step(path: Path, arguments: list[str]) -> int:
    data = load_config(TrainConfig, ["--config", str(path), *arguments, "--out_dir", "none"]).data
    return data.batch_size * data.seq_len


def _parse_option(option: str) -> tuple[str, str]:
    key, equals, value = option.partition("=")
    if not equals:
        raise UsageError(f"--options {option}: give key=value, such as compile=true")
    return key, value


def _flags(options: dict[str, Any]) -> list[str]:
    return [part for key, value in options.items() for part in (f"--{key}", str(value).lower())]


if __name__ == "__main__":
    sys.exit(run_with_exit_code(lambda: tyro.cli(bench_training)))
