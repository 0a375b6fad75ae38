"""Mixed precision under every layout: the dtype of all that is kept and sent, and the layouts agree to rounding."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from training.config import TrainConfig
from training.distributed.process_group import init_distributed
from training.experimental.parallel_config import ParallelConfig
from training.run_plan import RunPlan
from training.sharding.shard_spec import ShardSpec, assemble_shards
from training.trainer import Trainer

RunRanks = Callable[..., list[Any]]
Gradients = dict[str, dict[ShardSpec, Tensor]]
LAYOUTS = {
    "ddp": (2, ParallelConfig(micro_batches=2)),
    "zero1": (2, ParallelConfig(zero=1)),
    "zero2": (2, ParallelConfig(zero=2, micro_batches=2)),
    "zero3": (2, ParallelConfig(zero=3)),
    "tp": (2, ParallelConfig(tp=2, sequence_parallel=True)),
    "pp": (2, ParallelConfig(pp=2, schedule="zbv")),
    "zero2-tp-pp": (8, ParallelConfig(zero=2, tp=2, pp=2)),
}


def measure(config: TrainConfig) -> tuple[set[torch.dtype], float, Gradients, list[float]]:
    """Every dtype that is kept, the first step's loss and gradients of this rank, and the losses of all steps."""
    with init_distributed("cpu") as device, Trainer(RunPlan.of(config), device) as trainer:
        trainer.load()
        trainer.start()
        batch = trainer.batches.batch(0)
        scale = trainer.stability.scale
        part = trainer.model.forward_backward(batch, scale / trainer.tokens_per_step)
        kept, gradients = {part.dtype}, Gradients()
        for weight in trainer.model.params:
            if weight.local.numel():
                assert weight.local.grad is not None, weight.name
                kept |= {weight.local.dtype, weight.local.grad.dtype}
                gradients.setdefault(weight.name, {})[weight.spec] = weight.local.grad.clone() / scale
        loss = trainer.world.all_reduce(part.double()).item() / trainer.tokens_per_step
        trainer.optimizer.zero_grad()
        assert gc.get_freeze_count() > 0  # what was there by then is not searched for garbage at every step
        for step in range(1, config.optim.steps + 1):
            trainer.step(step)
        kept |= {moment.dtype for moments in trainer.optimizer.moments().values() for moment in moments.values()}
        return kept, loss, gradients, [step.loss for step in trainer.unreported]


def whole(ranks: list[tuple[Any, float, Gradients, Any]]) -> dict[str, Tensor]:
    """The gradients of all ranks put together."""
    specs: Gradients = {}
    for _, _, gradients, _ in ranks:
        for name, found in gradients.items():
            specs.setdefault(name, {}).update(found)
    return {name: assemble_shards(found) for name, found in specs.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {}


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("precision", "layout"),  # the certificate has the gradients of each layout in bf16
    [("bf16", x) for x in ("ddp", "zero1", "zero3", "zero2-tp-pp")] + [("fp16", x) for x in ("zero2", "tp", "pp")],
)
def test_gradient_sums_and_states_are_float32_and_layouts_agree(
    config: TrainConfig, run_ranks: RunRanks, alone: dict[str, Any], precision: str, layout: str
) -> None:
    config = replace(config, precision=precision, model=replace(config.model, layers=4))  # type: ignore[arg-type]
    config = replace(config, data=replace(config.data, batch_size=16))
    if precision not in alone:
        alone[precision] = measure(replace(config, out_dir=config.out_dir / "alone"))
    _, loss, _, losses = alone[precision]
    size, parallel = LAYOUTS[layout]
    ranks = run_ranks(size, measure, replace(config, parallel=parallel, out_dir=config.out_dir / "spread"))
    assert {dtype for kept, *_ in ranks for dtype in kept} == {torch.float32}
    assert all(rank[1] == pytest.approx(loss, rel=1e-3) for rank in ranks)
    expected, found = whole([alone[precision]]), whole(ranks)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert torch.linalg.norm(found[name] - gradient) < 2e-2 * torch.linalg.norm(gradient), name
    assert ranks[0][3] == pytest.approx(losses, rel=1e-2)
    assert ranks[0][3][-1] < ranks[0][3][0] - 0.5


def test_matrix_products_run_in_low_precision(config: TrainConfig) -> None:
    found = {
        precision: measure(replace(config, precision=precision, out_dir=config.out_dir / precision))  # type: ignore[arg-type]
        for precision in ("fp32", "bf16", "fp16", "fp64")
    }
    assert found["fp64"][0] == {torch.float64} and found["fp32"][0] == {torch.float32}
    exact = whole([found["fp64"]])
    errors = {
        name: max(float((g.double() - exact[key]).norm() / exact[key].norm()) for key, g in whole([told]).items())
        for name, told in found.items()
    }
    assert errors["fp32"] < 1e-5 < 10 * errors["fp32"] + 1e-4 < errors["fp16"] < errors["bf16"] < 0.1
