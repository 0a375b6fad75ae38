"""Outputs: what a run that did not end left behind, and inputs that change meanwhile."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.engine.run import open_stage
from gristmill.engine.staleness.outputs import reject_unknown_files
from gristmill.engine.task import FileSet, Task
from gristmill.errors import DamagedFile, InputError, OutputError, UsageError
from gristmill.io.files import mark_unfinished, reject_unfinished
from gristmill.storage.local import atomic_write_bytes
from tests.gristmill.engine.upper_stage import DAMAGED, QUIET, STAGE, join, upper_stage


def test_files_of_a_run_that_failed_are_removed_with_their_inputs(source: Path, tmp_path: Path) -> None:
    (source / "c").unlink()
    (source / "c").mkdir()
    with pytest.raises(OSError, match="directory"):
        upper_stage(source, tmp_path / "out")
    assert "a" in names_in(tmp_path / "out")  # written, and recorded by its task alone or not at all
    (source / "c").rmdir()
    (source / "a").rename(source / "renamed")
    for record in (tmp_path / "out/.gristmill/upper.done").glob("*.json"):
        if b'"about to write: ' not in record.read_bytes():
            record.unlink()  # as if killed between the output and its record
    upper_stage(source, tmp_path / "out")
    assert names_in(tmp_path / "out") == ["b", "renamed", "whole"]


def test_files_of_a_run_that_failed_are_removed_after_a_second_failure(source: Path, tmp_path: Path) -> None:
    """Whether the task of an input had ended when another failed depends on when they ran."""
    left = tmp_path / "out/a.malformed"
    for removed in ("a", "b"):
        (source / "c").write_bytes(DAMAGED)
        with pytest.raises(DamagedFile):
            upper_stage(source, tmp_path / "out")
        if removed == "a":
            left.write_text("written by a task that was cut off\n")
        (source / removed).unlink()
        for record in (tmp_path / "out/.gristmill/upper.done").glob("*.json"):
            if b'"about to write: ' not in record.read_bytes():
                record.unlink()
    (source / "c").write_text("text c\n")
    upper_stage(source, tmp_path / "out")
    assert names_in(tmp_path / "out") == ["c", "whole"]


def copy_all(sources: list[Path], targets: tuple[Path, ...]) -> None:
    for source, target in zip(sources, targets, strict=True):
        join([source], target)


def test_a_file_that_a_task_leaves_out_now_is_removed_after_a_kill_too(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for names, has_ended in (("abc", True), ("ac", False), ("ac", True)):
        targets = tuple(out / name for name in names)
        with open_stage(STAGE, out, QUIET, reads=[source], publishes=[out]) as run:
            arguments = {"sources": [source / name for name in names], "targets": targets}
            done = run.step("copy", [Task("group", copy_all, arguments, targets)])
            if has_ended:
                run.finish(done.counts)
    assert names_in(out) == ["a", "c"]


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


def join_set(parts: FileSet, target: Path) -> None:
    join(list(parts.paths), target)


def join_and_meanwhile(source: Path, target: Path, meanwhile: Callable[[], object]) -> int:
    """Join the files of a folder, which are a set; `meanwhile` is called after the tasks and before the end."""
    with open_stage(STAGE, target, QUIET, reads=[source], publishes=[target]) as run:
        arguments = {"parts": FileSet(tuple(sorted(source.glob("?")))), "target": target / "whole"}
        done = run.step("join", [Task("whole", join_set, arguments, (target / "whole",))])
        meanwhile()
        run.finish(done.counts)
    return run.ran


def test_a_set_of_inputs_that_changes_during_a_run_is_noticed_at_its_end(source: Path, tmp_path: Path) -> None:
    before = (source / "b").stat()
    with pytest.raises(InputError, match="in/b was changed while upper worked: run the same command again"):
        join_and_meanwhile(source, tmp_path / "out", lambda: (source / "b").write_text("TEXT B\n"))
    with pytest.raises(InputError, match="is not complete: upper"):
        reject_unfinished(tmp_path / "out")
    (source / "b").write_text("text b\n")
    os.utime(source / "b", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert join_and_meanwhile(source, tmp_path / "out", int) == 1  # nobody knows which text the task has read
    assert join_and_meanwhile(source, tmp_path / "out", int) == 0


@pytest.mark.parametrize(
    "mark", [mark_unfinished, lambda folder, stage: mark_unfinished(folder, stage, [folder / "b"])]
)
def test_inputs_that_are_marked_during_a_run_are_noticed_at_its_end(source: Path, tmp_path: Path, mark) -> None:
    with pytest.raises(InputError, match="other, which writes"):
        join_and_meanwhile(source, tmp_path / "out", lambda: mark(source, "other"))


@pytest.mark.parametrize("data", ["TEXT B longer\n", "TEXT X\n"])
def test_a_file_that_is_not_what_a_stage_wrote_is_refused(source: Path, tmp_path: Path, data: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    upper_stage(source, first)
    (first / "whole").touch()
    assert join_and_meanwhile(first, second, int) == 1  # touched, and so hashed
    (first / "b").write_text(data)
    with pytest.raises(InputError, match=r"first/b is not what upper wrote: it was changed .* run upper again"):
        join_and_meanwhile(first, second, int)
    assert upper_stage(source, first).ran == 1
    assert join_and_meanwhile(first, second, int) == 0
    (first / "b").write_text(data)
    shutil.copytree(first, tmp_path / "copy", ignore=shutil.ignore_patterns(".gristmill"))
    assert join_and_meanwhile(tmp_path / "copy", tmp_path / "third", int) == 1


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
        pytest.raises(OutputError, match=r"the ledger .*/upper\.ledger is damaged"),
    ):
        reject_unknown_files(tmp_path / "out", [], ("c",), run.ledger)


def test_a_copied_run_is_of_the_copied_input_once_that_was_changed(source: Path, tmp_path: Path) -> None:
    upper_stage(source, tmp_path / "out")
    shutil.copytree(source, tmp_path / "copy" / "in")
    shutil.copytree(tmp_path / "out", tmp_path / "copy" / "out")
    (tmp_path / "copy" / "in" / "a").write_text("other\n")
    upper_stage(tmp_path / "copy" / "in", tmp_path / "copy" / "out")
    (tmp_path / "copy" / "out").rename(tmp_path / "moved")
    (tmp_path / "copy" / "in" / "a").write_text("another\n")
    assert upper_stage(tmp_path / "copy" / "in", tmp_path / "moved").ran == 5
    with pytest.raises(UsageError, match=r"holds what upper made of .*/copy/in, and would lose it"):
        upper_stage(source, tmp_path / "moved")
