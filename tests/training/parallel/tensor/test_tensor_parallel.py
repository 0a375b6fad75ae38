"""Tensor parallelism: the shapes of shards, and the collectives with their gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from training.distributed.collectives import copy_to_tp, gather_from_sp, reduce_from_tp, reduce_scatter_to_sp
from training.experimental.parallel_config import ParallelConfig
from training.model.decoder import Decoder
from training.model.dropout import Dropout
from training.model.model_config import ModelConfig
from training.parallel.parallelize import shard_model
from training.parallel.placement_table import tensor_parallel_table
from training.parallel.tensor.tensor_parallel import ShardedDropout, apply_tensor_parallel
from training.sharding.axis import Axis
from training.sharding.shard_spec import ShardSpec

RunRanks = Callable[..., list[Any]]


def decoder(preset: str, **sizes: Any) -> Decoder:
    with torch.device("meta"):
        return Decoder(ModelConfig(preset=preset, layers=2, width=32, heads=8, kv_heads=4, **sizes).resolve(67, 16))  # type: ignore[arg-type]


def pieces_of(model: Decoder, axis: Axis) -> dict[str, ShardSpec]:
    table = tensor_parallel_table(False)
    named = model.named_parameters(remove_duplicate=False)
    return {
        n: row.piece(tuple(p.shape), {"tp": axis}) for n, p in named for end, row in table.items() if n.endswith(end)
    }


@pytest.mark.parametrize("preset", ["llama", "gpt2"])
@pytest.mark.parametrize("size", [2, 4])
def test_shapes_of_shards(preset: str, size: int) -> None:
    numels = {name: p.numel() for name, p in decoder(preset).named_parameters()}
    held = dict.fromkeys(numels, 0)
    for rank in range(size):
        part = decoder(preset)
        axis = Axis("tp", size, rank, None)
        pieces = pieces_of(part, axis)
        apply_tensor_parallel(part, pieces, axis, False)
        for name, p in part.named_parameters():
            assert tuple(p.shape) == pieces[name].size
            held[name] += p.numel()
        assert (part.head.weight is part.embed.tokens.weight) == (preset == "gpt2")
    for name, count in held.items():
        replicated = "norm" in name or "positions" in name or name.endswith(("o.bias", "down.bias"))
        assert count == numels[name] * (size if replicated else 1), name


def test_one_rank_changes_nothing() -> None:
    part = decoder("llama")
    before = str(part)
    apply_tensor_parallel(part, {}, Axis("tp", 1, 0, None), False)
    assert str(part) == before


@given(st.integers(1, 4), st.integers(1, 5), st.lists(st.integers(0, 2**40), min_size=1, max_size=3, unique=True))
def test_shards_of_dimension_1_drop_the_same_elements(parts: int, size: int, sample_ids: list[int]) -> None:
    x, full, keys = torch.ones(len(sample_ids), parts * size, 7), Dropout(0.3, "s"), torch.tensor(sample_ids)
    shards = [ShardedDropout(full, Axis("tp", parts, rank, None)) for rank in range(parts)]
    together = [shard(part, keys) for shard, part in zip(shards, x.chunk(parts, 1), strict=True)]
    assert torch.equal(torch.cat(together, 1), full(x, keys))


@pytest.mark.parametrize("preset", ["llama", "gpt2", "bloom"])  # rotary positions, learned ones, ALiBi
def test_the_embedding_of_a_sharded_sequence_drops_what_one_process_drops(preset: str) -> None:
    full, together = decoder(preset, dropout=0.3), []
    x, keys = torch.ones(2, 16, 32), torch.arange(2)
    for rank in range(2):
        part, axis = decoder(preset, dropout=0.3), Axis("tp", 2, rank, None)
        apply_tensor_parallel(part, pieces_of(part, axis), axis, True)
        together.append(part.embed.dropout(x.chunk(2, 1)[rank], keys))
    assert torch.equal(torch.cat(together, 1), full.embed.dropout(x, keys))


def apply_collectives() -> list[tuple[Tensor, Tensor]]:
    """Output and input gradient of each collective; the output's gradient is (rank + 1) x (1, 2, 3, …)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    axis = Axis("tp", size, rank, dist.group.WORLD)
    found = []
    for function, length in ((copy_to_tp, 4), (reduce_from_tp, 4), (gather_from_sp, 2), (reduce_scatter_to_sp, 4)):
        x = (10.0 * (rank + 1) + torch.arange(length)).view(1, length, 1).requires_grad_()
        y = function(x, axis)
        y.backward((rank + 1) * torch.arange(1.0, y.numel() + 1).view_as(y))
        assert x.grad is not None
        found.append((y.detach().flatten(), x.grad.flatten()))
    return found


def test_collectives_and_their_gradients_by_hand(run_ranks: RunRanks) -> None:
    (copy0, sum0, gather0, scatter0), (copy1, sum1, gather1, scatter1) = run_ranks(2, apply_collectives)
    assert copy0[0].tolist() == [10, 11, 12, 13] and copy1[0].tolist() == [20, 21, 22, 23]
    assert copy0[1].tolist() == copy1[1].tolist() == [3, 6, 9, 12]  # 1 x and 2 x (1, 2, 3, 4), summed
    assert sum0[0].tolist() == sum1[0].tolist() == [30, 32, 34, 36]
    assert sum0[1].tolist() == [1, 2, 3, 4] and sum1[1].tolist() == [2, 4, 6, 8]
    assert gather0[0].tolist() == gather1[0].tolist() == [10, 11, 20, 21]
    assert gather0[1].tolist() == [3, 6] and gather1[1].tolist() == [9, 12]
    assert scatter0[0].tolist() == [30, 32] and scatter1[0].tolist() == [34, 36]
    assert scatter0[1].tolist() == scatter1[1].tolist() == [1, 2, 2, 4]


def count_parameters(layout: ParallelConfig) -> tuple[int, int]:
    """Numbers of parameters that this rank holds, and of the full model."""
    from training.distributed.process_group import init_distributed
    from training.parallel.mesh import build_world

    config = decoder("llama").config
    with init_distributed("cpu") as device:
        world = build_world(layout.resolve(dist.get_world_size(), config, 16), device)
        parts = shard_model(decoder("llama"), layout.resolve(dist.get_world_size(), config, 16), world)
    return sum(p.numel() for part in parts for p in part.parameters()), sum(
        p.numel() for p in decoder("llama").parameters()
    )


def test_a_rank_holds_little_more_than_its_share(run_ranks: RunRanks) -> None:
    for layout in (ParallelConfig(tp=4), ParallelConfig(tp=2, pp=2)):
        for mine, everything in run_ranks(4, count_parameters, layout):
            assert mine < 1.1 * everything / 4
