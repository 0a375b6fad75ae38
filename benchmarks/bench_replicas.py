"""Benchmark: ways of data parallelism at equal tokens, over a slow link and with a straggler: loss, bytes, wall time.

    python benchmarks/bench_replicas.py --tokens OUT/tokens --picture docs/images/replicas.svg

A small Llama, on tokens that `gristmill run` has written, or on made-up text, in processes on this machine. The link is
simulated: before each collective a rank waits for what it sends in a ring, divided by the bandwidth, so that nothing is
hidden behind the backward pass; the server of asynchronous training waits so for every message, one at a time in each
direction, as they share its link. The straggler is one replica or worker, which sleeps in every step, or before every
part.
"""

import contextlib
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import torch
import torch.distributed as dist
import tyro
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.dedup_tables import markdown
from benchmarks.made_up_tokens import write_tokens
from gristmill.command import run_with_exit_code
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.config import TrainConfig
from training.data.data_config import DataConfig
from training.distributed.process_group import init_distributed
from training.distributed.rank_pool import RankPool
from training.experimental.parallel_config import ParallelConfig
from training.experimental.server import messages
from training.experimental.server.async_config import AsyncConfig
from training.experimental.server.async_trainer import AsyncTrainer, plan_async
from training.experimental.server.async_worker import work
from training.loop import train_as_planned
from training.model.model_config import ModelConfig
from training.optim.optim_config import OptimConfig
from training.parallel.traffic_counter import OPERATIONS
from training.reporting.reporting_config import EvalConfig, MetricsConfig
from training.run_plan import RunPlan

LAYOUTS = {
    "all-reduce": ParallelConfig(),
    "ZeRO-1": ParallelConfig(zero=1),
    "PowerSGD, rank 4": ParallelConfig(compression="powersgd"),
    "PowerSGD, rank 16": ParallelConfig(compression="powersgd", compression_rank=16),
    "int8": ParallelConfig(compression="int8"),
    "8 local steps": ParallelConfig(local_steps=8),
}
ASYNCHRONOUS = {"a server, staleness 0": 0, "a server, staleness 4": 4}


@dataclass(frozen=True)
class Conditions:
    """The link's bandwidth in megabytes a second, 0: as fast as it is; and seconds that the last replica sleeps."""

    name: str
    bandwidth: float = 0.0
    sleep: float = 0.0

    def wait(self, nbytes: float) -> None:
        """Wait as long as so many bytes take."""
        if self.bandwidth:
            time.sleep(nbytes / (self.bandwidth * 1e6))


@dataclass(frozen=True)
class Found:
    """Of a run: holdout loss in nats/token, megabytes that a replica or worker sends a step, seconds a step."""

    loss: float
    megabytes: float
    seconds: float


class ThrottledLink(TorchDispatchMode):
    """Context in which collectives of this thread wait for the link first; `sent` are bytes."""

    def __init__(self, conditions: Conditions) -> None:
        super().__init__()
        self.conditions, self.sent = conditions, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            leaves = tree_leaves((args, kwargs))
            nbytes = max((a.nbytes for a in leaves if isinstance(a, Tensor)), default=0)
            size = next(dist.ProcessGroup.unbox(a).size() for a in leaves if isinstance(a, torch.ScriptObject) and
                        "ProcessGroup" in str(a._type()))  # fmt: skip
            twice = 2 if OPERATIONS.get(func.overloadpacket.__name__) == "all-reduce" else 1
            sent = twice * nbytes * (size - 1) / size
            self.sent += sent
            self.conditions.wait(sent)
        return func(*args, **(kwargs or {}))


class Clock:
    """Notes when steps begin, and sleeps in each for so many seconds."""

    def __init__(self, sleep: float = 0.0) -> None:
        self.sleep, self.times = sleep, list[float]()

    def __call__(self, *_: Any) -> None:
        self.times.append(time.perf_counter())
        time.sleep(self.sleep)

    @property
    def seconds(self) -> float:
        """Seconds a step, without the first."""
        return (self.times[-1] - self.times[1]) / (len(self.times) - 2)


def replica(config: TrainConfig, conditions: Conditions) -> Found:
    """A rank of a run."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    link, clock = ThrottledLink(conditions), Clock(conditions.sleep * is_last)
    with link:
        summary = train_as_planned(RunPlan.of(config), clock)
    return Found(summary.holdout_loss, link.sent / config.optim.steps / 1e6, clock.seconds)


def server_or_worker(config: AsyncConfig, conditions: Conditions) -> Found | None:
    """Rank 0 serves, the others work; none needs the process group that they are in."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    with one_process():
        if rank > 0:
            with init_distributed("cpu") as device:
                work(plan_async(replace(config, role="worker")), device, Clock(conditions.sleep * (rank == size - 1)))
            return None
        clock = Clock()
        with throttled_server(conditions) as sent:
            summary = train_as_planned(plan_async(config), clock, AsyncTrainer)
    return Found(summary.holdout_loss, sum(sent) / (size - 1) / config.optim.steps / 1e6, clock.seconds)


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Context in which no launcher has started this process."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    before = {name: os.environ.pop(name, None) for name in names}
    try:
        yield
    finally:
        os.environ.update({name: value for name, value in before.items() if value is not None})


