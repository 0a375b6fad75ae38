"""A call in a process of its own: what it returns and raises, and that it ends when its caller is to."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gristmill import processes
from gristmill.errors import DamagedFile, WorkerDied
from gristmill.processes import call_apart
from tests.patience import patience, wait_until


def double(number: int) -> int:
    print("what a library prints")
    return 2 * number


def fail(path: Path) -> None:
    raise DamagedFile(path, "torn", "it is torn")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hold_the_interpreter(pid_file: Path) -> None:
    """Sleep as a library does that never lets go of the interpreter: no other thread runs, no signal is handled."""
    pid_file.write_text(str(os.getpid()))
    ctypes.PyDLL(None).sleep(100)


def test_a_call_returns_and_raises_as_it_would_here() -> None:
    assert call_apart(double, number=4) == 8
    with pytest.raises(DamagedFile, match="a/b: it is torn") as caught:
        call_apart(fail, path=Path("a/b"))
    assert caught.value.fault == "torn"
    with pytest.raises(WorkerDied, match=r"the process of die died \(SIGKILL\)"):
        call_apart(die)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_call_ends_with_its_caller(tmp_path: Path, number: int) -> None:
    pid_file = tmp_path / "pid"
    script = (
        "from pathlib import Path; from gristmill.processes import call_apart; from gristmill.command import *\n"
        "from tests.gristmill.test_apart import hold_the_interpreter\n"
        f"call = lambda: call_apart(hold_the_interpreter, pid_file=Path({str(pid_file)!r}))\n"
        "raise SystemExit(run_with_exit_code(call))"
    )
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) as caller:
        until = time.monotonic() + patience(60)
        while not (pid_file.exists() and pid_file.read_text()):
            assert time.monotonic() < until
            time.sleep(0.02)
        child = psutil.Process(int(pid_file.read_text()))
        caller.send_signal(number)
        _, errors = caller.communicate(timeout=patience(5))
        child.wait(patience(5))
    if number != signal.SIGKILL:
        assert errors.decode().endswith("run the same command again to resume\n") and errors.count(b"\n") == 1


def serving(pid: int) -> list[psutil.Process]:
    """The processes that make a call for another one."""
    return [child for child in psutil.Process(pid).children() if processes._SERVE in child.cmdline()]


@pytest.mark.every(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_training_of_a_tokenizer_obeys_at_once(tmp_path: Path, number: int, workers: int) -> None:
    text = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz     ", k=6_000_000))
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text(f'{{"text": "{text}"}}\n')
    command = f"-m gristmill_cli train_tokenizer --input_dir {tmp_path}/in --out_dir {tmp_path}/out"
    command += f" --model_type unigram --workers {workers}"
    with subprocess.Popen([sys.executable, *command.split()], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "training 32,000 pieces" not in (line := process.stderr.readline()):
            assert line, "it ended before"
        wait_until(lambda: bool(serving(process.pid)))
        for child in serving(process.pid):
            child.suspend()  # it cannot end its work
        process.send_signal(number)
        process.communicate(timeout=patience(60))
        assert not (tmp_path / "out/tokenizer.json").exists()
        assert process.returncode == (143 if number == signal.SIGTERM else 130)
