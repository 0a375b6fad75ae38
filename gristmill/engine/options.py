"""Options of a stage's run that change no byte of its output: workers, memory, limits, messages."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import tyro

from gristmill.budget import free_memory, usable_cores
from gristmill.errors import UsageError
from gristmill.paths import paths_in
from gristmill.storage.files import is_folder, reject_remote
from gristmill.storage.stores import store_of

_PROCESSES_A_CORE = 2
_MIN_WITHOUT_UNIT = 1 << 20  # fewer bytes of memory are a number whose unit was forgotten
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class TaskShard:
    """Process `index` of about `count`: which tasks it takes first."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "TaskShard":
        """Parse i/n, counted from 0 or from 1. Raises UsageError.

        >>> TaskShard.parse("3/8"), TaskShard.parse("8/8")
        (TaskShard(index=3, count=8), TaskShard(index=0, count=8))
        """
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and 0 <= int(index) <= int(count) and int(count)):
            raise UsageError(f"--shard {text}: expected i/n, such as 3/8: process 3 of 8, counted from 0 or from 1")
        return cls(int(index) % int(count), int(count))


@tyro.conf.configure(tyro.conf.arg(name=""))  # on a command line --workers, not --options.workers
@dataclass(frozen=True)
class RunOptions:
    """Resources and limits of a stage's run; none of them changes a byte of its output."""

    workers: int | None = None
    """Worker processes; by default one per core, or as many as the container's quota allows; at most two per core. With
    Ray, the number of shares that a node's memory is divided into: each task takes one share and one core."""
    memory: str = "auto"
    """Memory budget of all workers together, such as 512MiB or 4GiB; by default half of the free memory, within the
    container's limit. With Ray, the budget of each node."""
    max_malformed: float = 0.001
    """Fail if more than this fraction of the records, or of their bytes, is malformed, or if more than this fraction of
    a raw corpus is in damaged files. Below the limit, damaged files are left out; 0 allows none."""
    accept_versions: bool = False
    """Keep what other versions of Gristmill or of libraries wrote (pyarrow, zlib, Unicode's tables, …), though today's
    may write other bytes. What has to be written anew is written by today's."""
    retry_failed: bool = False
    """Run the tasks again in which functions, or the tokenizer, failed on documents, or that left out damaged files."""
    quiet: bool = False
    """Print no progress and no summary line."""
    explain: bool = False
    """Print why tasks run again: which input, argument or version differs from the last run."""
    explain_tasks: bool = False
    """Print the same for each task."""

    scratch: Path | None = None
    """Folder for local copies of files in a bucket while tasks work on them; by default the folder for temporary files.
    """
    scratch_size: str = ""
    """Disk space, such as 200GiB, for tasks that run at the same time in this process, or on one node with Ray. Each
    task reserves the size of its inputs twice, for inputs and outputs, and waits until there is room; by default there
    is no limit."""

    shard: str = ""
    """Run as process i of n, such as 3/8, on one or several machines that see the same folders. One process coordinates
    the others. Start each with the same command and its own i."""
    executor: Literal["local", "ray"] = "local"
    """Where tasks run: in processes of this machine, or on a Ray cluster (needs gristmill[ray])."""
    address: str = ""
    """Address of the Ray cluster; by default RAY_ADDRESS, or a new cluster on this machine."""
    of_run: tyro.conf.Suppress[Any] = None
    """The executor and scratch folder of the run that the stage is part of; none: the stage has its own."""

    def check(self) -> None:
        """Raise UsageError if an option is out of range."""
        assert self.processes > 0 and self.memory_bytes > 0 and self.scratch_bytes != 0
        if self.scratch:
            reject_remote(self.scratch, option="--scratch")
        if self.scratch and not is_folder(self.scratch) and os.access(self.scratch, os.F_OK):  # a device, too
            raise UsageError(f"--scratch {self.scratch}: expected a folder, got a file")
        if self.shard:
            TaskShard.parse(self.shard)
        if self.address and self.executor != "ray":
            raise UsageError(f"--address {self.address}: only --executor ray connects to a cluster: add it")
        if self.shard and self.executor == "ray":
            raise UsageError("--shard and --executor ray: give one, as Ray shares the tasks among its nodes itself")
        if self.executor == "ray" and not find_spec("ray"):
            raise UsageError("--executor ray: Ray is not installed. Try: pip install 'gristmill[ray]'")
        if not (isfinite(self.max_malformed) and 0 <= self.max_malformed <= 1):
            raise UsageError(f"--max_malformed {self.max_malformed}: expected a fraction from 0 to 1, such as 0.001")

    def check_scratch(self, arguments: Any) -> None:
        """Raise UsageError for a size if `arguments`, all that a command works with, name no object to fetch."""
        if self.scratch_size and not any(store_of(path).needs_copies for path in paths_in(arguments)):
            raise UsageError(
                f"--scratch_size {self.scratch_size} has no effect: it limits copies of files in a bucket, and all "
                "paths are local; leave it out"
            )

    @property
    def processes(self) -> int:
        """Return number of worker processes, on a node with Ray. Raises UsageError if fewer than one was asked for."""
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"--workers {self.workers}: expected 1 or more")
        cores = usable_cores()
        if self.executor == "ray":  # on nodes that may have more cores than this machine
            return self.workers or cores
        return min(self.workers or cores, _PROCESSES_A_CORE * cores)

    @property
    def memory_bytes(self) -> int:
        """Return the memory budget of all workers together, in bytes. Raises UsageError if `memory` is not a size."""
        if self.memory == "auto":
            return free_memory() // 2
        size = parse_size(self.memory, "--memory")
        if size < _MIN_WITHOUT_UNIT and self.memory.strip()[-1].isdecimal():
            raise UsageError(f"--memory {self.memory} is a number of bytes: expected one with a unit, such as 4GiB")
        return size

    @property
    def scratch_bytes(self) -> int | None:
        """Return the size of the scratch folder in bytes; None: not limited. Raises UsageError if it is not a size."""
        if not self.scratch_size:
            return None
        return parse_size(self.scratch_size, "--scratch_size")

    @property
    def memory_per_worker(self) -> int:
        """Return the memory budget of one worker, in bytes."""
        return self.memory_bytes // self.processes


