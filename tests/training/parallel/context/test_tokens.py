"""Each token of a sequence is on one rank, where its position says, and comes back to its place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from training.experimental.parallel_config import ParallelConfig
from training.model.batch import TokenBatch
from training.parallel.context.tokens import TokenOrder
from training.parallel.mesh import build_world
from training.sharding.axis import Axis


def order(ranks: int, rank: int, per_rank: int) -> TokenOrder:
    return TokenOrder(Axis("cp", ranks, rank, None), per_rank)


@pytest.mark.parametrize(("ranks", "per_rank"), [(2, 2), (3, 2), (4, 1)])
def test_tokens_are_where_their_positions_say(ranks: int, per_rank: int) -> None:
    whole = torch.arange(24).expand(2, 24)
    parts = [order(ranks, rank, per_rank).own(whole) for rank in range(ranks)]
    assert sorted(torch.cat(parts, 1)[0].tolist()) == list(range(24))
    for rank, part in enumerate(parts):
        local = torch.arange(part.shape[1])
        assert order(ranks, rank, per_rank).positions(local, len(local)).tolist() == part[1].tolist()
    for position in (0, 11, 23):
        rank, local = order(ranks, 0, per_rank).holder(position, 24)
        assert parts[rank][0, local] == position


def test_a_ring_s_ranks_have_equal_work_under_a_causal_mask() -> None:
    work = {int((order(4, rank, 2).own(torch.arange(32)[None]) + 1).sum()) for rank in range(4)}
    assert work == {32 * 33 // 2 // 4}


def there_and_back() -> list[Any]:
    layout = ParallelConfig(dp=1, zero_group=1, cp=dist.get_world_size())
    world = build_world(layout, torch.device("cpu"))
    tokens, of = torch.arange(24).view(2, 12), TokenOrder.of(layout, world)
    batch = of.own_batch(TokenBatch(tokens, tokens + 1, torch.arange(2), tokens))
    assert batch.positions is not None and torch.equal(batch.ids, batch.positions)
    return [batch.ids.tolist(), of.gather(batch.ids).equal(tokens), world.dp_rank, world.dp_size]


def test_what_ranks_hold_is_gathered_in_order(run_ranks: Callable[..., list[Any]]) -> None:
    first, second, third = run_ranks(3, there_and_back)
    assert first[0][0] == [0, 1, 10, 11] and second[0][0] == [2, 3, 8, 9] and third[0][1] == [16, 17, 18, 19]
    assert [found[1:] for found in (first, second, third)] == [[True, 0, 1]] * 3
