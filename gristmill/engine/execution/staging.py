"""Staging: a task that reads or writes objects works on local copies in a scratch folder, within a quota of disk.

Its function sees local paths only. Inputs are fetched first, in part where a part is read; outputs are put in their
place when the task has ended, atomically, and the done record, written last, is what counts. Tasks of several
processes that share a folder (see shards.py) stage their outputs as well, as two of them may run the same task.

Before a task begins it reserves the size of the copies of its inputs, and of its outputs as large as what it reads. The
name of its folder ends in that number, so a listing shows what is reserved. Tasks wait until their reservation fits.
"""

import errno
import fcntl
import glob
import os
import random
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from gristmill.counts import Counts, Damage
from gristmill.engine.task import FileSet, Result, Task, parts_of, paths_read_by, relocate
from gristmill.errors import GristmillError, InputError, OutputError, wrap_read_errors, wrap_write_errors
from gristmill.io.documents import WHOLE, Ranges, ReadInParts, merge_ranges
from gristmill.io.files import rejects_path
from gristmill.paths import SCHEMES, copy_name
from gristmill.storage.files import FileInfo, download, file_info, is_file, upload_files
from gristmill.storage.local import atomic_write, flush_all, sha256_file
from gristmill.storage.lock import is_held
from gristmill.storage.objects import ChangedWhileRead
from gristmill.storage.stores import store_of

_OWNER = "owner"  # the file in a scratch folder on which its process holds a lock as long as it lives
_WAIT_SECONDS = 0.2
TAKEN_OVER = "another process has taken over the work. Run the same command again to resume"
Published = tuple[Path, FileInfo, str]  # an output, its size and version, its SHA-256


class RecordedObjectChanged(InputError):
    """An object is gone, or has other bytes than the hash that the driver knew it by."""

    def __init__(self, path: Path, is_missing: bool) -> None:
        super().__init__(path, is_missing)
        self.path = path
        self.is_missing = is_missing

    def __str__(self) -> str:
        if self.is_missing:
            return f"{self.path} is missing"
        return f"{self.path} has changed"


@dataclass(frozen=True)
class Scratch:
    """A folder where tasks work on copies, which reserve `size` bytes at most, all together, if it is given.

    `is_private`: local outputs are staged, too, as other processes may run the same task. `fence`: a file that exists
    as long as the step of the tasks runs; a task that ends later publishes nothing. `heartbeat`: the file that says
    whether the lease of the run is held, for workers of its holder. `group`: a name that processes of one machine, as
    Ray's on a node, have in common: their tasks share the quota.
    """

    folder: Path
    size: int | None = None
    is_private: bool = False
    fence: Path | None = None
    heartbeat: Path | None = None
    group: str = ""

    def may_publish(self) -> bool:
        """Return whether a task that has ended may publish its outputs: no process has taken over the step or run."""
        if self.fence is not None and not is_file(self.fence):
            return False
        return self.heartbeat is None or is_held(self.heartbeat)

    def with_heartbeat(self, lock: Path) -> "Scratch":
        """Return the space with a heartbeat of the lease `lock`; a local lock, which orphans hold, needs none."""
        if store_of(lock).has_file_locks:
            return replace(self, heartbeat=None)
        return replace(self, heartbeat=self.folder / f"{lock.name}.heartbeat")

    @contextmanager
    def reserve(self, task: str, inputs: int, outputs: int = 0) -> Iterator[Path]:
        """Yield a new folder for a task with such sizes of copies and outputs, once they fit into the quota.

        A task for which the quota is too small waits until it is alone. Raises OutputError if its inputs do not fit.
        """
        needed = inputs + outputs
        if self.size is not None:
            if inputs > self.size:
                raise OutputError(
                    f"--scratch_size {self.size:,} bytes is too small for the task {task}: expected at least the size "
                    f"of its inputs, {inputs:,} bytes; try {2 * inputs:,}"
                )
            needed = min(needed, self.size)
        folder = self.folder / f"{os.getpid()}-{secrets.token_hex(4)}+{needed}"
        with wrap_write_errors(self.folder):
            while not self._take(folder, needed):
                time.sleep(_WAIT_SECONDS * (0.5 + random.random()))  # at random: two that collide do so once
                _remove_folders_of_dead(self.folder.parent)  # for which nobody else makes room
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _take(self, folder: Path, size: int) -> bool:
        """Make a task's folder if its reservation and all others, even of this moment, fit the quota."""
        if self.size is not None and self._reserved() + size > self.size:
            return False
        folder.mkdir(parents=True)
        if self.size is not None and self._reserved() > self.size:
            folder.rmdir()
            return False
        return True

    def _reserved(self) -> int:
        """Return the bytes that the tasks reserve which share the quota."""
        parent = glob.escape(str(self.folder.parent))
        folders = glob.escape(self.folder.name)
        if self.group:
            folders = f"{_prefix()}*-{self.group}"
        names = glob.glob(f"{parent}/{folders}/*+*")  # noqa: PTH207  # as folders vanish
        return sum(int(name.rpartition("+")[2]) for name in names)


