"""Benchmark: memory saved and time added by recomputation and offloading; or live bytes beside their formulas.

    python benchmarks/bench_memory.py --layers 8 --width 512 --seq_len 512 --batch_size 4
    python benchmarks/bench_memory.py --formulas

Each setting is a row, measured in its own process, on the CPU or with --device cuda on a GPU. Activations: bytes
that the forward pass keeps for the backward pass. States: AdamW's moments in memory. Peak: the maximum during a
step, less the memory of a process before training: resident on a CPU, allocated on a GPU. After step: the same at
the end of a step. The loss is equal in all rows.

With --formulas each row is a layout of a small model in processes on the CPU: the peak of each kind of live bytes,
counted storage by storage, beside the formulas of gristmill_planner/memory.py.
"""

import gc
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Self

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import torch
import tyro
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.dedup_tables import markdown
from benchmarks.live_bytes import LiveBytes
from benchmarks.memory_rows import KINDS, Row, compare, table_rows, worst_ratio
from gristmill.command import run_with_exit_code
from training.distributed.process_group import init_distributed
from training.distributed.rank_pool import RankPool
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import MemoryConfig
from training.memory.offload_parameters import allocate_parameters
from training.model.decoder import meta_decoder
from training.model.model_config import ModelConfig
from training.optim.build_optimizer import build_optimizer
from training.optim.optim_config import OptimConfig
from training.parallel.initialize import init_shard
from training.parallel.mesh import World, build_world
from training.parallel.parallelize import shard_model
from training.sharding.shard_spec import ShardSpec
from training.sharding.sharded_parameter import ShardedParameter

MB = 1_000_000

SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "nothing": (0, {}),
    "recompute selective": (0, {"recompute": "selective"}),
    "recompute full": (0, {"recompute": "full"}),
    "optimizer cpu": (0, {"optimizer": "cpu"}),
    "optimizer disk": (0, {"optimizer": "disk"}),
    "ZeRO-3": (3, {}),
    "ZeRO-3, parameters disk": (3, {"parameters": "disk"}),
    "ZeRO-3, both disk": (3, {"parameters": "disk", "optimizer": "disk"}),
    "ZeRO-3, both disk, full": (3, {"parameters": "disk", "optimizer": "disk", "recompute": "full"}),
}


@dataclass
class Result:
    """Measurements of one setting: bytes of memory, seconds per step, and the last step's summed loss in nats."""

    activations: int
    states: int
    peak: int
    after_step: int
    seconds: float
    loss: float


class Run:
    """A model and its optimizer on this rank, with the offloading of `memory`."""

    def __init__(self, config: ModelConfig, world: World, zero: int, memory: MemoryConfig) -> None:
        layout = ParallelConfig(zero=zero).resolve(world.size, config, config.context)  # type: ignore[arg-type]
        (self.part,) = shard_model(meta_decoder(config), layout, world, memory=memory)
        self.files = allocate_parameters([self.part], memory, world.device, world.rank)
        self.params = [sharded_parameter(name, p, world) for name, p in self.part.named_parameters()]
        self.optimizer = build_optimizer(
            self.params, OptimConfig(), memory, world.rank, after_update=self.files and self.files.after_update
        )
        with torch.no_grad():
            for weight in self.params:
                init_shard(weight.local, weight.name, weight.spec, config, seed=1)
                if self.files is not None:
                    self.files.drop_pages()

    def forward(self, ids: Tensor) -> Tensor:
        return self.part(ids, ids, torch.arange(len(ids), device=ids.device)).sum()

    def update(self, loss: Tensor) -> None:
        (loss / 1000).backward()
        for weight in self.params:
            if isinstance(weight.module_param, DTensor) and weight.module_param.grad is not None:
                weight.local.grad = weight.module_param.grad.to_local()
        self.optimizer.step(1e-3)
        self.optimizer.zero_grad()

    def close(self) -> None:
        self.optimizer.close()
        if self.files is not None:
            self.files.close()


def sharded_parameter(name: str, p: nn.Parameter, world: World) -> ShardedParameter:
    """The shard of a parameter without tensor parallelism: FSDP shards rows."""
    whole = ShardSpec.whole(tuple(p.shape))
    if not isinstance(p, DTensor):
        return ShardedParameter(name, p, p, whole, True)
    with torch.no_grad():
        own = nn.Parameter(p.to_local(), requires_grad=False)
    return ShardedParameter(name, p, own, whole.shard(0, world.size, world.rank), True)


