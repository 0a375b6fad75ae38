"""Task and run_stage: skip the tasks already done, run the others, and check that counts are conserved."""

import hashlib
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from gristmill.counts import READ, Counts
from gristmill.engine.claims import reject_overlapping_folders as reject_overlapping_folders
from gristmill.engine.executor import Call, execute
from gristmill.engine.ledger import Ledger, LedgerEntry
from gristmill.engine.options import RunOptions
from gristmill.engine.options import parse_size as parse_size
from gristmill.engine.report import note_count_mismatch as note_count_mismatch
from gristmill.errors import OutputError
from gristmill.io.files import rejects_path, remove_partial_files, walk
from gristmill.io.unfinished import STATE_DIR as STATE_DIR


class MemoryBudget(int):
    """Bytes of memory that a task may use. An argument of this type does not change the task's fingerprint."""

    def __repr__(self) -> str:
        return "MemoryBudget"


@dataclass(frozen=True)
class Task:
    """Unit of work of a stage: a module-level function, its arguments, its input files and its output files.

    The function returns its Counts and writes each output atomically. `size` is the bytes it reads,
    for the progress bar.
    """

    name: str
    function: Callable[..., Counts]
    arguments: dict[str, Any]
    inputs: tuple[Path, ...]
    outputs: tuple[Path, ...]
    size: int = 0

    def fingerprint(self) -> str:
        """SHA-256 of all that the outputs depend on: size and mtime of the inputs, arguments, output paths, code."""
        stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in self.inputs]
        code = code_version(inspect.getfile(self.function))
        text = repr((self.function.__qualname__, sorted(self.arguments.items()), self.outputs, stats, code))
        return hashlib.sha256(text.encode()).hexdigest()


def run_stage(
    name: str,
    tasks: Sequence[Task],
    state: Path,
    options: RunOptions,
    stale_prefix: str | None = "",
    *,
    summary: bool = True,
    started: float | None = None,
) -> Counts:
    """Run the tasks that are not done, append each to the ledger, and return the counts of all tasks.

    Removes outputs of earlier runs that these tasks do not write, because the next stage would read them.

    Args:
        name: Name of the stage and of its ledger, `state`/`name`.jsonl.
        tasks: All tasks of the stage, done or not, with unique names.
        state: Folder of the ledger, usually STATE_DIR in the output folder.
        options: Workers, memory and limits.
        stale_prefix: Remove outputs of tasks no longer planned if their name has this prefix; None: keep all.
        summary: Print a line with the counts and the speed; a step of a larger stage prints none.
        started: time.perf_counter() at the start of the stage's first step; now by default.

    Raises:
        ConservationError: the counts of a task do not add up; the task is not recorded as done.
        TooManyMalformed: more than `options.max_malformed` of the records of all tasks are malformed.
    """
    start = time.perf_counter() if started is None else started
    ledger = Ledger(state / f"{name}.jsonl")
    entries = ledger.read()
    _remove_stale_outputs(tasks, entries, stale_prefix)
    # Taken before the inputs are read: a task whose input changes meanwhile runs again next time.
    fingerprints = {task.name: task.fingerprint() for task in tasks}
    todo = [task for task in tasks if not is_done(task, entries, fingerprints[task.name])]
    remove_partial_files(outputs_of(todo))
    for task, counts in _run_with_progress(name, todo, options):
        counts.check_conserved(f"{name} {task.name}")
        written = [*task.outputs, *(path for path in map(rejects_path, task.outputs) if path.exists())]
        outputs = {os.path.abspath(path): path.stat().st_size for path in written}
        entries[task.name] = LedgerEntry(task.name, fingerprints[task.name], outputs, counts)
        ledger.append(entries[task.name])
    total = Counts({}, [])
    for task in tasks:
        total.merge(entries[task.name].counts)
    if summary and not options.quiet:
        _print_summary(name, tasks, todo, total, time.perf_counter() - start)
    total.check_malformed(name, options.max_malformed)
    return total


def is_done(task: Task, entries: dict[str, LedgerEntry], fingerprint: str) -> bool:
    """Whether the ledger has an entry of the task with this fingerprint, and its outputs are intact."""
    entry = entries.get(task.name)
    return entry is not None and entry.fingerprint == fingerprint and outputs_intact(entry)


