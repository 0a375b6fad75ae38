"""Fault injection: kills ranks of a training run at random moments, and compares it with an undisturbed run.

    python benchmarks/kill_training.py --train tokens/train --holdout tokens/holdout --folder /tmp/kills --kills 20

torchrun --max-restarts restarts the ranks, which resume from the last checkpoint. Losses, evaluations, samples,
parameters and optimizer states of the two runs must be bit-identical.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__: sys.path[0] = str(ROOT)  # fmt: skip

import msgspec
import psutil
import tyro
from rich.table import Table
from rich.text import Text

from gristmill.console import wide_console
from training.checkpoint.checkpoint import RECORD
from training.checkpoint.run_file import LATEST
from training.reporting.metrics_file import METRICS, read_metrics

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "dp 2": (2, []),
    "dp 2, ZeRO-3": (2, ["--parallel.zero", "3"]),
    "tp 2, sequence parallel": (2, ["--parallel.tp", "2", "--parallel.sequence_parallel", "true"]),
    "pp 2, zbv": (2, ["--parallel.pp", "2", "--parallel.schedule", "zbv"]),
    "dp 2, ZeRO-1, pp 2": (4, ["--parallel.zero", "1", "--parallel.pp", "2"]),
    "tp 2, pp 2": (4, ["--parallel.tp", "2", "--parallel.pp", "2"]),
    "dp 2, tp 2, pp 2": (8, ["--parallel.tp", "2", "--parallel.pp", "2", "--parallel.zero", "2"]),
}
RUN_OPTIONS = {  # a tiny model that saves checkpoints and evaluates often
    "model.layers": 4, "model.width": 32, "model.heads": 4, "data.seq_len": 32, "data.batch_size": 8,
    "checkpoint.every": 4, "eval.every": 10, "eval.sample_tokens": 8, "eval.sequences": 16,
    "metrics.log_every": 1, "metrics.tensorboard": "false", "device": "cpu",
}  # fmt: skip


@dataclass(frozen=True)
class KilledRank:
    """A killed rank, and the last step recorded before the kill."""

    rank: int
    step: int


def kill_training(
    train: Path,
    holdout: Path,
    folder: Path,
    kills: int = 20,
    steps: int = 40,
    layouts: tuple[str, ...] = tuple(LAYOUTS)[:-1],
    seed: int = 0,
) -> None:
    """Compare killed runs with undisturbed ones, layout by layout.

    Args:
        train: Folder of token shards to train on.
        holdout: Folder of token shards to evaluate on.
        folder: A new folder for the runs.
        kills: Number of kills, divided evenly among the layouts.
        steps: Steps per run.
        layouts: Some of: dp 2; dp 2, ZeRO-3; tp 2, sequence parallel; pp 2, zbv; dp 2, ZeRO-1, pp 2; tp 2, pp 2;
            dp 2, tp 2, pp 2.
        seed: Seed that selects the moments of the kills and the ranks.
    """
    folder.mkdir(parents=True)
    console, draw, passed = wide_console(), random.Random(seed), True
    table = Table("layout", "processes", "killed: rank after step", "resumed from", "differs", "seconds")
    for number, layout in enumerate(layouts):
        count = kills * (number + 1) // len(layouts) - kills * number // len(layouts)
        processes, options = LAYOUTS[layout]
        data = {"data.train": train, "data.holdout": holdout}
        options = [*to_arguments({**RUN_OPTIONS, "optim.steps": steps, **data}), *options]
        place, began = folder / f"{number}", time.monotonic()
        start_run(place / "whole", processes, 0, options).wait()
        process = start_run(place / "killed", processes, count, options)
        killed = kill_at_random(process, place / "killed", count, steps, draw)
        code = process.wait()
        faults = [f"exit code {code}"] * bool(code) + differences(place / "whole", place / "killed", steps)
        log_text = (place / "killed.log").read_text()
        resumed = [line.rpartition("step-")[2].lstrip("0") for line in log_text.splitlines() if "resuming from" in line]
        killed_ranks = ", ".join(f"{kill.rank} after {kill.step}" for kill in killed)
        seconds = f"{time.monotonic() - began:.0f}"
        table.add_row(
            layout, str(processes), killed_ranks, ", ".join(resumed), Text("; ".join(faults) or "nothing"), seconds
        )
        console.print(f"{layout}: {len(killed)} kills, differs: {'; '.join(faults) or 'nothing'}", markup=False)
        passed &= not faults and len(killed) == count
    console.print(table)
    sys.exit(0 if passed else 1)


def start_run(out_dir: Path, processes: int, restarts: int, options: Sequence[str]) -> subprocess.Popen[str]:
    """Start torchrun, which trains into `out_dir` and logs to `out_dir`.log."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    launcher = [sys.executable, "-m", "gristmill_cli", "torchrun", "--standalone"]
    launcher += [f"--nproc_per_node={processes}", f"--max-restarts={restarts}"]
    command = [*launcher, "training/train.py", "--out_dir", str(out_dir), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    with out_dir.with_suffix(".log").open("w") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=log, stderr=subprocess.STDOUT)