@contextmanager
def open_scratch(folder: Path | None, size: int | None, is_private: bool = False, group: str = "") -> Iterator[Scratch]:
    """Yield a new scratch folder in `folder`, by default that of temporary files; remove it at the end.

    What killed runs on a machine of this name left in `folder` is removed, too.
    """
    parent = (folder or Path(tempfile.gettempdir())).absolute()
    _remove_folders_of_dead(parent)
    with ExitStack() as stack:
        is_own = False
        while not is_own:  # another process may take it for a dead one's, and remove it before it is locked
            own = parent / f"{_prefix()}{os.getpid()}-{secrets.token_hex(4)}{group and f'-{group}'}"
            stack.callback(shutil.rmtree, own, ignore_errors=True)
            is_own = True
            with suppress(OSError):  # a task that needs it says what is wrong
                own.mkdir(parents=True)
                owner = stack.enter_context((own / _OWNER).open("wb"))
                fcntl.flock(owner, fcntl.LOCK_EX)
                is_own = (own / _OWNER).exists()
        yield Scratch(own, size, is_private, group=group)


def _prefix() -> str:
    """Return the beginning of the names of scratch folders that processes of this machine have."""
    return f"gristmill-scratch-{socket.gethostname()}-"


def _remove_folders_of_dead(parent: Path) -> None:
    """Remove the scratch folders of processes of this machine that have died."""
    for owner in parent.glob(f"{_prefix()}*/{_OWNER}"):
        with suppress(OSError), owner.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # process ids repeat, locks do not
            shutil.rmtree(owner.parent, ignore_errors=True)


@dataclass
class StagedTask:
    """A task with local paths; `places` maps each of its own paths that was staged to the copy in `folder`."""

    task: Task
    places: dict[Path, Path] = field(default_factory=dict)
    scratch: Scratch | None = None
    folder: Path | None = None  # of the copies

    def run(self, **more: Any) -> Counts | Result | None:
        """Call the function, with more arguments."""
        return self.task.function(**self.task.arguments, **more)

    def name_objects(self, counts: Counts) -> Counts:
        """Return counts in which examples and damaged files have the names of objects, not of their copies."""
        folder = self.folder
        if folder is None:
            return counts
        damaged = dict[str, Damage]()
        for name, damage in counts.damaged.items():
            damaged[name] = Damage(_original(damage.path, folder), damage.fault, _original(damage.detail, folder))
        examples = [_original(text, folder) for text in counts.examples]
        return msgspec.structs.replace(counts, examples=examples, damaged=damaged)

    def publish(self, outputs: tuple[Path, ...]) -> list[Published]:
        """Put the outputs, and their files of malformed records, in their places, several objects at a time.

        Raises OutputError if the step is over, or the lease is lost: the files may be another run's by now.
        """
        possible = (*outputs, *map(rejects_path, outputs))
        written = [path for path in possible if self._local(path).exists()]
        assert len(written) >= len(outputs), f"{self.task.name} did not write {set(outputs) - set(written)}"
        if self.scratch and not self.scratch.may_publish():
            raise OutputError(f"{self.task.name}: {TAKEN_OVER}")
        objects = dict[Path, Path]()
        kept = list[Path]()
        for path in written:
            if store_of(path).needs_copies:
                objects[path] = self._local(path)
            else:
                kept.append(self._local(path))
        flush_all(kept)  # before the record vouches for them
        uploaded = upload_files(objects)
        published = list[Published]()
        for path in written:
            info, sha256 = self._put(path, uploaded.get(path))
            published.append((path, info, sha256))
        return published

    def _local(self, path: Path) -> Path:
        return self.places.get(path, path)

    def _put(self, path: Path, uploaded: FileInfo | None) -> tuple[FileInfo, str]:
        """Put a local output in its place; return its state and its SHA-256. An object was `uploaded` before."""
        local = self._local(path)
        sha256 = sha256_file(local)
        if uploaded:
            return uploaded, sha256
        if local != path:
            with wrap_write_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                if not _has_bytes(path, local, sha256):  # an equal file stays: another task may have begun to read it
                    _move(local, path)
        info = file_info(path)
        assert info, f"{path} vanished"
        return info, sha256


