"""Outputs of a task in a bucket: several are put at a time, and the done record when all are there."""

import threading
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gristmill.engine.run import open_stage
from gristmill.engine.task import Stage, Task
from gristmill.errors import UsageError
from gristmill.paths import object_name
from gristmill.storage import bucket_store, objects
from gristmill.storage.local import atomic_write_bytes
from tests.gristmill.engine.upper_stage import QUIET
from tests.object_faults import Environment, refuse
from tests.object_store import Store

STAGE = Stage("parts", libraries=())
OUTPUTS, AT_ONCE = 20, 8
LARGE = 7  # the number of an output that is put in parts
SECONDS = 60  # a busy machine is slow


def write_parts(outputs: tuple[Path, ...]) -> None:
    """Task: write its number to each file, often to one."""
    for number, path in enumerate(outputs):
        atomic_write_bytes(path, f"{number:09}".encode() * (objects.PART_BYTES // 9 + 1 if number == LARGE else 1))


def parts_stage(folder: Path) -> None:
    """A stage of one task with many outputs."""
    outputs = tuple(folder / f"{number:02}" for number in range(OUTPUTS))
    with open_stage(STAGE, folder, QUIET, publishes=[folder]) as run:
        run.finish(run.step("parts", [Task("all", write_parts, {"outputs": outputs}, outputs)]).counts)


@pytest.fixture
def patient(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store, for whose answers clients wait."""
    monkeypatch.setitem(objects._CLIENT, "timeout", timedelta(seconds=3 * SECONDS))
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)
    objects._open.cache_clear()
    return store


class Together:
    """Lets puts of outputs wait until AT_ONCE of them do."""

    def __init__(self, key: str) -> None:
        self.key, self.now, self.most = key, 0, 0
        self._lock, self._are_together = threading.Lock(), threading.Event()

    def __call__(self, application: Any, environment: Environment, start_response: Any) -> Iterable[bytes] | None:
        name = environment["PATH_INFO"].rpartition("/")[2]
        if environment["REQUEST_METHOD"] != "PUT" or not name.isdecimal() or environment["QUERY_STRING"]:
            return None
        with self._lock:
            self.now += 1
            self.most = max(self.now, self.most)
            if self.now == AT_ONCE:
                self._are_together.set()
        self._are_together.wait(SECONDS)
        self._are_together.set()
        try:
            body = b"".join(application(environment, start_response))
        finally:
            with self._lock:
                self.now -= 1
        return [body]


def test_outputs_of_a_task_are_put_together(folder: Path, patient: Store) -> None:
    key = object_name(folder).key
    patient.fault = together = Together(key)
    parts_stage(folder)
    assert together.most == AT_ONCE == bucket_store._UPLOADS
    found = {name: data for name, data in patient.tree(key).items() if "/" not in name}
    assert sorted(found) == [f"{number:02}" for number in range(OUTPUTS)]
    assert all(data.startswith(f"{int(name):09}".encode()) for name, data in found.items())
    assert len(found[f"{LARGE:02}"]) > objects.PART_BYTES


def has_record(store: Store, folder: Path) -> bool:
    """Whether there is a done record of the task."""
    return any(b'"task":"all"' in data for data in store.tree(object_name(folder).key).values())


@pytest.mark.parametrize("refused", [(3, 5, 6), (5, LARGE), (LARGE,)])
def test_a_put_that_fails_leaves_no_record(folder: Path, patient: Store, refused: tuple[int, ...]) -> None:
    answer = refuse("403 Forbidden", "AccessDenied")

    def refuse_some(application: Any, environment: Environment, start_response: Any) -> Iterable[bytes] | None:
        is_put = environment["REQUEST_METHOD"] in ("PUT", "POST")
        is_one = is_put and environment["PATH_INFO"].endswith(tuple(f"/{number:02}" for number in refused))
        return answer(application, environment, start_response) if is_one else None

    patient.fault = refuse_some
    with pytest.raises(UsageError, match=rf"^cannot write {object_name(folder).url}/{refused[0]:02}: no permission"):
        parts_stage(folder)
    patient.fault = None
    assert not has_record(patient, folder)
    parts_stage(folder)
    assert has_record(patient, folder)
