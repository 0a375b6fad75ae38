"""Compressed sums beside references in NumPy: the power iteration, what 8-bit codes leave out, and the sum of all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

import training.experimental.compression.int8
from training.experimental.compression.bucket import CompressedBucket
from training.experimental.compression.int8 import BLOCK, decode, encode
from training.experimental.compression.options import CompressionOptions
from training.experimental.compression.powersgd import PowerSGD, initial_q
from training.experimental.parallel_config import ParallelConfig
from training.parallel.data.grad_reducer import GradReducer
from training.parallel.mesh import build_world

RunRanks = Callable[..., list[Any]]
Matrix = NDArray[np.float64]
SHAPES = [(12, 8), (5,), (6, 10), (20, 3), (2, 2)]  # the last is smaller than its approximation
SEED, RANK, STEPS = 3, 2, 3


def gradient(number: int, replica: int, step: int) -> Matrix:
    """Of parameter `number`: a matrix of full rank, whose sizes differ between rows."""
    random = np.random.default_rng([number, replica, step])
    found = random.standard_normal(SHAPES[number])
    return found * 10.0 ** -np.arange(SHAPES[number][0]).reshape(-1, *[1] * (found.ndim - 1))


def reducer(method: str) -> tuple[list[nn.Parameter], GradReducer]:
    world = build_world(ParallelConfig(dp=dist.get_world_size(), zero_group=1), torch.device("cpu"))
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
    names = {id(p): str(i) for i, p in enumerate(parameters) if p.ndim == 2}
    options = CompressionOptions(compression=method, compression_rank=RANK)  # type: ignore[arg-type]
    make = partial(CompressedBucket, options=options, seed=SEED, names=names)
    axes = world.axis("shard"), world.axis("replicate")
    return parameters, GradReducer(parameters, *axes, 0, make_bucket=make)


def reduce(method: str, fault: str = "", kept: bool = True) -> list[list[tuple[Matrix, Matrix]]]:
    """By step and parameter: the sum that this replica got, and what it has left out so far (0 of vectors)."""
    found = []
    with planted(fault):
        parameters, grads = reducer(method)
        for step in range(STEPS):
            with grads.backward_pass():
                terms = [(p * torch.tensor(gradient(i, dist.get_rank(), step))).sum() for i, p in enumerate(parameters)]
                torch.stack(terms).sum().backward()  # type: ignore[no-untyped-call]
            grads.finish()
            (bucket,) = grads.buckets
            assert isinstance(bucket, CompressedBucket)
            if kept:
                bucket.keep()
            left = [bucket.errors.get(str(i), torch.zeros(shape)) for i, shape in enumerate(SHAPES)]
            found.append(
                [
                    (p.grad.numpy(), e.numpy().copy())
                    for p, e in zip(parameters, left, strict=True)
                    if p.grad is not None
                ]
            )
            for p in parameters:
                p.grad = None
    return found


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """A fault in this process."""
    with pytest.MonkeyPatch.context() as patch:
        if fault == "memory dropped":
            patch.setattr(CompressedBucket, "keep", lambda _: None)
        if fault == "scale lost":
            patch.setattr(training.experimental.compression.int8, "decode", lambda codes, _, dtype: codes.to(dtype))
        yield


def orthonormal(columns: Matrix) -> Matrix:
    """By Gram and Schmidt, as in the paper's algorithm 1; twice, which is exact enough."""
    for _ in range(2):
        for i in range(columns.shape[1]):
            for j in range(i):
                columns[:, i] -= columns[:, j] * (columns[:, j] @ columns[:, i])
            columns[:, i] /= np.sqrt(columns[:, i] @ columns[:, i])
    return columns


def power_iterations(number: int, replicas: int) -> list[tuple[Matrix, list[Matrix]]]:
    """Algorithms 1 and 2 of Vogels et al. 2019, in float64: by step the sum, and what each replica has left out."""
    shape = SHAPES[number]
    q = initial_q((shape[0], shape[1]), RANK, SEED, str(number), torch.zeros(1, dtype=torch.float64)).numpy()
    errors, found = [np.zeros(shape)] * replicas, []
    for step in range(STEPS):
        deltas = [gradient(number, replica, step) + errors[replica] for replica in range(replicas)]
        p = orthonormal(np.add.reduce([delta @ q for delta in deltas]))
        qs = [delta.T @ p for delta in deltas]
        q = np.add.reduce(qs)
        errors = [delta - p @ own.T for delta, own in zip(deltas, qs, strict=True)]
        found.append((p @ q.T, errors))
    return found


def largest_difference(results: list[Any]) -> float:
    """Of two replicas' sums and memories from the reference's, over all steps and matrices."""
    worst = 0.0
    for i in (0, 2, 3):
        for step, (total, errors) in enumerate(power_iterations(i, 2)):
            for replica, result in enumerate(results):
                got, left = result[step][i]
                worst = max(worst, np.abs(got - total).max(), np.abs(left - errors[replica]).max())
    return float(worst)


def test_powersgd_is_the_paper_s_for_three_steps(run_ranks: RunRanks) -> None:
    assert largest_difference(run_ranks(2, reduce, "powersgd")) < 1e-10


def test_a_dropped_memory_is_noticed(run_ranks: RunRanks) -> None:
    assert largest_difference(run_ranks(2, reduce, "powersgd", "memory dropped")) > 1e-2


def lost(results: list[Any], method: str) -> float:
    """Largest number by which gradients + old memories differ from the sum that all got + new memories."""
    worst, zero = 0.0, [[np.zeros(shape) for shape in SHAPES] for _ in results]
    for step in range(STEPS):
        for i in range(len(SHAPES)):
            old = [r[step - 1][i][1] if step else zero[n][i] for n, r in enumerate(results)]
            given = sum(gradient(i, n, step) + old[n] for n in range(len(results)))
            new = sum(r[step][i][1] for r in results)
            worst = max(worst, *(float(np.abs(given - new - r[step][i][0]).max()) for r in results))
    return worst


