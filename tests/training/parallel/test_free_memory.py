"""Memory is asked for before it is taken: the least that a run needs, and runs that are refused."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.errors import UsageError
from tests.patience import patience
from tests.training.conftest import TORCHRUN, small_run
from training.config import TrainConfig
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import MemoryConfig
from training.model.decoder import meta_decoder
from training.model.model_config import ModelConfig
from training.parallel.free_memory import state_bytes
from training.parallel.mesh import build_world
from training.parallel.parallelize import parallelize
from training.train import train

ONE, ON_DISK = ParallelConfig(), MemoryConfig(optimizer="disk", parameters="disk")
CASES = {  # bytes a parameter (Rajbhandari et al. 2020, section 3.1): weights, gradients, masters and moments
    "fp32": (ONE, "fp32", MemoryConfig(), 2, "cpu", 4 + 4 + 8),
    "bf16": (ONE, "bf16", MemoryConfig(), 2, "cpu", 2 + 4 + 4 + 8),
    "bf16, SGD": (ONE, "bf16", MemoryConfig(), 0, "cpu", 2 + 4 + 4),
    "fp32, SGD": (ONE, "fp32", MemoryConfig(), 0, "cpu", 4 + 4),
    "ZeRO-1": (ParallelConfig(zero=1, zero_group=4), "bf16", MemoryConfig(), 2, "cuda", 2 + 16 / 4),
    "ZeRO-3": (ParallelConfig(zero=3, zero_group=4), "bf16", MemoryConfig(), 2, "cuda", 16 / 4),
    "moments in CPU memory": (ONE, "fp32", MemoryConfig(optimizer="cpu"), 2, "cuda", 4 + 4),
    "moments in CPU memory, the device": (ONE, "fp32", MemoryConfig(optimizer="cpu"), 2, "cpu", 4 + 4 + 8),
    "ZeRO-3 on disk": (ParallelConfig(zero=3, zero_group=2), "fp32", ON_DISK, 2, "cpu", 4 / 2),
    "evaluation": (ONE, "bf16", MemoryConfig(), None, "cpu", 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_least_that_states_take(name: str) -> None:
    layout, precision, memory, moments, device, each = CASES[name]
    assert state_bytes(1000, 1000 // layout.shards, layout, precision, memory, moments, device) == 1000 * each


@pytest.mark.every(2)
@pytest.mark.parametrize("launcher", [[sys.executable], TORCHRUN])
def test_a_model_that_does_not_fit_is_refused_at_once(corpus: Path, tmp_path: Path, launcher: list[str]) -> None:
    sizes = ["--model.width", "65536", "--model.layers", "200", "--model.heads", "512"]
    command = [*launcher, "training/train.py", *small_run(corpus), *sizes, "--out_dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=False)
    assert done.returncode != 0
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert line.startswith("error: parameters, gradients and the optimizer's state need ") and "GiB free: try" in line
    assert not list((tmp_path / "run").glob("[!.]*"))


def test_a_run_that_lacks_memory_starts_if_forced(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.parallel.free_memory.free_memory", lambda: 1000)
    config = replace(config, optim=replace(config.optim, name="sgd"))  # which keeps no moments, but has gradients
    with pytest.raises(UsageError, match=r"gradients .* need 0\.0 GiB, and this machine has 0\.0 GiB free.*--memory"):
        train(config)
    assert train(replace(config, memory=MemoryConfig(force=True))).holdout_loss


def counts_of_rank() -> tuple[int, int]:
    """Held, and updated, by a rank that has half of the experts, whose replicas are fewer than ZeRO's ranks."""
    model = ModelConfig(layers=1, width=8, heads=2, experts=4, expert_width=16).resolve(16, 8)
    layout = ParallelConfig(zero=1, ep=2).resolve(4, model, 8)
    counts: list[tuple[int, int]] = []
    world = build_world(layout, torch.device("cpu"))
    parallelize(
        meta_decoder(model), layout, world, 1, before_allocation=lambda *found: counts.append((found[0], found[1]))
    )
    return counts[0]


def test_experts_of_a_rank_are_sharded_over_fewer_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    experts, router, attention, norms, vocabulary = 4 * 3 * 8 * 16, 4 * 8, 4 * 8 * 8, 3 * 8, 2 * 16 * 8
    (found, *_) = run_ranks(4, counts_of_rank)
    rest = router + attention + norms + vocabulary
    assert found == (experts // 2 + rest, experts // 4 + rest // 4)
