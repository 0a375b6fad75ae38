"""Parts of a stage's work: each call has a ledger of its own, and a call for the whole takes them over."""

from pathlib import Path

import pytest

from gristmill.engine.ledger import Ledger
from gristmill.engine.run import StageRun, open_stage
from gristmill.engine.task import Stage, Task
from gristmill.errors import InputError, UsageError
from gristmill.io.files import reject_unfinished
from tests.gristmill.engine.upper_stage import QUIET, join

COPY = Stage("copy", libraries=())


def interrupt(parts: list[Path], target: Path) -> None:
    raise KeyboardInterrupt(parts, target)


def join_and_die(parts: list[Path], target: Path) -> None:
    join(parts, target)
    raise KeyboardInterrupt


def copy_stage(source: Path, target: Path, names: str, part: str = "", function=join) -> StageRun:
    """Copy some files; return the run."""
    with open_stage(COPY, target, QUIET, reads=[source], publishes=[target], part=part) as run:
        tasks = [
            Task(f"all/{name}", function, {"parts": [source / name], "target": target / name}, (target / name,))
            for name in names
        ]
        run.finish(run.step("copy", tasks).counts)
    return run


def names_in(folder: Path, pattern: str = "*") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern) if path.is_file())


def test_parts_give_what_the_whole_gives_which_then_has_nothing_to_do(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert [copy_stage(source, out, names, part).ran for names, part in (("ab", "one"), ("c", "two"))] == [2, 1]
    assert names_in(out / ".gristmill", "*.ledger") == ["copy+one.ledger", "copy+two.ledger"]
    assert copy_stage(source, out, "abc").ran == 0
    assert names_in(out / ".gristmill", "*.ledger") == ["copy.ledger"]
    assert names_in(out) == ["a", "b", "c"]
    assert copy_stage(source, out, "ab", "one").ran == 0  # as the whole has done it


def test_a_part_removes_its_own_files_alone(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    copy_stage(source, out, "ab", "one")
    copy_stage(source, out, "bc", "two")
    copy_stage(source, out, "a", "one")
    assert names_in(out) == ["a", "b", "c"]  # b is of the other part, too
    copy_stage(source, out, "c", "two")
    assert names_in(out) == ["a", "c"]
    copy_stage(source, out, "c")
    assert names_in(out) == ["c"]


def test_a_data_set_takes_over_its_tasks_from_the_whole(source: Path, tmp_path: Path) -> None:
    """Their names begin with its own; so files of inputs that are gone are removed by the data set's call."""
    out = tmp_path / "out"
    copy_stage(source, out, "abc")
    assert copy_stage(source, out, "ab", "all").ran == 0
    assert names_in(out) == ["a", "b"]
    assert not any(record.outputs for record in Ledger(out / ".gristmill", "copy").read().values())


def test_an_unfinished_part_marks_its_folder_until_it_or_the_whole_has_ended(source: Path, tmp_path: Path) -> None:
    for ends in (("ab", "one"), ("abc", "")):
        out = tmp_path / f"out{ends[1]}"
        with pytest.raises(KeyboardInterrupt):
            copy_stage(source, out, "ab", "one", interrupt)
        copy_stage(source, out, "c", "two")
        with pytest.raises(InputError, match=r"is not complete: copy\+one, .* Run copy again"):
            reject_unfinished(out)
        copy_stage(source, out, *ends)
        reject_unfinished(out)


def test_the_whole_takes_over_what_a_killed_part_has_written(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        copy_stage(source, out, "ab", "one", join_and_die)
    assert names_in(out) == ["a"]  # without a record
    copy_stage(source, out, "ab")
    copy_stage(source, out, "c", "two")
    with pytest.raises(KeyboardInterrupt):
        copy_stage(source, out, "a", "two", join_and_die)
    copy_stage(source, out, "b")
    assert names_in(out) == ["b"]


def test_the_whole_of_another_input_does_not_replace_what_parts_have_written(source: Path, tmp_path: Path) -> None:
    copy_stage(source, tmp_path / "out", "ab", "one")
    source.with_name("other").mkdir()
    (source.with_name("other") / "a").write_text("other\n")
    with pytest.raises(UsageError, match="would lose it"):
        copy_stage(source.with_name("other"), tmp_path / "out", "a")
    assert names_in(tmp_path / "out") == ["a", "b"]


def test_the_whole_of_the_input_of_one_part_does_not_replace_what_is_of_another(source: Path, tmp_path: Path) -> None:
    other = source.with_name("other")
    other.mkdir()
    (other / "d").write_text("other\n")
    for order in (("one", "two"), ("two", "one")):
        out = tmp_path / order[0]
        copy_stage(source, out, "ab", order[0])
        copy_stage(other, out, "d", order[1])
        for _ in range(2):
            with pytest.raises(UsageError, match="would lose it"):
                copy_stage(source, out, "ab")
        assert names_in(out) == ["a", "b", "d"]


def test_outputs_with_a_plus_in_their_names_are_no_parts(source: Path, tmp_path: Path) -> None:
    for label in ("x", "x+y"):
        with open_stage(COPY, tmp_path, QUIET, label=label, files=[tmp_path / label]) as run:
            arguments = {"parts": [source / "a"], "target": tmp_path / label}
            run.finish(run.step("copy", [Task("all", join, arguments, (tmp_path / label,))]).counts)
    with open_stage(COPY, tmp_path, QUIET, label="x", files=[tmp_path / "x"]) as run:
        assert not run.ledger.others and not run.records_of_others()
        arguments = {"parts": [source / "b"], "target": tmp_path / "x"}
        run.finish(run.step("copy", [Task("all", join, arguments, (tmp_path / "x",))]).counts)
    assert names_in(tmp_path) == ["x", "x+y"]


def test_names_of_parts_are_not_confused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for part in ("a+b", "a", "a/b"):
        copy_stage(source, out, "a", part)
    assert names_in(out / ".gristmill", "*.ledger") == ["copy+a%2Bb.ledger", "copy+a+b.ledger", "copy+a.ledger"]
    copy_stage(source, out, "a", "a")
    assert names_in(out / ".gristmill", "*.ledger") == ["copy+a%2Bb.ledger", "copy+a.ledger"]
