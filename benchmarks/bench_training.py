"""Training, timed: tokens a second, how much of the measured peak of a matrix product that is, memory, bubbles.

    python benchmarks/bench_training.py                            nanoGPT's CPU setting, as GPT-2 and as Llama
    python benchmarks/bench_training.py --peer ../nanoGPT          the same, alternately with nanoGPT itself
    python benchmarks/bench_training.py --layouts                  two processes, in every layout they allow

Tokens are random: what they are does not matter here. `taskset -c 1` before it keeps it to one core.
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

from benchmarks.bench_training_tables import PEER, Line, layout_table, pipeline_table, speed_table
from gristmill.command import run_with_exit_code
from gristmill.config import load_config
from gristmill.errors import UsageError
from gristmill.io.token_shards import Manifest, ShardRecord, TokenizerRecord, TokenShardWriter, token_dtype
from training.config import TrainConfig
from training.distributed.layout import STAGES_PER_RANK

REPOSITORY = Path(__file__).resolve().parents[1]
VOCABULARY = 65  # as many as tinyshakespeare has characters
# Nothing but steps
_SHORT = ["--eval.sequences", "1", "--eval.sample_tokens", "0", "--metrics.tensorboard", "false"]
# In which each two processes are measured: what the table says, and the options. Pipelines follow below.
LAYOUTS = {
    "dp 2": {"dp": 2},
    **{f"dp 2, ZeRO-{zero}": {"dp": 2, "zero": zero} for zero in (1, 2, 3)},
    "tp 2": {"tp": 2},
    "tp 2, sequence parallel": {"tp": 2, "sequence_parallel": True},
}


def bench_training(
    configs: tyro.conf.Positional[list[Path]] = [  # noqa: B006  tyro reads it as what stands when none is given
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
    """Time training, each configuration in processes of its own, taking turns so that a busy machine is fair.

    Args:
        configs: TOML files of training configurations.
        steps: Steps of each run; the first tenth is left out.
        rounds: Times that each has its turn.
        peer: A checkout of nanoGPT with its data/shakespeare_char prepared; run at the first configuration's sizes.
        layouts: Two processes of the first configuration, in each layout, rather than one process of each.
        only: Of the layouts, those with this in their name; and one process.
        threads: Threads of each process.
        options: What is to be changed, as key=value: compile=true precision=bf16 parallel.micro_batches=4.
    """
    if steps < 2 or rounds < 1:
        raise UsageError(f"--steps {steps} --rounds {rounds}: wanted 2 steps and 1 round or more")
    changes = dict(_pair(option) for option in options)
    with TemporaryDirectory() as name:
        folder = Path(name)
        arguments = ["--data.train", str(folder / "tokens"), "--data.holdout", str(folder / "tokens"), *_SHORT]
        first = load_config(TrainConfig, ["--config", str(configs[0]), *arguments, *_flags(changes), "--out_dir", name])
        largest = max(_tokens_per_step(path, [*arguments, *_flags(changes)]) for path in configs)
        write_tokens(folder / "tokens", 2 * largest + 1)
        lines = [Line(PEER, peer)] if peer is not None and not layouts else []
        lines += two_processes(configs[0], first, only) if layouts else one_process(configs, first.device)
        for number in range(rounds):
            for line in lines:
                reports = (
                    [run_peer(line.path, first, steps, threads)]
                    if line.name == PEER
                    else run_ours(
                        line, [*arguments, *_flags(changes)], steps, threads, folder / f"{line.name} {number}"
                    )
                )
                line.rounds.append(reports)
    if layouts:
        return Group(layout_table(lines), pipeline_table([line for line in lines if line.options.get("parallel.pp")]))
    return Group(speed_table(lines))


def one_process(configs: Sequence[Path], device: str) -> list[Line]:
    """Each configuration alone; where there are several GPUs, nn.DataParallel on all of them as well."""
    lines = [Line(path.stem, path) for path in configs]
    if device != "cpu" and torch.cuda.device_count() > 1:
        lines.append(Line(f"{configs[0].stem}, nn.DataParallel", configs[0], what="DataParallel"))
    return lines


def two_processes(path: Path, config: TrainConfig, only: str) -> list[Line]:
    """One process, then two in each layout; a pipeline's micro-batches are as many as the batch divides into, to 8."""
    micro_batches = max(n for n in range(1, 9) if config.data.batch_size % n == 0)
    lines = [Line("one process", path)]
    for name, layout in LAYOUTS.items():
        lines.append(Line(name, path, {f"parallel.{key}": value for key, value in layout.items()}, 2))
    for schedule in STAGES_PER_RANK:
        options: dict[str, Any] = {"pp": 2, "schedule": schedule, "micro_batches": micro_batches}
        lines.append(Line(f"pp 2, {schedule}", path, {f"parallel.{key}": value for key, value in options.items()}, 2))
    return lines[:1] + [line for line in lines[1:] if only in line.name]


