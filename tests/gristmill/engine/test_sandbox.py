"""The sandbox of the tests: a task that opens what it did not declare fails in it, and so does planning that reads."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
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


def copy_by_name(name: str, target: Path) -> None:
    atomic_write_bytes(target, Path(name).read_bytes())


def copy_by_arrow(name: str, target: Path) -> None:
    atomic_write_bytes(target, pa.OSFile(name).read())


def run_in_sandbox(tmp_path: Path, function: Callable[..., None], **arguments: object) -> str:
    """Run a task in a sandbox; return what it has written."""
    for name in ("source", "neighbour"):
        (tmp_path / name).write_text(name)
    target = tmp_path / "out" / "copy"
    with sandboxed(tmp_path), open_stage(Stage("copy"), tmp_path / "out", QUIET) as run:
        run.step("copy", [Task("copy", function, {"target": target, **arguments}, (target,))])
    return target.read_text()


def test_an_undeclared_input_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neighbour"):
        run_in_sandbox(tmp_path, copy_with_neighbour, source=tmp_path / "source")
    assert (tmp_path / "source").read_text() == "source"


def test_an_undeclared_input_by_its_own_name_is_seen_or_empty(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="source"):
        run_in_sandbox(tmp_path, copy_by_name, name=str(tmp_path / "source"))
    assert run_in_sandbox(tmp_path, copy_by_arrow, name=str(tmp_path / "source")) == "\0" * 6


def test_planning_that_reads_is_seen_or_finds_nothing(tmp_path: Path) -> None:
    (tmp_path / "source").write_text("data")
    with pytest.raises(AssertionError, match="source"), sandboxed(tmp_path):
        assert pa.OSFile(str(tmp_path / "source")).read() == b"\0" * 4
        (tmp_path / "source").read_text()
    assert (tmp_path / "source").read_text() == "data"


def test_normalize_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.io.readers.SLICE_BYTES", 200)
    (tmp_path / "in" / "book").mkdir(parents=True)
    (tmp_path / "in" / "book" / "a.jsonl").write_text('{"text": "some text", "n": 1}\n' * 40 + "broken\n")
    (tmp_path / "in" / "book" / "b.jsonl").write_text('{"text": "other text"}\n')
    options = RunOptions(workers=1, quiet=True, max_malformed=0.5)
    with sandboxed(tmp_path) as sandbox:
        counts = normalize_text(tmp_path / "in", tmp_path / "sandboxed", options=options)
    assert sandbox.tasks > 5 and isinstance(counts, Counts)
    monkeypatch.undo()
    normalize_text(tmp_path / "in", tmp_path / "plain", options=options)
    for name in ("a.jsonl", "b.jsonl"):
        assert (tmp_path / "sandboxed/book" / name).read_bytes() == (tmp_path / "plain/book" / name).read_bytes()
