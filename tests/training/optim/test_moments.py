import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gristmill.errors import OutputError
from training.distributed.rank_pool import RankError
from training.memory.memory_config import MemoryConfig
from training.optim.build_optimizer import build_optimizer
from training.optim.flat_buckets import ALIGNMENT, plan_buckets
from training.optim.moments import MomentsOnDisk
from training.optim.optim_config import OptimConfig
from training.optim.optimizer import Optimizer
from training.sharding.shard_spec import ShardSpec
from training.sharding.sharded_parameter import ShardedParameter

RunRanks = Callable[..., list[Any]]
Params = list[ShardedParameter]
SHAPES = [(30, 41), (41,), (501, 7), (1,), (0, 3), (64, 64), (3, 41)]


def make_params(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Params:
    generator, params = torch.Generator().manual_seed(0), []
    for number, shape in enumerate(SHAPES):
        own = nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype).to(device))
        params.append(ShardedParameter(f"w{number}", own, own, ShardSpec.whole((9, *shape[1:])), True))
    return params


def on_disk(folder: Path) -> MemoryConfig:
    return MemoryConfig(optimizer="disk", folder=folder)


def train(params: Params, optimizer: Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.local.grad = torch.randn(p.local.shape, generator=generator, dtype=p.local.dtype).to(p.local.device)
        optimizer.step(0.1 / (step + 1))


def equal(params: Params, optimizer: Optimizer, others: Params, other: Optimizer) -> bool:
    moments, expected = optimizer.moments(), other.moments()
    states = [torch.equal(values, expected[n][key]) for n, found in moments.items() for key, values in found.items()]
    return all(states) and all(torch.equal(a.local, b.local) for a, b in zip(params, others, strict=True))


@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(1, 500) | st.none())
def test_buckets_cover_every_element_once_in_order_and_aligned(sizes: list[int], most: int | None) -> None:
    total, buckets = plan_buckets(sizes, most)
    done = [0] * len(sizes)
    end = 0
    for bucket in buckets:
        assert bucket.start == end and bucket.numel <= max(ALIGNMENT, most or total)
        end, offset = end + bucket.numel, 0
        for s in bucket.slices:
            assert s.start == done[s.param] and s.offset == offset and s.numel > 0
            assert s.start % ALIGNMENT == s.offset % ALIGNMENT == 0
            done[s.param], offset = s.start + s.numel, offset + -(-s.numel // ALIGNMENT) * ALIGNMENT
        assert offset == bucket.numel
    assert done == sizes and end == total < sum(sizes) + ALIGNMENT * max(1, len(sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bucket", [64, 1000, 1 << 22])
def test_updates_are_bitwise_equal_wherever_the_moments_are(tmp_path: Path, dtype: torch.dtype, bucket: int) -> None:
    params = make_params(dtype)
    optimizer = build_optimizer(params, OptimConfig())
    train(params, optimizer)
    for memory in (MemoryConfig(optimizer="cpu"), on_disk(tmp_path)):
        ours = make_params(dtype)
        other = build_optimizer(ours, OptimConfig(), memory, bucket_numel=bucket)
        train(ours, other)
        assert equal(ours, other, params, optimizer)
        other.close()
    assert not list(tmp_path.iterdir())


def test_loaded_states_are_used(tmp_path: Path) -> None:
    params, others = make_params(), make_params()
    optimizer = build_optimizer(params, OptimConfig())
    other = build_optimizer(others, OptimConfig(), on_disk(tmp_path), rank=3, bucket_numel=128)
    train(others, other, 2)
    with torch.no_grad():
        for a, b in zip(params, others, strict=True):
            b.local.copy_(a.local)
    for name, states in other.moments().items():
        for key, values in states.items():
            values.copy_(optimizer.moments()[name][key])
    other.updates = 0
    train(params, optimizer)
    train(others, other)
    assert equal(others, other, params, optimizer)


def _killed(folder: Path) -> None:
    params = make_params()
    optimizer = build_optimizer(params, OptimConfig(), on_disk(folder))
    train(params, optimizer)
    os.kill(os.getpid(), signal.SIGKILL)


def test_files_of_a_killed_run_are_ignored(tmp_path: Path, run_ranks: RunRanks) -> None:
    with pytest.raises(RankError, match="died with exit code -9"):
        run_ranks(1, _killed, tmp_path)
    assert any((tmp_path / "rank-00000/exp_avg.bin").read_bytes())
    moments = build_optimizer(make_params(), OptimConfig(), on_disk(tmp_path)).moments()
    assert all(not values.any() for states in moments.values() for values in states.values())


def test_files_are_removed_with_the_optimizer(tmp_path: Path) -> None:
    build_optimizer(make_params(), OptimConfig(), on_disk(tmp_path))
    assert not list(tmp_path.iterdir())


def _without_room(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # what a full disk is like
    try:
        build_optimizer(make_params(), OptimConfig(), on_disk(folder))
    except OutputError as error:
        assert "exp_avg.bin" in str(error) and not list(folder.iterdir()), "what was allocated fills the disk on"
        os._exit(7)


def test_two_runs_with_one_folder_do_not_save_each_others_moments(tmp_path: Path) -> None:
    params = make_params()
    optimizer = build_optimizer(params, OptimConfig(), on_disk(tmp_path))
    train(params, optimizer)
    before = {
        name: {key: values.clone() for key, values in found.items()} for name, found in optimizer.moments().items()
    }
    with pytest.raises(OutputError, match="in use by another training run"):
        build_optimizer(make_params(), OptimConfig(), on_disk(tmp_path))
    assert all(torch.equal(v, before[n][k]) for n, found in optimizer.moments().items() for k, v in found.items())


def test_a_full_disk_is_an_error_at_the_start(tmp_path: Path, run_ranks: RunRanks) -> None:
    with pytest.raises(RankError, match="died with exit code 7"):
        run_ranks(1, _without_room, tmp_path)
    with pytest.raises(OutputError, match="a part of that path is a file"):
        (tmp_path / "file").touch()
        build_optimizer(make_params(), OptimConfig(), on_disk(tmp_path / "file"))


def test_memory_is_bounded_by_buckets_not_by_the_model(tmp_path: Path) -> None:
    """32 MB of states, of which at most a tenth is ever in memory."""
    length, bucket = 1 << 22, 1 << 16
    total, buckets = plan_buckets([length], bucket)
    before = _resident()
    moments = MomentsOnDisk(tmp_path / "r", total, buckets, torch.float32)
    most = 0
    for _ in range(2):
        moments.prefetch(0)
        for number in range(len(buckets)):
            if number + 1 < len(buckets):
                moments.prefetch(number + 1)
            for (values,) in moments.get(number):
                values.add_(1.0)
            moments.write_back(number)
            most = max(most, _resident() - before)
        moments.finish()
    assert all((values == 2).all() for values in moments.flat_states().values())
    assert most < 2 * 4 * length / 10
    moments.close()


def _resident() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024 + int(fields["RssFile"].split()[0]) * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offloaded_updates_of_a_gpu_equal_the_cpu(tmp_path: Path, place: str) -> None:
    expected, params = make_params(), make_params(device="cuda")
    optimizer = build_optimizer(expected, OptimConfig())
    memory = MemoryConfig(optimizer=place, folder=tmp_path)  # type: ignore[arg-type]
    other = build_optimizer(params, OptimConfig(), memory, bucket_numel=512)
    train(expected, optimizer)
    train(params, other)
    assert all(torch.equal(a.local, b.local.cpu()) for a, b in zip(expected, params, strict=True))
