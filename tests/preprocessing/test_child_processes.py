"""A user's function that starts or ends processes, or changes its own: nothing hangs, and errors name the function."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.storage.lock import hold_worker_lock, stage_lock
from tests.gristmill_cli.corpus import ROOT, write_records

SCRIPT = """
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

from gristmill.engine.options import RunOptions
from gristmill.errors import GristmillError
from preprocessing.apply import apply


def length(text):
    return len(text)


def uses_a_pool(documents):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        yield from (d for d in documents if pool.map(length, [d.text]))


def keeps_a_daemon(documents):
    multiprocessing.Process(target=time.sleep, args=(60,), daemon=True).start()
    yield from documents


def forks(documents):
    for document in documents:
        if not os.fork():
            os._exit(0)
        os.wait()
        yield document


def leaves_a_process(documents):
    multiprocessing.Process(target=time.sleep, args=(60,)).start()
    yield from documents


def yields_in_a_copy(documents):
    os.fork()
    yield from documents


def reads_in_a_copy(documents):
    if not os.fork():
        for document in documents:
            pass
        os._exit(0)
    yield from documents


def leaves_in_a_copy(documents):
    if not os.fork():
        sys.exit()
    yield from documents


def leaves_a_pool(documents):
    pool = multiprocessing.Pool(2)
    yield from (d for d in documents if pool.map(length, [d.text]))


def leaves_a_thread(documents):
    threading.Thread(target=time.sleep, args=(600,)).start()
    yield from documents


def moves(documents):
    os.chdir("/")
    os.umask(0o777)
    signal.alarm(600)
    yield from documents


def clears_modules(documents):
    sys.modules.clear()
    yield from documents


def interrupts(documents):
    next(documents)
    signal.raise_signal(signal.SIGINT)
    yield


def exits(documents):
    next(documents)
    os._exit(0)
    yield


def closes_files(documents):
    os.closerange(3, 1000)
    yield from documents


def is_interrupted(documents):
    next(documents)
    signal.alarm(1)
    time.sleep(600)
    yield


def terminates(documents):
    next(documents)
    signal.raise_signal(signal.SIGTERM)
    yield


if __name__ == "__main__":
    for name in sys.argv[2:]:
        function = name if ":" in name else f"starting:{name}"
        try:
            counts = apply(Path("in"), Path(name), function, RunOptions(int(sys.argv[1]), quiet=True))
            print(name, counts.total("written").documents, flush=True)
        except GristmillError as error:
            print(name, error, flush=True)
"""


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_function_may_start_processes_that_end(tmp_path: Path, workers: str) -> None:
    assert started(tmp_path, workers, "uses_a_pool", "keeps_a_daemon", "forks") == [
        "uses_a_pool 4", "keeps_a_daemon 4", "forks 4",
    ]  # fmt: skip


@pytest.mark.parametrize("workers", ["1", "2"])
def test_processes_that_do_not_end_and_copies_of_the_task_are_refused(tmp_path: Path, workers: str) -> None:
    left, *copies = started(
        tmp_path, workers, "leaves_a_process", "yields_in_a_copy", "reads_in_a_copy", "leaves_in_a_copy"
    )
    assert left.startswith("leaves_a_process starting:leaves_a_process left 1 of its processes running")
    assert len(copies) == 3
    assert all("forked this process, and the copy read or yielded documents, too" in line for line in copies)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_what_a_function_leaves_behind_holds_nothing_up(tmp_path: Path, workers: str) -> None:
    functions = ["leaves_a_pool", "moves", "clears_modules", *["leaves_a_thread"] * (workers == "1")]
    assert started(tmp_path, workers, *functions) == [f"{name} 4" for name in functions]
    assert all(path.stat().st_mode & 0o400 for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_function_that_ends_its_process_is_named(tmp_path: Path, workers: str) -> None:
    ends = {"exits": "exit code 0", "closes_files": "exit code 1", "is_interrupted": "SIGALRM", "terminates": "SIGTERM"}
    said = started(tmp_path, workers, *ends)
    assert [line.partition("):")[0] for line in said] == [
        f"{name} a worker process died in starting:{name} ({how}" for name, how in ends.items()
    ]


def test_a_function_that_interrupts_and_a_module_that_ends_its_process_are_named(tmp_path: Path) -> None:
    (tmp_path / "ending.py").write_text("import os\nos._exit(0)\n")
    interrupted, ended = started(tmp_path, "1", "interrupts", "ending:keep")
    assert interrupted.startswith("interrupts starting:interrupts interrupted its process: a function must not send")
    assert ended.startswith("ending:keep a worker process died in the import of ending (exit code 0): ")


def started(folder: Path, workers: str, *functions: str) -> list[str]:
    """What a script says of functions that it applies in turn; it must end."""
    (folder / "starting.py").write_text(SCRIPT)
    for source in "ab":  # a task each
        (folder / "in" / source).mkdir(parents=True)
        write_records(folder / "in" / source / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    done = subprocess.run(
        [sys.executable, folder / "starting.py", workers, *functions], cwd=folder, capture_output=True, text=True,
        timeout=100, env={**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_the_lock_of_workers_is_not_held_by_what_they_fork(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock, (to_read, to_write) = tmp_path / "apply.lock", os.pipe()
    if not os.fork():  # a worker
        hold_worker_lock(lock)
        if not os.fork():  # a process that outlives it
            signal.alarm(5)
            os.close(to_write)
            os.read(to_read, 1)
        os._exit(0)
    os.wait()
    with stage_lock(lock):
        assert "waiting" not in capsys.readouterr().err
    os.close(to_write)