def outputs_intact(entry: LedgerEntry) -> bool:
    """Whether every output exists with its recorded size."""
    sizes = ((Path(path), size) for path, size in entry.outputs.items())
    return all(path.is_file() and path.stat().st_size == size for path, size in sizes)


def outputs_of(tasks: Iterable[Task]) -> list[Path]:
    """The output files of all tasks."""
    return [path for task in tasks for path in task.outputs]


def reject_unknown_files(folder: Path, planned: Iterable[Path], suffixes: tuple[str, ...], ledger: Path) -> None:
    """Raise OutputError if `folder` has files with these `suffixes` that are neither `planned` nor in the ledger.

    The next stage reads the whole folder, so files of another run would become part of its corpus.
    """
    known = {os.path.abspath(path) for path in planned}
    unknown = {os.path.abspath(path) for path in walk(folder) if path.name.endswith(suffixes)} - known
    for wait in (0.0, 1.0):  # a concurrent process writes its file first and its line in the ledger just after
        time.sleep(wait if unknown else 0.0)
        unknown -= {path for entry in Ledger(ledger).read().values() for path in entry.outputs}
    if unknown:
        raise OutputError(
            f"{folder} holds {len(unknown):,} files that {ledger.stem} did not write, {Path(min(unknown)).name!r} "
            "the first: it may be another run's output. Give an empty or new folder, or remove them."
        )


@cache
def code_version(file: str) -> str:
    """SHA-256 of the sources that a task's result may depend on.

    These are `file`, which defines the task's function, and all modules of its top-level package and of
    gristmill. For a function from outside this project: `file` and gristmill.
    """
    gristmill, own = Path(__file__).resolve().parents[1], Path(file).resolve()
    package = next((folder for folder in own.parents if folder.parent == gristmill.parent), None)
    folders = {gristmill, package} if package else {gristmill}
    sources = sorted({own, *(path for folder in folders for path in folder.rglob("*.py"))})
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def _remove_stale_outputs(tasks: Sequence[Task], entries: dict[str, LedgerEntry], prefix: str | None) -> None:
    """Remove recorded outputs that `tasks` do not write, of planned tasks and of tasks whose name has the prefix."""
    planned = {task.name for task in tasks}
    kept = {os.path.abspath(path) for output in outputs_of(tasks) for path in (output, rejects_path(output))}
    for name, entry in entries.items():
        if name in planned or (prefix is not None and name.startswith(prefix)):
            for path in set(entry.outputs) - kept:
                Path(path).unlink(missing_ok=True)


def _run_with_progress(name: str, tasks: Sequence[Task], options: RunOptions) -> Iterator[tuple[Task, Counts]]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=options.quiet or not console.is_terminal,
    ) as progress:
        bar = progress.add_task(name.partition("-")[0], total=sum(task.size for task in tasks))
        calls = [Call(task.function, task.arguments) for task in tasks]
        for position, counts in execute(calls, options.processes):
            yield tasks[position], counts
            progress.advance(bar, tasks[position].size)


def _print_summary(name: str, tasks: Sequence[Task], todo: Sequence[Task], total: Counts, seconds: float) -> None:
    """Print one line: documents read, documents per outgoing reason, megabytes per second, tasks skipped."""
    outgoing = {reason: total.total(reason).documents for reason in total.reasons}
    read = outgoing.pop(READ, 0)
    parts = " + ".join(f"{count:,} {reason}" for reason, count in outgoing.items() if count)
    megabytes = total.total(READ).bytes / 1e6
    speed = f"{megabytes:,.1f} MB in {seconds:.1f} s ({megabytes / seconds:,.1f} MB/s)"
    rate = speed if megabytes else f"{seconds:.1f} s"
    skipped = f", {len(tasks) - len(todo)} of {len(tasks)} tasks done before" if len(todo) < len(tasks) else ""
    done = rate + skipped if todo else "done already, nothing to do"
    print(f"{name.partition('-')[0]}: {read:,} read = {parts or 'nothing'} | {done}", file=sys.stderr, flush=True)
