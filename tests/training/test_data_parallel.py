from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from training.config import DataConfig, ModelConfig
from training.data import Batches, BatchSplit, TokenSequences
from training.forward_backward import forward_backward
from training.initialize import materialize
from training.mesh import open_world
from training.model import Decoder
from training.parallelize import parallelize

RunRanks = Callable[..., list[Any]]


def gradients(train: Path, preset: str, micro: int, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients of the first global batch, as this rank sees them."""
    data = TokenSequences(train, 16)
    with open_world("cpu") as world, torch.random.fork_rng():
        with torch.device("meta"):
            model = Decoder(ModelConfig(preset=preset, layers=2, width=32, init_std=0.2).resolve(300, 16))
        model = materialize(model, world.device, seed=1).to(dtype)
        split = BatchSplit.of(DataConfig(train, train, batch_size=12, micro_batch=micro), world.size)
        batch = Batches(data, split, world.rank, seed=1).step(0)
        loss = forward_backward(parallelize(model, world), batch, 12 * 16, world, "fp32")
        return world.sum(loss).item() / (12 * 16), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("preset", ["llama", "gpt2"])
def test_loss_and_gradients_depend_neither_on_ranks_nor_on_accumulation(
    corpus: Path, run_ranks: RunRanks, preset: str
) -> None:
    train = corpus / "tokens/train"
    loss, expected = gradients(train, preset, 0, torch.float64)
    for ranks, micro in ((1, 3), (2, 0), (2, 2), (3, 2)):
        for got, grads in run_ranks(ranks, gradients, train, preset, micro, torch.float64):
            assert abs(got - loss) < 1e-12
            assert max((grads[name] - expected[name]).abs().max() for name in expected) < 1e-12
    assert max(g.abs().max() for g in expected.values()) > 1e-2


def test_float32_losses_agree_to_rounding(corpus: Path, run_ranks: RunRanks) -> None:
    losses = [run_ranks(n, gradients, corpus / "tokens/train", "llama", 0, torch.float32)[0][0] for n in (1, 2)]
    assert abs(losses[0] - losses[1]) < 1e-5
