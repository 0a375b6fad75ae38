"""Scratch: tasks reserve disk within --scratch_size, and only the folders of processes that died are removed."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gristmill.engine.execution.staging import open_scratch
from gristmill.engine.options import RunOptions
from gristmill.engine.run import open_stage
from gristmill.engine.task import Stage, Task
from gristmill.storage.local import atomic_write_bytes
from tests.object_store import Store, object_store

KIB = 1 << 10
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    """A store with four objects, for all tests."""
    with object_store() as running, pytest.MonkeyPatch.context() as monkeypatch:
        for i in range(4):
            running.put(f"in/{i}.bin", bytes(100 * KIB))
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


def copy(source: Path, output: Path, running: str) -> None:
    """Task: copy a file slowly, beside others; each leaves a file with how many worked at the same time."""
    own = Path(running, output.stem)
    own.touch()
    time.sleep(0.3)
    Path(f"{running}-seen", f"{output.stem}-{len(list(Path(running).iterdir()))}").touch()
    atomic_write_bytes(output, source.read_bytes())
    own.unlink()


def run(folder: Path, size: str) -> tuple[list[int], str]:
    """`copy_objects` in a process of its own, as workers have the environment in which the fork server was started.

    Returns how many tasks worked at the same time, as each saw it, and what the process printed.
    """
    script = f"from tests.gristmill.engine.test_scratch import *; copy_objects(Path({str(folder)!r}), {size!r})"
    for name in ("scratch", "running", "running-seen"):
        (folder / name).mkdir()
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    return [int(path.name.rpartition("-")[2]) for path in (folder / "running-seen").iterdir()], done.stderr


def copy_objects(folder: Path, size: str) -> None:
    """Copy four objects of 100 KiB in a stage."""
    root = Path("s3:/bucket/out")
    options = RunOptions(workers=4, quiet=True, scratch=folder / "scratch", scratch_size=size)
    with open_stage(Stage("copy"), root, options, publishes=[root]) as stage:
        arguments = [(Path(f"s3:/bucket/in/{i}.bin"), root / f"{i}.bin") for i in range(4)]
        common = {"running": str(folder / "running")}
        tasks = [Task(to.stem, copy, {"source": source, "output": to, **common}, (to,)) for source, to in arguments]
        stage.step("copy", tasks)


def test_tasks_run_beside_each_other_as_far_as_the_size_allows(store: Store, tmp_path: Path) -> None:
    seen, _ = run(tmp_path, "450KiB")
    assert max(seen) <= 2  # each reserves 200 KiB
    assert sorted(name for name in store.tree("out") if name.endswith(".bin")) == [f"{i}.bin" for i in range(4)]
    assert not any((tmp_path / "scratch").iterdir())


def test_a_task_that_needs_more_than_all_runs_alone_and_larger_inputs_are_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    assert run(tmp_path / "one", "150KiB")[0] == [1] * 4
    (tmp_path / "other").mkdir()
    _, said = run(tmp_path / "other", "90KiB")
    assert re.search(
        r"OutputError: --scratch_size 92,160 bytes is too small for the task .* try 204,800$", said.strip()
    )


def test_reservations_at_the_same_moment_stay_within_the_size(tmp_path: Path) -> None:
    lock, reserved, most = threading.Lock(), 0, 0

    def work(number: int) -> None:
        nonlocal reserved, most
        with scratch.reserve(f"{number}", 300):
            with lock:
                reserved += 300
                most = max(most, reserved)
            time.sleep(0.001)
            with lock:
                reserved -= 300

    with open_scratch(tmp_path, 1000) as scratch, ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(40))) == [None] * 40
    assert 300 <= most <= 900 and not any(tmp_path.iterdir())


def test_scratch_is_removed_of_processes_that_died_and_of_no_other(tmp_path: Path, monkeypatch) -> None:
    """In containers, all processes may have the same number, on hosts of one name."""
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from gristmill.engine.execution.staging import open_scratch\n"
        "with open_scratch(Path(sys.argv[1]), None) as scratch:\n"
        "    (scratch.folder / 'copy').mkdir(parents=True)\n"
        "    print(scratch.folder, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout
    left = Path(other.stdout.readline().strip())
    gone = left.rename(left.with_name(left.name.replace(str(other.pid), str(2**22 + 1))))  # no process has this number
    with open_scratch(tmp_path, None) as scratch:
        assert (gone / "copy").is_dir() and scratch.folder.is_dir()
    other.kill()
    other.communicate()
    monkeypatch.setattr(os, "getpid", lambda: os.getppid())  # of a process that lives
    same = gone.rename(gone.with_name(gone.name.replace(str(2**22 + 1), str(os.getpid()))))
    with open_scratch(tmp_path, None) as scratch:
        assert not same.exists()
    assert not list(tmp_path.iterdir())


def test_a_scratch_folder_is_not_removed_while_it_is_made(tmp_path: Path) -> None:
    """By another process that begins and removes what was left."""

    def open_and_look(_: int) -> bool:
        with open_scratch(tmp_path, None) as scratch:
            return scratch.folder.is_dir()

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(open_and_look, range(2_000)))
    assert not any(tmp_path.iterdir())
