"""--scratch_size: the scratch folder of a run in a bucket stays as small, whatever the tasks in it write."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from gristmill.engine.options import RunOptions
from gristmill.engine.run import open_stage
from gristmill.engine.scratch.room import taken_by
from gristmill.engine.task import Stage, Task
from gristmill.storage.local import atomic_write
from tests.object_store import Store, object_store

ROOT = Path(__file__).resolve().parents[4]
MIB = 1 << 20
LATE = 8 * MIB  # of what tasks write until they are seen to, on a busy machine; unbounded they would take 24
STAGE = Stage("slow")


@pytest.fixture
def store() -> Iterator[Store]:
    with object_store() as running:
        yield running


def write_slowly(output: Path, starts: str, is_removed: bool) -> None:
    """Task: write 6 MiB in two seconds, half of it to a temporary file, which may have no name."""
    with Path(starts).open("a") as file:
        file.write("started\n")
    with (
        atomic_write(output) as temporary,
        temporary.open("wb") as kept,
        TemporaryFile(dir=output.parent) if is_removed else Path(f"{output}.sorted").open("wb") as sorted_,
    ):
        for _ in range(48):
            for file in (kept, sorted_):
                file.write(os.urandom(1 << 16))
                file.flush()
            time.sleep(0.04)


@contextmanager
def watched(folder: Path) -> Iterator[list[int]]:
    """Context: the sizes that a folder had, with files of other processes that have no name."""
    sizes, ended = list[int](), threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            sizes.append(taken_by(folder) + removed_bytes(f"{folder}/"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield sizes
    finally:
        ended.set()
        watcher.join()


def own_descriptors() -> Iterator[Path]:
    """Open files of this process's group; a look at all that a machine runs takes too long to be of one moment."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getpgid(int(process.name)) == os.getpgrp():
                yield from (process / "fd").iterdir()


def removed_bytes(folder: str) -> int:
    found = dict[tuple[int, int], int]()
    for descriptor in own_descriptors():
        with suppress(OSError):
            name = str(descriptor.readlink())
            if name.startswith(folder) and name.endswith("(deleted)"):
                status = descriptor.stat()
                found[status.st_dev, status.st_ino] = 512 * status.st_blocks
    return sum(found.values())


def start(store: Store, folder: Path, size: str, *options: object) -> subprocess.CompletedProcess[str]:
    """`run` in a process of its own."""
    (folder / "scratch").mkdir()
    script = f"from tests.gristmill.engine.scratch.test_room import *; run(Path({str(folder)!r}), {size!r}, *{options})"
    return subprocess.run(
        [sys.executable, "-c", script], env=os.environ | store.environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def run(folder: Path, size: str, is_removed: bool = False, workers: int = 4) -> None:
    root, starts = Path("s3:/bucket/out"), str(folder / "starts")
    options = RunOptions(workers=workers, quiet=True, scratch=folder / "scratch", scratch_size=size)
    with open_stage(STAGE, root, options, publishes=[root]) as stage:
        outputs = [root / f"{i}.bin" for i in range(4)]
        tasks = [
            Task(path.stem, write_slowly, {"output": path, "starts": starts, "is_removed": is_removed}, (path,))
            for path in outputs
        ]
        stage.step("write", tasks)


@pytest.mark.parametrize("is_removed", [False, True])
def test_what_tasks_write_beside_each_other_is_within_the_size(store: Store, tmp_path: Path, is_removed: bool) -> None:
    with watched(tmp_path / "scratch") as sizes:
        done = start(store, tmp_path, "9MiB", is_removed)
    assert done.returncode == 0, done.stderr
    assert [len(data) for name, data in store.tree("out").items() if name.endswith(".bin")] == [3 * MIB] * 4
    assert 5 * MIB < max(sizes) <= 9 * MIB + LATE, max(sizes)
    assert len((tmp_path / "starts").read_text().splitlines()) > 4  # some began again, when there was room
    assert not any((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize("workers", [1, 4])
def test_a_task_that_needs_more_than_all_is_refused(store: Store, tmp_path: Path, workers: int) -> None:
    with watched(tmp_path / "scratch") as sizes:
        done = start(store, tmp_path, "4MiB", False, workers)
    message = done.stderr.splitlines()[-1]
    assert "OutputError: --scratch_size 4,194,304 bytes: the task " in message and " alone needs " in message, message
    assert max(sizes) <= 4 * MIB + LATE, max(sizes)


def test_a_file_without_a_name_takes_room(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with TemporaryFile(dir=tmp_path) as file:
        file.write(bytes(MIB))
        file.flush()
        assert taken_by(tmp_path) >= MIB <= taken_by(tmp_path / "link")
    assert taken_by(tmp_path) < MIB
