"""A stage killed by SIGKILL and run again writes the same bytes, and leaves nothing unfinished."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet
import pytest

from tests.patience import found_below, patience

TO_HASH = "python dedup/to_hash.py all {norm} {out} 0 0 0 999 --hash sha1 --workers {workers}"
PAIRS = (
    "python dedup/generate_duplicate_pairs.py --input_dir {minhash} --out_file {out}/duplicate_pairs.txt "
    "--range 13 --bands 9 --processes {workers} --memory 4K"
)
CLUSTERS = (
    "python dedup/generate_connected_components.py --input_dir {out} --signatures {minhash} --out_file {out}/c.parquet "
    "--workers {workers} --memory 4K"
)
FILES, EACH = 24, 12


@pytest.fixture(scope="module")
def norm(write: Callable, texts_of: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources that take a while to sign, each a task; every third repeats one before it."""
    root = tmp_path_factory.mktemp("interrupted")
    for number in range(FILES):
        write(root / f"{number:03}/a.jsonl", [" ".join(texts_of(6, number // 3 * 900 + 6 * i)) for i in range(EACH)])
    return root


@pytest.fixture(scope="module")
def minhash(norm: Path, run: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    run(TO_HASH.format(norm=norm, out=out, workers=2))
    return out


def wait_until_there(process: subprocess.Popen[bytes], folder: Path, pattern: str, count: int) -> None:
    """Wait until so many files are there; the process must be in the middle."""
    end = time.monotonic() + patience(60)
    while len(found_below(folder, pattern)) < count:
        assert process.poll() is None, "it ended before it could be stopped"
        assert time.monotonic() < end
        time.sleep(0.002)


def kill_when(process: subprocess.Popen[bytes], folder: Path, pattern: str, count: int) -> None:
    """Kill a process once so many files are there."""
    wait_until_there(process, folder, pattern, count)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def assert_whole(found: dict[str, bytes], expected: dict[str, bytes]) -> None:
    assert sorted(found) == sorted(expected)
    assert [name for name in expected if found[name] != expected[name]] == []


@pytest.mark.every(2)
@pytest.mark.parametrize("workers", [1, 2])
def test_to_hash(
    norm: Path, minhash: Path, tmp_path: Path, run: Callable, start: Callable, contents: Callable, workers: int
) -> None:
    line = TO_HASH.format(norm=norm, out=tmp_path, workers=workers)
    kill_when(start(line), tmp_path, "*.signatures.arrow", 3)
    assert len(list(tmp_path.rglob("*.signatures.arrow"))) < FILES
    ended = run(line)
    assert "tasks done before" in ended.stderr
    assert_whole(contents(tmp_path), contents(minhash))


@pytest.mark.every(2)
@pytest.mark.parametrize(("pattern", "workers"), [("bands/*/*.bin", 2), ("edges/*.bin", 1)])
def test_generate_duplicate_pairs(
    minhash: Path, tmp_path: Path, run: Callable, start: Callable, contents: Callable, pattern: str, workers: int
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    line = PAIRS.format(minhash=minhash, out=killed, workers=workers)
    kill_when(start(line), killed, pattern, 3)
    assert not (killed / "duplicate_pairs.txt").exists()
    line = line.replace("4K", "100M")
    run(line.replace(str(killed), str(whole)))
    run(line)  # other partitions than those that the killed run left
    assert_whole(contents(killed), contents(whole))
    assert contents(killed)["duplicate_pairs.txt"].count(b" :: ") > FILES * EACH // 2
    assert not list(killed.rglob("*.bin"))


@pytest.mark.thorough
@pytest.mark.parametrize(("pattern", "workers"), [("bands/*/*.bin", 1), ("edges/*.bin", 2)])
def test_generate_connected_components(
    minhash: Path, tmp_path: Path, run: Callable, start: Callable, contents: Callable, pattern: str, workers: int
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    line = CLUSTERS.format(minhash=minhash, out=killed, workers=workers)
    kill_when(start(line), killed, pattern, 1)
    assert not (killed / "c.parquet").exists()
    run(line.replace(str(killed), str(whole)).replace("4K", "1G"))
    run(line)
    assert_whole(contents(killed), contents(whole))
    assert pyarrow.parquet.read_table(killed / "c.parquet").num_rows > FILES * EACH // 2
    assert not list(killed.rglob("*.bin")) and not list(killed.rglob("*.run"))


@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_sigterm_ends_workers_and_prints_one_line(norm: Path, tmp_path: Path, start: Callable, send: Callable) -> None:
    """As `kill`, a container or a scheduler sends it: to the process alone, or to its workers as well."""
    line = TO_HASH.format(norm=norm, out=tmp_path, workers=2) + " --quiet"
    process = start(line, stderr=subprocess.PIPE, start_new_session=True)
    wait_until_there(process, tmp_path, "*.arrow", 1)
    send(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=patience(60))
    assert errors.decode() == "terminated: run the same command again to resume\n"
    assert process.returncode == 143
