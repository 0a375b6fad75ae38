"""The average of the weights: its formula, its place in checkpoints, evaluation and export."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from gristmill.errors import UsageError
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.checkpoint.checkpoint_group import single_process_group
from training.checkpoint.shard_storage import read_shards
from training.config import TrainConfig
from training.evaluate_config import EvaluateConfig
from training.evaluation import evaluate_checkpoint
from training.experimental.parallel_config import ParallelConfig
from training.hugging_face.export_hf import export_hf
from training.memory.memory_config import MemoryConfig
from training.optim.build_optimizer import build_optimizer
from training.optim.optim_config import OptimConfig
from training.optim.weight_average import AveragingOptimizer
from training.reporting.metrics_file import METRICS, read_metrics
from training.sharding.shard_spec import ShardSpec
from training.sharding.sharded_parameter import ShardedParameter
from training.train import train


def parameter(name: str, values: torch.Tensor) -> ShardedParameter:
    own = nn.Parameter(values)
    return ShardedParameter(name, own, own, ShardSpec.whole(tuple(values.shape)), True)


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_the_average_follows_the_weights(name: str) -> None:
    params = [parameter("blocks.0.w", torch.ones(2, 3)), parameter("tied", torch.ones(4))]
    params += [parameter("tied", torch.ones(4)), parameter("none", torch.empty(0, 3))]
    optimizer = build_optimizer(params, OptimConfig(name=name, ema_decay=0.75))  # type: ignore[arg-type]
    assert isinstance(optimizer, AveragingOptimizer)
    with torch.no_grad():
        params[0].local.mul_(3)  # loaded after the optimizer was made
    expected = params[0].local.detach().clone()
    for _ in range(3):
        for param in params:
            param.local.grad = torch.ones_like(param.local)
        optimizer.step(0.1)
        expected = 0.75 * expected + 0.25 * params[0].local.detach()
    found, weight = optimizer.moments(), params[0].local.detach().clone()
    torch.testing.assert_close(found["blocks.0.w"]["ema"], expected)
    assert found["none"]["ema"].shape == (0, 3)
    average = found["tied"]["ema"].clone()
    with optimizer.averaged_weights():
        torch.testing.assert_close(params[0].local.detach(), expected)
        assert torch.equal(params[2].local, average)
    assert torch.equal(params[0].local, weight) and torch.equal(params[1].local, params[2].local)
    torch.testing.assert_close(found["blocks.0.w"]["ema"], expected)


def metrics(out_dir: Path, kind: str) -> list[float]:
    return [record["loss"] for record in read_metrics(out_dir / METRICS) if record["kind"] == kind]


@pytest.fixture
def averaged(config: TrainConfig) -> TrainConfig:
    """Four steps with an average, evaluated after each, with a checkpoint after two."""
    optim = replace(config.optim, ema_decay=0.9, schedule="constant", steps=4, warmup_steps=1)
    evaluation = replace(config.eval, ema=True, every=1, sample_tokens=0)
    return replace(config, optim=optim, eval=evaluation, checkpoint=CheckpointConfig(every=2))


def with_steps(config: TrainConfig, steps: int) -> TrainConfig:
    return replace(config, optim=replace(config.optim, steps=steps))


def test_the_average_is_evaluated_and_resumed_exactly_under_any_layout(
    averaged: TrainConfig, run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    train(averaged)
    plain = replace(averaged, out_dir=tmp_path / "plain", optim=replace(averaged.optim, ema_decay=0.0))
    train(replace(plain, eval=replace(plain.eval, ema=False)))
    assert metrics(plain.out_dir, "step") == metrics(averaged.out_dir, "step")  # the weights came back
    assert metrics(averaged.out_dir, "eval")[-1] > metrics(plain.out_dir, "eval")[-1] + 0.05  # it lags behind
    halves = replace(averaged, out_dir=tmp_path / "halves")
    train(with_steps(halves, 2)), train(halves)
    assert metrics(halves.out_dir, "eval") == metrics(averaged.out_dir, "eval")
    moved = replace(averaged, out_dir=tmp_path / "moved")
    run_ranks(2, train, replace(with_steps(moved, 2), parallel=ParallelConfig(zero=3)))
    run_ranks(2, train, replace(moved, parallel=ParallelConfig(tp=2)))
    assert metrics(moved.out_dir, "eval") == pytest.approx(metrics(averaged.out_dir, "eval"), rel=1e-5)


def test_the_average_is_exported_and_evaluated(averaged: TrainConfig, tmp_path: Path) -> None:
    train(with_steps(averaged, 2))
    export_hf(averaged.out_dir, tmp_path / "weights")
    export_hf(averaged.out_dir, tmp_path / "average", ema=True)
    weights, average = (
        safetensors.torch.load_file(tmp_path / kind / "model.safetensors")["model.norm.weight"]
        for kind in ("weights", "average")
    )
    (checkpoint,) = averaged.out_dir.glob("checkpoints/step-*2")
    stored = torch.empty_like(average)
    with single_process_group() as group:
        spec = ShardSpec.whole(tuple(stored.shape))
        read_shards({"optim.norm.weight.ema": [(stored, spec)]}, checkpoint, group.process_group)
    assert torch.equal(average, stored) and not torch.equal(average, weights)
    found = evaluate_checkpoint(EvaluateConfig(averaged.out_dir, (averaged.data.holdout,), sequences=10, ema=True))
    assert [losses.whole.loss for losses in found.values()] == pytest.approx(
        metrics(averaged.out_dir, "eval")[-1:], rel=1e-6
    )
    plain = replace(averaged, out_dir=tmp_path / "plain", optim=replace(averaged.optim, ema_decay=0.0))
    train(with_steps(replace(plain, eval=replace(plain.eval, ema=False)), 1))
    with pytest.raises(UsageError, match=r"holds no average of the weights.*try without --ema"):
        export_hf(plain.out_dir, tmp_path / "none", ema=True)


def test_options_that_exclude_an_average_are_errors(averaged: TrainConfig) -> None:
    with pytest.raises(UsageError, match=r"eval.ema is true and optim.ema_decay 0: .*try --optim.ema_decay"):
        replace(averaged, optim=replace(averaged.optim, ema_decay=0.0)).check()
    disk = replace(averaged, memory=MemoryConfig(parameters="disk"), parallel=ParallelConfig(zero=3))
    with pytest.raises(UsageError, match=r"ema_decay with memory.parameters disk.*try --memory.parameters device"):
        disk.check()
