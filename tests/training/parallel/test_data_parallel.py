"""Gradient buckets: sums, shards, overlap. The parity certificate tests gradients under every layout."""

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
SHAPES = [(5, 4), (3,), (7, 2), (1,), (6, 6), (2, 3)]  # numbers of rows that 2 and 4 do not divide, and fewer than 4


def build(zero: int, shard: int) -> tuple[World, list[nn.Parameter], GradReducer]:
    layout = ParallelConfig(dist.get_world_size(), zero, shard, 1, False, 1, "1f1b", 1, 1)  # type: ignore[arg-type]
    world = build_world(layout, torch.device("cpu"))
    parameters = [nn.Parameter(torch.full(shape, float(i))) for i, shape in enumerate(SHAPES)]
    return world, parameters, GradReducer(parameters, world.axis("shard"), world.axis("replicate"), zero)


def gradient(number: int, rank: int, turn: int) -> Tensor:
    """A gradient of parameter `number`: all elements, ranks and turns differ."""
    shape = SHAPES[number]
    return (
        1000.0 * number + 100.0 * (rank + 1) + 10.0 * turn + torch.arange(float(torch.Size(shape).numel())).view(shape)
    )


def loss(parameters: list[nn.Parameter], rank: int, turn: int, unused: int | None) -> Tensor:
    return torch.stack([
        (p * gradient(i, rank, turn)).sum() for i, p in enumerate(parameters) if i != unused
    ]).sum()  # fmt: skip


def train(zero: int, shard: int, bucket_bytes: int, unused: int | None) -> list[tuple[int, int, Tensor, Tensor]]:
    """Two updates, p -= grad, each after two backward passes, of which the second reduces the gradients.

    Returns by parameter: the number of buckets, this rank's first row, its gradient, and the full parameter.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.parallel.data_parallel, "BUCKET_BYTES", bucket_bytes)
        world, parameters, reducer = build(zero, shard)
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
    unused = 2  # a parameter without a gradient
    results = run_ranks(4, train, zero, shard, bucket_bytes, unused)
    assert results[0][0][0] == {1: len(SHAPES), 100: 4, 1 << 20: 1}[bucket_bytes]
    for i, shape in enumerate(SHAPES):
        expected = [sum(gradient(i, r, 2 * t) + gradient(i, r, 2 * t + 1) for r in range(4)) for t in range(2)]
        if i == unused:
            expected = [torch.zeros(shape)] * 2
        for result in results:
            _, first, grad, whole = result[i]
            assert torch.equal(grad, expected[1][first : first + len(grad)])
            assert torch.equal(whole, torch.full(shape, float(i)) - expected[0] - expected[1])
        held = sum(len(result[i][2]) for result in results)
        assert held == len(expected[0]) * 4 // shard  # a shard group holds each row once


def started_before_finish(bucket_bytes: int) -> list[bool]:
    """Whether a backward pass starts to reduce any bucket without enable_grad_sync, and all buckets with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.parallel.data_parallel, "BUCKET_BYTES", bucket_bytes)
        world, parameters, reducer = build(0, 1)
    loss(parameters, world.dp_rank, 0, None).backward()
    before = [bucket._work is not None for bucket in reducer.buckets]
    reducer.enable_grad_sync()
    loss(parameters, world.dp_rank, 1, None).backward()
    after = [bucket._work is not None for bucket in reducer.buckets]
    reducer.finish_grad_sync()
    return [any(before), all(after)]


def test_buckets_are_reduced_during_the_last_backward_pass_and_not_before(run_ranks: RunRanks) -> None:
    assert run_ranks(2, started_before_finish, 1) == [[False, True]] * 2


def keeps_full_gradients(zero: int) -> tuple[bool, int]:
    """Whether the full gradients remain after the reduction; the number of elements that this rank updates."""
    world, parameters, reducer = build(zero, 2)
    reducer.enable_grad_sync()
    loss(parameters, world.dp_rank, 0, None).backward()
    reducer.finish_grad_sync()
    return any(p.grad is not None for p in parameters), sum(own.numel() for own in reducer.own.values())


def test_zero_2_frees_full_gradients(run_ranks: RunRanks) -> None:
    assert [r[0] for r in run_ranks(2, keeps_full_gradients, 1)] == [True, True]
    two = run_ranks(2, keeps_full_gradients, 2)
    assert [r[0] for r in two] == [False, False]
    assert sum(r[1] for r in two) == sum(torch.Size(s).numel() for s in SHAPES)


def test_own_rows_are_a_view_of_the_full_parameter() -> None:
    from training.distributed.mesh import Axis

    p = nn.Parameter(torch.zeros(5, 2))
    reducer = GradReducer([p], Axis("shard", 2, 1, None), Axis("replicate", 1, 0, None), 1)
    with torch.no_grad():
        reducer.own[id(p)].add_(1)
    assert p.tolist() == [[0, 0]] * 3 + [[1, 1]] * 2
