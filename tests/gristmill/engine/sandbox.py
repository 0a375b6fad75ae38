"""A sandbox for tasks: each runs in an empty folder that holds copies of its declared inputs and nothing else.

What a task opens without declaring it is then missing, whichever library opens it. An audit hook sees to the rest: the
files that Python opens while the driver plans.
"""

import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gristmill.budget import Budget
from gristmill.engine import run as engine_run
from gristmill.engine.executors.staging import Scratch
from gristmill.engine.records import DoneRecord, Ledger
from gristmill.engine.task import Task, paths_read_by, relocate
from gristmill.engine.worker import run_task
from gristmill.io.files import STATE_DIR, rejects_path
from gristmill.storage.files import FileInfo


class Sandbox:
    """Runs tasks in sandboxes; `tasks` counts them, `opened` lists the files that the driver opened between them."""

    def __init__(self, root: Path) -> None:
        self.root, self.tasks = root, 0
        self.opened: list[str] = []
        self._is_planning = False

    def run_task(
        self,
        step: str,
        task: Task,
        identity: dict[str, str],
        ledger: Ledger,
        inputs: dict[Path, FileInfo],
        scratch: Scratch | None = None,
        budget: Budget | None = None,
    ) -> DoneRecord:
        """As worker.run_task, in a sandbox."""
        self._is_planning, self.tasks = False, self.tasks + 1
        with tempfile.TemporaryDirectory() as folder:
            self._run(Path(folder), task)
        done = dataclasses.replace(task, function=_already_run, arguments={"result": self._result}, memory=None)
        record = run_task(step, done, identity, ledger, inputs, scratch, budget)
        self._is_planning = True
        return record

    def _run(self, folder: Path, task: Task) -> None:
        for path in paths_read_by([task]):
            target = _inside(folder, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                shutil.copy2(path, target)  # a missing input is an error: a task says None for it
        budget = {} if task.memory is None else {"memory": task.memory}
        self._result = task.function(**relocate(task.arguments, lambda path: _inside(folder, path)), **budget)
        for output in (*task.outputs, *map(rejects_path, task.outputs)):
            written = _inside(folder, output)
            if written.exists():
                output.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(written, output)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Audit hook: note the files below `root` that are opened while the driver plans."""
        if event == "open" and self._is_planning and isinstance(arguments[0], str):
            path = os.path.abspath(arguments[0])
            if path.startswith(str(self.root)) and STATE_DIR not in path and Path(path).is_file():
                self.opened.append(path)

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Context in which files that are opened outside of tasks are noted."""
        self._is_planning = True
        try:
            yield
        finally:
            self._is_planning = False


@contextmanager
def sandboxed(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """Context: stages with workers=1 run tasks in sandboxes; fails if planning has opened a file below `root`."""
    sandbox = Sandbox(root)
    monkeypatch.setattr(engine_run, "run_task", sandbox.run_task)
    sys.addaudithook(sandbox.audit)
    with sandbox.planning():
        yield sandbox
    assert not sandbox.opened, sandbox.opened


def _inside(folder: Path, path: Path) -> Path:
    return folder / path.absolute().relative_to("/")


def _already_run(result: Any) -> Any:
    return result