@contextmanager
def staged(
    task: Task,
    inputs: Mapping[Path, FileInfo],
    scratch: Scratch | None,
    hashes: Mapping[Path, str] = MappingProxyType({}),
) -> Iterator[StagedTask]:
    """Yield the task with copies of its remote inputs, in a folder that is removed at the end.

    `inputs` says what the driver saw, `hashes` are the SHA-256 of objects that stages wrote. Raises InputError if an
    object is gone or another one.
    """
    fetched: list[tuple[Path, Ranges]] = []
    if any(store_of(path).needs_copies for path in paths_read_by([task])):
        fetched = list(remote_ranges(task.arguments, set(task.outputs)))
    moved = list[Path]()
    for path in task.outputs:
        if store_of(path).needs_copies or (scratch and scratch.is_private):
            moved.append(path)
    if not fetched and not moved:
        yield StagedTask(task)
        return
    assert scratch, f"{task.name} needs a scratch folder"
    size = _fetched_bytes(fetched, inputs)
    with scratch.reserve(task.name, size, max(size, task.size)) as folder:
        staged_paths = [path for path, _ in fetched]
        for output in moved:
            staged_paths += [output, rejects_path(output)]
        places = {path: copy_name(folder, path) for path in staged_paths}
        with _names_full_disk(scratch), wrap_write_errors(scratch.folder):
            for place in places.values():
                place.parent.mkdir(parents=True, exist_ok=True)
            for path, ranges in fetched:
                _fetch(path, places[path], ranges, inputs.get(path), hashes.get(path))
        arguments = relocate(task.arguments, lambda path: places.get(path, path))
        outputs = tuple(places.get(path, path) for path in task.outputs)
        copy = StagedTask(replace(task, arguments=arguments, outputs=outputs), places, scratch, folder)
        has_remote = any(store_of(path).needs_copies for path in places)
        is_all_here = len(moved) == len(task.outputs) and has_remote  # else output's disk is full
        try:
            with _names_full_disk(scratch) if is_all_here else nullcontext():
                yield copy
        except GristmillError as error:  # says the names of the copies
            arguments_of_error = [_original(argument, folder) for argument in error.args]
            raise type(error)(*arguments_of_error) from error


def _fetched_bytes(fetched: Iterable[tuple[Path, Ranges]], inputs: Mapping[Path, FileInfo]) -> int:
    """Return the bytes of the ranges of objects that are fetched, as far as their sizes are known."""
    fetched_bytes = 0
    for path, ranges in fetched:
        if path in inputs:
            size = inputs[path].size
            for start, end in ranges:
                last = size
                if end is not None:
                    last = min(size, end)
                fetched_bytes += last - start
    return fetched_bytes


@contextmanager
def local_copies(paths: Iterable[Path]) -> Iterator[list[Path]]:
    """Yield files to read; objects as copies in a scratch folder that is removed at the end.

    For commands that are no stage. An error names the objects, not their copies.
    """
    files = list(paths)
    if not any(store_of(path).needs_copies for path in files):
        yield files
        return
    task = Task("copies", _read_nothing, {"paths": files})
    with open_scratch(None, None) as scratch, staged(task, {}, scratch) as copy:
        yield copy.task.arguments["paths"]


