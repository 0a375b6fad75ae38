"""The executor: the same results for any number of workers, and no worker outlives its parent."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from gristmill.engine.execution import local
from gristmill.engine.execution.call import Call
from gristmill.engine.execution.local import LocalExecutor
from gristmill.engine.execution.task_run import TaskRun
from gristmill.engine.task import FileSet, Task
from gristmill.errors import GristmillError, InputError, WorkerDied
from gristmill.io.documents import Slice
from gristmill.text import matching_form, utf8_size
from tests.patience import patience, wait_until

ROOT = Path(__file__).resolve().parents[4]


def run_all(calls: list[Call], workers: int) -> list[tuple[int, Any]]:
    with LocalExecutor(workers) as executor:
        return list(executor.run(calls))


CALLS = [Call(matching_form, {"text": f"Text,  {i}!"}) for i in range(6)]


@pytest.mark.parametrize("workers", [1, 2])
def test_every_call_is_made_once(workers: int) -> None:
    assert dict(run_all(CALLS, workers)) == {i: f"text {i}" for i in range(6)}


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_is_raised_unchanged(workers: int) -> None:
    from gristmill.io.artefacts import load_pickle

    bad = Path(__file__)  # a file, and no pickle
    with pytest.raises(InputError, match=r"test_local\.py is not a pickle"):
        run_all([*CALLS, Call(load_pickle, {"path": bad})], workers)


def test_no_calls_give_no_results() -> None:
    assert run_all([], 2) == []


def test_a_killed_worker_is_an_error_that_says_what_to_try() -> None:
    calls = [Call(utf8_size, {"text": "a"}), Call(os._exit, {"status": 9})]
    with pytest.raises(GristmillError, match="fewer --workers"):
        run_all(calls, 2)


def test_a_dead_worker_leaves_no_call_to_cancel() -> None:
    """The pool's thread sets the error of each; at one that is cancelled meanwhile it would print a traceback."""
    with LocalExecutor(2) as executor:
        calls = [Call(os._exit, {"status": 9}), *CALLS]
        pending = {executor.submit(call): position for position, call in enumerate(calls)}
        with pytest.raises(WorkerDied):
            while pending:
                list(executor.take_finished(pending))
        assert not pending


def die_in_task(task_run: TaskRun) -> None:
    """End this process, as a crash in a library does."""
    os._exit(9)


def test_the_files_that_a_task_of_a_dead_worker_reads_are_named(tmp_path: Path) -> None:
    slices = tuple(Slice(tmp_path / name, f"book/{name}") for name in "abcde")
    task = TaskRun("filter", "find", Task.on_slices(slices, utf8_size, {}, ()))
    with pytest.raises(
        WorkerDied,
        match=r"died in the task book/a\+0 of filter, which reads book/a, book/b, book/c and 2 others \(exit code 9\):",
    ):
        run_all([*CALLS, Call(die_in_task, {}, task_run=task)], 2)


def end_and_tidy(path: Path) -> None:
    """Terminate this process, and write a file in the time that is left."""
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    finally:
        path.touch()


def test_a_worker_that_is_terminated_tidies_up(tmp_path: Path) -> None:
    with pytest.raises(GristmillError, match="a worker process died"):
        run_all([Call(end_and_tidy, {"path": tmp_path / name}) for name in "ab"], 2)
    assert (tmp_path / "a").exists() or (tmp_path / "b").exists()