def kill_at_random(
    launcher: subprocess.Popen[str], out_dir: Path, count: int, steps: int, draw: random.Random
) -> list[KilledRank]:
    """KilledRank one rank in each of `count` equal parts of the run; return the kills."""
    kills: list[KilledRank] = []
    seen: set[int] = set()
    for part in range(count):
        most = steps * 3 // 4  # so that the run does not end before the last kill
        goal = draw.randint(part * most // count, (part + 1) * most // count)
        while launcher.poll() is None and steps_done(out_dir) < goal:
            time.sleep(0.005)
        time.sleep(draw.random() * 0.1)  # in the middle of a step or of writing a checkpoint
        workers = ranks_of(launcher.pid, seen)
        while launcher.poll() is None and not workers:
            time.sleep(0.05)
            workers = ranks_of(launcher.pid, seen)
        if launcher.poll() is not None:
            break
        rank = draw.choice(sorted(workers))
        kills.append(KilledRank(rank, steps_done(out_dir)))
        seen |= {process.pid for process in workers.values()}
        workers[rank].kill()
    return kills


def ranks_of(launcher: int, earlier: set[int]) -> dict[int, psutil.Process]:
    """The training processes of a torchrun by rank, without those of earlier attempts."""
    found = {}
    for process in psutil.Process(launcher).children():
        try:
            if process.pid not in earlier and (rank := process.environ().get("RANK")) is not None:
                found[int(rank)] = process
        except psutil.Error:
            continue
    return found


def steps_done(out_dir: Path) -> int:
    return max((record["step"] for record in read_metrics(out_dir / METRICS)), default=0)


def differences(whole: Path, killed: Path, steps: int) -> list[str]:
    """Names of the results in which the killed run differs from the undisturbed one."""
    found = [f"{name} of {kind}s" for kind, name in (("step", "loss"), ("step", "grad_norm"), ("eval", "loss"),
             ("eval", "text")) if metric_values(whole, kind, name) != metric_values(killed, kind, name)]  # fmt: skip
    if [step for step, _ in metric_values(whole, "step", "loss")] != list(range(1, steps + 1)):
        found.append("the whole run's steps")
    return found + ["the last checkpoint"] * (checkpoint_hashes(whole) != checkpoint_hashes(killed))


def metric_values(out_dir: Path, kind: str, name: str) -> list[tuple[int, Any]]:
    records = read_metrics(out_dir / METRICS)
    return [(record["step"], record[name]) for record in records if record["kind"] == kind]


def checkpoint_hashes(out_dir: Path) -> dict[str, str] | None:
    """Digests of the latest checkpoint's files, without its metadata file, which contains random names."""
    latest = out_dir / "checkpoints" / LATEST
    if not latest.is_file():
        return None
    record = msgspec.json.decode((latest.parent / latest.read_text() / RECORD).read_bytes())
    return {name: digest for name, digest in record["files"].items() if not name.startswith(".")}


def to_arguments(options: dict[str, Any]) -> list[str]:
    return [word for key, value in options.items() for word in (f"--{key}", str(value))]


if __name__ == "__main__":
    tyro.cli(kill_training)
