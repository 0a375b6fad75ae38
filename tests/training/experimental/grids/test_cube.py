"""3D products: each product and gradient is that of one process, with as many elements as the paper says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from training.experimental.grids.cube import Turn, product_3d
from training.experimental.parallel_config import ParallelConfig
from training.parallel.mesh import build_world
from training.parallel.traffic_counter import TrafficCounter
from training.parallel.traffic_inputs import Traffic
from training.sharding.shard_spec import shard_range

RunRanks = Callable[..., list[Any]]
N, H, OUTPUTS = 32, 24, 30


def block(whole: Tensor, *cut: tuple[int, int]) -> Tensor:
    """The part of each dimension that is number `index` of `parts`."""
    return whole[tuple(slice(*shard_range(n, *part)) for n, part in zip(whole.shape, cut, strict=True))]


def multiply(back: bool) -> tuple[float, Traffic, Traffic]:
    """The largest error of Y, dX and dW on this rank, and the traffic of the product and of its gradients."""
    layout = ParallelConfig(dp=1, zero_group=1, tp=dist.get_world_size(), tensor="3d")
    world = build_world(layout, torch.device("cpu"))
    turn = Turn(world.axis("column"), world.axis("row"), world.axis("depth"))
    turn = turn.back if back else turn
    k, into, out, side = turn.layers.rank, turn.inputs.rank, turn.outputs.rank, turn.layers.size
    generator = torch.Generator().manual_seed(5)
    x, w, dy = (torch.randn(s, generator=generator).double() for s in ((N, H), (OUTPUTS, H), (N, OUTPUTS)))
    before, after, inputs = (side**2, k * side + out), (side**2, k * side + into), (side**2, into * side + k)
    own_x = block(x, before, (side, into)).requires_grad_()
    own_w = block(w, (side, out), inputs).requires_grad_()
    with TrafficCounter(world) as forward:
        y = product_3d(own_x[None], turn, own_w)[0]
    with TrafficCounter(world) as backward:
        y.backward(block(dy, after, (side, out)))
    assert own_x.grad is not None and own_w.grad is not None
    errors = [y - block(x @ w.T, after, (side, out)), own_x.grad - block(dy @ w, before, (side, into))]
    errors.append(own_w.grad - block(dy.T @ x, (side, out), inputs))
    return max(float(e.detach().abs().max()) for e in errors), forward.traffic, backward.traffic


def elements(traffic: Traffic) -> float:
    """Elements that a rank receives of what is gathered, or sends of what is reduced: half, of two ranks."""
    return sum(volume.bytes for volume in traffic.values()) / 8 / 2


@pytest.mark.parametrize("back", [False, True])
def test_products_are_those_of_one_process_with_the_papers_elements(run_ranks: RunRanks, back: bool) -> None:
    x, w, y = N * H, H * OUTPUTS, N * OUTPUTS
    for error, forward, backward in run_ranks(8, multiply, back):
        assert error < 1e-12
        assert elements(forward) == (2 - 1) * (x + w + y) / 2**3  # Bian et al. 2021, section 3
        assert elements(backward) == (2 - 1) * (2 * (x + w) + y) / 2**3  # which share dY
        assert {operation for _, operation in forward} == {"all-gather", "reduce-scatter"}
