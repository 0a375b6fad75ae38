"""Muon: its update by the formula, its momentum over layouts and restarts, and what it refuses."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gristmill.errors import UsageError
from gristmill_parity.plain.muon import newton_schulz
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.config import TrainConfig
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import MemoryConfig
from training.optim.build_optimizer import build_optimizer
from training.optim.muon import orthogonalize
from training.optim.optim_config import MATRICES, OptimConfig, part_of
from training.reporting.metrics_file import METRICS, read_metrics
from training.sharding.shard_spec import ShardSpec
from training.sharding.sharded_parameter import ShardedParameter
from training.train import train


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6), (1, 7)])
def test_singular_values_become_almost_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = orthogonalize(matrix)
    torch.testing.assert_close(found, newton_schulz(matrix), rtol=0, atol=1e-12)
    assert torch.linalg.svdvals(found).min() > 0.6 and torch.linalg.svdvals(found).max() < 1.3
    assert not orthogonalize(torch.zeros(3, 4)).any()  # of a parameter without a gradient


def parameters() -> list[ShardedParameter]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"embed.tokens.weight": (9, 6), "blocks.0.mlp.up.weight": (8, 6), "norm.weight": (6,)}
    params = []
    for name, shape in shapes.items():
        own = nn.Parameter(torch.randn(shape, generator=draw))
        own.grad = torch.randn(shape, generator=draw)
        params.append(ShardedParameter(name, own, own, ShardSpec.whole(shape), True))
    return params


def test_matrices_of_blocks_get_the_scaled_direction_and_all_else_adamw() -> None:
    params, others = parameters(), parameters()
    matrix, gradient = params[1].local.detach().clone(), params[1].local.grad
    assert gradient is not None
    optimizer = build_optimizer(params, OptimConfig(name="muon", weight_decay=0.3))
    optimizer.step(0.1)
    wanted = 0.97 * matrix - 0.1 * 0.2 * 8**0.5 * orthogonalize(1.95 * gradient)
    torch.testing.assert_close(params[1].local.detach(), wanted)
    build_optimizer(others, OptimConfig(weight_decay=0.3)).step(0.1)
    assert all(torch.equal(params[i].local, others[i].local) for i in (0, 2))
    states = {name: set(states) for name, states in optimizer.moments().items()}
    assert states.pop("blocks.0.mlp.up.weight") == {"momentum_buffer"}
    assert states == {key: {"exp_avg", "exp_avg_sq"} for key in ("embed.tokens.weight", "norm.weight")}


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("parts", [MATRICES, (), ("norms",), ("head", "hidden")])
def test_the_parts_that_decay_are_chosen(name: str, parts: tuple[str, ...]) -> None:
    params = parameters()
    for param in params:
        param.local.grad = torch.zeros_like(param.local)
    before = [param.local.detach().clone() for param in params]
    config = OptimConfig(name=name, weight_decay=0.5, decay_parts=parts)  # type: ignore[arg-type]
    build_optimizer(params, config).step(0.5)
    factors = [float((p.local / b).detach().mean()) for p, b in zip(params, before, strict=True)]
    wanted = [0.75 if part in parts else 1.0 for part in ("embeddings", "hidden", "norms")]
    assert factors == pytest.approx(wanted)


def losses(out_dir: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(out_dir / METRICS) if record["kind"] == "step"]


def test_a_muon_run_resumes_exactly_and_under_any_layout(
    config: TrainConfig, run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    options = replace(config.optim, name="muon", schedule="constant", steps=4, warmup_steps=1)
    config = replace(config, optim=options, eval=replace(config.eval, sample_tokens=0))
    config = replace(config, checkpoint=CheckpointConfig(every=2))
    train(config)
    halves = replace(config, out_dir=tmp_path / "halves")
    for steps in (2, 4):
        train(replace(halves, optim=replace(options, steps=steps)))
    assert losses(halves.out_dir) == losses(config.out_dir)
    moved = replace(config, out_dir=tmp_path / "moved")
    for steps, parallel in ((2, ParallelConfig(zero=3)), (4, ParallelConfig(tp=2))):
        run_ranks(2, train, replace(moved, parallel=parallel, optim=replace(options, steps=steps)))
    assert losses(moved.out_dir) == pytest.approx(losses(config.out_dir), rel=1e-5)


def test_offloading_and_another_optimizers_run_are_refused(config: TrainConfig) -> None:
    muon = replace(config, optim=replace(config.optim, name="muon"))
    with pytest.raises(UsageError, match=r"memory.optimizer disk .*try --memory.optimizer device"):
        train(replace(muon, memory=MemoryConfig(optimizer="disk")))
    train(replace(config, optim=replace(config.optim, steps=1)))
    with pytest.raises(UsageError, match=r"optim.name \(adamw there, muon now\)"):
        train(muon)


def test_a_matrix_that_is_looked_up_is_an_embedding() -> None:
    names = {"blocks.1.attention.query.weight", "embed.tokens.weight", "embed.positions.weight"}
    assert {part_of(name, (8, 4)) for name in names} == {"embeddings"}
    assert part_of("head.weight", (8, 4)) == "head" and part_of("blocks.1.attention.q_norm.weight", (4,)) == "norms"
