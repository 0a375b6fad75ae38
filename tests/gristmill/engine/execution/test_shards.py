"""--shard i/n with real processes: the bytes of one process, whoever dies, and errors that every process tells."""

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gristmill.storage.files import read_file
from gristmill.storage.objects import list_objects
from tests.gristmill.engine.upper_stage import DAMAGED, Settings, upper_stage
from tests.object_store import BUCKET, object_store
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[4]
FILES, SECONDS = 12, 0.2


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of files, one a task."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(FILES):
        (folder / f"{number:02}").write_text(f"text {number}\n")
    return folder


def start(source: Path, target: Path | str, shard: str, seconds: float, **environment: str) -> subprocess.Popen[str]:
    words = [source, target, "1", str(seconds), "--shard", shard]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.gristmill.engine.upper_stage", *words], cwd=ROOT, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": ".", "GRISTMILL_LEASE_SECONDS": "1"} | environment,
    )  # fmt: skip


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def left_behind(target: Path) -> set[str]:
    """Names below the state folder of a run that has ended, without those that are meant to stay."""
    state = target / ".gristmill"
    stay = {"upper.ledger", "upper.lock", "upper.lock-workers", "upper.compacting", "upper.queue"}
    stay |= {"upper.queue/step.json", "upper.queue/processes"}
    return {path.relative_to(state).as_posix() for path in state.rglob("*")} - stay


def test_three_processes_share_a_stage(tmp_path: Path, source: Path) -> None:
    three = [start(source, tmp_path / "out", f"{i}/3", SECONDS) for i in range(3)]
    messages = sorted((process.communicate(timeout=patience(60))[1] for process in three), key=len)
    assert [process.returncode for process in three] == [0, 0, 0], messages
    assert sum("has finished the work; this process helped with" in text for text in messages) == 2, messages
    helped = sum(int(text.split("helped with ")[1].split(" ")[0]) for text in messages if "helped with" in text)
    assert 0 < helped < 2 * FILES + 1
    upper_stage(source, tmp_path / "alone")
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    assert not left_behind(tmp_path / "out")
    assert upper_stage(source, tmp_path / "out", Settings(seconds=SECONDS)).ran == 0


@pytest.mark.thorough
def test_a_process_with_other_options_waits_and_then_does_its_own_work(tmp_path: Path, source: Path) -> None:
    first = start(source, tmp_path / "out", "0/2", SECONDS)
    while not (tmp_path / "out/.gristmill/upper.queue/step.json").exists():
        time.sleep(0.02)
    other = start(source, tmp_path / "out", "1/2", 0.1)
    messages = [process.communicate(timeout=patience(60))[1] for process in (first, other)]
    assert messages[0].startswith(f"upper: {FILES} read") and "helped" not in messages[1], messages
    last = messages[1].splitlines()[-1]  # it has joined nothing anew, as the parts have the same bytes
    assert last.startswith(f"upper: {FILES} read") and f"1 of {2 * FILES + 1} tasks done before" in last
    assert [first.returncode, other.returncode] == [0, 0]


@pytest.mark.thorough
def test_who_helps_says_in_its_log_what_it_does(tmp_path: Path, source: Path) -> None:
    """Of a long task, too."""
    two = [start(source, tmp_path / "out", f"{i}/2", 1.0, GRISTMILL_LOG_SECONDS="0.1") for i in range(2)]
    messages = [process.communicate(timeout=patience(100))[1] for process in two]
    assert [process.returncode for process in two] == [0, 0], messages
    helped = next(text for text in messages if "helped with" in text)
    assert re.search(r"^upper: upper: helping with 12 tasks: 0 done, now \d\d", helped, re.M), helped
    assert any("upper: upper: 0 of 12 tasks, " in text for text in messages), messages


def test_a_time_that_is_none_is_refused_in_one_line(tmp_path: Path, source: Path) -> None:
    process = start(source, tmp_path / "out", "0/2", SECONDS, GRISTMILL_LEASE_SECONDS="abc")
    message = process.communicate(timeout=patience(60))[1]
    assert process.returncode == 2, message
    assert message.startswith("error: GRISTMILL_LEASE_SECONDS 'abc': expected seconds") and message.count("\n") == 1, (
        message
    )


def test_those_that_live_take_over_from_those_that_are_killed(tmp_path: Path, source: Path) -> None:
    chance = random.Random(seed := random.randrange(1 << 30))
    three = [start(source, tmp_path / "out", f"{i}/3", SECONDS) for i in range(3)]
    for process in chance.sample(three, 2):
        time.sleep(chance.uniform(0.4, 1.4))
        process.kill()
        process.communicate()
    messages = [process.communicate(timeout=patience(60))[1] for process in three if process.returncode is None]
    assert sorted(process.returncode for process in three) == [-9, -9, 0], (seed, messages)
    upper_stage(source, tmp_path / "alone")
    assert contents(tmp_path / "out") == contents(tmp_path / "alone"), seed
    assert not left_behind(tmp_path / "out"), seed
    assert upper_stage(source, tmp_path / "out", Settings(seconds=SECONDS)).ran == 0, seed


def test_the_error_of_a_task_ends_every_process_with_one_line(tmp_path: Path, source: Path) -> None:
    (source / f"{FILES - 1:02}").write_bytes(DAMAGED)
    three = [start(source, tmp_path / "out", f"{i}/3", SECONDS) for i in range(3)]
    for process in three:
        message = process.communicate(timeout=patience(60))[1]
        assert process.returncode == 1
        assert message.splitlines()[-1] == f"error: {source}/{FILES - 1:02}: ends too early", message
        assert "Traceback" not in message
    assert not {name for name in left_behind(tmp_path / "out") if "scratch" in name or "board" in name}


@pytest.mark.thorough
def test_a_bucket_is_shared_like_a_disk(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of the scratch folders
    target = f"s3://{BUCKET}/out"
    with object_store() as store:
        environment = store.environment | {"GRISTMILL_LEASE_SECONDS": "3"}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        two = [start(source, target, f"{i}/2", SECONDS, **environment) for i in range(2)]
        while not any(path.endswith(".done") for verb, path in store.requests if verb == "PUT"):
            time.sleep(0.1)
        first = read_file(Path(target, ".gristmill", "upper.lock")).decode()
        in_charge = next(process for process in two if f"process {process.pid} " in first)
        in_charge.kill()
        messages = [process.communicate(timeout=patience(100))[1] for process in two]
        assert sorted(process.returncode for process in two) == [-9, 0], messages
        upper_stage(source, tmp_path / "alone")
        names = sorted(name for name, _ in list_objects(Path(target)))
        data = {name: read_file(Path(target, name)).decode() for name in names if not name.startswith(".gristmill")}
    assert data == contents(tmp_path / "alone")
    state = {"upper.ledger", "upper.queue/step.json"}
    assert {name.removeprefix(".gristmill/") for name in names if name.startswith(".gristmill")} == state