def test_a_driver_that_is_killed_while_it_starts_a_worker_leaves_no_traceback() -> None:
    script = (
        "import os\n"
        "from multiprocessing import forkserver\n"
        "from gristmill.engine.execution.local import start_fork_server\n"
        "start_fork_server([])\n"
        "sentinel, pipe = forkserver.connect_to_new_process([os.dup(2), os.dup(2)])\n"
        "os.close(pipe)\n"  # as the end of this process would do
        "os.read(sentinel, 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=patience(60)
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_fork_server_that_dies_while_it_starts_a_worker_is_a_dead_worker() -> None:
    script = (
        "import os, signal\n"
        "from multiprocessing import forkserver\n"
        "from gristmill.engine.execution.local import Call, LocalExecutor, start_fork_server\n"
        "from gristmill.errors import WorkerDied\n"
        "start_fork_server(['os'])\n"
        "server = forkserver._forkserver._forkserver_pid\n"
        "os.kill(server, signal.SIGSTOP)\n"
        "connect = forkserver.connect_to_new_process\n"
        "def connect_and_kill(files):\n"
        "    forkserver.connect_to_new_process = connect\n"
        "    pipes = connect(files)\n"  # the server is asked, and will not answer
        "    os.kill(server, signal.SIGKILL)\n"
        "    return pipes\n"
        "forkserver.connect_to_new_process = connect_and_kill\n"
        "try:\n"
        "    with LocalExecutor(2) as executor:\n"
        "        list(executor.run([Call(os.getpid, {})] * 2))\n"
        "except WorkerDied as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=patience(60)
    )
    assert done.stdout.startswith("a worker process died (") and "Traceback" not in done.stderr, done


def test_workers_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    # subprocess.run takes its arguments by name and so can be a Call that lasts
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys\n"
        "from subprocess import run\n"
        "from gristmill.engine.execution.local import Call, LocalExecutor\n"
        "if __name__ == '__main__':\n"
        "    nap = {'args': [sys.executable, '-c', 'import sys, time; time.sleep(9999)']}\n"
        "    with LocalExecutor(2) as executor:\n"
        "        list(executor.run([Call(run, nap)] * 4))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, script], env=environment) as parent:
        workers = wait_for_workers(parent.pid)
        naps = naps_below(psutil.Process(parent.pid))
        parent.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(workers, timeout=patience(60))  # less than the naps
    for nap in naps:
        nap.kill()
    assert workers and not alive


def wait_for_workers(pid: int) -> list[psutil.Process]:
    """Every process below `pid`, except the naps, once both workers have begun."""
    parent = psutil.Process(pid)
    wait_until(lambda: len(naps_below(parent)) == 2)
    naps = naps_below(parent)
    return [process for process in parent.children(recursive=True) if process not in naps]


def naps_below(parent: psutil.Process) -> list[psutil.Process]:
    naps = list[psutil.Process]()
    for process in parent.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if "time.sleep" in " ".join(process.cmdline()):
                naps.append(process)
    return naps


def test_workers_run_the_copy_of_the_code_that_started_them(tmp_path: Path) -> None:
    """And see none of its modules under another name, such as gristmill/paths.py as a module of its own."""
    shutil.copytree(ROOT / "gristmill", tmp_path / "gristmill", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "empty").mkdir()
    script = (
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from gristmill.engine.execution.local import Call, LocalExecutor\n"
        "from importlib.util import find_spec\n"
        "with LocalExecutor(2) as executor:\n"
        "    where = executor.submit(Call(find_spec, {'name': 'gristmill.paths'})).result().origin\n"
        "    print(where, executor.submit(Call(find_spec, {'name': 'urls'})).result())\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path / "empty",
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert done.stdout == f"{tmp_path / 'gristmill/paths.py'} None\n", done.stdout + done.stderr


def test_workers_have_numba_and_not_what_compiles_kernels(tmp_path: Path) -> None:
    """Kernels are compiled once per installation, and all that numba needs for it takes half a second to import.

    What a kernel on arrays needs as it is read from the cache is there.
    """
    (tmp_path / "looking.py").write_text(
        "import sys\n\ndef loaded(names):\n    return sorted(names & {*sys.modules})\n"
    )
    names = {"numba", "numba.np.arrayobj", "numba.np.linalg"}
    script = (
        "import gristmill.kernels, looking\n"
        "from gristmill.engine.execution.local import Call, LocalExecutor\n"
        "with LocalExecutor(2) as executor:\n"
        f"    print(executor.submit(Call(looking.loaded, {{'names': {names}}})).result())\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience(60))
    assert done.stdout == "['numba', 'numba.np.arrayobj']\n", done.stdout + done.stderr


def test_calls_with_absolute_paths_share_their_sets_of_files() -> None:
    shared = FileSet((Path("a"), Path("b")))
    one, other = (Call(print, {"files": shared, "number": i}).with_absolute_paths() for i in range(2))
    assert one.arguments["files"] is other.arguments["files"]
    assert one.arguments["files"].paths == (Path("a").absolute(), Path("b").absolute())


def test_a_script_that_calls_a_stage_outside_of_main_is_told(tmp_path: Path) -> None:
    """Its workers import it, and would call the stage again and wait for it for ever."""
    (tmp_path / "in").mkdir()
    for name in "ab":
        (tmp_path / "in" / f"{name}.jsonl").write_text('{"text": "%s"}\n' % (name * 300_000))
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from gristmill.engine.options import RunOptions\n"
        "from preprocessing.normalize_text import normalize_text\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "normalize_text(folder / 'in', folder / 'out', options=RunOptions(workers=2, quiet=True))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=patience(60)
    )
    assert done.returncode == 1 and "call it under `if __name__ == '__main__':`" in done.stderr


def sleep_in(seconds: float, pid_file: Path) -> None:
    pid_file.write_text(str(os.getpid()))
    time.sleep(seconds)


def test_an_interrupted_pool_ends_though_a_worker_hangs_that_holds_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_GRACE_SECONDS", 0.5)
    waited_too_long, pid_file = threading.Event(), tmp_path / "pid"
    with pytest.raises(KeyboardInterrupt), LocalExecutor(2) as executor:
        executor.submit(Call(sleep_in, {"seconds": 100, "pid_file": pid_file}))
        executor.submit(Call(int, {})).result()
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.05)
        busy = int(pid_file.read_text())
        idle = next(worker.pid for worker in executor._started if worker.pid != busy)
        time.sleep(0.5)  # it waits for a call
        os.kill(idle, signal.SIGSTOP)

        def end_it() -> None:
            waited_too_long.set()
            os.kill(busy, signal.SIGKILL)

        watch = threading.Timer(patience(50), end_it)
        watch.start()
        raise KeyboardInterrupt
    watch.cancel()
    assert not waited_too_long.is_set()
