"""Buckets, and what travels when; that gradients are right under every layout is the parity certificate's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import training.parallel.data_parallel
from training.distributed.layout import ParallelConfig
from training.distributed.mesh import World, build_world
from training.parallel.data_parallel import GradReducer

RunRanks = Callable[..., list[Any]]
SHAPES = [(5, 4), (3,), (7, 2), (1,), (6, 6), (2, 3)]  # rows that do not divide by 2 or 4, and fewer than 4


def setting(zero: int, shard: int) -> tuple[World, list[nn.Parameter], GradReducer]:
    layout = ParallelConfig(dist.get_world_size(), zero, shard, 1, False, 1, "1f1b", 1, 1)  # type: ignore[arg-type]
    world = build_world(layout, torch.device("cpu"))
    parameters = [nn.Parameter(torch.full(shape, float(i))) for i, shape in enumerate(SHAPES)]
    return world, parameters, GradReducer(parameters, world.axis("shard"), world.axis("replicate"), zero)


def example(number: int, rank: int, turn: int) -> Tensor:
    """A gradient of parameter `number`: every element of every rank and turn another one."""
    shape = SHAPES[number]
    return (
        1000.0 * number + 100.0 * (rank + 1) + 10.0 * turn + torch.arange(float(torch.Size(shape).numel())).view(shape)
    )


def loss(parameters: list[nn.Parameter], rank: int, turn: int, unused: int | None) -> Tensor:
    return torch.stack([
        (p * example(i, rank, turn)).sum() for i, p in enumerate(parameters) if i != unused
    ]).sum()  # fmt: skip


def train(zero: int, shard: int, bucket_bytes: int, unused: int | None) -> list[tuple[int, int, Tensor, Tensor]]:
    """Two rounds: gradients of two backward passes each, the last of which travels; each parameter less its gradient.

    By parameter: how many buckets there are, and the first row of ours, the gradient, and the whole parameter after.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.parallel.data_parallel, "BUCKET_BYTES", bucket_bytes)
        world, parameters, reducer = setting(zero, shard)
    for turn in range(2):
        for p in parameters:
            p.grad = reducer.own[id(p)].grad = None
        loss(parameters, world.dp_rank, 2 * turn, unused).backward()
        reducer.enable_grad_sync()
        loss(parameters, world.dp_rank, 2 * turn + 1, unused).backward()
        reducer.finish_grad_sync()
        grads = []
        with torch.no_grad():
            for p in parameters:
                own = reducer.own[id(p)]
                assert own.grad is not None and own.grad.shape == own.shape
                grads.append(own.grad.clone())
                own -= own.grad
        reducer.all_gather_params()
    first = [(reducer.own[id(p)].data_ptr() - p.data_ptr()) // (p.stride(0) * p.element_size()) for p in parameters]
    return [(len(reducer.buckets), *x) for x in zip(first, grads, (p.detach() for p in parameters), strict=True)]


@pytest.mark.parametrize(("zero", "shard"), [(0, 1), (1, 4), (2, 4), (2, 2)])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_gradients_are_summed_over_replicas_and_passes(
    run_ranks: RunRanks, zero: int, shard: int, bucket_bytes: int
) -> None:
    unused = 2  # a parameter that no gradient reaches
    results = run_ranks(4, train, zero, shard, bucket_bytes, unused)
    assert results[0][0][0] == {1: len(SHAPES), 100: 4, 1 << 20: 1}[bucket_bytes]
    for i, shape in enumerate(SHAPES):
        expected = [sum(example(i, r, 2 * t) + example(i, r, 2 * t + 1) for r in range(4)) for t in range(2)]
        if i == unused:
            expected = [torch.zeros(shape)] * 2
        for result in results:
            _, first, grad, whole = result[i]
            assert torch.equal(grad, expected[1][first : first + len(grad)])
            assert torch.equal(whole, torch.full(shape, float(i)) - expected[0] - expected[1])
        held = sum(len(result[i][2]) for result in results)
        assert held == len(expected[0]) * 4 // shard  # each row once in a group


def sent_before_finish(bucket_bytes: int) -> list[bool]:
    """After a backward pass, whether each bucket is on its way; without and with enable_grad_sync."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.parallel.data_parallel, "BUCKET_BYTES", bucket_bytes)
        world, parameters, reducer = setting(0, 1)
    loss(parameters, world.dp_rank, 0, None).backward()
    before = [bucket._work is not None for bucket in reducer.buckets]
    reducer.enable_grad_sync()
    loss(parameters, world.dp_rank, 1, None).backward()
    after = [bucket._work is not None for bucket in reducer.buckets]
    reducer.finish_grad_sync()
    return [any(before), all(after)]


def test_buckets_travel_during_the_last_backward_pass_and_not_before(run_ranks: RunRanks) -> None:
    assert run_ranks(2, sent_before_finish, 1) == [[False, True]] * 2


def kept(zero: int) -> tuple[bool, int]:
    """Whether the whole gradients are still there after the sum, and the elements that are updated here."""
    world, parameters, reducer = setting(zero, 2)
    reducer.enable_grad_sync()
    loss(parameters, world.dp_rank, 0, None).backward()
    reducer.finish_grad_sync()
    return any(p.grad is not None for p in parameters), sum(own.numel() for own in reducer.own.values())


def test_zero_2_keeps_its_own_rows_gradients_only(run_ranks: RunRanks) -> None:
    assert [r[0] for r in run_ranks(2, kept, 1)] == [True, True]
    two = run_ranks(2, kept, 2)
    assert [r[0] for r in two] == [False, False]
    assert sum(r[1] for r in two) == sum(torch.Size(s).numel() for s in SHAPES)


def test_own_rows_are_a_view_of_the_whole() -> None:
    from training.distributed.mesh import Axis

    p = nn.Parameter(torch.zeros(5, 2))
    reducer = GradReducer([p], Axis("shard", 2, 1, None), Axis("replicate", 1, 0, None), 1)
    with torch.no_grad():
        reducer.own[id(p)].add_(1)
    assert p.tolist() == [[0, 0]] * 3 + [[1, 1]] * 2
