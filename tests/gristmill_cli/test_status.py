"""gristmill status: who works in a folder, how far, and that nobody does."""

import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from gristmill.engine.execution.call import Call
from gristmill.engine.execution.task_queue import Failure, Heartbeat, ProcessState, StepManifest, TaskQueue
from gristmill.errors import InputError, UsageError
from gristmill.storage.files import read_file
from gristmill.storage.lock import Lease, stage_lock
from gristmill_cli.status.command import stages_of_run, status
from tests.object_store import BUCKET, object_store

STEP = StepManifest("session", step=2, tasks=3, name="upper: upper")


def told(out: Path) -> str:
    """What the command prints, in one line."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(status(out))
    return " ".join(capture.get().split())


def start_run(out: Path) -> None:
    """What a run has written when its first stage has ended."""
    state = out / ".gristmill"
    (state / "run").mkdir(parents=True)
    (state / "run" / "normalize_text.json").touch()
    (out / "run.json").write_text('{"apply": {"function": null}, "dedup": {"exact": false}}')


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskQueue:
    """The board of a run with a step of three tasks: one done, one taken by a process of another host, one open."""
    monkeypatch.setenv("GRISTMILL_LEASE_SECONDS", "1")
    board = TaskQueue(tmp_path / ".gristmill" / "run.queue")
    board.post(STEP, [Call(print, {})])
    for position in range(2):
        assert board.take(STEP, position, 0)
    board.finish(STEP, 0, None)
    elsewhere = ProcessState(7, "elsewhere", 0.0, 3, running=["b"], tasks_done=1, retried=2, core_seconds=3600.0)
    (board.folder / "processes").mkdir()
    (board.folder / "processes" / "elsewhere-7-abc.json").write_bytes(msgspec.json.encode(elsewhere))
    return board


def test_a_shared_run_is_told(tmp_path: Path, board: TaskQueue) -> None:
    start_run(tmp_path)
    with (
        stage_lock(tmp_path / ".gristmill" / "run.lock", quiet=True),
        Heartbeat(board.processes.folder, board.name) as state,
    ):
        state.is_in_charge = True
        text = told(tmp_path)
        found = json.loads(str(status(tmp_path, json=True)))
    assert "stages finished: normalize_text stages running: filter stages waiting: to_hash" in text
    line = f"run in {tmp_path}: working; upper: upper: 1 of 3 tasks done, 1 taken; 2 retried; 1.0"
    assert line in text  # and the core hours of this very process, which runs other tests, too
    assert "7 elsewhere 19" in text and "helps; dead 1 2 1.000" in text
    alive = {process["process"]: process["alive"] for process in found["works"][0]["processes"]}
    assert alive == {os.getpid(): True, 7: False} and "generate_exact_pairs" not in found["stages"]


def test_a_run_that_ended_or_was_killed_is_told(tmp_path: Path, board: TaskQueue) -> None:
    assert "run in" in told(tmp_path) and "stopped;" in told(tmp_path) and "nothing is running" in told(tmp_path)
    failure = Failure.of(InputError("a.jsonl: ends too early"))
    board.post(StepManifest("session", step=3, state="failed", failure=failure))
    assert told(tmp_path).endswith("failed; a.jsonl: ends too early nothing is running here")


def test_a_stage_without_shards_is_told(tmp_path: Path) -> None:
    loose = tmp_path / "dup" / ".gristmill" / "upper.done"
    loose.mkdir(parents=True)
    (loose / "1.json").touch()
    with stage_lock(loose.with_name("upper.lock"), quiet=True):
        assert f"upper in {tmp_path}/dup: working; 1 task done in this run of the stage" in told(tmp_path)
    assert told(tmp_path / "dup") == "nothing is running here"
    assert told(tmp_path).endswith(f"here {tmp_path} is neither the --out of a run nor the output folder of a stage")
    with pytest.raises(UsageError, match="there is no such folder"):
        status(tmp_path / "none")


def write_training_run(out: Path, steps: int, total: int) -> Path:
    """The files of a training run that recorded a report every second step, of a minute each, until 2026-11-29."""
    out.mkdir()
    start = {"date": "2026-11-29T08:00:00+00:00", "host": "node1", "processes": 8}
    (out / "run.json").write_text(json.dumps({"steps": total, "optim.lr": 1e-3, "starts": [start, start]}))
    records: list[dict[str, Any]] = [{"kind": "run", "step": 0, "parameters": 1234}]
    for step in range(1, steps + 1):
        record: dict[str, Any] = {"kind": "step", "step": step, "loss": 9 - step / 10, "tokens_per_second": 1000.0}
        if step % 2 == 0:
            times = {"time": 1795935600.0 + 60 * step, "elapsed_seconds": 60.0 * step, "device_hours": 8 * step / 60}
            record |= {**times, "remaining_seconds": 60.0 * (total - step) if step < total else None}
        records.append(record)
    records.append({"kind": "eval", "step": steps, "loss": 8.5})
    (out / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (out / f"checkpoints/step-{steps - 1:08}").mkdir(parents=True)
    (out / "checkpoints/step-00000009.partial").mkdir()
    (out / ".lock").touch()
    return out


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The local clock is that of Greenwich."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def test_a_training_run_is_told(utc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill_cli.status.training.time.time", lambda: 1795936000.0)
    out = write_training_run(tmp_path / "model", 5, 300)
    head = "step 5 of 300 on node1, 8 processes, 2 starts loss 8.5000, holdout 8.5000, 1,000 tokens/s"
    told_times = "0:04:00 until 2026-11-29 07:04:00, 0.53 device hours"
    resumes = "nobody trains here; the same command resumes from the checkpoint of step 4"
    assert told(out) == f"training: stopped, {head} {told_times} {resumes}"
    with (out / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert told(out) == f"training: working, {head} {told_times} ends about 2026-11-29 12:00"
    assert told(write_training_run(tmp_path / "done", 4, 4)).startswith("training: finished, step 4 of 4 on node1")
    found = json.loads(str(status(out, json=True)))["training"]
    assert (found["state"], found["checkpoint"], found["elapsed_seconds"]) == ("stopped", 4, 240.0)
    (tmp_path / "new").mkdir()
    (tmp_path / "new/run.json").write_text('{"steps": 9}')  # killed before its first report
    assert told(tmp_path / "new").startswith("training: stopped, step 0 of 9 nobody trains here; the same command")


def test_a_step_without_shards_is_told_with_its_tasks(tmp_path: Path) -> None:
    (source := tmp_path / "in").mkdir()
    for name in "abcde":
        (source / name).write_text(f"text {name}\n")
    script = [sys.executable, "-m", "tests.gristmill.engine.upper_stage", source, tmp_path / "out", "2", "1"]
    run, seen = subprocess.Popen(script, env={**os.environ, "PYTHONPATH": "."}, stderr=subprocess.DEVNULL), set[str]()
    while run.poll() is None:
        if (tmp_path / "out").is_dir():
            seen.update(re.findall(r"working; (upper: \w+: \d of \d tasks done, \d taken)", told(tmp_path / "out")))
        time.sleep(0.1)
    assert run.returncode == 0
    assert {"upper: upper: 0 of 5 tasks done, 2 taken", "upper: upper: 4 of 5 tasks done, 1 taken"} <= seen, seen
    assert "upper: parts: 0 of 5 tasks done, 2 taken" in seen and not list(tmp_path.rglob("*.step"))


@pytest.fixture(params=["disk", "bucket"])
def out(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a run whose first stage has ended."""
    monkeypatch.setenv("GRISTMILL_LEASE_SECONDS", "1")
    start_run(tmp_path / "out")
    if request.param == "disk":
        yield tmp_path / "out"
        return
    with object_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        store.upload_tree(tmp_path / "out", "killed")
        yield Path(f"s3://{BUCKET}/killed")


