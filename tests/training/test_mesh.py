from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline.errors import UsageError
from training.mesh import open_world


def cooperate() -> tuple[Any, ...]:
    said = []
    with open_world("cpu") as world:
        try:
            world.main_only(lambda: (_ for _ in ()).throw(UsageError("no")))
        except UsageError as error:
            said.append(str(error))
        total = world.sum(torch.tensor(world.rank + 1.0)).item()
        return world.rank, total, world.max(10 * world.rank), world.main_only(lambda: world.rank), said, world.mesh.ndim


def test_ranks_agree(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(2, cooperate) == [(0, 3.0, 10, 0, ["no"], 1), (1, 3.0, 10, 0, ["no"], 1)]


def test_one_process_is_a_world_and_leaves_nothing_open() -> None:
    with open_world("cpu") as world:
        assert (world.rank, world.size, world.is_main, world.device.type) == (0, 1, True, "cpu")
    assert not dist.is_initialized()


def test_a_process_group_of_the_caller_s_is_left_open() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with open_world("cpu"):
            pass
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error() -> None:
    with pytest.raises(UsageError, match="--device cpu"), open_world("cuda"):
        pass
