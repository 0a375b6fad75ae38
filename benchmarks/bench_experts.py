"""Benchmark: a dense model and sparse ones at equal active parameters and tokens, with each kind of balancing.

    python benchmarks/bench_experts.py OUT/tokens --picture docs/images/experts.svg

OUT/tokens has `train` and `holdout`, as `gristmill run` writes them. A token passes MLPs of the same width everywhere:
one of `ffn_width`, or `experts_per_token` experts of a part of it. Runs of one seed read the same sequences in the same
order, one after the other. Loads are those of the last report, over the mean; the worst layer's.
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import tyro
from matplotlib.figure import Figure
from tyro.conf import Positional

from benchmarks.dedup_tables import markdown
from gristmill.command import run_with_exit_code
from training.config import TrainConfig
from training.data.data_config import DataConfig
from training.distributed.rank_pool import RankPool
from training.model.model_config import ModelConfig
from training.optim.optim_config import OptimConfig
from training.reporting.metrics_file import METRICS, read_metrics
from training.reporting.reporting_config import EvalConfig, MetricsConfig
from training.train import train

CHOSEN = 2
KINDS: Mapping[str, Mapping[str, Any]] = {
    "dense": {},
    "sparse, not balanced": {"balance": "none"},
    "sparse, sequence": {"balance": "sequence"},
    "sparse, switch": {"balance": "switch"},
    "sparse, bias": {"balance": "bias"},
}


@dataclass(frozen=True)
class Found:
    """What a run came to."""

    losses: list[tuple[int, float]]
    """Of the holdout, by step, in nats a token."""
    max_loads: list[tuple[int, float]]
    """The largest load of an expert over the mean, of the worst layer, by step; empty of a dense model."""
    min_load: float
    parameters: int
    seconds: float
    """Of a step, on average."""


def run(config: TrainConfig) -> Found:
    """Train; what each process does."""
    summary = train(config)
    records = list(read_metrics(config.out_dir / METRICS))
    loads = [record for record in records if record["kind"] == "experts"]
    return Found(
        [(record["step"], record["loss"]) for record in records if record["kind"] == "eval"],
        [(record["step"], max(record["max_load"].values())) for record in loads],
        min(loads[-1]["min_load"].values()) if loads else 1.0,
        summary.parameters,
        mean(record["step_seconds"] for record in records if record["kind"] == "step"),
    )


def configs(
    tokens: Path, out_dir: Path, seed: int, steps: int, width: int, experts: int, batch: int
) -> dict[str, TrainConfig]:
    """The runs of a seed, by name."""
    found = {}
    for name, options in KINDS.items():
        ffn = 4 * width
        sparse = {"experts": experts, "experts_per_token": CHOSEN, "expert_width": ffn // CHOSEN} if options else {}
        found[name] = TrainConfig(
            out_dir=out_dir / f"{name} {seed}",
            data=DataConfig(tokens / "train", tokens / "holdout", seq_len=128, batch_size=batch),
            model=ModelConfig(layers=4, width=width, heads=4, ffn_width=ffn, **sparse, **options),
            optim=OptimConfig(steps=steps, lr=2e-3, warmup_steps=steps // 10),
            eval=EvalConfig(every=max(1, steps // 10), sample_tokens=0, sequences=64),
            metrics=MetricsConfig(tensorboard=False, log_every=max(1, steps // 20)),
            seed=seed,
            device="cpu",
        )
    return found


def table(found: Mapping[str, Sequence[Found]], steps: int) -> str:
    """A row for each kind, over its seeds."""
    rows = []
    for name, runs in found.items():
        losses = [each.losses[-1][1] for each in runs]
        largest = [each.max_loads[-1][1] for each in runs if each.max_loads]
        cells = [f"{mean(largest):.2f}", f"{mean(each.min_load for each in runs):.2f}"] if largest else ["–", "–"]
        spread = " ".join(f"{loss:.3f}" for loss in losses)
        rows.append([
            name, f"{runs[0].parameters / 1e6:.2f}", f"{mean(losses):.3f}", spread, *cells,
            f"{1e3 * mean(each.seconds for each in runs):.0f}",
        ])  # fmt: skip
    head = ("model", "million parameters", "holdout loss", "of each seed", "max load", "min load", "ms a step")
    notes = [f"{steps} steps; of sparse models a token passes {CHOSEN} experts of half the dense MLP's width"]
    return markdown("Dense and sparse at equal active parameters", head, rows, notes)


def draw(found: Mapping[str, Sequence[Found]], path: Path) -> None:
    """Losses and loads by step; a thin line for each seed."""
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    of_loss, of_load = figure.subplots(1, 2)
    for number, (name, runs) in enumerate(found.items()):
        for seed, each in enumerate(runs):
            style = {"color": f"C{number}", "lw": 1.2, "label": None if seed else name}
            of_loss.plot(*zip(*each.losses, strict=True), **style)
            if each.max_loads:
                of_load.plot(*zip(*each.max_loads, strict=True), **style)
    of_loss.set(xlabel="step", ylabel="holdout loss, nats/token")
    of_load.set(xlabel="step", ylabel="largest load over the mean, worst layer")
    figure.legend(*of_loss.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(path)


def bench_experts(
    tokens: Positional[Path], steps: int = 600, width: int = 128, experts: int = 8, seeds: int = 2, batch: int = 16,
    picture: Path | None = None,
) -> str:  # fmt: skip
    """A table of a dense model and sparse ones; `picture`: a file of their curves."""
    found: dict[str, list[Found]] = {name: [] for name in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        every = [
            (name, config)
            for seed in range(1, seeds + 1)
            for name, config in configs(tokens, Path(folder), seed, steps, width, experts, batch).items()
        ]
        with RankPool(1, job_timeout=3600.0, timeout=600.0) as ranks:
            for name, config in every:
                found[name].append(ranks.run(1, run, config)[0])
    if picture is not None:
        draw(found, picture)
    return table(found, steps)


if __name__ == "__main__":
    sys.exit(run_with_exit_code(lambda: print(tyro.cli(bench_experts))))
