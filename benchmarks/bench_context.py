"""Benchmark: memory and time of steps on long sequences, in one process and with their tokens divided over several.

    python benchmarks/bench_context.py --seq_len 65536

Each row is a layout of a small Llama, in processes on the CPU, which are trained on the same sequence for some steps:
forward and backward pass, sum and norm of gradients, update by AdamW. Kept: bytes that a rank's forward pass keeps for
the backward pass, without parameters. Peak: the most bytes of tensors alive at any time, on the rank with most.
"""

import math
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import torch
import tyro
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.dedup_tables import markdown
from benchmarks.live_bytes import LiveBytes
from gristmill.command import run_with_exit_code
from training.distributed.rank_pool import RankPool
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import MemoryConfig
from training.model.batch import TokenBatch
from training.model.decoder import meta_decoder
from training.model.model_config import ModelConfig
from training.optim.build_optimizer import build_optimizer
from training.optim.optim_config import OptimConfig
from training.optim.optimizer import Optimizer
from training.parallel.gradients import scale_gradients, squared_grad_norm
from training.parallel.mesh import build_world
from training.parallel.parallel_model import ParallelModel
from training.parallel.parallelize import parallelize

MB = 1_000_000
_VOCABULARY = 256
_LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class Steps:
    """A rank's measurements of some steps: bytes, seconds of one, and the loss of each, in nats a token."""

    kept: int
    peak: int
    seconds: float
    losses: list[float]


def measure_steps(config: ModelConfig, layout: ParallelConfig, seq_len: int, count: int) -> Steps:
    """Train `count` steps on one sequence as a rank of a resolved layout."""
    world = build_world(layout, torch.device("cpu"), timeout=1800.0)
    model = parallelize(meta_decoder(config), layout, world, seed=1)
    own = {p.untyped_storage()._cdata for part in model.parts for p in part.parameters()}
    kept: dict[int, int] = {}

    def count_kept(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return x

    tokens = torch.randint(_VOCABULARY, (1, seq_len + 1), generator=torch.Generator().manual_seed(1))
    batch = TokenBatch(tokens[:, :-1], tokens[:, 1:], torch.zeros(1, dtype=torch.int64))
    optimizer = build_optimizer(model.params, OptimConfig(), MemoryConfig(), world.rank)
    started, losses = time.monotonic(), []
    with LiveBytes() as live:
        for step in range(count):
            with nullcontext() if step else saved_tensors_hooks(count_kept, lambda x: x):
                losses.append(_step(model, optimizer, batch, seq_len))
    return Steps(sum(kept.values()), live.peaks()["peak"], (time.monotonic() - started) / count, losses)


def _step(model: ParallelModel, optimizer: Optimizer, batch: TokenBatch, seq_len: int) -> float:
    """A whole step, as the trainer takes it: gradients clipped to a norm of 1, then the update. Returns the loss."""
    loss = model.forward_backward(batch, 1 / seq_len).double()
    squares = squared_grad_norm(model.params, model.world.device)
    total, square = model.world.all_reduce(torch.stack([loss, squares])).tolist()
    scale_gradients(model.params, min(1.0, 1 / math.sqrt(square)))
    optimizer.step(_LEARNING_RATE)
    model.start_all_gather()
    optimizer.zero_grad()
    return total / seq_len


def measured(pool: RankPool, config: ModelConfig, asked: ParallelConfig, seq_len: int, count: int = 1) -> Steps:
    """Steps by as many ranks as context parallelism takes: of the rank with most bytes, and of the slowest."""
    layout = asked.resolve(asked.cp, config, seq_len)
    ranks = pool.run(asked.cp, measure_steps, config, layout, seq_len, count)
    return Steps(
        max(each.kept for each in ranks),
        max(each.peak for each in ranks),
        max(each.seconds for each in ranks),
        ranks[0].losses,
    )


def small_model(seq_len: int, layers: int = 2, width: int = 32, heads: int = 4) -> ModelConfig:
    """A Llama whose activations outweigh its parameters by far."""
    sizes = {"layers": layers, "width": width, "heads": heads, "kv_heads": heads, "ffn_width": 3 * width}
    return ModelConfig(preset="llama", **sizes).resolve(_VOCABULARY, seq_len)  # type: ignore[arg-type]


def bench_context(
    seq_len: int = 65536,
    processes: int = 4,
    contexts: tuple[Literal["ring", "ulysses"], ...] = ("ring", "ulysses"),
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    steps: int = 1,
    timeout: float = 1800.0,
) -> str:
    """A row for one process and for each of `contexts`; `timeout`: seconds for a row."""
    config = small_model(seq_len, layers, width, heads)
    layouts = {"one process": ParallelConfig()}
    layouts |= {f"{each}, cp {processes}": ParallelConfig(cp=processes, context=each) for each in contexts}
    rows, first = [], None
    with RankPool(processes, timeout=timeout, job_timeout=timeout) as pool:
        for name, layout in layouts.items():
            found = measured(pool, config, layout, seq_len, steps)
            first = first or found
            pairs = (found.kept, first.kept), (found.peak, first.peak)
            shares = [f"{each / MB:,.1f} ({each / whole:.3f})" for each, whole in pairs]
            losses = ", ".join(f"{loss:.6f}" for loss in found.losses)
            rows.append([name, *shares, f"{found.seconds:.1f}", losses])
            print(*rows[-1], file=sys.stderr, flush=True)
    columns = ("layout", "kept MB (share)", "peak MB (share)", "s a step", "losses")
    title = f"{steps} steps on {seq_len:,} tokens, {layers} layers of width {width}"
    return markdown(title, columns, rows, [])


if __name__ == "__main__":
    sys.exit(run_with_exit_code(lambda: print(tyro.cli(bench_context))))