def measure(config: ModelConfig, zero: int, memory: MemoryConfig, device: str, batch: int, steps: int) -> Result:
    """Measure one setting in this process."""
    with init_distributed(device) as place:  # type: ignore[arg-type]
        nn.Linear(64, 64, device=place)(torch.ones(64, 64, device=place)).sum().backward()  # torch's own memory
        before = memory_of(place)
        world = build_world(ParallelConfig(zero=zero).resolve(1, config, config.context), place)  # type: ignore[arg-type]
        run = Run(config, world, zero, memory)
        ids = torch.randint(config.vocab_size, (batch, config.context), generator=torch.Generator().manual_seed(1))
        ids = ids.to(place)
        activations, times, peaks = _activations(run, ids), [], []
        for _ in range(steps):
            start = time.perf_counter()
            with Peak(place) as peak:
                loss = run.forward(ids)
                run.update(loss)
                last = loss.item()
                del loss
            times.append(time.perf_counter() - start)
            peaks.append(peak.bytes - before)
        after_step, states = memory_of(place) - before, run.optimizer.memory_bytes
        run.close()
    return Result(activations, states, max(peaks), after_step, min(times), last)


def _activations(run: Run, ids: Tensor) -> int:
    """Bytes kept by a forward pass for the backward pass. Also completes the first, untimed step."""
    with LiveBytes() as live:
        loss = run.forward(ids)
        gc.collect()
        kept = live.total()
    run.update(loss)
    return kept


def memory_of(device: torch.device) -> int:
    """Bytes allocated on a GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status("VmRSS")


class Peak:
    """Context manager: `bytes` is the peak memory within it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes = device, 0

    def __enter__(self) -> Self:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory
        return self

    def __exit__(self, *error: object) -> None:
        gpu = self.device.type == "cuda"
        self.bytes = torch.cuda.max_memory_allocated(self.device) if gpu else _status("VmHWM")


def _status(field: str) -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


def bench_memory(
    layers: int = 8,
    width: int = 512,
    heads: int = 8,
    vocab_size: int = 8192,
    seq_len: int = 256,
    batch_size: int = 4,
    steps: int = 5,
    device: Literal["cpu", "cuda"] = "cpu",
    folder: Path | None = None,
    only: list[str] | None = None,
    formulas: bool = False,
) -> str:
    """Measure every setting on a Llama of this size; or live bytes by kind, beside their formulas.

    Args:
        steps: Timed steps per setting, after a warm-up step; the fastest is reported.
        folder: Folder for offloaded states, on the disk to measure; by default the system's temporary folder.
        only: Names of the settings to measure.
        formulas: Print the table of formulas and live bytes, whose models and layouts are fixed; `only`: words in rows.
    """
    if formulas:
        return formula_table([row for row in table_rows() if only is None or any(word in str(row) for word in only)])
    config = ModelConfig(layers=layers, width=width, heads=heads).resolve(vocab_size, seq_len)
    results = {}
    # glibc then returns freed memory at once, so that resident memory is memory in use
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}
    context = multiprocessing.get_context("forkserver")  # every process starts from the same state, with torch imported
    context.set_forkserver_preload(
        ["training.optim.optimizer", "training.parallel.parallelize", "training.memory.offload_parameters", "rich"]
    )
    for name, (zero, places) in SETTINGS.items():
        if only and name not in only:
            continue
        with TemporaryDirectory(dir=folder) as files:
            memory = MemoryConfig(**places, folder=Path(files))
            with ProcessPoolExecutor(1, context) as pool:
                results[name] = pool.submit(measure, config, zero, memory, device, batch_size, steps).result()
    size = sum(p.numel() for p in meta_decoder(config).parameters())
    return results_table(results, f"{size / 1e6:,.1f} million parameters, {batch_size} x {seq_len} tokens, {device}")


def formula_table(rows: list[Row]) -> str:
    """A row per layout and pipeline rank: kilobytes by the formulas / measured; the worst ratio of a kind."""
    lines = []
    with RankPool(8) as pool:
        for row in rows:
            for rank, (estimate, measured) in compare(row, pool.run).items():
                pairs = [(estimate[kind], measured.get(kind, 0)) for kind in KINDS]
                cells = [f"{e / 1e3:,.0f} / {m / 1e3:,.0f}" if e or m else "" for e, m in pairs]
                name = str(row) + f"; rank {rank}" * (row.resolved.pp > 1)
                lines.append([name, *cells, f"{worst_ratio(estimate, measured, ('peak',)):.3f}"])
    return markdown("kB of each kind at its peak: formula / live bytes", ("layout", *KINDS, "worst"), lines, [])


def results_table(results: dict[str, Result], title: str) -> str:
    first = next(iter(results.values()))
    rows = []
    for name, result in results.items():
        sizes = (result.activations, result.states, result.peak, result.after_step)
        ratio = result.seconds / first.seconds
        times = (f"{result.seconds * 1e3:,.0f}", f"{ratio:.2f}")
        rows.append([name, *(f"{size / MB:,.1f}" for size in sizes), *times, f"{result.loss:.4f}"])
    head = ("setting", "activations MB", "states MB", "peak MB", "after step MB", "ms/step", "×", "loss")
    return markdown(title, head, rows, [])


if __name__ == "__main__":
    sys.exit(run_with_exit_code(lambda: print(tyro.cli(bench_memory))))
