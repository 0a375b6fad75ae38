"""Claims: what a run that did not end left behind, and inputs that change meanwhile."""

from pathlib import Path

import pytest

from gristmill.engine.claims import reject_unknown_files
from gristmill.engine.run import open_stage
from gristmill.engine.task import Task
from gristmill.errors import InputError, OutputError, UsageError
from gristmill.io.files import atomic_write_bytes
from tests.gristmill.engine.upper_stage import QUIET, STAGE, join, upper_stage


def test_files_of_a_run_that_failed_are_removed_with_their_inputs(source: Path, tmp_path: Path) -> None:
    (source / "c").unlink()
    (source / "c").mkdir()
    with pytest.raises(OSError, match="directory"):
        upper_stage(source, tmp_path / "out")
    assert "a" in names_in(tmp_path / "out")  # written, and recorded by its task alone or not at all
    (source / "c").rmdir()
    (source / "a").rename(source / "renamed")
    for record in (tmp_path / "out/.gristmill/upper.done").glob("*.json"):
        if b'"claims of' not in record.read_bytes():
            record.unlink()  # as if killed between the output and its record
    upper_stage(source, tmp_path / "out")
    assert names_in(tmp_path / "out") == ["b", "renamed", "whole"]


def change_while_reading(source: Path, output: Path) -> None:
    atomic_write_bytes(output, source.read_bytes())
    source.write_text("changed meanwhile\n")


def test_an_input_that_changes_while_it_is_read_is_noticed(source: Path, tmp_path: Path) -> None:
    task = Task("one", change_while_reading, {"source": source / "a", "output": tmp_path / "x"}, (tmp_path / "x",))
    with (
        pytest.raises(InputError, match="in/a was changed while upper worked"),
        open_stage(STAGE, tmp_path, QUIET) as run,
    ):
        run.step("copy", [task])
    assert not any(step for step, _ in run.ledger.read())


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def test_an_input_of_an_earlier_step_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "out/first", tmp_path / "out/second"
    with open_stage(STAGE, tmp_path / "out", QUIET) as run:
        run.finish(run.step("two", [join_task(source / "b", second)]).counts)
    with pytest.raises(UsageError, match="out/second is an input"), open_stage(STAGE, tmp_path / "out", QUIET) as run:
        run.step("one", [join_task(second, first)])
        run.step("two", [join_task(first, second)])
    assert second.read_text() == "text b\n"


def join_task(part: Path, target: Path) -> Task:
    return Task(target.name, join, {"parts": [part], "target": target}, (target,))


def test_files_that_a_damaged_ledger_does_not_name_any_more(source: Path, tmp_path: Path) -> None:
    upper_stage(source, tmp_path / "out")
    ledger = tmp_path / "out/.gristmill/upper.ledger"
    ledger.write_bytes(ledger.read_bytes()[:-100])
    with (
        open_stage(STAGE, tmp_path / "out", QUIET) as run,
        pytest.raises(OutputError, match=r"its ledger .*/upper\.ledger is damaged"),
    ):
        reject_unknown_files(tmp_path / "out", [], ("c",), run.ledger)
