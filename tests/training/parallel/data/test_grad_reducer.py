"""Gradient buckets: sums, shards, overlap. The parity certificate tests gradients under every layout."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import training.parallel.data.grad_reducer
from training.experimental.parallel_config import ParallelConfig
from training.parallel.data.grad_reducer import GradReducer
from training.parallel.mesh import World, build_world

RunRanks = Callable[..., list[Any]]
SHAPES = [(5, 4), (3,), (7, 2), (1,), (6, 6), (2, 3)]  # numbers of rows that 2 and 4 do not divide, and fewer than 4


def build(
    zero: int, shard: int, micro_batches: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[World, list[nn.Parameter], GradReducer]:
    layout = ParallelConfig(dist.get_world_size(), zero, shard, 1, False, 1, "1f1b", 1, 1)  # type: ignore[arg-type]
    world = build_world(layout, torch.device("cpu"))
    parameters = [nn.Parameter(torch.full(shape, float(i), dtype=dtype)) for i, shape in enumerate(SHAPES)]
    return world, parameters, GradReducer(parameters, world.axis("shard"), world.axis("replicate"), zero, micro_batches)


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
        patch.setattr(training.parallel.data.grad_reducer, "BUCKET_BYTES", bucket_bytes)
        world, parameters, reducer = build(zero, shard, micro_batches=2)
    for turn in range(2):
        for p in parameters:
            p.grad = reducer.own[id(p)].grad = None
        for part in range(2):
            with reducer.backward_pass():
                loss(parameters, world.dp_rank, 2 * turn + part, unused).backward()
        reducer.finish()
        grads = []
        with torch.no_grad():
            for p in parameters:
                own = reducer.own[id(p)]
                assert own.grad is not None and own.grad.shape == own.shape
                grads.append(own.grad.clone())
                own -= own.grad
        reducer.start_all_gather()
        reducer.finish_all_gather()
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


def started_in_pass(bucket_bytes: int) -> list[bool]:
    """Whether the first of two backward passes starts to reduce any bucket, and the second all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.parallel.data.grad_reducer, "BUCKET_BYTES", bucket_bytes)
        world, parameters, reducer = build(0, 1, micro_batches=2)
    started = []
    for turn in range(2):
        with reducer.backward_pass():
            loss(parameters, world.dp_rank, turn, None).backward()
            started.append([bucket._work is not None for bucket in reducer.buckets])
    reducer.finish()
    return [any(started[0]), all(started[1])]


def test_buckets_are_reduced_during_the_last_backward_pass_and_not_before(run_ranks: RunRanks) -> None:
    assert run_ranks(2, started_in_pass, 1) == [[False, True]] * 2


def held_gradients(zero: int) -> list[int]:
    """Bytes of gradients per byte of parameters after each of two micro-batches; then of what this rank updates."""
    _, parameters, reducer = build(zero, 2 if zero else 1, micro_batches=2)
    whole, found = sum(p.nbytes for p in parameters), []
    own = list(reducer.own.values())
    for turn in range(2):
        with reducer.backward_pass():
            loss(parameters, 0, turn, None).backward()
        reducer.finish()
        buffers = [bucket._buffer for bucket in reducer.buckets]
        grads = [t for t in (*(p.grad for p in [*parameters, *own]), *buffers) if t is not None]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in grads}
        found.append(round(sum(storages.values()) / whole, 1))
    return [*found, sum(p.numel() for p in own)]


def test_no_gradient_is_held_twice_and_zero_2_frees_full_ones(run_ranks: RunRanks) -> None:
    size = sum(torch.Size(s).numel() for s in SHAPES)
    assert [r[:2] for r in run_ranks(2, held_gradients, 0)] == [[1.0, 1.0]] * 2
    assert [r[0] for r in run_ranks(2, held_gradients, 1)] == [1.1, 1.1]  # with padding
    two = run_ranks(2, held_gradients, 2)
    assert [r[:2] for r in two] == [[0.6, 0.6]] * 2 and sum(r[2] for r in two) == size


def test_own_rows_are_a_view_of_the_full_parameter() -> None:
    from training.sharding.axis import Axis

    p = nn.Parameter(torch.zeros(5, 2))
    reducer = GradReducer([p], Axis("shard", 2, 1, None), Axis("replicate", 1, 0, None), 1)
    with torch.no_grad():
        reducer.own[id(p)].add_(1)
    assert p.tolist() == [[0, 0]] * 3 + [[1, 1]] * 2


class Returns(nn.Module):
    """A module whose result is its parameter."""

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.parameter = parameter

    def forward(self) -> Tensor:
        return self.parameter.detach().clone()


def used_while_gathered(dtype: torch.dtype) -> list[tuple[int, bool]]:
    """By parameter in the order of use: how many of the buckets are being gathered then, and if it is complete."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.parallel.data.grad_reducer, "BUCKET_BYTES", 1)
        _, parameters, reducer = build(1, 2, dtype=dtype)
    modules = [Returns(p) for p in parameters]
    reducer.all_gather_before_use(modules)
    found = []
    for update in (1, 2):
        with torch.no_grad():
            for i, p in enumerate(parameters):
                reducer.own[id(p)].fill_(10.0 * update + i)
        reducer.start_all_gather()
        for i, module in enumerate(modules):
            complete = torch.equal(module(), torch.full(SHAPES[i], 10.0 * update + i, dtype=dtype))
            found.append((sum(bucket._gathering is not None for bucket in reducer.buckets), complete))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updated_weights_are_gathered_while_earlier_ones_are_used(run_ranks: RunRanks, dtype: torch.dtype) -> None:
    in_flight = [min(2, len(SHAPES) - 1 - i) for i in range(len(SHAPES))]
    assert run_ranks(2, used_while_gathered, dtype) == [[(n, True) for n in in_flight] * 2] * 2
