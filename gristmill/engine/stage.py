"""Task and run_stage: what is done is skipped, what is not is run, and the books must balance."""

import hashlib
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from gristmill.counts import READ, Counts
from gristmill.engine.executor import Call, execute
from gristmill.engine.ledger import Entry, Ledger
from gristmill.errors import OutputError, UsageError
from gristmill.io.files import rejects_path, remove_partial_files, walk

STATE_DIR = ".gristmill"  # the folder, beside a stage's output, that holds its ledger and work files
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@tyro.conf.configure(tyro.conf.arg(name=""))  # on a command line --workers, not --options.workers
@dataclass(frozen=True)
class RunOptions:
    """Resources and limits of a stage's run; none of them changes a byte of its output."""

    workers: int | None = None
    """Processes to use; all cores by default."""
    memory: str = "auto"
    """Memory that all workers may take together, such as 512MiB or 4GiB; by default half of what is free."""
    max_malformed: float = 0.001
    """Stop when more than this fraction of the records read is malformed."""
    quiet: bool = False
    """Print neither progress nor the line that says what was done."""

    @property
    def processes(self) -> int:
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"--workers {self.workers}: wanted 1 or more")
        return self.workers or len(os.sched_getaffinity(0))

    @property
    def memory_bytes(self) -> int:
        """The budget in bytes."""
        return psutil.virtual_memory().available // 2 if self.memory == "auto" else parse_size(self.memory)


class MemoryBudget(int):
    """Bytes of memory a task may take: an argument that changes nothing in what it writes, nor in its fingerprint."""

    def __repr__(self) -> str:
        return "MemoryBudget"


@dataclass(frozen=True)
class Task:
    """A piece of work: a module-level function, its arguments, the files it reads and those it writes.

    The function returns Counts, and its outputs appear whole or not at all.
    """

    name: str
    function: Callable[..., Counts]
    arguments: dict[str, Any]
    inputs: tuple[Path, ...]
    outputs: tuple[Path, ...]
    size: int = field(default=0)  # bytes to read, for the progress bar

    def fingerprint(self) -> str:
        """What the outputs depend on: inputs' size and mtime, arguments, code."""
        stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in self.inputs]
        code = code_version(inspect.getfile(self.function))
        text = repr((self.function.__qualname__, sorted(self.arguments.items()), self.outputs, stats, code))
        return hashlib.sha256(text.encode()).hexdigest()


def run_stage(
    name: str,
    tasks: Sequence[Task],
    state: Path,
    options: RunOptions,
    scope: str | None = "",
    *,
    summary: bool = True,
    since: float | None = None,
) -> Counts:
    """Run the tasks that are not done, write each into the ledger, and balance the books of all.

    `state` is the folder beside the output that holds `name`.jsonl, the ledger. What earlier runs
    wrote for tasks within `scope` (a prefix of their names; None for none) that this one does not
    plan is removed: the output of an input that is gone would be read as if it were not. A step of a
    larger stage gives no `summary`; the stage's own counts the time `since` its first step began.
    """
    start = time.perf_counter() if since is None else since
    ledger = Ledger(state / f"{name}.jsonl")
    entries = ledger.read()
    _remove_stale_outputs(tasks, entries, scope)
    fingerprints = {task.name: task.fingerprint() for task in tasks}  # of the inputs as they are before we read them
    todo = [task for task in tasks if not is_done(task, entries, fingerprints[task.name])]
    remove_partial_files(outputs_of(todo))
    for task, counts in _with_progress(name, todo, options):
        counts.check_conserved(f"{name} {task.name}")
        written = [*task.outputs, *(path for path in map(rejects_path, task.outputs) if path.exists())]
        outputs = {os.path.abspath(path): path.stat().st_size for path in written}
        entries[task.name] = Entry(task.name, fingerprints[task.name], outputs, counts)
        ledger.append(entries[task.name])
    total = Counts({}, [])
    for task in tasks:
        total.merge(entries[task.name].counts)
    if summary and not options.quiet:
        _say(name, tasks, todo, total, time.perf_counter() - start)
    total.check_malformed(name, options.max_malformed)
    return total


def is_done(task: Task, entries: dict[str, Entry], fingerprint: str) -> bool:
    """Whether the ledger holds this very task and its outputs are what they were then."""
    entry = entries.get(task.name)
    return entry is not None and entry.fingerprint == fingerprint and outputs_intact(entry)


def outputs_intact(entry: Entry) -> bool:
    """Whether every output is there and of the size it had when the task ended."""
    sizes = ((Path(path), size) for path, size in entry.outputs.items())
    return all(path.is_file() and path.stat().st_size == size for path, size in sizes)


