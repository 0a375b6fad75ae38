"""Benchmark: memory and time of a step on long sequences, in one process and with their tokens divided over several.

    python benchmarks/bench_context.py --seq_len 65536

Each row is a layout of a small Llama, in processes on the CPU. Kept: bytes that a rank's forward pass keeps for the
backward pass, without parameters. Peak: the most bytes of tensors alive at any time of the step, on the rank with most.
"""

import sys
import time
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
from training.distributed.layout import ParallelConfig
from training.distributed.mesh import build_world
from training.distributed.rank_pool import RankPool
from training.model.batch import Batch
from training.model.decoder import meta_decoder
from training.model.model_config import ModelConfig
from training.parallel.parallelize import parallelize

MB = 1_000_000
_VOCABULARY = 256


@dataclass(frozen=True)
class Step:
    """A rank's measurements of a step: bytes, seconds, and its term of the summed loss in nats."""

    kept: int
    peak: int
    seconds: float
    loss: float


def measure_step(config: ModelConfig, layout: ParallelConfig, seq_len: int) -> Step:
    """Run the forward and backward pass of one sequence as a rank of a resolved layout."""
    world = build_world(layout, torch.device("cpu"), timeout=1800.0)
    model = parallelize(meta_decoder(config), layout, world, seed=1)
    own = {p.untyped_storage()._cdata for part in model.parts for p in part.parameters()}
    kept: dict[int, int] = {}

    def count(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return x

    tokens = torch.randint(_VOCABULARY, (1, seq_len + 1), generator=torch.Generator().manual_seed(1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], torch.zeros(1, dtype=torch.int64))
    started = time.monotonic()
    with LiveBytes() as live, saved_tensors_hooks(count, lambda x: x):
        loss = float(model.forward_backward(batch, 1 / seq_len))
    return Step(sum(kept.values()), live.peaks()["peak"], time.monotonic() - started, loss)


def measured(pool: RankPool, config: ModelConfig, asked: ParallelConfig, processes: int, seq_len: int) -> Step:
    """The step of the rank with most bytes, and the loss of all of them."""
    steps = pool.run(processes, measure_step, config, asked.resolve(processes, config, seq_len), seq_len)
    return Step(
        max(step.kept for step in steps),
        max(step.peak for step in steps),
        max(step.seconds for step in steps),
        sum(step.loss for step in steps) / seq_len,
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
    timeout: float = 1800.0,
) -> str:
    """A row for one process and for each of `contexts`; `timeout`: seconds for a row."""
    config = small_model(seq_len, layers, width, heads)
    layouts = {
        "one process": (1, ParallelConfig()),
        **{f"{each}, cp {processes}": (processes, ParallelConfig(cp=processes, context=each)) for each in contexts},
    }
    rows, first = [], None
    with RankPool(processes, timeout=timeout, job_timeout=timeout) as pool:
        for name, (count, layout) in layouts.items():
            step = measured(pool, config, layout, count, seq_len)
            first = first or step
            shares = [
                f"{each / MB:,.1f} ({each / of:.3f})" for each, of in ((step.kept, first.kept), (step.peak, first.peak))
            ]
            rows.append([name, *shares, f"{step.seconds:.1f}", f"{step.loss:.6f}"])
            print(*rows[-1], file=sys.stderr, flush=True)
    columns = ("layout", "kept MB (share)", "peak MB (share)", "s", "loss")
    title = f"One step on {seq_len:,} tokens, {layers} layers of width {width}"
    return markdown(title, columns, rows, [])


if __name__ == "__main__":
    sys.exit(run_with_exit_code(lambda: print(tyro.cli(bench_context))))
