"""Benchmark: how far the loss of mixed precision is from float32's, and of each layout from one process, step by step.

    python benchmarks/bench_precision.py OUT/tokens/train OUT/tokens/holdout

Every row trains the same small Llama on the same sequences, in as many processes of this machine as its layout needs.
A difference is relative, |a - b| / b, of the mean of WINDOW steps' losses; the largest over the run is shown.
"""

import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
import tyro
from numpy.typing import NDArray

from benchmarks.dedup_tables import markdown
from gristmill.command import run_with_exit_code
from training.config import TrainConfig
from training.data.data_config import DataConfig
from training.distributed.rank_pool import RankPool
from training.experimental.parallel_config import ParallelConfig
from training.model.model_config import ModelConfig
from training.optim.optim_config import OptimConfig
from training.reporting.metrics_file import METRICS, read_metrics
from training.reporting.reporting_config import EvalConfig, MetricsConfig
from training.train import train

WINDOW = 10
LAYOUTS = {
    "one process": ParallelConfig(),
    **{f"dp 2, ZeRO-{zero}": ParallelConfig(dp=2, zero=zero) for zero in (0, 1, 2, 3)},  # type: ignore[arg-type]
    "tp 2": ParallelConfig(tp=2),
    "tp 2, sequence parallel": ParallelConfig(tp=2, sequence_parallel=True),
    "pp 2": ParallelConfig(pp=2),
    "dp 2, tp 2, pp 2, ZeRO-1": ParallelConfig(dp=2, zero=1, tp=2, pp=2),
}


def bench_precision(
    train_tokens: tyro.conf.Positional[Path],
    holdout_tokens: tyro.conf.Positional[Path],
    precision: Literal["bf16", "fp16"] = "bf16",
    steps: int = 300,
    layers: int = 4,
    width: int = 64,
    seq_len: int = 64,
    batch_size: int = 16,
    lr: float = 1e-3,
    only: list[str] | None = None,
) -> str:
    """Train in float32 in one process, then in `precision` in each layout, and compare the losses.

    Args:
        only: Names of the layouts, beside one process.
    """
    with TemporaryDirectory() as folder, RankPool(8, job_timeout=3600.0) as ranks:
        config = TrainConfig(
            out_dir=Path(folder),
            data=DataConfig(train_tokens, holdout_tokens, seq_len=seq_len, batch_size=batch_size, verify="size"),
            model=ModelConfig(layers=layers, width=width, heads=4),
            optim=OptimConfig(steps=steps, lr=lr, min_lr=lr / 10, warmup_steps=steps // 10),
            eval=EvalConfig(sample_tokens=0),
            metrics=MetricsConfig(tensorboard=False, log_every=steps),
            device="cpu",
        )
        reference, exact = _losses(replace(config, out_dir=Path(folder, "fp32")), ranks)
        found = {}
        for name, layout in LAYOUTS.items():
            if name == "one process" or not only or name in only:
                out_dir = Path(folder, name.replace(" ", "-"))
                found[name] = _losses(replace(config, out_dir=out_dir, precision=precision, parallel=layout), ranks)
    alone = found["one process"][0]
    rows = [["float32, one process", f"{reference[-1]:.4f}", f"{exact:.4f}", "", ""]]
    for name, (losses, holdout) in found.items():
        differences = [_largest(losses, others) for others in (reference, alone)]
        rows.append([f"{precision}, {name}", f"{losses[-1]:.4f}", f"{holdout:.4f}", *differences])
    head = ("", f"loss, last {WINDOW} steps", "holdout", "from float32", f"from one process in {precision}")
    title = f"{steps} steps of {batch_size} x {seq_len} tokens, {layers} layers of width {width}"
    return markdown(title, head, rows, [])


def _losses(config: TrainConfig, ranks: RankPool) -> tuple[NDArray[np.float64], float]:
    """Train; returns the mean loss of each WINDOW consecutive steps, and the holdout loss at the end."""
    layout = config.parallel
    ranks.run(max(1, layout.dp) * layout.tp * layout.pp, train, config)
    records = list(read_metrics(config.out_dir / METRICS))
    losses = [record["loss"] for record in records if record["kind"] == "step"]
    holdout = [record["loss"] for record in records if record["kind"] == "eval"]
    return np.convolve(losses, np.ones(WINDOW) / WINDOW, "valid"), holdout[-1]


def _largest(losses: NDArray[np.float64], others: NDArray[np.float64]) -> str:
    return f"{100 * np.abs(losses / others - 1).max():.2f} %"


if __name__ == "__main__":
    sys.exit(run_with_exit_code(lambda: print(tyro.cli(bench_precision))))
