"""Benchmark: the holdout loss of replicas that take local steps, beside synchronous training, at equal tokens.

    python benchmarks/bench_local_steps.py OUT/tokens --replicas 2 --local_steps 50

OUT/tokens has `train` and `holdout`, as `gristmill run` writes them. All runs read the same sequences in the same
order. One with local steps has a process a replica, started by torchrun; the synchronous one has one process, as its
losses are those of any number. Bytes are what a replica gives to all-reduces, with as many replicas in both.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import tyro

from benchmarks.dedup_tables import markdown
from gristmill.command import run_with_exit_code
from training.reporting.metrics_file import METRICS, read_metrics

ROOT = Path(__file__).resolve().parents[1]
_FLOAT = 4  # bytes


@dataclass(frozen=True)
class Row:
    """A way to train: its options, and the synchronous steps that it begins with."""

    name: str
    options: str
    local_steps: int = 0
    synchronous: int = 0

    def megabytes(self, steps: int, parameters: int) -> float:
        """What a replica gives to all-reduces in a run."""
        rounds = (steps - self.synchronous) // self.local_steps if self.local_steps else 0
        whole = self.synchronous if self.local_steps else steps
        return (whole + rounds) * parameters * _FLOAT / 1e6


def bench_local_steps(
    tokens: tyro.conf.Positional[Path],
    replicas: int = 2,
    local_steps: int = 50,
    steps: int = 1000,
    seeds: tuple[int, ...] = (1, 2),
    layers: int = 4,
    width: int = 128,
    seq_len: int = 64,
    batch_size: int = 12,
    lr: float = 1e-3,
    out: Path | None = None,
) -> str:
    """Train in each way with each seed, and return a table of the losses and bytes.

    Args:
        tokens: Folder with `train` and `holdout`.
        batch_size: Sequences of a step over all replicas.
        out: Folder to keep the runs in: a second call resumes what is not finished. By default they are removed.
    """
    begin = steps // 10 // local_steps * local_steps
    outer = f"--parallel.local_steps {local_steps}"
    rows = [
        Row("gradients summed in every step", ""),
        Row(f"local steps, H = {local_steps}", outer, local_steps),
        Row(f"H = {local_steps}, plain averages", f"{outer} --optim.outer_lr 1 --optim.outer_momentum 0", local_steps),
        Row(f"H = {local_steps} after {begin} synchronous steps", outer, local_steps, begin),
    ]
    base = (
        f"--data.train {tokens}/train --data.holdout {tokens}/holdout --data.seq_len {seq_len} --device cpu "
        f"--data.batch_size {batch_size} --model.layers {layers} --model.width {width} --optim.steps {steps} "
        f"--optim.warmup_steps {steps // 20} --optim.lr {lr} --optim.min_lr {lr / 10} --eval.every 0 "
        f"--eval.sample_tokens 0 --eval.sequences 0 --checkpoint.every {begin} --checkpoint.keep 99 "
        f"--metrics.log_every {max(1, steps // 5)} --metrics.tensorboard false --timeout 600"
    )
    losses: dict[str, list[float]] = {row.name: [] for row in rows}
    parameters = 0
    with TemporaryDirectory() as scratch:
        for seed in seeds:
            folder = (out or Path(scratch)) / f"seed-{seed}"
            for number, row in enumerate(rows):
                branch = f" --branch_from {folder}/0/checkpoints/step-{begin:08d}" if row.synchronous else ""
                _train(
                    replicas if row.local_steps else 1,
                    f"{base} --seed {seed} --out_dir {folder}/{number} {row.options}{branch}",
                )
                records = read_metrics(folder / str(number) / METRICS)
                parameters = next(record["parameters"] for record in records if record["kind"] == "run")
                losses[row.name].append([record["loss"] for record in records if record["kind"] == "eval"][-1])
    head = ("", *(f"seed {seed}" for seed in seeds), "mean", "beside the first", "MB all-reduced", "of the first")
    title = f"Holdout loss after {steps} steps of {batch_size} x {seq_len} tokens, {replicas} replicas"
    return markdown(title, head, [_cells(row, rows[0], losses, steps, parameters) for row in rows], [])


def _train(processes: int, options: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    subprocess.run([*command, "training/train.py", *options.split()], cwd=ROOT, stdout=sys.stderr, check=True)


def _cells(row: Row, first: Row, losses: dict[str, list[float]], steps: int, parameters: int) -> list[str]:
    loss, reference = mean(losses[row.name]), mean(losses[first.name])
    sent, whole = row.megabytes(steps, parameters), first.megabytes(steps, parameters)
    return [
        row.name, *(f"{each:.4f}" for each in losses[row.name]), f"{loss:.4f}",
        f"{100 * (loss / reference - 1):+.2f} %", f"{sent:,.0f}", f"1 / {whole / sent:.1f}",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_with_exit_code(lambda: print(tyro.cli(bench_local_steps))))
