"""Evaluation by a pipeline, and its schedules. The parity certificate tests gradients."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from training.experimental.parallel_config import ParallelConfig
from training.model.batch import TokenBatch
from training.model.decoder import meta_decoder
from training.model.model_config import ModelConfig
from training.parallel.mesh import build_world
from training.parallel.parallel_model import ParallelModel
from training.parallel.parallelize import parallelize
from training.parallel.pipeline.schedules import SCHEDULES

RunRanks = Callable[..., list[Any]]
CONFIG = ModelConfig(preset="gpt2", layers=6, width=16, heads=2, init_std=0.3).resolve(31, 8)


def batches(sizes: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(31, (size, 9), generator=generator) for size in sizes]


def build(layout: ParallelConfig) -> ParallelModel:
    layout = layout.resolve(dist.get_world_size(), CONFIG, 8)
    return parallelize(meta_decoder(CONFIG), layout, build_world(layout, torch.device("cpu")), 1, "fp64")


def evaluate(layout: ParallelConfig, sizes: list[int]) -> tuple[float, list[float]]:
    """The summed loss of batches of several sizes, and the next logits after three tokens."""
    model = build(layout)
    found = batches(sizes)
    loss = model.loss([x[:, :-1] for x in found], [x[:, 1:] for x in found])
    dist.all_reduce(loss)
    return loss.item(), model.next_logits(found[0][:1, :3]).tolist()


LAYOUTS = [
    ParallelConfig(pp=4),
    ParallelConfig(pp=2, schedule="interleaved-1f1b", virtual_stages=3),
    ParallelConfig(pp=3, schedule="zbv"),
    ParallelConfig(pp=2, tp=2, sequence_parallel=True, schedule="dualpipev"),
    ParallelConfig(tp=4, tensor="2d"),
    ParallelConfig(pp=2, tp=4, tensor="2d"),
    ParallelConfig(tp=8, tensor="2.5d", depth=2),
    ParallelConfig(tp=8, tensor="3d"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=ParallelConfig.describe)
def test_evaluation_takes_batches_of_any_number_and_size(run_ranks: RunRanks, layout: ParallelConfig) -> None:
    (loss, logits), *_ = run_ranks(1, evaluate, ParallelConfig(), [3, 1, 2])
    for found, after in run_ranks(layout.tp * layout.pp, evaluate, layout, [3, 1, 2]):
        assert abs(found - loss) < 1e-10
        assert after == pytest.approx(logits, abs=1e-5)  # sent in float32


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_a_schedule_runs_every_micro_batch_once_on_every_stage(schedule: Any) -> None:
    layout, found = ParallelConfig(pp=2, schedule=schedule).resolve(2, CONFIG, 8), defaultdict(str)
    for kind, stage in layout.passes(0) + layout.passes(1):
        found[stage] += kind
    assert sorted(found) == list(range(layout.stages))
    for order in found.values():
        assert order.count("F") == layout.stages
        assert order.count("B") + order.count("I") == layout.stages and order.count("I") == order.count("W")
    split = any("W" in order for order in found.values())
    assert split == (schedule in ("zero-bubble", "zbv", "dualpipev"))


def evaluate_between_steps() -> list[float]:
    """Losses of the same batch: evaluated, in a training step, evaluated again."""
    model = build(ParallelConfig(pp=2, schedule="zbv"))
    tokens = torch.cat(batches([2, 2]))
    ids, targets = tokens[:, :-1], tokens[:, 1:]
    losses = [model.loss([ids], [targets])]
    losses.append(model.forward_backward(TokenBatch(ids, targets, torch.arange(4)), 1.0).double())
    losses.append(model.loss(list(ids.split(1)), list(targets.split(1))))
    for loss in losses:
        dist.all_reduce(loss)
    return [loss.item() for loss in losses]


def test_evaluation_and_training_steps_alternate(run_ranks: RunRanks) -> None:
    for first, step, last in run_ranks(2, evaluate_between_steps):
        assert first == pytest.approx(step, rel=1e-12) and first == pytest.approx(last, rel=1e-12)