def outputs_of(tasks: Iterable[Task]) -> list[Path]:
    """Everything that tasks write."""
    return [path for task in tasks for path in task.outputs]


def reject_overlapping_folders(source: Path, target: Path) -> None:
    """UsageError if what is written to `target` would be read as part of `source`, or overwrite it."""
    if target.resolve().is_relative_to(source.resolve()):
        raise UsageError(
            f"{target} is {source} or lies in it, and what is written there would be read as input: "
            "give an output folder beside it"
        )


def reject_unknown_files(folder: Path, planned: Iterable[Path], suffixes: tuple[str, ...], ledger: Path) -> None:
    """OutputError if `folder` holds data files that neither this plan nor the stage's ledger knows.

    The next stage reads the whole folder: what another run left there would join the corpus.
    """
    ours = {os.path.abspath(path) for path in planned}
    strangers = {os.path.abspath(path) for path in walk(folder) if path.name.endswith(suffixes)} - ours
    for wait in (0.0, 1.0):  # a process beside this one may have written a file, and not yet its line in the ledger
        time.sleep(wait if strangers else 0.0)
        strangers -= {path for entry in Ledger(ledger).read().values() for path in entry.outputs}
    if strangers:
        raise OutputError(
            f"{folder} holds {len(strangers):,} files that {ledger.stem} did not write, {Path(min(strangers)).name!r} "
            "the first: it may be another run's output. Give an empty or new folder, or remove them."
        )


def note_count_mismatch(n_docs: int, counts: Counts, options: RunOptions) -> None:
    """Point out that a number of documents given on the command line is not what was found."""
    found = counts.total(READ).documents
    if n_docs > 0 and n_docs != found and not options.quiet:
        print(
            f"note: n_docs was given as {n_docs:,}; {found:,} documents were found, and all are used", file=sys.stderr
        )


def parse_size(text: str) -> int:
    """Bytes of '512MiB', '4G', '1000000'.

    >>> parse_size("1.5KiB")
    1536
    """
    number = text.strip().rstrip("BbIi")
    unit = number[-1:].upper() if number[-1:].isalpha() else ""
    try:
        size = int(float(number.removesuffix(number[-1:] if unit else "")) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size <= 0:
        raise UsageError(f"{text!r} is not a size: wanted a number with a unit, such as 512MiB or 4GiB")
    return size


@cache
def code_version(file: str) -> str:
    """A hash of the sources that a task's result depends on: those of its own top-level package and the ground's."""
    ground, own = Path(__file__).resolve().parents[1], Path(file).resolve()
    package = next((folder for folder in own.parents if folder.parent == ground.parent), None)
    folders = {ground, package} if package else {ground}
    sources = sorted({own, *(path for folder in folders for path in folder.rglob("*.py"))})
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def _remove_stale_outputs(tasks: Sequence[Task], entries: dict[str, Entry], scope: str | None) -> None:
    """Remove outputs that earlier runs wrote for tasks that are planned otherwise or no longer."""
    planned = {task.name for task in tasks}
    kept = {os.path.abspath(path) for output in outputs_of(tasks) for path in (output, rejects_path(output))}
    for name, entry in entries.items():
        if name in planned or (scope is not None and name.startswith(scope)):
            for path in set(entry.outputs) - kept:
                Path(path).unlink(missing_ok=True)


def _with_progress(name: str, tasks: Sequence[Task], options: RunOptions) -> Iterator[tuple[Task, Counts]]:
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


def _say(name: str, tasks: Sequence[Task], todo: Sequence[Task], total: Counts, seconds: float) -> None:
    """One line: what came in, where it went, how fast."""
    went = {reason: total.total(reason).documents for reason in total.reasons}
    read = went.pop(READ, 0)
    parts = " + ".join(f"{count:,} {reason}" for reason, count in went.items() if count)
    megabytes = total.total(READ).bytes / 1e6
    speed = f"{megabytes:,.1f} MB in {seconds:.1f} s ({megabytes / seconds:,.1f} MB/s)"
    rate = speed if megabytes else f"{seconds:.1f} s"
    skipped = f", {len(tasks) - len(todo)} of {len(tasks)} tasks done before" if len(todo) < len(tasks) else ""
    done = rate + skipped if todo else "done already, nothing to do"
    print(f"{name.partition('-')[0]}: {read:,} read = {parts or 'nothing'} | {done}", file=sys.stderr, flush=True)
