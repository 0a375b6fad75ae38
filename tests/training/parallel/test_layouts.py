"""Layouts: the same losses under each, and a checkpoint of one resumes under any other."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gristmill.errors import UsageError
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.config import TrainConfig
from training.distributed.rank_pool import RankError
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import MemoryConfig
from training.reporting.metrics_file import METRICS, read_metrics
from training.train import train

RunRanks = Callable[..., list[Any]]
CUBE = ParallelConfig(dp=2, zero=1, tp=2, sequence_parallel=True, pp=2, schedule="zbv", micro_batches=4)
RESUMES = {
    "one process": (1, ParallelConfig()),
    "dp 4": (4, ParallelConfig(zero=3)),
    "tp 4": (4, ParallelConfig(tp=4, sequence_parallel=True)),
    "pp 4": (4, ParallelConfig(pp=4)),
}

CHAIN = [
    (2, ParallelConfig(tp=2)),
    (4, ParallelConfig(tp=4, tensor="2d")),
    (1, ParallelConfig()),
    (2, ParallelConfig(pp=2)),
]
CUBES = [
    (2, ParallelConfig(tp=2)),
    (8, ParallelConfig(tp=8, tensor="2.5d", depth=2)),
    (8, ParallelConfig(tp=8, tensor="3d")),
    (1, ParallelConfig()),
]


def recorded(out_dir: Path) -> tuple[list[tuple[int, float, float]], list[str]]:
    """The recorded values that must not depend on the layout: (step, loss, gradient norm), and sampled texts."""
    records = [r for r in read_metrics(out_dir / METRICS) if r["kind"] != "run"]
    numbers = [(r["step"], r["loss"], r.get("grad_norm", 0.0)) for r in records]
    return numbers, [r["text"] for r in records if r["kind"] == "eval"]


def assert_same(one: Path, other: Path) -> None:
    (numbers, texts), (others, other_texts) = recorded(one), recorded(other)
    assert len(numbers) == len(others) and texts == other_texts
    for expected, found in zip(numbers, others, strict=True):
        assert found == pytest.approx(expected, rel=1e-10), other.name


@pytest.fixture
def exact(config: TrainConfig) -> TrainConfig:
    """Twelve steps in float64, of a model that all layouts here divide."""
    model = replace(config.model, preset="gpt2", layers=4, kv_heads=4, dropout=0.1)
    saves = CheckpointConfig(every=6, keep=9)
    data, measured = replace(config.data, batch_size=16), replace(config.eval, every=6)
    return replace(config, model=model, precision="fp64", checkpoint=saves, data=data, eval=measured)


def train_with(
    config: TrainConfig, out_dir: Path, layout: ParallelConfig, steps: int, run_ranks: RunRanks, n: int
) -> None:
    optim = replace(config.optim, steps=steps, min_lr=config.optim.lr)  # a constant rate does not depend on steps
    run_ranks(n, train, replace(config, out_dir=out_dir, parallel=layout, optim=optim))


@pytest.mark.thorough
def test_a_run_resumes_under_any_layout_with_the_same_losses(
    exact: TrainConfig, run_ranks: RunRanks, tmp_path: Path
) -> None:
    train_with(exact, tmp_path / "through", ParallelConfig(), 12, run_ranks, 1)
    assert len(recorded(tmp_path / "through")[0]) == 14
    train_with(exact, tmp_path / "half", CUBE, 6, run_ranks, 8)
    for name, (processes, layout) in RESUMES.items():
        out_dir = tmp_path / name
        shutil.copytree(tmp_path / "half", out_dir)
        train_with(exact, out_dir, layout, 12, run_ranks, processes)
        assert_same(tmp_path / "through", out_dir)


@pytest.mark.parametrize("chain", [CHAIN, pytest.param(CUBES, marks=pytest.mark.thorough)], ids=["grid", "cubes"])
def test_a_run_goes_on_from_layout_to_layout_as_in_one_process(
    exact: TrainConfig, run_ranks: RunRanks, tmp_path: Path, chain: list[tuple[int, ParallelConfig]]
) -> None:
    """Each takes two steps from the checkpoint of the one before."""
    config = replace(exact, checkpoint=CheckpointConfig(every=2, keep=9), eval=replace(exact.eval, every=2))
    steps = 2 * len(chain)
    train_with(config, tmp_path / "through", ParallelConfig(), steps, run_ranks, 1)
    for turn, (processes, layout) in enumerate(chain, start=1):
        train_with(config, tmp_path / "chain", layout, 2 * turn, run_ranks, processes)
    assert len(recorded(tmp_path / "chain")[0]) == steps + len(chain)
    assert_same(tmp_path / "through", tmp_path / "chain")


def stored_rows(checkpoint: Path, name: str) -> list[tuple[int, int]]:
    """First row and number of rows of each piece of a parameter that a checkpoint has."""
    entry = FileSystemReader(checkpoint).read_metadata().state_dict_metadata[f"model.{name}"]
    assert isinstance(entry, TensorStorageMetadata)
    return sorted((chunk.offsets[0], chunk.sizes[0]) for chunk in entry.chunks)


@pytest.mark.thorough
def test_a_run_goes_on_with_more_ranks_than_heads_of_keys_and_values(
    exact: TrainConfig, run_ranks: RunRanks, tmp_path: Path
) -> None:
    """Losses and gradient norms are those of one process; what several ranks have is in a checkpoint once."""
    model = replace(exact.model, kv_heads=2)
    config = replace(
        exact, model=model, checkpoint=CheckpointConfig(every=2, keep=9), eval=replace(exact.eval, every=2)
    )
    chain = [
        (4, ParallelConfig(tp=4)), (1, ParallelConfig()), (4, ParallelConfig(tp=4, sequence_parallel=True)),
        (2, ParallelConfig(tp=2)), (8, ParallelConfig(tp=4, zero=3)), (1, ParallelConfig()),
    ]  # fmt: skip
    train_with(config, tmp_path / "through", ParallelConfig(), 2 * len(chain), run_ranks, 1)
    for turn, (processes, layout) in enumerate(chain, start=1):
        train_with(config, tmp_path / "chain", layout, 2 * turn, run_ranks, processes)
    assert_same(tmp_path / "through", tmp_path / "chain")
    rows = model.width // model.heads
    first = tmp_path / "chain/checkpoints/step-00000002"
    assert stored_rows(first, "blocks.0.attention.k.weight") == [(0, rows), (rows, rows)]
    assert stored_rows(first, "blocks.0.attention.v.bias") == [(0, rows), (rows, rows)]


@pytest.mark.every(2)
@pytest.mark.parametrize("place", ["optimizer", "parameters"])
def test_training_from_disk_has_the_same_losses(
    exact: TrainConfig, run_ranks: RunRanks, tmp_path: Path, place: str
) -> None:
    memory = MemoryConfig(recompute="selective", **{place: "disk"})  # type: ignore[arg-type]
    train_with(exact, tmp_path / "through", ParallelConfig(), 8, run_ranks, 1)
    train_with(replace(exact, memory=memory), tmp_path / "disk", ParallelConfig(zero=3), 8, run_ranks, 2)
    assert_same(tmp_path / "through", tmp_path / "disk")
    assert not list((tmp_path / "disk/offload").glob("**/*.*"))


@pytest.mark.parametrize("place", ["optimizer", "parameters"])
def test_an_unwritable_folder_is_an_error_at_the_start(
    exact: TrainConfig, run_ranks: RunRanks, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").touch()
    memory = MemoryConfig(folder=tmp_path / "file", **{place: "disk"})  # type: ignore[arg-type]
    with pytest.raises(RankError, match="a part of that path is a file"):
        train_with(replace(exact, memory=memory), tmp_path / "run", ParallelConfig(zero=3), 8, run_ranks, 2)


def test_offloaded_parameters_need_zero_3(exact: TrainConfig) -> None:
    with pytest.raises(UsageError, match=r"try --parallel.zero 3"):
        train(replace(exact, memory=MemoryConfig(parameters="cpu")))