def _read_nothing(paths: list[Path]) -> None:
    """Task: none; its inputs are copied."""


@contextmanager
def _names_full_disk(scratch: Scratch) -> Iterator[None]:
    """Convert the error of a full disk, on which all that is written is scratch, to one that names it."""
    try:
        yield
    except (GristmillError, OSError) as error:
        cause: BaseException | None = error
        while cause and not (isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)):
            cause = cause.__cause__
        if not cause:
            raise
        disk = shutil.disk_usage(scratch.folder)
        raise OutputError(
            f"--scratch {scratch.folder.parent} is full: its disk has {disk.free:,} of {disk.total:,} bytes free. Give "
            "a folder on a larger disk, or a --scratch_size that fits, so that fewer tasks run at the same time"
        ) from error


def _original(argument: Any, folder: Path) -> Any:
    """Return an argument of an error with the names of files, not of their copies in `folder`."""
    if isinstance(argument, Path):
        return Path(_original(str(argument), folder))
    if not isinstance(argument, str):
        return argument
    copies = rf"{re.escape(str(folder))}/({'|'.join(SCHEMES)})/"
    return re.sub(copies, r"\1:/", argument).replace(str(folder), "")


def _has_bytes(path: Path, local: Path, sha256: str) -> bool:
    """Return whether a file has the bytes of another one."""
    info = file_info(path)
    return info is not None and info.size == local.stat().st_size and sha256_file(path) == sha256


def _move(local: Path, path: Path) -> None:
    """Rename a file; copy it first if it is on another file system."""
    try:
        local.replace(path)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        with atomic_write(path) as temporary:
            shutil.copyfile(local, temporary)


def _fetch(path: Path, target: Path, ranges: Ranges, seen: FileInfo | None, sha256: str | None) -> None:
    """Copy ranges of an object to the same offsets of the local file `target`.

    `seen` is what the driver knows of the object, `sha256` the hash of its bytes if a stage wrote it. If it is gone or
    another one, raises InputError, of such a hash RecordedObjectChanged. An object that is read in parts is known by
    its version.
    """
    target.touch()
    try:
        with wrap_read_errors(path):
            versions = {download(path, target, start, end) for start, end in ranges}
    except InputError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        if sha256:
            raise RecordedObjectChanged(path, is_missing=True) from error
        raise _no_object(path, seen) from error
    is_same = seen is None or versions <= {seen}
    if sha256 and ranges == WHOLE:  # a copy of the object has its bytes and another version
        is_same = sha256_file(target) == sha256
    if not is_same:
        if sha256:
            raise RecordedObjectChanged(path, is_missing=False)
        raise ChangedWhileRead(path)


def _no_object(path: Path, seen: FileInfo | None) -> InputError:
    if seen:
        what = f"{path} was removed while it was read: run the same command again"
    else:
        what = f"cannot read {path}: there is no such object. Check the path, or run the stage that writes it"
    return InputError(
        f"{what}. (An object whose key ends in a slash, {path.name}/, cannot be read as a file: rename it.)"
    )


def remote_ranges(value: Any, outputs: set[Path]) -> Iterator[tuple[Path, Ranges]]:
    """Yield every remote path in a value that is no output, with the bytes of it that are read, once each."""
    ranges_of: dict[Path, Ranges] = {}
    for path, ranges in _ranges(value, WHOLE):
        if path not in outputs and store_of(path).needs_copies:
            ranges_of[path] = ranges_of.get(path, ()) + ranges
    for path, ranges in ranges_of.items():
        yield path, merge_ranges(ranges)


def _ranges(value: Any, ranges: Ranges) -> Iterator[tuple[Path, Ranges]]:
    """Yield every path in a value with the bytes that are read: what the value around it reads, or all."""
    if isinstance(value, Path):
        yield value, ranges
    elif isinstance(value, FileSet):
        for path in value.paths:
            yield path, ranges
    else:
        if isinstance(value, ReadInParts):
            ranges = value.ranges
        for item in parts_of(value):
            yield from _ranges(item, ranges)
