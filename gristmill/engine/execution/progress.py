"""Progress of a step: a bar on a terminal, lines in a log, and a note for `gristmill status`."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from gristmill.engine.options import RunOptions
from gristmill.engine.task import Task
from gristmill.storage.files import names_ending
from gristmill.storage.lock import seconds_in
from gristmill.storage.stores import store_of
from gristmill.wording import count_of

_NOTE = ".step"
_LINE_SECONDS = 60  # between two lines of progress in a log


class StepNote(msgspec.Struct, frozen=True):
    """The step that a process works on alone, for `gristmill status`; with --shard it is in the queue."""

    name: str
    tasks: int
    workers: int  # 0: not known, as Ray's nodes come and go
    finished: str  # folder in which each finished task leaves a file
    before: int  # files there as the step began

    @classmethod
    def read(cls, state: Path, run: str) -> tuple["StepNote", int] | None:
        """Return the step that a run is at, and how many of its tasks are done; None if none is noted."""
        try:
            note = msgspec.json.decode((state / f"{run}{_NOTE}").read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return None
        done = count_records(state / note.finished) - note.before
        return note, max(0, done)


def count_records(folder: Path) -> int:
    """Return how many tasks have left a record in a folder."""
    return len(names_ending(folder, ".json"))


@contextmanager
def step_progress(
    step: str, tasks: Sequence[Task], options: RunOptions, run: str, finished: Path
) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of a step on the terminal or in the log, and to `gristmill status`; yields as _progress_bar.

    `finished` is the folder in which each finished task leaves a file.
    """
    with _step_note(step, run, finished, len(tasks), options), _progress_bar(step, tasks, options.quiet) as advance:
        yield advance


@contextmanager
def _step_note(step: str, run: str, finished: Path, tasks: int, options: RunOptions) -> Iterator[None]:
    """Note in a file next to the folder `finished` which step of a run is at work; not where it costs requests."""
    path = finished.with_name(f"{run}{_NOTE}")
    if options.shard or store_of(path).needs_copies:
        yield
        return
    workers = options.processes
    if options.executor == "ray":
        workers = 0
    note = StepNote(step, tasks, workers, finished.name, count_records(finished))
    with suppress(OSError):  # tasks will say what is wrong
        path.write_bytes(msgspec.json.encode(note))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _progress_bar(name: str, tasks: Sequence[Task], quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar of the bytes that tasks read; not on a terminal, it is a line a minute.

    Yields the function to call with the bytes of each task, and with how many were tried again so far. Prints the
    notices of the tasks first.
    """
    for task in tasks:
        if task.notice and not quiet:
            print(f"{name.partition(':')[0]}: {task.notice}", file=sys.stderr, flush=True)
    size = sum(task.size for task in tasks)
    console = Console(stderr=True)
    if not quiet and not console.is_terminal:
        lines = _LogLines(name, len(tasks), size)
        with log_lines(lines.line):
            yield lines.advance
        return
    columns = [TextColumn("{task.description}"), BarColumn()]
    if size:
        columns += [DownloadColumn(), TransferSpeedColumn()]
    else:
        columns += [MofNCompleteColumn(), TextColumn("tasks")]
    columns.append(TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        bar = progress.add_task(name, total=size or len(tasks))
        if size:
            yield lambda done, _: progress.advance(bar, done)
        else:
            yield lambda _, __: progress.advance(bar, 1)


def log_seconds() -> float:
    """Return the seconds between two lines of a log; GRISTMILL_LOG_SECONDS, or a minute."""
    return seconds_in("GRISTMILL_LOG_SECONDS", _LINE_SECONDS)


@contextmanager
def log_lines(line: Callable[[], str]) -> Iterator[None]:
    """Print what `line` returns once a minute (GRISTMILL_LOG_SECONDS), in a thread, however long tasks last.

    A task may run in this process: nobody else has time to look at the clock.
    """
    ended = threading.Event()
    seconds = log_seconds()

    def work() -> None:
        while not ended.wait(seconds):
            print(line(), file=sys.stderr, flush=True)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _LogLines:
    """Progress for logs: what is done, and how long the rest will take."""

    def __init__(self, name: str, tasks: int, size: int) -> None:
        self.name = name
        self.tasks = tasks
        self.size = size
        self.tasks_done = 0
        self.bytes_done = 0
        self.retried = 0
        self.started = time.monotonic()

    def advance(self, size: int, retried: int) -> None:
        """Count a task that has read `size` bytes; `retried` tasks were tried again so far."""
        self.tasks_done = self.tasks_done + 1
        self.bytes_done = self.bytes_done + size
        self.retried = retried

    def line(self) -> str:
        """Return how far the step is now."""
        seconds = time.monotonic() - self.started
        share = self.tasks_done / self.tasks
        if self.size:
            share = self.bytes_done / self.size
        if share:
            left = f"{timedelta(seconds=round(seconds / share - seconds))} left"
        else:
            left = f"{timedelta(seconds=round(seconds))} so far"
        if self.retried:
            left += f", {count_of(self.retried, 'task')} retried"
        megabytes = self.bytes_done / 1e6
        return (
            f"{self.name}: {self.tasks_done:,} of {count_of(self.tasks, 'task')}, {megabytes:,.0f} of "
            f"{self.size / 1e6:,.0f} MB, {megabytes / max(seconds, 1e-9):,.1f} MB/s, {left}"
        )
