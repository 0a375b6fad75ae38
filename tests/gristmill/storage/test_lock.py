"""Locks: a stage that is started twice runs once at a time, and a killed run is taken over, in real processes."""

import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gristmill.io.files import STATE_DIR
from gristmill.storage import lock
from gristmill.storage.lock import hold_worker_lock, stage_lock, workers_path
from tests.gristmill.engine.upper_stage import upper_stage

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}").write_text(f"text {number}\n")
    return folder


def start(source: Path, target: Path, workers: int, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.gristmill.engine.upper_stage", source, target, str(workers), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."})


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_a_second_start_waits_and_finds_everything_done(tmp_path: Path, source: Path) -> None:
    with stage_lock(tmp_path / "out" / STATE_DIR / "upper.lock"):
        both = [start(source, tmp_path / "out", workers=2, seconds=0) for _ in range(2)]
        said = [process.stderr.readline() for process in both if process.stderr]
    assert all(line.startswith(f"waiting for process {os.getpid()} on ") for line in said), said
    messages = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], messages
    assert sorted("done already" in message for message in messages) == [False, True], messages


@pytest.mark.parametrize(("left", "run"), [("process 7 on here", "was killed"), ("", "has just ended")])
def test_who_is_waited_for_is_said_when_a_worker_outlives_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str, run: str
) -> None:
    path = tmp_path / "upper.lock"
    path.write_text(left)
    said = list[str]()
    with workers_path(path).open("wb") as file:

        def say_and_end(holder: str) -> None:
            said.append(holder)
            fcntl.flock(file, fcntl.LOCK_UN)

        fcntl.flock(file, fcntl.LOCK_SH)
        monkeypatch.setattr(lock, "_say_waiting", say_and_end)
        with stage_lock(path):
            pass
    assert said == [f"worker processes of a run that {run} (fuser {path}-workers lists them)"]
    assert not path.read_text()  # this run has ended


@pytest.mark.parametrize(("limit", "hint"), [("TMPDIR=$PWD/" + "x" * 100, "Set TMPDIR"), ("ulimit -n 16;", "ulimit")])
def test_workers_that_cannot_start_are_one_sentence(tmp_path: Path, source: Path, limit: str, hint: str) -> None:
    (tmp_path / ("x" * 100)).mkdir()
    command = f"{limit} {sys.executable} -m tests.gristmill.engine.upper_stage {source} {tmp_path}/out 2 0"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, env=environment)
    message = done.stderr.splitlines()[-1]
    assert "error: cannot start worker processes: " in message and hint in message


def test_killed_runs_are_taken_over(tmp_path: Path, source: Path) -> None:
    generator = random.Random(seed := random.randrange(1 << 30))
    for _ in range(4):
        process = start(source, tmp_path / "out", workers=2, seconds=0.1)
        time.sleep(generator.uniform(0.2, 1.0))
        process.kill()
        process.communicate()
    upper_stage(source, tmp_path / "out")  # starts while the killed run's workers may be alive
    upper_stage(source, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole"), seed
    assert not list((tmp_path / "out").rglob("*.partial"))


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
