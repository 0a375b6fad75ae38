"""Runs of a stage: finished tasks are skipped, changed ones run again, and nothing is lost when a run is refused."""

import gc
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.counts import READ, Counts
from gristmill.engine import task
from gristmill.engine.execution import progress
from gristmill.engine.execution.call import Call
from gristmill.engine.run import open_stage
from gristmill.engine.staleness import done_tasks
from gristmill.engine.staleness.identity import identify
from gristmill.engine.staleness.outputs import reject_overlapping_folders, reject_unknown_files
from gristmill.engine.task import Result, Stage, Task
from gristmill.errors import ConservationError, InputError, OutputError, StorageError, TooManyMalformed, UsageError
from gristmill.io.files import reject_unfinished
from gristmill.io.writers import Rejects
from gristmill.storage.local import atomic_write_bytes
from tests.gristmill.engine import upper_stage as upper_stage_module
from tests.gristmill.engine.upper_stage import QUIET, STAGE, Settings, join, upper_stage

TASKS = 7  # of a first run on three files: three copies, three parts, one join


@pytest.fixture
def target(tmp_path: Path, source: Path) -> Path:
    """The output of a finished run."""
    assert upper_stage(source, tmp_path / "out").ran == TASKS
    return tmp_path / "out"


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_a_finished_stage_runs_nothing_and_leaves_no_temporary_file(source: Path, target: Path) -> None:
    assert upper_stage(source, target).ran == 0
    assert contents(target)["whole"] == "TEXT A\nTEXT B\nTEXT C\n"
    assert not list(target.rglob("*.work")) and not list(target.rglob("*.done"))


