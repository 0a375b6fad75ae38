"""A run has the garbage collector pass over what stays, and leaves that as it was: a process may make many runs."""

import gc
from collections.abc import Iterator

import pytest

from gristmill.processes import kept_objects
from training.config import TrainConfig
from training.loop import train_as_planned
from training.run_plan import RunPlan


@pytest.fixture(autouse=True)
def _frozen_as_before() -> Iterator[None]:
    """The tests' process has frozen its modules and tests."""
    yield
    gc.freeze()


def train_and_count(config: TrainConfig) -> set[bool]:
    """Whether anything is frozen, at each step of a run."""
    counts = set[bool]()
    train_as_planned(RunPlan.of(config), lambda: counts.add(gc.get_freeze_count() > 0))
    return counts


def test_modules_are_not_searched_for_garbage_at_every_step(config: TrainConfig) -> None:
    gc.unfreeze()
    assert True in train_and_count(config)
    assert gc.get_freeze_count() == 0


def test_what_a_process_has_frozen_stays_frozen(config: TrainConfig) -> None:
    """Else each run in a warm process would search all of torch for garbage, which takes as long as a short run."""
    gc.freeze()
    frozen = gc.get_freeze_count()
    assert train_and_count(config) == {True}
    assert gc.get_freeze_count() > frozen / 2


def test_the_context_of_a_run() -> None:
    gc.unfreeze()
    with kept_objects():
        assert gc.get_freeze_count() > 0
        with kept_objects():
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
