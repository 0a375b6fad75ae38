"""A run whose sequences are divided has the losses, evaluations, samples and checkpoints of one process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import UsageError
from tests.training.parallel.test_layouts import assert_same, train_with
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.config import TrainConfig
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import MemoryConfig
from training.train import train

RunRanks = Callable[..., list[Any]]


@pytest.fixture
def exact(config: TrainConfig) -> TrainConfig:
    """Four steps in float64, evaluated and saved after two; of documents that do not see each other."""
    data = replace(config.data, batch_size=8, mask_documents=True)
    measured = replace(config.eval, every=2, sample_tokens=8)
    return replace(config, precision="fp64", checkpoint=CheckpointConfig(every=2, keep=9), data=data, eval=measured)


def test_a_run_goes_on_between_one_process_and_several(exact: TrainConfig, run_ranks: RunRanks, tmp_path: Path) -> None:
    train_with(exact, tmp_path / "one", ParallelConfig(), 4, run_ranks, 1)
    train_with(exact, tmp_path / "other", ParallelConfig(cp=2, zero=1), 2, run_ranks, 2)
    train_with(exact, tmp_path / "other", ParallelConfig(), 4, run_ranks, 1)
    assert_same(tmp_path / "one", tmp_path / "other")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"compile": True, "parallel": ParallelConfig(cp=2, context="ulysses")},
            "compile and parallel.context ulysses: .* try --compile false, or --parallel.context ring",
        ),
        ({"compile": True, "memory": MemoryConfig(recompute="full")}, "compile and memory.recompute full with .* none"),
        ({"memory": MemoryConfig(recompute="selective")}, "recompute selective and parallel.context ring: .* full"),
    ],
)
def test_what_divided_sequences_cannot_do_is_refused(exact: TrainConfig, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        train(replace(exact, **{"parallel": ParallelConfig(cp=2), **changes}))
