"""Learning-rate schedules by their formulas, and options that do not fit one."""

import math
from typing import Any

import pytest

from gristmill.errors import UsageError
from training.optim.optim_config import OptimConfig, decay_start, describe_late_decay, learning_rate


def rates(**options: Any) -> list[float]:
    config = OptimConfig(**{"steps": 110, "lr": 1.0, "min_lr": 0.2, "warmup_steps": 10, **options})
    config.check()
    return [learning_rate(step, config) for step in range(config.steps)]


def test_linear_warm_up_and_cosine_decay() -> None:
    found = rates()
    assert found[:10] == [(i + 1) / 10 for i in range(10)]
    assert math.isclose(found[59], 0.6)  # half way down
    assert math.isclose(found[-1], 0.2) and found[9:] == sorted(found[9:], reverse=True)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_a_decay_from_a_low_peak_falls_by_default(schedule: Any) -> None:
    low = OptimConfig(steps=100, warmup_steps=10, lr=5e-5, schedule=schedule, cooldown_steps=(schedule == "wsd") * 20)
    low.check()
    assert math.isclose(learning_rate(99, low), 5e-6) and max(learning_rate(i, low) for i in range(100)) == 5e-5
    assert OptimConfig(lr=1e-3).final_lr == OptimConfig(lr=1e-4).final_lr == 1e-4
    assert OptimConfig(lr=5e-5, schedule="constant").final_lr == 1e-4  # as its run.json has it: it has no effect


def test_no_warm_up_and_warm_up_only() -> None:
    assert learning_rate(0, OptimConfig(steps=1, lr=1.0, min_lr=0.1, warmup_steps=0)) == 0.1
    assert learning_rate(4, OptimConfig(steps=5, lr=1.0, warmup_steps=10)) == 0.5


def test_linear_and_constant_schedules() -> None:
    found = rates(schedule="linear")
    assert found[9] == 1.0 and math.isclose(found[59], 0.6) and math.isclose(found[34], 0.8)
    assert found[-1] == pytest.approx(0.2)
    assert rates(schedule="constant") == [(i + 1) / 10 for i in range(10)] + [1.0] * 100
    assert rates(schedule="linear", decay_steps=60)[60:] == pytest.approx([0.2] * 50)


@pytest.mark.parametrize(("shape", "quarter"), [("linear", 0.8), ("1-sqrt", 0.6)])
def test_wsd_is_stable_and_then_decays(shape: str, quarter: float) -> None:
    found = rates(schedule="wsd", cooldown_steps=40, cooldown_shape=shape)
    assert found[10:70] == [1.0] * 60 and found[70] < 1.0
    assert math.isclose(found[79], quarter) and found[-1] == pytest.approx(0.2)
    assert rates(schedule="wsd") == rates(schedule="constant")  # a stable run, from which decays branch off
    assert decay_start(OptimConfig(schedule="wsd")) == math.inf


@pytest.mark.parametrize(
    ("options", "last"),
    [
        ({"schedule": "wsd", "cooldown_steps": 50, "decay_steps": 100}, "1.00e-02"),  # its decay never begins
        ({"schedule": "wsd", "cooldown_steps": 95, "decay_steps": 100}, "9.27e-03"),
        ({"schedule": "cosine", "decay_steps": 1000}, "1.00e-02"),
        ({"schedule": "linear", "decay_steps": 22}, "5.05e-03"),
        ({"schedule": "cosine", "decay_steps": 100, "warmup_steps": 24}, "5.00e-03"),
    ],
)
def test_a_decay_longer_than_the_run_is_said_with_its_last_rate(options: dict[str, Any], last: str) -> None:
    config = OptimConfig(**{"steps": 12, "lr": 1e-2, "warmup_steps": 2, **options})
    config.check()
    end = f"the learning rate's decay ends at step {config.decay_steps}, beyond this run's 12 steps: "
    end += "the rate of step 12 is "
    assert describe_late_decay(config) == f"{end}{last}, not 1.00e-04"
    assert f"{learning_rate(11, config):.2e}" == last


@pytest.mark.parametrize(
    "options",
    [{}, {"decay_steps": 9}, {"decay_steps": 12}, {"decay_steps": 99, "min_lr": 1e-2}]
    + [{"schedule": "wsd", "decay_steps": 99}, {"schedule": "wsd", "cooldown_steps": 5}, {"schedule": "constant"}],
)
def test_nothing_is_said_of_a_decay_that_fits(options: dict[str, Any]) -> None:
    assert describe_late_decay(OptimConfig(**{"steps": 12, "lr": 1e-2, "warmup_steps": 2, **options})) == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cooldown_steps": 5}, "schedule cosine, which has no cooldown; try --optim.schedule wsd"),
        ({"schedule": "constant", "decay_steps": 5}, "schedule constant, which does not decay; try --optim.schedule"),
        ({"schedule": "wsd", "cooldown_steps": 101}, "longer than the run; try --optim.cooldown_steps 20"),
        ({"schedule": "wsd", "cooldown_steps": 60}, "more than the 100 steps .* try --optim.warmup_steps 40"),
        ({"lr": 5e-5, "min_lr": 1e-4}, "min_lr is 0.0001 and optim.lr 5e-05: .* rise .* try --optim.min_lr 5e-06"),
        ({"schedule": "linear", "cooldown_shape": "1-sqrt"}, "schedule linear, which has no cooldown; .* wsd, or"),
        (
            {"decay_steps": 30},
            "warmup_steps is 50 and optim.decay_steps 30: .* try a lower --optim.warmup_steps, or a later",
        ),
    ],
)
def test_a_decay_that_does_not_fit_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        OptimConfig(steps=100, **options).check()
