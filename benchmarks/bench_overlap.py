"""Benchmark: how much of a step's communication is hidden behind computation, in each layout.

    python benchmarks/bench_overlap.py

Every rank traces its steps with torch.profiler. A collective lasts from its call until its data has arrived; a rank
waits for it in `Work.wait`. What is communicated while the rank does not wait is hidden.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import torch.distributed as dist
import tyro
from rich.table import Column, Table
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.bench_training import write_tokens
from gristmill.command import run_with_exit_code
from gristmill.console import wide_console
from training.config import TrainConfig
from training.data.data_config import DataConfig
from training.distributed.process_group import init_distributed
from training.distributed.rank_pool import RankPool
from training.experimental.parallel_config import ParallelConfig
from training.model.model_config import ModelConfig
from training.optim.optim_config import OptimConfig
from training.reporting.reporting_config import EvalConfig, MetricsConfig
from training.run_plan import RunPlan
from training.trainer import Trainer

LAYOUTS = {
    **{f"dp 2, ZeRO-{zero}": ParallelConfig(dp=2, zero=zero) for zero in (0, 1, 2, 3)},  # type: ignore[arg-type]
    "dp 2, ZeRO-2, 4 micro-batches": ParallelConfig(dp=2, zero=2, micro_batches=4),
    "dp 2, pp 2, ZeRO-1": ParallelConfig(dp=2, pp=2, zero=1, micro_batches=4),
    "dp 2, pp 2, ZeRO-2": ParallelConfig(dp=2, pp=2, zero=2, micro_batches=4),
    "tp 2": ParallelConfig(tp=2),
    "pp 2": ParallelConfig(pp=2, micro_batches=4),
}
_WAIT = "waits for a collective"
_WARM_UP = 2  # steps
Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class Step:
    """A rank's step: its milliseconds, those in which it communicates, and those of them in which it does not wait."""

    total: float
    communication: float
    hidden: float


def bench_overlap(
    steps: int = 5, layers: int = 8, width: int = 512, seq_len: int = 128, batch_size: int = 8, only: str = ""
) -> Table:
    """Trace `steps` steps of a Llama in each layout, on the CPU with gloo; means of the slowest rank.

    Args:
        only: Run only layouts whose names contain this.
    """
    title = f"{steps} steps of {batch_size} x {seq_len} tokens, {layers} layers of width {width}, one thread a process"
    head = ("step, ms", "communication, ms", "hidden, ms", "hidden")
    table = Table("", *(Column(name, justify="right") for name in head), title=title, box=None)
    with TemporaryDirectory() as folder, RankPool(4, job_timeout=600.0) as ranks:
        tokens = Path(folder, "tokens")
        write_tokens(tokens, 2 * (batch_size * seq_len + 1))
        for name, layout in LAYOUTS.items():
            if only not in name:
                continue
            config = TrainConfig(
                out_dir=Path(folder, "run"),
                data=DataConfig(tokens, tokens, seq_len=seq_len, batch_size=batch_size, verify="size"),
                model=ModelConfig(layers=layers, width=width, heads=4),
                optim=OptimConfig(steps=100),
                eval=EvalConfig(sequences=1, sample_tokens=0),
                metrics=MetricsConfig(tensorboard=False),
                parallel=layout,
                device="cpu",
            )
            traced = ranks.run(max(1, layout.dp) * layout.tp * layout.pp, trace_steps, config, steps)
            slowest = max(traced, key=lambda step: step.total)
            times = (slowest.total, slowest.communication, slowest.hidden)
            table.add_row(name, *(f"{ms:.1f}" for ms in times), f"{slowest.hidden / slowest.communication:.0%}")
    return table


def trace_steps(config: TrainConfig, steps: int) -> Step:
    """Train some steps as this process's rank: the mean of all but the first ones."""
    with (
        init_distributed(config.device, config.seconds_to_wait) as device,
        Trainer(RunPlan.of(config), device) as trainer,
        _waits_are_recorded(),
    ):
        trainer.load()
        for number in range(1, _WARM_UP + 1):
            trainer.step(number)
        return _trace(trainer, range(_WARM_UP + 1, _WARM_UP + steps + 1))


@contextmanager
def _waits_are_recorded() -> Iterator[None]:
    wait = dist.Work.wait

    def recorded(work: dist.Work, *arguments: Any) -> Any:
        with record_function(_WAIT):
            return wait(work, *arguments)

    with patch.object(dist.Work, "wait", recorded):
        yield


def _trace(trainer: Trainer, numbers: Sequence[int]) -> Step:
    """In one trace, as what a step sends may arrive in the next one."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("step"):
        for number in numbers:
            trainer.step(number)
        trainer.model.finish_all_gather()
    spans: dict[str, Spans] = {"gloo:": [], _WAIT: [], "step": []}
    for event in profiler.events() or ():
        for kind, found in spans.items():
            if event.name.startswith(kind):
                found.append((event.time_range.start / 1e3, event.time_range.end / 1e3))
    both = _length(spans["gloo:"]) + _length(spans[_WAIT]) - _length(spans["gloo:"] + spans[_WAIT])
    communication, count = _length(spans["gloo:"]), len(numbers)
    return Step(_length(spans["step"]) / count, communication / count, (communication - both) / count)


def _length(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans."""
    length, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        length += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return length


if __name__ == "__main__":
    sys.exit(run_with_exit_code(lambda: wide_console().print(tyro.cli(bench_overlap))))