def run_ours(line: Line, arguments: list[str], steps: int, threads: int, folder: Path) -> list[dict[str, Any]]:
    """The reports of a line's processes, by rank."""
    folder.mkdir()
    given = ["--config", str(line.path), *arguments, *_flags(line.options), "--out_dir", str(folder / "run")]
    task = json.dumps({"arguments": given, "steps": steps, "report": str(folder), "what": line.what})
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={line.processes}"]
    worker = [str(REPOSITORY / "benchmarks/bench_training_worker.py"), task]
    _run([sys.executable, *(launcher if line.processes > 1 else []), *worker], Path.cwd(), threads, line.name)
    return [_report(json.loads((folder / f"{rank}.json").read_text())) for rank in range(line.processes)]


def run_peer(folder: Path, config: TrainConfig, steps: int, threads: int) -> dict[str, Any]:
    """nanoGPT's own training script at a configuration's sizes; what it says of each iteration's time."""
    wanted = folder / "data/shakespeare_char/train.bin"
    if not wanted.is_file():
        raise UsageError(f"--peer {folder}: wanted a checkout of nanoGPT and {wanted}, which its prepare.py writes")
    model, data, optim = config.model.resolve(VOCABULARY, config.data.seq_len), config.data, config.optim
    values = {
        "device": "cpu", "compile": False, "dtype": "float32", "eval_iters": 1, "eval_interval": 10 * steps,
        "log_interval": 1, "block_size": data.seq_len, "batch_size": data.batch_size, "n_layer": model.layers,
        "n_head": model.heads, "n_embd": model.width, "dropout": 0.0, "max_iters": steps,
        "lr_decay_iters": optim.steps, "learning_rate": optim.lr, "min_lr": optim.min_lr,
    }  # fmt: skip
    command = [sys.executable, "train.py", "config/train_shakespeare_char.py"]
    told = _run([*command, *(f"--{key}={value}" for key, value in values.items())], folder, threads, PEER)
    times = [float(found) / 1000 for found in re.findall(r"^iter \d+: .*time ([\d.]+)ms", told, re.MULTILINE)]
    if len(times) < steps:
        raise UsageError(f"--peer {folder}: its train.py tells of {len(times)} iterations, not of {steps}")
    return _report({"seconds": times[:steps], "tokens_per_step": data.batch_size * data.seq_len})


def write_tokens(folder: Path, count: int) -> None:
    """Random tokens, as one document."""
    dtype = token_dtype(VOCABULARY)
    with TokenShardWriter(folder / "random", dtype) as shard:
        shard.add(np.random.default_rng(1).integers(0, VOCABULARY, count))
    record = ShardRecord("random", 1, shard.tokens, shard.tokens, shard.sha256)
    Manifest(TokenizerRecord("none", "none", VOCABULARY, 0), dtype.name, [record], {}).save(folder)


def _run(command: list[str], folder: Path, threads: int, name: str) -> str:
    """What a command prints; UsageError with its last words if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"{name} failed:\n{done.stderr[-2000:]}\nits configuration may not fit this machine")
    return done.stdout


def _report(found: dict[str, Any]) -> dict[str, Any]:
    """The same without the first tenth of the steps."""
    skipped = -(-len(found["seconds"]) // 10)
    return found | {key: found[key][skipped:] for key in ("seconds", "busy") if key in found}


def _tokens_per_step(path: Path, arguments: list[str]) -> int:
    data = load_config(TrainConfig, ["--config", str(path), *arguments, "--out_dir", "none"]).data
    return data.batch_size * data.seq_len


def _pair(option: str) -> tuple[str, str]:
    key, equals, value = option.partition("=")
    if not equals:
        raise UsageError(f"--options {option}: wanted key=value, such as compile=true")
    return key, value


def _flags(options: dict[str, Any]) -> list[str]:
    return [part for key, value in options.items() for part in (f"--{key}", str(value).lower())]


if __name__ == "__main__":
    sys.exit(run_with_exit_code(lambda: tyro.cli(bench_training)))
