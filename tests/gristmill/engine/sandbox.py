"""A sandbox for tasks: each runs in an empty folder that holds copies of its declared inputs and nothing else.

Wherever else a task or the driver looks, it finds zeros: the files below the given folders, and those that tasks have
written, have their sizes and times, but not their contents, until the sandbox is left. So what is opened without being
declared is missing or wrong, whichever library opens it. An audit hook names the files that Python opens.
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

from gristmill.engine import run as engine_run
from gristmill.engine.execution.call import Call
from gristmill.engine.execution.task_run import TaskRun
from gristmill.engine.run import run_task
from gristmill.engine.staleness.ledger import Ledger
from gristmill.engine.staleness.records import DoneRecord
from gristmill.engine.task import Task, paths_read_by, relocate
from gristmill.io.files import STATE_DIR, rejects_path


class Sandbox:
    """Runs tasks in sandboxes; `tasks` counts them, `opened` lists the files below `roots` that were opened otherwise.

    `store` is a folder for the contents of files. The driver may read and write files with the names `plans`.
    """

    def __init__(self, roots: tuple[Path, ...], store: Path, plans: tuple[str, ...]) -> None:
        self.roots, self.tasks = roots, 0
        self.opened: list[str] = []
        self._store, self._plans = store, plans
        self._hidden: dict[Path, tuple[Path, int]] = {}  # by real path: its content, and the inode of the zeros
        self._is_watching = False

    def run_task(self, this: TaskRun, identity: dict[str, str], ledger: Ledger) -> DoneRecord:
        """Run a task as the engine does, in a sandbox."""
        self.tasks += 1
        task = this.task
        with self._unwatched():
            with tempfile.TemporaryDirectory() as folder:
                result = self._run(Path(folder), task)
            done = dataclasses.replace(task, function=_already_run, arguments={"result": result}, memory=None)
            record = run_task(dataclasses.replace(this, task=done), identity, ledger)
            for path in (*task.outputs, *map(rejects_path, task.outputs)):
                self._hide(path)
        return record

    def _run(self, folder: Path, task: Task) -> Any:
        for path in paths_read_by([task]):
            target = _inside(folder, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                shutil.copy2(self._content_of(path), target)  # a missing input is an error: a task says None for it
        budget = {} if task.memory is None else {"memory": task.memory}
        arguments = relocate(task.arguments, lambda path: _inside(folder, path))
        self._is_watching = True
        result = task.function(**arguments, **budget)
        self._is_watching = False
        for output in (*task.outputs, *map(rejects_path, task.outputs)):
            written = _inside(folder, output)
            if written.exists():
                output.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(written, output)
        return result

    def _hide(self, path: Path) -> None:
        """Put zeros in place of a file's content."""
        real = path.resolve()
        if not real.is_file() or self._content_of(real) != real or real.name in self._plans:
            return
        content, status = self._store / str(len(self._hidden)), real.stat()
        shutil.move(real, content)
        with real.open("wb") as file:
            file.truncate(status.st_size)
        os.utime(real, ns=(status.st_atime_ns, status.st_mtime_ns))
        self._hidden[real] = content, real.stat().st_ino

    def _content_of(self, path: Path) -> Path:
        """The file with the content of a file: itself, if it was not hidden or has been replaced since."""
        real = path.resolve()
        content, inode = self._hidden.get(real, (real, 0))
        return content if real.exists() and real.stat().st_ino == inode else real

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Audit hook: note the files below the roots that are opened while the driver plans or a task runs."""
        if event == "open" and self._is_watching and isinstance(arguments[0], str):
            path = Path(os.path.abspath(arguments[0]))
            is_state = STATE_DIR in path.parts and not any(part.endswith(".work") for part in path.parts)
            is_known = is_state or path.name.startswith(self._plans) or not any(map(path.is_relative_to, self.roots))
            if not is_known and path.is_file():
                self.opened.append(str(path))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which all files are hidden, and those that are opened are noted."""
        for path in [path for root in self.roots for path in root.rglob("*") if STATE_DIR not in path.parts]:
            self._hide(path)
        self._is_watching = True
        try:
            yield
        finally:
            self._is_watching = False
            for path, (content, _) in self._hidden.items():
                if self._content_of(path) == content:
                    content.replace(path)

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        self._is_watching = False
        try:
            yield
        finally:
            self._is_watching = True


@contextmanager
def sandboxed(*roots: Path, plans: tuple[str, ...] = ()) -> Iterator[Sandbox]:
    """Context: stages with workers=1 run tasks in sandboxes; fails if a file below a root was opened otherwise."""
    with tempfile.TemporaryDirectory() as store, pytest.MonkeyPatch.context() as patched:
        sandbox = Sandbox(roots, Path(store), plans)
        patched.setattr(engine_run, "run_task", sandbox.run_task)
        run_here(patched)
        sys.addaudithook(sandbox.audit)
        with sandbox.watching():
            yield sandbox
    assert not sandbox.opened, sandbox.opened


def run_here(patched: pytest.MonkeyPatch) -> None:
    """Let tasks of a user's function run as any other, in this process with workers=1."""
    patched.setattr(engine_run, "Call", lambda function, arguments, _, this, *__: Call(function, arguments, "", this))


def _inside(folder: Path, path: Path) -> Path:
    return folder / path.absolute().relative_to("/")


def _already_run(result: Any) -> Any:
    return result
