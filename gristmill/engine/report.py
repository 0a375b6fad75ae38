"""Messages of a run of a stage: its progress, the reasons why tasks run again, and a summary line."""

import re
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

from gristmill.counts import INCOMING, READ, Counts
from gristmill.engine.ledger import DoneRecord, Ledger
from gristmill.engine.options import RunOptions
from gristmill.engine.task import Task
from gristmill.storage.files import list_names
from gristmill.storage.lock import seconds_in
from gristmill.storage.stores import store_of
from gristmill.wording import count_of

_NOTE = ".step"
_HASH = re.compile(r"(?<=[0-9a-f]{8})[0-9a-f]+")  # but for its first digits
_LINE_SECONDS = 60  # between two lines of progress in a log
_PASSED_ON = ("written", "kept", "signed", "unique", "clustered", "sampled")  # reasons that a summary names first


class StepNote(msgspec.Struct, frozen=True):
    """The step that a process works on alone, for `gristmill status`; with --shard it is in the queue."""

    name: str
    tasks: int
    workers: int  # 0: not known, as Ray's nodes come and go
    loose: str  # folder of the done records
    before: int  # done records there as the step began

    @classmethod
    def read(cls, state: Path, run: str) -> tuple["StepNote", int] | None:
        """The step of a run whose state is in a folder, and how many of its tasks are done; None if it tells none."""
        try:
            note = msgspec.json.decode((state / f"{run}{_NOTE}").read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return None
        return note, max(0, _records_in(state / note.loose) - note.before)


def _records_in(folder: Path) -> int:
    return sum(name.endswith(".json") for name in list_names(folder))


@contextmanager
def step_progress(
    step: str, tasks: Sequence[Task], options: RunOptions, run: str, ledger: Ledger
) -> Iterator[Callable[[int, int], None]]:
    """Context: tell those who look at this process's terminal or log, and `gristmill status`; see _progress_bar."""
    with _step_note(step, run, ledger, len(tasks), options), _progress_bar(step, tasks, options.quiet) as advance:
        yield advance


@contextmanager
def _step_note(step: str, run: str, ledger: Ledger, tasks: int, options: RunOptions) -> Iterator[None]:
    """Context: a file next to the ledger says which step of a run is at work; none where it would cost requests."""
    path = ledger.file.with_name(f"{run}{_NOTE}")
    if options.shard or store_of(path).needs_copies:
        yield
        return
    workers = 0 if options.executor == "ray" else options.processes
    note = StepNote(step, tasks, workers, ledger.loose.name, _records_in(ledger.loose))
    with suppress(OSError):  # tasks will say what is wrong
        path.write_bytes(msgspec.json.encode(note))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _progress_bar(name: str, tasks: Sequence[Task], quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Context: a progress bar of the bytes that tasks read; yields the function to call with those of each task,
    and with how many were tried again so far.

    Not on a terminal, it is a line a minute. Prints the notices of the tasks first.
    """
    for task in tasks:
        if task.notice and not quiet:
            print(f"{name.partition(':')[0]}: {task.notice}", file=sys.stderr, flush=True)
    if not quiet and not Console(stderr=True).is_terminal:
        lines = _LogLines(name, len(tasks), sum(task.size for task in tasks))
        with log_lines(lines.line):
            yield lines.advance
        return
    size = sum(task.size for task in tasks)
    counted = (DownloadColumn(), TransferSpeedColumn()) if size else (MofNCompleteColumn(), TextColumn("tasks"))
    columns = (TextColumn("{task.description}"), BarColumn(), *counted)
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=quiet) as progress:
        bar = progress.add_task(name, total=size or len(tasks))
        yield lambda done, _: progress.advance(bar, done if size else 1)


def log_seconds() -> float:
    """Seconds between two lines of a log; GRISTMILL_LOG_SECONDS, or a minute."""
    return seconds_in("GRISTMILL_LOG_SECONDS", _LINE_SECONDS)


@contextmanager
def log_lines(line: Callable[[], str]) -> Iterator[None]:
    """Context: print what `line` returns once a minute (GRISTMILL_LOG_SECONDS), in a thread, however long tasks last.

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
        """How far the step is now."""
        seconds = time.monotonic() - self.started
        share = self.bytes_done / self.size if self.size else self.tasks_done / self.tasks
        worked = timedelta(seconds=round(seconds))
        left = f"{timedelta(seconds=round(seconds / share - seconds))} left" if share else f"{worked} so far"
        return (
            f"{self.name}: {self.tasks_done:,} of {count_of(self.tasks, 'task')}, {self.bytes_done / 1e6:,.0f} of "
            f"{self.size / 1e6:,.0f} MB, {self.bytes_done / 1e6 / max(seconds, 1e-9):,.1f} MB/s, {left}"
            + (f", {count_of(self.retried, 'task')} retried" if self.retried else "")
        )


def explain(stage: str, reasons: Sequence[tuple[str, str]], tasks: int, details: bool) -> None:
    """Print why tasks run, by name: with `details` each on a line, else the first of them and how many there are."""
    shown = reasons if details else reasons[:1]
    for name, reason in shown:
        more = (
            f" ({len(reasons)} of {count_of(tasks, 'task')} to run; --explain_tasks lists them)"
            if reasons[len(shown) :]
            else ""
        )
        said = reason if details else _HASH.sub("…", reason)
        print(f"{stage}: {name}: {said}{more}", file=sys.stderr, flush=True)


def rerun_reason(identity: dict[str, str], record: DoneRecord | None) -> str:
    """Why a task runs: it is new, its identity differs from its record, or an output was changed."""
    if record is None:
        return "no earlier run finished it"
    changed = [name for name in identity | record.identity if identity.get(name) != record.identity.get(name)]
    if not changed:
        return "its output was removed or changed"
    name = changed[0]
    before = record.identity.get(name, "none")
    now = identity.get(name, "none")
    return f"{name} was {before[:60]}, is now {now[:60]}" + (f" (and {len(changed) - 1} more)" if changed[1:] else "")


def print_summary(stage: str, counts: Counts, ran: int, tasks: int, seconds: float) -> None:
    """Print one line: documents read and repeated, those per outgoing reason, files not read, speed, tasks skipped."""
    names = sorted(counts.reasons, key=lambda reason: (reason not in _PASSED_ON, reason))
    found = {reason: counts.total(reason).documents for reason in names}
    some = {READ: found.get(READ, 0)} | {reason: count for reason, count in found.items() if count}
    incoming, outgoing = (
        " + ".join(f"{count:,} {reason}" for reason, count in some.items() if (reason in INCOMING) == is_incoming)
        for is_incoming in (True, False)
    )
    megabytes = counts.total(READ).bytes / 1e6
    speed = f"{megabytes:,.1f} MB in {seconds:.1f} s ({megabytes / seconds:,.1f} MB/s)"
    rate = speed if megabytes else f"{seconds:.1f} s"
    skipped = f", {tasks - ran} of {count_of(tasks, 'task')} done before" if ran < tasks else ""
    done = rate + skipped if ran else "done already, nothing to do"
    unread = counts.unread_files()
    files = f" | files not read: {unread}" if unread else ""
    files += f" | left out: {counts.damaged_files()}" if counts.damaged else ""
    print(f"{stage}: {incoming} = {outgoing or 'nothing'}{files} | {done}", file=sys.stderr, flush=True)


def note_count_mismatch(n_docs: int, counts: Counts, options: RunOptions) -> None:
    """Print a note if `n_docs` from the command line differs from the number of documents read; 0 or less: unknown."""
    found = counts.total(READ).documents
    if n_docs > 0 and n_docs != found and not options.quiet:
        print(f"note: n_docs is {n_docs:,}, but {found:,} documents were found; all are used", file=sys.stderr)
