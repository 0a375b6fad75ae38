from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gristmill.errors import UsageError
from training.distributed import process_group
from training.distributed.process_group import init_distributed, main_only
from training.experimental.parallel_config import ParallelConfig
from training.parallel.mesh import World, build_world


def build(device: torch.device) -> World:
    return build_world(ParallelConfig(dp=dist.get_world_size(), zero_group=1), device)


def cooperate() -> tuple[Any, ...]:
    said = []
    with init_distributed("cpu") as device:
        world = build(device)
        try:
            main_only(lambda: (_ for _ in ()).throw(UsageError("no")))
        except UsageError as error:
            said.append(str(error))
        total = world.all_reduce(torch.tensor(world.rank + 1.0)).item()
        return world.rank, total, world.all_reduce_max(10 * world.rank), main_only(lambda: world.rank), said


def test_collectives_of_the_world(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(2, cooperate) == [(0, 3.0, 10, 0, ["no"]), (1, 3.0, 10, 0, ["no"])]


def position() -> tuple[Any, ...]:
    with init_distributed("cpu") as device:
        world = build_world(ParallelConfig(pp=2, dp=4, zero=2, zero_group=2, tp=1), device)
        axes = {name: (world.axis(name).size, world.axis(name).rank) for name in ("pp", "replicate", "shard", "tp")}
        peers = {}
        for name in ("pp", "replicate", "shard"):
            group = world.axis(name).group
            assert group is not None
            peers[name] = dist.get_process_group_ranks(group)
        assert world.axis("tp").group is None
        return world.dp_rank, world.dp_size, axes, peers


def test_the_order_of_the_axes(run_ranks: Callable[..., list[Any]]) -> None:
    positions = run_ranks(8, position)
    assert [replica for replica, *_ in positions] == [0, 1, 2, 3] * 2 and {p[1] for p in positions} == {4}
    assert positions[6][2] == {"pp": (2, 1), "replicate": (2, 1), "shard": (2, 0), "tp": (1, 0)}
    assert positions[6][3] == {"pp": [2, 6], "replicate": [4, 6], "shard": [6, 7]}


def test_one_process_is_a_world_and_closes_its_group() -> None:
    with init_distributed("cpu") as device:
        world = build(device)
        assert (world.rank, world.size, world.is_main, world.device.type) == (0, 1, True, "cpu")
    assert not dist.is_initialized()


def test_the_caller_s_process_group_is_left_open() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with init_distributed("cpu"):
            pass
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_rank_that_dies_before_it_connects_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_attempt = dist.PrefixStore("attempt0", store)  # rank 1 starts, and then does no more
    of_attempt.set("versions 1", f"{process_group._describe_versions()} on elsewhere")
    of_attempt.add("started", 1)
    place = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    for name, value in (place | {"TORCHELASTIC_USE_AGENT_STORE": True}).items():
        monkeypatch.setenv(name, str(value))
    told = r"could not connect within --timeout, 1 s: one has died"
    with pytest.raises(UsageError, match=told), init_distributed("cpu", timeout=1.0):
        pass
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error() -> None:
    with pytest.raises(UsageError, match="--device cpu"), init_distributed("cuda"):
        pass
