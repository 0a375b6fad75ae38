"""A run resumes with the options it was started with, those that its record omits among them."""

from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import UsageError
from training.checkpoint.run_folder import RunFolder
from training.distributed.mesh import init_distributed
from training.model.model_config import ModelConfig
from training.optim.optim_config import OptimConfig


def folder(out_dir: Path, **options: Any) -> RunFolder:
    model = ModelConfig(layers=1, width=8, heads=2, **options).resolve(30, 8)
    identity = {f"model.{key}": value for key, value in model.record().items()} | {"data.order": "keyed"}
    return RunFolder(out_dir, identity, OptimConfig(steps=10))


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"window": 4}, {}, r"model.window \(4 there, None now\)"),
        ({}, {"window": 4}, r"model.window \(None there, 4 now\)"),
        ({"head_dim": 6}, {"head_dim": 10}, r"model.head_dim \(6 there, 10 now\)"),
    ],
)
def test_an_option_that_only_one_record_has_is_a_difference(
    tmp_path: Path, before: dict[str, Any], now: dict[str, Any], said: str
) -> None:
    with init_distributed("cpu"):
        folder(tmp_path, **before).claim()
        folder(tmp_path, **before).require_same_run()
        with pytest.raises(UsageError, match=said):
            folder(tmp_path, **now).require_same_run()


def test_the_last_rate_of_a_stable_run_is_free_until_it_decays(tmp_path: Path) -> None:
    """Its default was once 1e-4, above a low peak: such a run goes on, and its decay falls to another rate."""

    def run(min_lr: float, **options: int) -> RunFolder:
        identity = {"data.order": "keyed", "optim.min_lr": min_lr}
        return RunFolder(tmp_path, identity, OptimConfig(schedule="wsd", lr=5e-5, **options))

    with init_distributed("cpu"):
        run(1e-4).claim()
        run(5e-6, cooldown_steps=100).require_same_run()
        run(5e-6, cooldown_steps=100).claim()
        with pytest.raises(UsageError, match=r"optim.min_lr \(5e-06 there, 1e-06 now\)"):
            run(1e-6, cooldown_steps=100).require_same_run()
