"""Memory is asked for before it is taken: the least that a run needs, and runs that are refused."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.errors import UsageError
from tests.patience import patience
from tests.training.conftest import TORCHRUN, small_run
from training.config import TrainConfig
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import MemoryConfig
from training.parallel.free_memory import state_bytes
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
    assert state_bytes(1000, layout, precision, memory, moments, device) == 1000 * each


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
