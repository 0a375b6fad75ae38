import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from training.distributed.stall_watch import StallWatch, gpu_busy

Ask = Callable[[StallWatch], bool]


@pytest.fixture
def ask_later(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    """Whether a watch of one second has stalled, 0.4 s later; asked by another thread, while this one waits here."""
    clock = [0.0]
    monkeypatch.setattr("training.distributed.stall_watch.time", SimpleNamespace(monotonic=lambda: clock[0]))

    def look(watch: StallWatch) -> bool:
        time.sleep(0.03)  # this thread waits for the answer by then
        return watch.stalled()

    def ask(watch: StallWatch) -> bool:
        clock[0] += 0.4
        return thread.submit(look, watch).result()

    with ThreadPoolExecutor(1) as thread:
        yield ask


def test_a_thread_that_stays_where_it_is_has_stalled(ask_later: Ask) -> None:
    watch = StallWatch(1.0, lambda: True)
    assert [ask_later(watch) for _ in range(5)] == [False, False, False, True, True]


def test_a_thread_that_moves_or_begins_steps_has_not(ask_later: Ask) -> None:
    watch = StallWatch(1.0, lambda: True)
    for _ in range(4):
        assert not ask_later(watch)
        assert not ask_later(watch)
    found = []
    for _ in range(5):
        watch.beat()
        found.append(ask_later(watch))
    assert not any(found)


def test_a_thread_whose_device_is_idle_is_slow_by_itself(ask_later: Ask) -> None:
    watch = StallWatch(1.0, lambda: False)
    for _ in range(5):
        assert not ask_later(watch)
    assert not gpu_busy(torch.device("cpu"))