@contextmanager
def killed_in_the_end(locks: list[Path]) -> Iterator[subprocess.Popen[str]]:
    """Context: a process that holds locks until it is killed, at the end."""
    script = (
        "import sys\n"
        "from contextlib import ExitStack\n"
        "from pathlib import Path\n"
        "from gristmill.storage.lock import stage_lock\n"
        "with ExitStack() as stack:\n"
        "    for path in sys.argv[1:]:\n"
        "        stack.enter_context(stage_lock(Path(path)))\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, *locks], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_killed_run_is_told_as_stopped(out: Path) -> None:
    with killed_in_the_end([out / ".gristmill/run.lock", out / "norm/.gristmill/filter.lock"]) as process:
        text = told(out)
        assert "stages running: filter" in text and text.count(": working;") == 2
        assert text.count("in charge 0 0") == 1, "its process is listed once, though it works on a run and a stage"
    text, found = told(out), json.loads(str(status(out, json=True)))
    assert "stages stopped: filter stages waiting: to_hash" in text and text.endswith("in charge; dead 0 0 0.000"), text
    assert text.count(": stopped;") == 2 and "nothing is running here" in text
    who = f"process {process.pid} on {socket.gethostname()}, since "
    assert [(work["name"], work["state"]) for work in found["works"]] == [("run", "stopped"), ("filter", "stopped")]
    assert all(work["holder"].startswith(who) and not work["processes"][0]["alive"] for work in found["works"])
    assert text.count(f"{who}{found['works'][0]['holder'][len(who) :]} was in charge") >= 1
    assert found["stages"]["filter"] == "stopped"
    with stage_lock(out / ".gristmill/run.lock", quiet=True):
        assert "stages running: filter" in told(out)
    assert "stages waiting: filter" in told(out)


def test_processes_of_other_hosts_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRISTMILL_LEASE_SECONDS", "1")
    out = Path(f"s3://{BUCKET}/watched")
    with object_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        with monkeypatch.context() as patched:
            patched.setattr(socket, "gethostname", lambda: "elsewhere")
            lease = Lease(out / ".gristmill/upper.lock")
        assert lease.acquire()
        content = read_file(lease.path)
        monkeypatch.setenv("GRISTMILL_LEASE_SECONDS", "120")  # a busy machine is slow to renew
        assert f"upper in s3://{BUCKET}/watched: working" in told(out)
        lease.release()
        monkeypatch.setenv("GRISTMILL_LEASE_SECONDS", "1")
        store.put("watched/.gristmill/upper.lock", content)  # as a killed process leaves it
        assert f"upper in s3://{BUCKET}/watched: stopped; process {os.getpid()} on elsewhere, since" in told(out)


def test_a_run_in_a_bucket_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Path(f"s3://{BUCKET}/out")
    with object_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        board = TaskQueue(out / "dup" / ".gristmill" / "upper.queue")
        with stage_lock(out / "dup/.gristmill/upper.lock"), Heartbeat(board.processes.folder, board.name):
            board.post(STEP, [Call(print, {})])
            board.finish(STEP, 0, None)
            text = told(out)
    assert f"upper in s3://{BUCKET}/out/dup: working; upper: upper: 1 of 3 tasks done" in text, text


def test_a_given_tokenizer_is_not_waited_for(tmp_path: Path) -> None:
    for tokenizer, is_trained in (({"file": None}, True), ({"file": "tokenizer.json"}, False)):
        (tmp_path / "run.json").write_text(json.dumps({"dedup": {}, "tokenizer": tokenizer}))
        assert ("train_tokenizer" in stages_of_run(tmp_path, "stopped")) is is_trained
