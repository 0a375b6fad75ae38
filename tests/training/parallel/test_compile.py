"""torch.compile: the same losses under every layout, and an error for schedules that split the backward pass."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.errors import UsageError
from training.config import TrainConfig
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import MemoryConfig, Recompute
from training.model.dropout import Dropout
from training.parallel.pipeline.schedules import SPLIT_BACKWARD, Schedule
from training.parallel.tensor.tensor_parallel import ShardedDropout
from training.reporting.metrics_file import METRICS, read_metrics
from training.reporting.reporting_config import EvalConfig
from training.sharding.axis import Axis
from training.train import train

needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")


def graphs_of(config: TrainConfig, backend: str = "inductor") -> int:
    """Train; returns the number of graphs that were compiled, by `backend` in place of the usual one."""
    import torch._dynamo.utils  # here: a second of imports
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # a pool of compilers would start slowly
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_module = torch.nn.Module.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "compile", lambda self, **how: compile_module(self, **how, backend=backend))
        train(config)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def losses(out_dir: Path) -> list[float]:
    return [r["loss"] for r in read_metrics(out_dir / METRICS) if "loss" in r]


@pytest.mark.every(4)
@needs_compiler
@pytest.mark.parametrize(
    ("layout", "recompute", "backend", "model"),
    [
        # the graphs of dynamo and autograd alone: inductor's code is compared in parity/test_independent.py
        (ParallelConfig(tp=2, sequence_parallel=True), "none", "aot_eager", {}),
        (ParallelConfig(zero=3), "selective", "aot_eager", {}),
        (ParallelConfig(cp=2), "none", "aot_eager", {}),
        (ParallelConfig(ep=2), "none", "aot_eager", {"experts": 4, "expert_width": 32, "sinks": True}),
    ],
)
def test_compiled_blocks_have_the_same_losses(
    config: TrainConfig,
    run_ranks: Callable[..., list[Any]],
    tmp_path: Path,
    layout: ParallelConfig,
    recompute: Recompute,
    backend: str,
    model: dict[str, Any],
) -> None:
    config = replace(config, precision="fp64", eval=EvalConfig(sample_tokens=0, sequences=10))
    config = replace(config, model=replace(config.model, **model))
    assert run_ranks(1, graphs_of, config) == [0]
    memory = MemoryConfig(recompute=recompute)
    compiled = replace(config, out_dir=tmp_path / "compiled", compile=True, parallel=layout, memory=memory)
    assert min(run_ranks(2, graphs_of, compiled, backend)) > 0
    expected = losses(config.out_dir)
    assert len(expected) == 13 and losses(compiled.out_dir) == pytest.approx(expected, rel=1e-10)


@pytest.mark.thorough
@needs_compiler
def test_compiled_dropout_has_the_same_mask() -> None:
    dropout = ShardedDropout(Dropout(0.3, "site"), Axis("tp", 2, 1, None))
    x, sample_ids = torch.ones(2, 3, 8, 16), torch.tensor([5, 2**40])
    dropped = dropout(x, sample_ids)
    dropout.compile()
    assert torch.equal(dropout(x, sample_ids), dropped) and (dropped == 0).any()


def test_the_dropout_of_all_layers_is_compiled_once() -> None:
    import torch._dynamo.utils

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x, sample_ids = torch.ones(2, 3, 8, 16), torch.tensor([5, 2**40])
    layers = [Dropout(0.3, f"blocks.{number}") for number in range(10)]  # torch compiles code anew eight times at most
    dropped = [layer(x, sample_ids) for layer in layers]
    for layer, expected in zip(layers, dropped, strict=True):
        layer.compile(backend="eager")
        assert torch.equal(layer(x, sample_ids), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("schedule", SPLIT_BACKWARD)
def test_compiled_blocks_need_an_unsplit_backward_pass(config: TrainConfig, schedule: Schedule) -> None:
    split = replace(config, compile=True, parallel=ParallelConfig(pp=2, schedule=schedule, micro_batches=4))
    with pytest.raises(UsageError, match=rf"{schedule}.*try --parallel\.schedule interleaved-1f1b"):
        split.check()
    assert (split.seconds_to_wait, replace(split, compile=False).seconds_to_wait) == (600, 60)
    assert replace(split, timeout=7).seconds_to_wait == 7
    replace(split, compile=False).check()
    replace(split, parallel=ParallelConfig(schedule=schedule)).check()
