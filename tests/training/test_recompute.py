import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from scripts.bench_memory import LiveBytes
from training.config import ModelConfig
from training.mesh import World, open_world
from training.model import Decoder, summed_loss
from training.recompute import checkpoint_activations

RunRanks = Callable[..., list[Any]]
MODES = ("none", "selective", "full")


def build(preset: str, recompute: str, layers: int = 3) -> Decoder:
    torch.manual_seed(0)
    config = ModelConfig(preset=preset, layers=layers, width=32, heads=4, kv_heads=2 if preset == "llama" else 4)  # type: ignore[arg-type]
    model = Decoder(config.resolve(60, 16))
    checkpoint_activations(model, recompute)  # type: ignore[arg-type]
    return model


def tokens() -> Tensor:
    return torch.randint(60, (4, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("preset", ["llama", "gpt2"])
@pytest.mark.parametrize("bf16", [False, True])
def test_gradients_are_bit_for_bit_the_same_and_less_is_kept(preset: str, bf16: bool) -> None:
    expected, kept, ids = {}, [], tokens()
    for mode in MODES:
        model = build(preset, mode)
        with LiveBytes() as live, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = summed_loss(model(ids), ids)
            kept.append(live.total())
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        expected = expected or gradients
        assert gradients.keys() == expected.keys()  # no wrapper in the names
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)  # type: ignore[arg-type]
    assert kept[2] < 0.7 * kept[1] < 0.7 * 0.95 * kept[0]


def test_what_is_computed_again() -> None:
    """Whole blocks with "full", with "selective" what is not kept, and nothing where there are no gradients."""
    counts = {}
    for mode in MODES:
        model, ids = build("gpt2", mode), tokens()
        with LiveBytes() as live:
            model(ids).sum().backward()
            counts[mode] = [live.calls[name] for name in ("aten.addmm.default", "aten.gelu.default")]
        with torch.no_grad(), LiveBytes() as live:
            model(ids)
        assert live.calls["aten.gelu.default"] == 3
    # 6 products with bias a block; the last is not needed again, as nothing of the block follows it
    assert counts == {"none": [18, 3], "selective": [18, 6], "full": [18 + 15, 6]}


def test_a_copy_of_the_model_is_its_own() -> None:
    model = build("llama", "full")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    ids = tokens()
    twin(ids).sum().backward()
    assert twin.blocks["0"].mlp.up.weight.grad is not None
    assert model.blocks["0"].mlp.up.weight.grad is None


class _Sum(torch.autograd.Function):
    """Megatron's g: the sum over the processes forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_place: bool) -> Tensor:
        x = x if in_place else x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class _Row(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.a, self.b, self.in_place = nn.Linear(8, 8), nn.Linear(8, 8), in_place

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(nn.functional.silu(_Sum.apply(self.a(x), self.in_place)))


def reduced_gradients() -> dict[tuple[str, bool], list[Tensor] | str]:
    with open_world("cpu"):
        return {(mode, in_place): _reduced_gradients(mode, in_place) for mode in MODES for in_place in (False, True)}


def _reduced_gradients(recompute: str, in_place: bool) -> list[Tensor] | str:
    torch.manual_seed(0)
    part = nn.Module()
    part.blocks = nn.ModuleDict({str(i): _Row(in_place) for i in range(2)})
    checkpoint_activations(part, recompute)  # type: ignore[arg-type]
    x = torch.randn(2, 3, 8)
    try:
        for block in part.blocks.values():
            x = block(x)
    except AssertionError as error:
        return str(error)
    x.square().sum().backward()
    return [p.grad for p in part.parameters()]  # type: ignore[misc]


def test_collectives_in_a_block_are_repeated_and_never_counted_twice(run_ranks: RunRanks) -> None:
    for got in run_ranks(2, reduced_gradients):
        assert "overwrites a kept product" in got.pop(("selective", True))
        expected = got.pop(("none", False))
        assert len(got) == 4 and all(
            torch.equal(a, b) for case in got.values() for a, b in zip(case, expected, strict=True)
        )


def sharded_gradients() -> dict[tuple[str, bool], list[Tensor]]:
    with open_world("cpu") as world:
        return {(mode, bf16): _sharded_gradients(world, mode, bf16) for mode in MODES for bf16 in (False, True)}


def _sharded_gradients(world: World, recompute: str, bf16: bool) -> list[Tensor]:
    model, ids = build("llama", recompute), tokens()
    for block in model.blocks.values():
        fully_shard(block, mesh=world.mesh)
    fully_shard(model, mesh=world.mesh)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = summed_loss(model(ids[world.rank :: 2]), ids[world.rank :: 2])
    loss.backward()
    return [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]


def test_under_fully_sharded_data_parallelism(run_ranks: RunRanks) -> None:
    got = run_ranks(2, sharded_gradients)[0]
    for bf16 in (False, True):
        for mode in ("selective", "full"):
            assert all(map(torch.equal, got[mode, bf16], got["none", bf16]))


class _Stage(nn.Module):
    def __init__(self, model: Decoder, first: bool, last: bool, names: list[str]) -> None:
        super().__init__()
        self.embed = model.embed if first else nn.Identity()
        self.blocks = nn.ModuleDict({name: model.blocks[name] for name in names})
        self.head = model.head if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks.values():
            x = block(x, None)
        return self.head(x)


def staged_gradients(schedule: str) -> dict[str, dict[str, Tensor]]:
    with open_world("cpu") as world:
        return {mode: _staged_gradients(world, mode, schedule) for mode in MODES}


def _staged_gradients(world: World, recompute: str, schedule: str) -> dict[str, Tensor]:
    model, ids = build("gpt2", recompute, layers=4), tokens()
    numbers = (world.rank, 3 - world.rank) if schedule == "ZBVZeroBubble" else (world.rank, world.rank + 2)
    parts = {n: _Stage(model, n == 0, n == 3, [str(n)]) for n in numbers}
    stages = [PipelineStage(part, n, 4, torch.device("cpu")) for n, part in parts.items()]
    run = get_schedule_class(schedule)(stages, 4, loss_fn=summed_loss)  # type: ignore[arg-type]
    inputs, targets = ((ids,) if 0 in parts else ()), ({"target": ids} if 3 in parts else {})
    run.step(*inputs, **targets)
    return {f"{n}.{name}": p.grad for n, part in parts.items() for name, p in part.named_parameters()}  # type: ignore[misc]


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_with_schedules_that_compute_weight_gradients_later(run_ranks: RunRanks, schedule: str) -> None:
    for got in run_ranks(2, staged_gradients, schedule):
        assert got["none"]
        for mode in ("selective", "full"):
            assert all(torch.equal(got[mode][name], wanted) for name, wanted in got["none"].items())
