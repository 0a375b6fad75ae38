"""A run has the garbage collector pass over what stays, and leaves that as it was: a process may make many runs."""

import gc
from collections.abc import Callable, Iterator

import pytest

from gristmill.processes import _Collector, keep_objects
from training.config import TrainConfig
from training.loop import train_as_planned
from training.run_plan import RunPlan
from training.train import train


@pytest.fixture(autouse=True)
def _kept_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tests' process keeps its modules and tests."""
    monkeypatch.setattr(_Collector, "passes_over_own", False)
    gc.unfreeze()
    yield
    gc.freeze()


def train_and_look(config: TrainConfig) -> set[bool]:
    """Whether anything is frozen, at each step of a run."""
    seen = set[bool]()
    train_as_planned(RunPlan.of(config), lambda: seen.add(gc.get_freeze_count() > 0))
    return seen


def test_modules_are_not_searched_for_garbage_at_every_step(config: TrainConfig) -> None:
    assert train_and_look(config) == {True}
    assert gc.get_freeze_count() == 0


def test_what_a_process_keeps_stays_kept(config: TrainConfig) -> None:
    """Else each run in a warm process would search all of torch for garbage, which takes as long as a short run."""
    keep_objects()
    kept = gc.get_freeze_count()
    assert train_and_look(config) == {True}
    assert gc.get_freeze_count() > kept / 2


def test_a_worker_keeps_its_modules_over_jobs(config: TrainConfig, run_ranks: Callable[..., list[int]]) -> None:
    run_ranks(1, train, config)
    assert run_ranks(1, gc.get_freeze_count)[0] > 100_000
    assert run_ranks(1, count_searched)[0] < 100_000


def count_searched() -> int:
    """How many objects the garbage collector searches."""
    return len(gc.get_objects())