_SHARED = {"accept_versions", "retry_failed"}  # options in which the processes of one run agree
OWN_OPTIONS = frozenset(field.name for field in fields(RunOptions)) - _SHARED  # of each process
_FLAGS = ("quiet", "explain", "explain_tasks")


def words_of_work(words: Sequence[str]) -> list[str]:
    """Return the words of a command line without the options in which the processes of one run may differ.

    >>> words_of_work(["gristmill", "filter", "--explain_tasks", "in", "--shard", "1/2", "--workers=3", "--seed", "9"])
    ['gristmill', 'filter', 'in', '--seed', '9']
    """
    kept = list[str]()
    is_value = False
    for word in words:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        is_own = word.startswith("--") and name in OWN_OPTIONS
        if not (is_own or (is_value and not word.startswith("--"))):
            kept.append(word)
        is_value = is_own and "=" not in word and name not in _FLAGS
    return kept


def parse_size(text: str, option: str = "") -> int:
    """Parse a size in bytes, such as '512MiB', '4G' or '1000000'; units are powers of 1024.

    Raises UsageError, which names `option`, if the text is no size or one below a byte.

    >>> parse_size("1.5KiB")
    1536
    """
    number = text.strip().rstrip("BbIi")
    unit = ""
    if number[-1:].isalpha():
        unit = number[-1].upper()
        number = number[:-1]
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size <= 0:
        given = f"{option} {text!r}".lstrip()
        raise UsageError(f"{given} is not a size: expected a number with a unit, such as 512MiB or 4GiB")
    return size
