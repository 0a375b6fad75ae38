"""Processes end at SIGTERM and Ctrl-C, whatever they are doing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gristmill.errors import UsageError
from gristmill.processes import ends_at_ctrl_c, raised_signals
from tests.patience import patience

IN_CALLBACK = """
import ctypes, os, signal, sys, time
from gristmill.command import run_with_exit_code
from gristmill.engine.execution.call import Call
from gristmill.engine.execution.local import LocalExecutor

def stop(number, *processes):
    @ctypes.CFUNCTYPE(None)
    def called_from_c():  # Python drops what is raised in it
        for process in processes:
            os.kill(process, number)
        time.sleep(1)  # until a driver has interrupted its workers, too

    called_from_c()
    HalfMade()
    print("went on")

class HalfMade:
    def __init__(self):
        time.sleep(60)
        self.whole = True

    def __del__(self):
        assert self.whole

def stop_from_worker(number, driver, itself):
    stop(number, driver, *([os.getpid()] if itself else []))

def work():
    number = int(sys.argv[2])
    if sys.argv[1] == "driver":
        stop(number, os.getpid())
    arguments = {"number": number, "driver": os.getpid(), "itself": sys.argv[1] == "both"}
    with LocalExecutor(2) as executor:
        list(executor.run([Call(stop_from_worker, arguments), Call(int, {})]))

if __name__ == "__main__":
    sys.exit(run_with_exit_code(work))
"""
STOPPED = {signal.SIGINT: ("interrupted", 130), signal.SIGTERM: ("terminated", 143)}


@pytest.mark.every(3)
@pytest.mark.parametrize("number", STOPPED)
@pytest.mark.parametrize("sent_to", ["driver", "worker", "both"])
def test_a_signal_that_arrives_in_a_callback_from_c_is_not_lost(tmp_path: Path, sent_to: str, number: int) -> None:
    """As when numba compiles: Python drops there what the signal's handler raises."""
    script = tmp_path / "stops.py"
    script.write_text(IN_CALLBACK)
    ended = subprocess.run(
        [sys.executable, script, sent_to, str(int(number))], capture_output=True, text=True, timeout=patience(50),
        check=False, env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"},
    )  # fmt: skip
    what, exit_code = STOPPED[number]
    assert ended.stderr == f"{what}: run the same command again to resume\n"
    assert (ended.returncode, ended.stdout) == (exit_code, "")


PRELOADED = """
import os, signal, sys, time

if sys.argv[0] == "-c":  # imported by the fork server
    os.killpg(0, signal.SIGINT)  # as Ctrl-C does

def wait(seconds):
    time.sleep(seconds)
"""
CALLS_PRELOADED = """
import sys
from gristmill.command import run_with_exit_code
from gristmill.engine.execution.call import Call
from gristmill.engine.execution.local import LocalExecutor
from preloaded import wait

def work():
    with LocalExecutor(2) as executor:
        list(executor.run([Call(wait, {"seconds": 60})] * 2))

if __name__ == "__main__":
    sys.exit(run_with_exit_code(work))
"""


def test_ctrl_c_while_modules_are_preloaded_prints_one_line(tmp_path: Path) -> None:
    (tmp_path / "preloaded.py").write_text(PRELOADED)
    script = tmp_path / "calls.py"
    script.write_text(CALLS_PRELOADED)
    ended = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=patience(50), check=False,
        start_new_session=True, env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"},
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (130, "interrupted: run the same command again to resume\n")


def test_processes_forked_from_one_that_handles_sigterm_end_at_once() -> None:
    """A handler in Python may never be called in a process that waits for a lock, as a Pool's do."""
    started, start = os.pipe()
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # an earlier test may have left another, as Ray does
    with raised_signals():
        if not (child := os.fork()):
            try:
                os.write(start, b"x")
                time.sleep(60)
            finally:  # an exception would run the rest of the tests here
                os._exit(0)
        os.read(started, 1)
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    signal.signal(signal.SIGTERM, before)


def test_ctrl_c_ends_a_process_at_once_only_while_it_imports() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(UsageError), ends_at_ctrl_c():
            assert signal.getsignal(signal.SIGINT) != signal.default_int_handler
            raise UsageError("a wrong option")
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_a_process_imports_says_so() -> None:
    code = "import os; from gristmill.processes import ends_at_ctrl_c\nwith ends_at_ctrl_c(): os.kill(os.getpid(), 2)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "interrupted\n")
