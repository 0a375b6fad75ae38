"""A run resumes with the options it was started with, those that its record omits among them."""

from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import UsageError
from training.checkpoint.run_folder import RunFolder
from training.data.data_config import DataConfig
from training.distributed.process_group import init_distributed
from training.model.model_config import ModelConfig
from training.optim.optim_config import OptimConfig


def save_nothing(out_dir: Path) -> None:
    """A folder with the name of a checkpoint: of the run there is something to resume."""
    (out_dir / "checkpoints/step-00000001").mkdir(parents=True)


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
        save_nothing(tmp_path)
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
        save_nothing(tmp_path)
        run(5e-6, cooldown_steps=100).require_same_run()
        run(5e-6, cooldown_steps=100).claim()
        with pytest.raises(UsageError, match=r"optim.min_lr \(5e-06 there, 1e-06 now\)"):
            run(1e-6, cooldown_steps=100).require_same_run()


def test_a_run_that_was_killed_before_its_first_checkpoint_may_be_corrected(tmp_path: Path) -> None:
    """It starts over, whatever the options: nothing that was trained is left."""
    mistaken, corrected = (
        RunFolder(tmp_path, {"seed": steps, "data.order": "keyed"}, OptimConfig(steps=steps)) for steps in (1000, 10)
    )
    with init_distributed("cpu"):
        mistaken.claim()
        corrected.require_same_run()
        assert corrected.describe_changed_decay(0) == ""
        corrected.claim()
        save_nothing(tmp_path)
        with pytest.raises(UsageError, match=r"another run, which differs in seed \(10 there, 1000 now\)"):
            mistaken.require_same_run()
        corrected.require_same_run()


@pytest.mark.parametrize("shared", [{}, {"replicas.count": 2}, {"parallel.parts": 3}])
def test_a_run_may_go_on_with_other_batches_but_not_beside_others_that_read_them(
    tmp_path: Path, shared: dict[str, int]
) -> None:
    folders = [
        RunFolder(tmp_path, {"data.order": "keyed", "data.batch_size": 8, **ramp, **shared}, OptimConfig(steps=9))
        for ramp in ({}, {"data.batch_size": 4, "data.batch_ramp": ("2:99",)})
    ]
    with init_distributed("cpu"):
        folders[0].claim()
        save_nothing(tmp_path)
        if not shared:
            folders[1].require_same_run()
            folders[1].claim()
            folders[0].require_same_run()
            return
        with pytest.raises(UsageError, match=r"differs in data.batch_size \(8 there, 4 now\); data.batch_ramp \(None"):
            folders[1].require_same_run()


def test_a_run_of_an_earlier_packing_is_refused_with_the_reason(tmp_path: Path) -> None:
    def run(**packing: Any) -> RunFolder:
        identity = {"data.order": "keyed", **{f"data.{name}": value for name, value in packing.items()}}
        return RunFolder(tmp_path, identity, OptimConfig(steps=10))

    now = DataConfig(tmp_path, tmp_path, packing="best-fit").of_documents()
    assert now == {"data.packing": "best-fit", "data.packing_version": 2}
    assert DataConfig(tmp_path, tmp_path).of_documents() == {}
    with init_distributed("cpu"):
        run(packing="best-fit").claim()
        save_nothing(tmp_path)
        with pytest.raises(UsageError, match=r"best-fit packing in its version 1, and this release has version 2, .*t"):
            run(packing="best-fit", packing_version=2).require_same_run()
        with pytest.raises(UsageError, match=r"differs in data.packing \(best-fit there, None now\)\. Give"):
            run().require_same_run()
        run(packing="best-fit", packing_version=2).claim()
        run(packing="best-fit", packing_version=2).require_same_run()
