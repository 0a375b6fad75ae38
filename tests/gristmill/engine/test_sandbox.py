"""The sandbox of the tests: a task that opens what it did not declare fails in it, and so does planning that reads."""

from pathlib import Path

import pytest

from gristmill.counts import Counts
from gristmill.engine.options import RunOptions
from gristmill.engine.run import open_stage
from gristmill.engine.task import Stage, Task
from gristmill.storage.local import atomic_write_bytes
from preprocessing.normalize_text import normalize_text
from tests.gristmill.engine.sandbox import sandboxed

QUIET = RunOptions(workers=1, quiet=True)


def copy_with_neighbour(source: Path, target: Path) -> None:
    atomic_write_bytes(target, source.read_bytes() + source.with_name("neighbour").read_bytes())


def test_an_undeclared_input_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("source", "neighbour"):
        (tmp_path / name).write_text(name)
    target = tmp_path / "out" / "copy"
    task = Task("copy", copy_with_neighbour, {"source": tmp_path / "source", "target": target}, (target,))
    with (
        sandboxed(tmp_path, monkeypatch),
        pytest.raises(FileNotFoundError, match="neighbour"),
        open_stage(Stage("copy"), tmp_path / "out", QUIET) as run,
    ):
        run.step("copy", [task])


def test_planning_that_reads_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").write_text("data")
    with pytest.raises(AssertionError, match="source"), sandboxed(tmp_path, monkeypatch):
        (tmp_path / "source").read_text()


def test_normalize_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.io.readers.SLICE_BYTES", 200)
    (tmp_path / "in" / "book").mkdir(parents=True)
    (tmp_path / "in" / "book" / "a.jsonl").write_text('{"text": "some text", "n": 1}\n' * 40 + "broken\n")
    (tmp_path / "in" / "book" / "b.jsonl").write_text('{"text": "other text"}\n')
    options = RunOptions(workers=1, quiet=True, max_malformed=0.5)
    with sandboxed(tmp_path, monkeypatch) as sandbox:
        counts = normalize_text(tmp_path / "in", tmp_path / "sandboxed", options=options)
    assert sandbox.tasks > 5 and isinstance(counts, Counts)
    monkeypatch.undo()
    normalize_text(tmp_path / "in", tmp_path / "plain", options=options)
    for name in ("a.jsonl", "b.jsonl"):
        assert (tmp_path / "sandboxed/book" / name).read_bytes() == (tmp_path / "plain/book" / name).read_bytes()