@pytest.mark.parametrize("method", ["powersgd", "int8"])
def test_what_is_sent_and_what_is_left_out_are_the_gradient(run_ranks: RunRanks, method: str) -> None:
    results = run_ranks(3, reduce, method)
    assert lost(results, method) < 1e-12
    for result in results:
        for step in range(STEPS):
            for i in (1, 4) if method == "powersgd" else (1,):  # summed as they are
                exact = sum(gradient(i, n, step) for n in range(3))
                assert np.allclose(result[step][i][0], exact, rtol=1e-14, atol=1e-15) and not result[step][i][1].any()
            assert all(np.array_equal(result[step][i][0], results[0][step][i][0]) for i in range(len(SHAPES)))


@pytest.mark.parametrize(("method", "fault"), [("powersgd", "memory dropped"), ("int8", "memory dropped")])
def test_gradients_without_their_memory_are_noticed(run_ranks: RunRanks, method: str, fault: str) -> None:
    assert lost(run_ranks(2, reduce, method, fault), method) > 1e-4


def test_a_lost_scale_is_noticed(run_ranks: RunRanks) -> None:
    results = run_ranks(2, reduce, "int8", "scale lost")
    exact = gradient(0, 0, 0) + gradient(0, 1, 0)
    assert np.abs(results[0][0][0][0] - exact).max() > 1  # its memory hides it from the sum


def test_8_bit_codes_are_off_by_half_a_step_at_most(run_ranks: RunRanks) -> None:
    blocks = torch.randn(7, BLOCK, generator=torch.Generator().manual_seed(1)) * torch.logspace(-20, 20, 7)[:, None]
    blocks[3] = 0
    codes, scales = encode(blocks)
    assert ((decode(codes, scales, torch.float32) - blocks).abs() <= scales * 0.5001).all()
    assert (codes.abs().amax(1) == torch.tensor([127, 127, 127, 0, 127, 127, 127])).all()
    every = [np.concatenate([gradient(i, n, 0).ravel() for i in (4, 3, 2, 0)]) for n in range(2)]  # one chunk each
    half = sum(np.abs(x[:BLOCK]).max() for x in every) / 254
    bound = half + (np.abs(sum(every)).max() + half) / 254
    (got, _), *_ = run_ranks(2, reduce, "int8")[0][0]
    assert 0 < np.abs(got - gradient(0, 0, 0) - gradient(0, 1, 0)).max() <= bound * 1.0001


def test_a_gradient_that_is_not_finite_stays_so() -> None:
    for value in (float("nan"), float("inf")):
        blocks = torch.ones(2, BLOCK)
        blocks[0, 5] = value
        found = decode(*encode(blocks), torch.float32)
        assert not found[0, 5].isfinite() and torch.allclose(found[1], blocks[1])


@pytest.mark.parametrize("method", ["powersgd", "int8"])
def test_a_refused_update_leaves_the_memories(run_ranks: RunRanks, method: str) -> None:
    for result in run_ranks(2, reduce, method, "", False):
        assert not any(left.any() for step in result for _, left in step)


def full_rank() -> float:
    """Largest difference between an all-reduce and PowerSGD of full rank, of tall, wide and square matrices."""
    world = build_world(ParallelConfig(dp=dist.get_world_size(), zero_group=1), torch.device("cpu"))
    shapes = [(12, 8), (6, 10), (7, 7)]
    matrices = [torch.tensor(np.random.default_rng([i, world.rank]).standard_normal(s)) for i, s in enumerate(shapes)]
    exact = torch.cat([m.flatten() for m in matrices])
    qs = [initial_q(s, min(s), SEED, str(i), m) for i, (s, m) in enumerate(zip(shapes, matrices, strict=True))]
    sums, _, vector = PowerSGD(matrices, qs, torch.ones(3), world.axis("replicate")).finish()
    dist.all_reduce(exact)
    assert vector.tolist() == [2, 2, 2]
    return float((torch.cat([s.flatten() for s in sums]) - exact).abs().max())


def test_powersgd_of_full_rank_is_an_all_reduce(run_ranks: RunRanks) -> None:
    assert max(run_ranks(2, full_rank)) < 1e-12


def after_zeros() -> tuple[float, float]:
    """What two steps after a gradient of zeros miss of a matrix of the approximation's rank: the first, and both."""
    world = build_world(ParallelConfig(dp=dist.get_world_size(), zero_group=1), torch.device("cpu"))
    random = np.random.default_rng(world.rank)
    left, right = random.standard_normal((12, 1)), random.standard_normal((1, 8))
    gradients, whole = [torch.zeros(12, 8).double(), torch.tensor(left @ right)], torch.tensor(left @ right)
    dist.all_reduce(whole)
    error, missed = torch.zeros_like(whole), []
    q = initial_q((12, 8), RANK, SEED, "0", whole)
    for gradient in [*gradients, torch.zeros_like(whole)]:
        step = PowerSGD([gradient + error], [q], torch.ones(1), world.axis("replicate"))
        (found,), (q,), _ = step.finish()
        error = step.matrices[0]
        missed.append(float((whole := whole - found).abs().max()))
    return missed[1], missed[2]


def test_a_gradient_of_zeros_does_not_end_the_iteration(run_ranks: RunRanks) -> None:
    """Its Q is zero: the next step begins with any orthonormal columns, and what it misses is sent by the one after."""
    for first, both in run_ranks(2, after_zeros):
        assert first > 1e-2 and both < 1e-12
