"""SUMMA: each product and gradient is that of one process, with as many elements as the papers say."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from training.experimental.grids.summa import Grid, blocks_along, input_gradient, product, sum_to_each, weight_gradient
from training.experimental.parallel_config import ParallelConfig
from training.parallel.mesh import World, build_world
from training.parallel.traffic_counter import TrafficCounter
from training.parallel.traffic_inputs import Traffic
from training.sharding.shard_spec import shard_range

RunRanks = Callable[..., list[Any]]
N, H = 36, 24  # of X; W has 30 outputs, or 31, which divide unevenly


def grid_world(depth: int) -> World:
    tp, tensor = dist.get_world_size(), "2.5d" if depth > 1 else "2d"
    layout = ParallelConfig(dp=1, zero_group=1, tp=tp, tensor=tensor, depth=depth)  # type: ignore[arg-type]
    return build_world(layout, torch.device("cpu"))


def block(whole: Tensor, *cut: tuple[int, int]) -> Tensor:
    """The part of each dimension that is number `index` of `parts`."""
    return whole[tuple(slice(*shard_range(n, *part)) for n, part in zip(whole.shape, cut, strict=True))]


def multiply(outputs: int, depth: int) -> list[tuple[float, Traffic]]:
    """The error of Y, dX and dW on this rank, each with its traffic."""
    world = grid_world(depth)
    grid, layer, q = Grid.of(world.axes), world.axis("depth"), world.axis("row").size
    i, j, k = grid.row.rank, grid.column.rank, layer.rank
    generator = torch.Generator().manual_seed(5)
    x, w, dy = (torch.randn(s, generator=generator).double() for s in ((N, H), (outputs, H), (N, outputs)))
    rows, columns = (depth * q, k * q + i), (q, j)
    own_x, own_w, own_dy = block(x, rows, columns), block(w, columns, (q, i)), block(dy, rows, columns)
    layer_rows = slice(N // depth * k, N // depth * (k + 1))
    wanted = [block(x @ w.T, rows, columns), block(dy @ w, rows, columns)]
    wanted.append(block(dy[layer_rows].T @ x[layer_rows], columns, (q, i)))
    found: list[tuple[float, Traffic]] = []
    products = ((product, own_x, own_w), (input_gradient, own_dy, own_w), (weight_gradient, own_dy, own_x))
    for function, first, second in products:
        with TrafficCounter(world) as counter:
            y = function(first, second, grid)
        found.append((float((y - wanted[len(found)]).abs().max()), counter.traffic))
    return found


def elements(traffic: Traffic, q: int) -> dict[str, float]:
    """Elements that a rank receives of what is broadcast, or sends of what is reduced, by axis."""
    total: dict[str, float] = {}
    for (axis, operation), volume in traffic.items():
        assert operation in ("broadcast", "reduce") and volume.calls == q
        total[axis] = total.get(axis, 0) + volume.bytes / 8 * (q - 1) / q
    return total


@pytest.mark.parametrize(("ranks", "depth", "q"), [(4, 1, 2), (8, 2, 2), (9, 1, 3), (12, 3, 2)])
def test_products_are_those_of_one_process_with_the_papers_elements(
    run_ranks: RunRanks, ranks: int, depth: int, q: int
) -> None:
    for outputs in (30, 31):
        for rank, found in enumerate(run_ranks(ranks, multiply, outputs, depth)):
            first, last = shard_range(outputs, q, rank % q)
            for error, traffic in found:
                assert error < 1e-12
                of_x, of_w = (q - 1) * (N // depth) * H / q**2, (q - 1) * H * (last - first) / q
                sent = elements(traffic, q)
                assert sent == {"column": of_x, "row": of_w}, (rank, traffic)
            if outputs == 30:  # Xu et al. 2021, table 1
                assert sum(sent.values()) == (q - 1) * (N // depth * H + H * outputs) / q**2


def next_is_on_its_way() -> list[int]:
    """How many broadcasts have begun when each block is used, and reductions when each term is computed."""
    grid, begun, found = Grid.of(grid_world(1).axes), [0], []
    broadcast, reduce = dist.broadcast, dist.reduce

    def count(function: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            begun[0] += 1
            return function(*args, **options)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", count(broadcast))
        for _ in blocks_along(grid.column, torch.ones(3)):
            found.append(begun[0])
        begun[0] = 0
        patch.setattr(dist, "reduce", count(reduce))

        def terms() -> Any:
            for _ in range(2):
                found.append(begun[0])
                yield torch.ones(3)

        assert sum_to_each(grid.row, terms()).tolist() == [2, 2, 2]
    return found


def test_a_block_is_broadcast_while_the_one_before_is_used(run_ranks: RunRanks) -> None:
    assert run_ranks(4, next_is_on_its_way) == [[2, 2, 0, 1]] * 4