def test_a_task_is_identified_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes time for each file that it reads."""
    seen: list[str] = []

    def counting(task: Task, *arguments: Any) -> dict[str, str]:
        seen.append(task.name)
        return identify(task, *arguments)

    monkeypatch.setattr(done_tasks, "identify", counting)
    assert upper_stage(source, tmp_path / "out").ran == len(seen) == TASKS


def edit_input(source: Path, _: Path) -> int:
    (source / "b").write_text("TEXT B longer\n")
    return 5  # its copy and its part; the other parts, which the join needs; and the join


def touch_input(source: Path, _: Path) -> int:
    os.utime(source / "b", ns=(1, 1))
    return 2  # its copy and its part, whose bytes are the same: the join is done


def remove_output(_: Path, target: Path) -> int:
    (target / "b").unlink()
    return 1


def change_output(_: Path, target: Path) -> int:
    (target / "b").write_text("Text B\n")  # of the same size
    return 1


def remove_joined(_: Path, target: Path) -> int:
    (target / "whole").unlink()
    return 4  # the join needs the parts again


def damage_ledger(_: Path, target: Path) -> int:
    ledger = target / ".gristmill" / "upper.ledger"
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(b"\xff\xfe not UTF-8\n" if b'"task":"b"' in line else line for line in lines))
    return 2


def touch_output(_: Path, target: Path) -> int:
    os.utime(target / "b", ns=(1, 1))
    return 0


@pytest.mark.parametrize(
    "change", [edit_input, touch_input, remove_output, change_output, remove_joined, damage_ledger, touch_output]
)
def test_what_changed_runs_again_and_nothing_else(
    tmp_path: Path, source: Path, target: Path, change: Callable[[Path, Path], int]
) -> None:
    expected = change(source, target)
    assert [upper_stage(source, target).ran, upper_stage(source, target).ran] == [expected, 0]
    upper_stage(source, tmp_path / "fresh")
    assert contents(target) == contents(tmp_path / "fresh")


def test_a_temporary_file_that_a_killed_run_left_is_not_trusted(source: Path, target: Path) -> None:
    before = contents(target)
    left = target / ".gristmill" / "upper.work" / "b"  # of the same size, and of other arguments
    left.parent.mkdir()
    left.write_text("text ?\n")
    (target / "whole").unlink()
    upper_stage(source, target)
    assert contents(target) == before


@pytest.mark.parametrize("stage", [replace(STAGE, version=2), replace(STAGE, libraries=("zlib",))])
def test_another_version_runs_everything_again(source: Path, target: Path, stage: Stage) -> None:
    assert [upper_stage(source, target, stage=stage).ran, upper_stage(source, target, stage=stage).ran] == [TASKS, 0]


def test_an_argument_runs_again_and_a_budget_does_not(source: Path, target: Path) -> None:
    assert upper_stage(source, target, Settings(memory=1 << 30)).ran == 0
    assert upper_stage(source, target, Settings(suffix="!")).ran == TASKS
    assert contents(target)["a"] == "TEXT A\n!"


def test_a_moved_or_copied_output_is_still_done(tmp_path: Path, source: Path, target: Path, monkeypatch) -> None:
    moved = target.rename(tmp_path / "elsewhere")
    assert upper_stage(source, moved).ran == 0
    shutil.copytree(moved, tmp_path / "copied", copy_function=shutil.copyfile)  # with new modification times
    assert upper_stage(source, tmp_path / "copied").ran == 0
    monkeypatch.chdir(tmp_path)
    assert upper_stage(Path("in"), Path("copied")).ran == 0
    renamed = source.rename(tmp_path / "renamed")
    assert upper_stage(renamed, tmp_path / "copied").ran == 0


def test_the_reason_for_a_task_is_explained(source: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_input(source, target)
    upper_stage(source, target, options=replace(QUIET, explain_tasks=True))
    assert "upper: b: b changed\n" in capsys.readouterr().err
    upper_stage(source, target, Settings("?"), options=replace(QUIET, explain_tasks=True))
    assert 'upper: b: suffix "" → "?"\n' in capsys.readouterr().err
    remove_joined(source, target)
    upper_stage(source, target, Settings("?"), options=replace(QUIET, explain_tasks=True))
    assert "upper: whole: its output was removed or changed" in capsys.readouterr().err
    upper_stage(source, target, Settings("."), options=replace(QUIET, explain=True))
    said = capsys.readouterr().err
    assert said.startswith('upper: upper: 3 of 3 tasks run: suffix "?" → "."\n')


def test_an_explanation_speaks_of_files(source: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    explaining = replace(QUIET, explain=True)
    edit_input(source, target)
    (source / "a").unlink()
    (source / "d").write_text("text d\n")
    (target / "c").unlink()
    upper_stage(source, target, options=explaining)
    first = capsys.readouterr().err.splitlines()[0]
    assert first == (
        "upper: upper: 3 of 3 tasks run: 1 file new (d), 1 file gone (a), 1 file changed (b), "
        "outputs of 1 task were removed or changed"
    )
    (source / "d").unlink()
    upper_stage(source, target, options=explaining)
    assert capsys.readouterr().err.startswith("upper: upper: 0 of 2 tasks run: 1 file gone (d)\n")


def test_versions_are_accepted(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What other versions wrote stays, as its record says; a file that changed is read by those of today."""
    stage = replace(STAGE, libraries=("zlib",))
    loud = replace(QUIET, quiet=False)
    upper_stage(source, target, stage=stage)
    made_with = task.library_version("zlib")
    monkeypatch.setattr(task, "library_version", lambda name: {"zlib": "99.1"}[name])
    edit_input(source, target)
    (target / "c").unlink()
    capsys.readouterr()
    run = upper_stage(source, target, stage=stage, options=replace(loud, accept_versions=True))
    # b and c; b and what is needed of the other parts; and the join
    assert run.ran == 2 + 3 + 1
    said = capsys.readouterr().err
    assert f"kept what was made with zlib {made_with} (now 99.1), by --accept_versions" in said
    versions = {
        name: record.identity["zlib"] for (step, name), record in run.records.done.records.items() if step == "upper"
    }
    assert versions == {"a": made_with, "b": "99.1", "c": "99.1"}
    again = upper_stage(source, target, stage=stage, options=loud)
    assert again.ran and again.records.done.records["upper", "a"].identity["zlib"] == "99.1"
    assert f"zlib {made_with} → 99.1: 1 of 3 tasks of upper runs again" in capsys.readouterr().err