@contextlib.contextmanager
def throttled_server(conditions: Conditions) -> Iterator[list[int]]:
    """Context in which this server's messages wait for its link; yields the bytes of each."""
    sent, send, receive = list[int](), messages.Link.send, messages.Link.receive
    ways = {"out": threading.Lock(), "in": threading.Lock()}

    def take(way: str, nbytes: int) -> None:
        sent.append(nbytes)
        with ways[way]:
            conditions.wait(nbytes)

    def slow_send(self: messages.Link, header: dict[str, Any], values: Tensor | None = None) -> None:
        if values is not None:
            take("out", values.nbytes)
        send(self, header, values)

    def slow_receive(self: messages.Link, into: Tensor | None = None) -> dict[str, Any]:
        header = receive(self, into)
        if header["has_values"] and into is not None:
            take("in", into.nbytes)
        return header

    messages.Link.send, messages.Link.receive = slow_send, slow_receive  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        messages.Link.send, messages.Link.receive = send, receive  # type: ignore[method-assign]


def options(folder: Path, steps: int, width: int) -> dict[str, Any]:
    """The options that all runs have."""
    return {
        "data": DataConfig(folder / "train", folder / "holdout", seq_len=64, batch_size=16),
        "model": ModelConfig(layers=2, width=width, heads=4),
        "optim": OptimConfig(steps=steps, lr=3e-3, warmup_steps=max(1, steps // 10)),
        "eval": EvalConfig(sample_tokens=0, sequences=256),
        "metrics": MetricsConfig(tensorboard=False, log_every=steps),
        "checkpoint": CheckpointConfig(every=0, async_save=False),
        "device": "cpu",
        "timeout": 120.0,
    }


def measure(
    pool: RankPool, folder: Path, given: dict[str, Any], conditions: Conditions, replicas: int
) -> dict[str, Found]:
    """Every way under the same conditions, by name."""
    found = {}
    for name, layout in LAYOUTS.items():
        config = TrainConfig(out_dir=Path(tempfile.mkdtemp(dir=folder)), parallel=layout, **given)
        found[name] = pool.run(replicas, replica, config, conditions)[0]
    for name, staleness in ASYNCHRONOUS.items():
        out_dir = Path(tempfile.mkdtemp(dir=folder))
        also = {"parts": replicas, "workers": replicas, "staleness": staleness, "port": free_port()}
        run = AsyncConfig(out_dir=out_dir, role="server", **given | also)
        found[name] = pool.run(replicas + 1, server_or_worker, run, conditions)[0]
    return found


def free_port() -> int:
    """A port that nothing listens at, and that Linux gives no connection meanwhile: those are above."""
    while True:
        port = random.randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def draw(found: dict[str, dict[str, Found]], path: Path) -> None:
    """Loss against seconds a step, a panel for each of the conditions."""
    figure = Figure(figsize=(3.4 * len(found), 3.2), layout="constrained")
    axes = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for panel, (title, rows) in zip(axes, found.items(), strict=True):
        for number, (name, each) in enumerate(rows.items()):
            panel.plot(each.seconds * 1e3, each.loss, "osD^v<>P*"[number], label=name)
        panel.set(title=title, xlabel="milliseconds a step", xlim=(0, None))
    axes[0].set_ylabel("holdout loss, nats/token")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path)


def bench_replicas(
    steps: int = 200, width: int = 64, replicas: int = 2, bandwidth: float = 20.0, sleep: float = 0.1,
    tokens: Path | None = None, picture: Path | None = None,
) -> str:  # fmt: skip
    """A table of all ways under each of the conditions; `bandwidth` in MB/s, `sleep` in seconds.

    `tokens`: a folder with `train` and `holdout`, as `gristmill run` writes them; by default of made-up text.
    """
    every = [
        Conditions("as it is"),
        Conditions(f"a link of {bandwidth:g} MB/s", bandwidth),
        Conditions(f"one sleeps {sleep:g} s a step", 0.0, sleep),
    ]
    with tempfile.TemporaryDirectory() as name, RankPool(replicas + 1, job_timeout=1200.0, timeout=120.0) as pool:
        folder = Path(name)
        for part, seed, documents in (("train", 1, max(200, steps * 6)), ("holdout", 2, 40)) if tokens is None else ():
            write_tokens(folder / part, seed, documents)
        given = options(tokens or folder, steps, width)
        found = {each.name: measure(pool, folder, given, each, replicas) for each in every}
    if picture is not None:
        draw(found, picture)
    return table(found, replicas, steps)


def table(found: dict[str, dict[str, Found]], replicas: int, steps: int) -> str:
    """A row for each way: bytes, then loss and time under each of the conditions."""
    head = ("way", "MB a step", *(f"{name}: {what}" for name in found for what in ("loss", "ms a step")))
    first = next(iter(found.values()))
    rows = []
    for name in first:
        cells = [
            cell for rows in found.values() for cell in (f"{rows[name].loss:.3f}", f"{rows[name].seconds * 1e3:.0f}")
        ]
        rows.append([name, f"{first[name].megabytes:.3f}", *cells])
    rows.append(["nn.DataParallel", *["needs GPUs"] * (len(head) - 1)])
    notes = [
        f"{replicas} replicas, {steps} steps of the same tokens; MB: what a replica sends, or a worker both ways",
        "nn.DataParallel divides a batch over the GPUs of one process; on a CPU it runs the module as it is",
    ]
    return markdown("Ways of data parallelism", head, rows, notes)


if __name__ == "__main__":
    sys.exit(run_with_exit_code(lambda: print(tyro.cli(bench_replicas))))
