import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.live_bytes import LiveBytes
from training.distributed.process_group import init_distributed
from training.experimental.parallel_config import ParallelConfig
from training.kernels.dispatch import gelu
from training.memory.recompute import checkpoint_activations
from training.model.batch import TokenBatch
from training.model.decoder import Decoder, meta_decoder
from training.model.model_config import ModelConfig
from training.parallel.mesh import build_world
from training.parallel.parallel_model import ParallelModel
from training.parallel.parallelize import parallelize

RunRanks = Callable[..., list[Any]]
MODES = ("none", "selective", "full")


def config_of(preset: str, **changes: Any) -> ModelConfig:
    config = ModelConfig(preset=preset, layers=4, width=32, heads=4, kv_heads=2 if preset == "llama" else 4)  # type: ignore[arg-type]
    return replace(config, **changes).resolve(60, 16)


def build(preset: str, recompute: str) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(config_of(preset))
    checkpoint_activations(model, recompute)  # type: ignore[arg-type]
    return model


def batch() -> TokenBatch:
    ids = torch.randint(60, (4, 17), generator=torch.Generator().manual_seed(1))
    return TokenBatch(ids[:, :-1], ids[:, 1:], torch.arange(4))


@pytest.mark.parametrize("preset", ["llama", "gpt2"])
@pytest.mark.parametrize("bf16", [False, True])
def test_gradients_are_bitwise_equal_and_fewer_activations_are_kept(preset: str, bf16: bool) -> None:
    expected: dict[str, Tensor | None] = {}
    kept, some = [], batch()
    for mode in MODES:
        model = build(preset, mode).to(torch.bfloat16 if bf16 else torch.float32)
        with LiveBytes() as live:
            loss = model(some.ids, some.targets)
            kept.append(live.total())
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        expected = expected or gradients
        assert gradients.keys() == expected.keys()  # no wrapper in the names
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)  # type: ignore[arg-type]
    assert kept[2] < 0.8 * kept[1] < 0.8 * 0.95 * kept[0]


def test_which_operations_are_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole blocks with "full", with "selective" what is not kept, and nothing where there are no gradients."""
    counts, ids, activations = {}, batch().ids, Mock(side_effect=gelu)
    monkeypatch.setattr("training.model.mlp.gelu", activations)
    for mode in MODES:
        model = build("gpt2", mode)
        activations.reset_mock()
        with LiveBytes() as live:
            model(ids).sum().backward()
            counts[mode] = [live.calls["mkldnn._linear_pointwise.default"], activations.call_count]
        activations.reset_mock()
        with torch.no_grad():
            model(ids)
        assert activations.call_count == 4
    # of 6 products a block the outputs and the gradients of inputs
    assert counts == {"none": [48, 4], "selective": [48, 8], "full": [48 + 24, 8]}


def test_a_copy_of_the_model_is_independent() -> None:
    model = build("llama", "full")
    twin = copy.deepcopy(model)
    twin(batch().ids).sum().backward()
    assert next(twin.blocks.parameters()).grad is not None and next(model.blocks.parameters()).grad is None


LAYOUTS = {
    "fsdp": ParallelConfig(zero=3, micro_batches=2),
    "tensor": ParallelConfig(tp=2),
    "sequence": ParallelConfig(tp=2, sequence_parallel=True),
    "1f1b": ParallelConfig(pp=2),
    "zero-bubble": ParallelConfig(pp=2, schedule="zero-bubble"),
    "zbv": ParallelConfig(pp=2, schedule="zbv"),
    "dualpipev": ParallelConfig(pp=2, schedule="dualpipev"),
}


def spread_gradients(preset: str, precision: str) -> dict[str, dict[str, list[Tensor | None]]]:
    """By layout and recomputation, this process's gradients; with dropout, which is to be the same again."""
    config, got = config_of(preset, dropout=0.2), {}
    with init_distributed("cpu") as device:
        for name, asked in LAYOUTS.items():
            layout = asked.resolve(2, config, 16)
            world = build_world(layout, device)
            share = batch().chunk(layout.dp)[world.dp_rank]
            got[name] = {}
            for mode in MODES:
                model = parallelize(meta_decoder(config), layout, world, 1, precision)
                got[name][mode] = _gradients(model, share, mode)
    return got


def _gradients(model: ParallelModel, share: TokenBatch, recompute: str) -> list[Tensor | None]:
    for part in model.parts:
        checkpoint_activations(part, recompute)  # type: ignore[arg-type]
    model.forward_backward(share, 1.0)
    return [w.local.grad for w in model.params]


@pytest.mark.every(2)
@pytest.mark.parametrize(("preset", "precision"), [("llama", "bf16"), ("gpt2", "fp32")])
def test_recomputation_under_every_kind_of_layout(run_ranks: RunRanks, preset: str, precision: str) -> None:
    for ranks in run_ranks(2, spread_gradients, preset, precision):
        for layout, modes in ranks.items():
            assert modes["none"][0] is not None
            for mode in ("selective", "full"):
                assert all(map(torch.equal, modes[mode], modes["none"])), (layout, mode)  # type: ignore[arg-type]


class _SumInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class _Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(nn.functional.silu(_SumInPlace.apply(self.a(x))))


def test_an_in_place_collective_on_a_saved_output_is_an_error() -> None:
    """It would be summed again, and gradients be wrong without an error."""
    part = nn.Module()
    part.blocks = nn.ModuleDict({"0": _Row()})
    checkpoint_activations(part, "selective")
    with init_distributed("cpu"), pytest.raises(AssertionError, match="overwrites a saved output"):
        part.blocks["0"](torch.randn(2, 3, 8))