def test_versions_are_not_accepted_with_another_argument(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = replace(STAGE, libraries=("zlib",))
    upper_stage(source, target, stage=stage)
    monkeypatch.setattr(task, "library_version", lambda name: {"zlib": "99.1"}[name])
    accepting = replace(QUIET, accept_versions=True)
    assert upper_stage(source, target, Settings("!"), accepting, stage).ran == TASKS


def test_what_another_version_of_the_stage_wrote_is_accepted(
    source: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loud = replace(QUIET, quiet=False)
    upper_stage(source, target)
    upgraded = replace(STAGE, version=2, steps=(("shout", 3),))
    capsys.readouterr()
    assert upper_stage(source, target, options=replace(loud, accept_versions=True), stage=upgraded).ran == 0
    assert "upper: kept what was made with version 1 of the stage (now 2), " in capsys.readouterr().err
    assert upper_stage(source, target, options=loud, stage=upgraded).ran == TASKS
    assert "note: version of the stage 1 → 2, " in capsys.readouterr().err


def test_a_log_has_lines_of_progress(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while the only task of a process works."""
    written = list[str]()
    line = progress._LogLines.line

    def written_line(lines: progress._LogLines) -> str:
        written.append(line(lines))
        return written[-1]

    def work_until_a_line_is_written(seconds: float) -> None:
        before = len(written)
        while len(written) == before:
            time.sleep(0.01)

    monkeypatch.setattr(progress._LogLines, "line", written_line)
    monkeypatch.setattr(upper_stage_module, "time", SimpleNamespace(sleep=work_until_a_line_is_written))
    monkeypatch.setenv("GRISTMILL_LOG_SECONDS", "0.1")
    upper_stage(source, tmp_path / "out", Settings(), replace(QUIET, quiet=False))
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"upper: upper: 0 of 3 tasks, 0 of 0 MB, 0\.0 MB/s, \d+:\d\d:\d\d so far", lines[0])
    for ended in (1, 2):
        wanted = rf"upper: upper: {ended} of 3 tasks, 0 of 0 MB, [0-9.]+ MB/s, \d+:\d\d:\d\d left"
        assert any(re.fullmatch(wanted, line) for line in lines), lines


def test_the_output_of_a_removed_input_is_removed(source: Path, target: Path) -> None:
    (target / "mine").write_text("not written by the stage")
    (source / "b").unlink()
    upper_stage(source, target)
    assert sorted(contents(target)) == ["a", "c", "mine", "whole"]


def test_another_input_that_would_replace_the_output_is_refused(tmp_path: Path, source: Path, target: Path) -> None:
    other, before = tmp_path / "other", contents(target)
    shutil.copytree(source, other)
    assert upper_stage(other, target).ran == 0  # a copy: nothing to replace
    (other / "a").write_text("other\n")
    with pytest.raises(
        UsageError, match=r"out holds what upper made of .*/in, and would lose it .* such as .*out-other"
    ):
        upper_stage(other, target)
    assert contents(target) == before
    shutil.rmtree(source)
    assert upper_stage(other, target).ran == 5  # the first input is gone, and most of this one is the same: it moved
    for path in other.iterdir():
        path.write_text(f"all new {path.name}\n")
    shutil.copytree(other, tmp_path / "another")
    shutil.rmtree(other)
    with pytest.raises(UsageError, match="and would lose it"):
        upper_stage(tmp_path / "another", target)


def test_the_input_of_a_finished_run_that_moved_is_known(tmp_path: Path, source: Path, target: Path) -> None:
    moved = source.rename(tmp_path / "moved")
    assert upper_stage(moved, target).ran == 0
    shutil.copytree(moved, tmp_path / "other")
    (tmp_path / "other" / "a").write_text("other\n")
    with pytest.raises(UsageError, match=r"what upper made of .*/moved, and would lose it"):
        upper_stage(tmp_path / "other", target)


def count_calls(number: int) -> Result:
    """Task: say how many calls there are in this process; only every tenth looks, as it takes half a second."""
    return Result(Counts({}, []), 0 if number % 10 else sum(type(found) is Call for found in gc.get_objects()))


def test_calls_are_made_when_they_are_run(tmp_path: Path) -> None:
    with open_stage(STAGE, tmp_path / "out", QUIET) as run:
        tasks = [Task(str(number), count_calls, {"number": number}) for number in range(50)]
        left = count_calls(0).value  # of other tests
        assert max(run.step("count", tasks).values(int)) < left + 25


def test_an_output_that_is_an_input_is_refused(source: Path) -> None:
    with pytest.raises(UsageError, match=r"is the input folder .*/in or lies in it"):
        upper_stage(source, source)
    assert contents(source)["a"] == "text a\n"
    pairs = [(source / "b", source / "new"), (source / "a", source / "b")]
    tasks = [Task(target.name, join, {"parts": [part], "target": target}, (target,)) for part, target in pairs]
    with pytest.raises(UsageError, match="in/b is an input"), open_stage(STAGE, source, QUIET) as run:
        run.step("join", tasks)
    assert sorted(contents(source)) == ["a", "b", "c"]


def test_an_unfinished_output_is_refused_until_the_stage_has_ended(tmp_path: Path, source: Path, target: Path) -> None:
    (source / "b").write_text("longer than before\n")
    (source / "c").unlink()
    (source / "c").mkdir()  # a task that fails
    with pytest.raises(OSError, match="directory"):
        upper_stage(source, target)
    for folder in (target, target / "below", tmp_path):
        with pytest.raises(InputError, match=r"is not complete: upper, which writes .*/out, was interrupted"):
            reject_unfinished(folder)
    (source / "c").rmdir()
    upper_stage(source, target)
    reject_unfinished(target)


def test_a_result_without_its_goal_is_made_again(tmp_path: Path, source: Path) -> None:
    def run_with_goal(memory: int) -> int:
        with open_stage(Stage("joined", libraries=()), tmp_path / "out", QUIET) as run:
            whole, parts = tmp_path / "out" / "whole", sorted(source.iterdir())
            counts = run.goal({"parts": parts, "kind": "join", "whole": whole}, (whole,))
            if counts is None:  # the number of tasks depends on the budget
                for i in range(memory):
                    task = Task(
                        f"{memory} {i}", join, {"parts": parts, "target": run.work / f"{i}"}, (run.work / f"{i}",)
                    )
                    run.step(f"parts {i}", [task])
                run.step("join", [Task("whole", join, {"parts": parts, "target": whole}, (whole,))])
                counts = Counts({}, [])
            run.finish(counts)
        return run.ran

    assert [run_with_goal(3), run_with_goal(2), run_with_goal(2)] == [4, 0, 0]
    (tmp_path / "out" / "whole").unlink()
    assert [run_with_goal(2), run_with_goal(3)] == [3, 0]


def lose_a_document(source: Path) -> Counts:
    counts = Counts({}, [])
    counts.add("a", READ, source.stat().st_size)
    return counts


def test_a_task_that_loses_a_document_is_not_done(tmp_path: Path, source: Path) -> None:
    for _ in range(2):
        with (
            pytest.raises(ConservationError, match="upper one"),
            open_stage(STAGE, tmp_path / "out", QUIET) as run,
        ):
            run.step("lose", [Task("one", lose_a_document, {"source": source / "a"})])


def reject_record(source: Path, output: Path) -> Counts:
    counts = Counts({}, [])
    Rejects(output).add(source.name, 1, "no text", source.read_bytes())
    atomic_write_bytes(output, b"")
    counts.add("a", READ, 5)
    counts.add("a", "malformed: no text", 5)
    return counts


def test_too_many_malformed_records_leave_the_output_unfinished(tmp_path: Path, source: Path) -> None:
    def run(limit: float) -> int:
        out = tmp_path / "out"
        with open_stage(STAGE, out, replace(QUIET, max_malformed=limit), publishes=[out]) as stage_run:
            task = Task("one", reject_record, {"source": source / "a", "output": out / "one"}, (out / "one",))
            stage_run.finish(stage_run.step("reject", [task]).counts)
        return stage_run.ran

    for _ in range(2):
        with pytest.raises(TooManyMalformed, match="1 of 1 record is malformed"):
            run(0.5)
        with pytest.raises(InputError, match="more malformed or damaged input than --max_malformed allows"):
            reject_unfinished(tmp_path / "out")
    assert run(1.0) == 0
    reject_unfinished(tmp_path / "out")
    (tmp_path / "out" / "one.malformed").unlink()
    assert run(1.0) == 1


def test_unknown_files_are_rejected(source: Path, target: Path) -> None:
    with open_stage(STAGE, target, QUIET) as run:
        reject_unknown_files(target, [], ("a", "other"), run.ledger)  # the ledger knows it
        (target / "other").touch()
        reject_unknown_files(target, [target / "other"], ("a", "other"), run.ledger)  # the plan does
        with pytest.raises(OutputError, match="1 file that upper did not write, such as 'other'"):
            reject_unknown_files(target, [], ("a", "other"), run.ledger)


@pytest.mark.parametrize("output", [".", "below", "below/more", "../root/x"])
def test_folders_that_overlap_are_refused(tmp_path: Path, output: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(UsageError, match="outside it"):
        reject_overlapping_folders(root, root / output)
    with pytest.raises(UsageError, match="another output folder"):
        reject_overlapping_folders(root / "below", root)
    reject_overlapping_folders(root, tmp_path / "root2")


def work_and_fail_once(output: Path, began: Path, seconds: float) -> None:
    """Task: work for a while, and fail the first time as object storage does."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    if not began.exists():
        began.touch()
        raise StorageError("the store is away")
    output.write_text("done")


def work_in_another_process(output: Path, seconds: float) -> None:
    """Task: let a process that it starts work for a while."""
    script = f"import time\nwhile time.process_time() < {seconds}: pass"
    subprocess.run([sys.executable, "-c", script], check=True)
    output.write_text("done")


def test_the_ledger_counts_the_time_of_processes_that_a_task_starts(tmp_path: Path) -> None:
    arguments = {"output": tmp_path / "out/a", "seconds": 0.3}
    (tmp_path / "out").mkdir()
    with open_stage(STAGE, tmp_path / "out", QUIET) as run:
        run.step("work", [Task("a", work_in_another_process, arguments, (arguments["output"],))])
        run.finish(Counts({}, []))
    (cost,) = run.ledger.costs()
    assert cost.core_seconds >= 0.3


def test_the_ledger_says_what_tasks_took(tmp_path: Path) -> None:
    arguments = {"output": tmp_path / "out/a", "began": tmp_path / "began", "seconds": 0.2}
    (tmp_path / "out").mkdir()
    with open_stage(STAGE, tmp_path / "out", replace(QUIET, shard="0/1")) as run:
        run.step("work", [Task("a", work_and_fail_once, arguments, (arguments["output"],))])
        run.finish(Counts({}, []))
    (cost,) = run.ledger.costs()
    assert cost.step == "work" and cost.retries == 1 and cost.core_seconds >= 0.2
