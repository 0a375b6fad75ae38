"""Parts of a stage's work: each call is a run of its own, with outputs and a ledger of its own."""

import re
from pathlib import Path

import pytest

from gristmill.engine.run import StageRun, open_stage
from gristmill.engine.staleness.ledger import run_name
from gristmill.engine.task import Stage, Task
from gristmill.errors import InputError, UsageError
from gristmill.io.files import reject_unfinished
from tests.gristmill.engine.upper_stage import QUIET, join

COPY = Stage("copy", libraries=())
JOIN = Stage("join", libraries=())


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


def test_parts_give_what_the_whole_gives(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for ran in ([2, 1], [0, 0]):
        assert [copy_stage(source, out, names, part).ran for names, part in (("ab", "one"), ("c", "two"))] == ran
    assert names_in(out / ".gristmill", "*.ledger") == ["copy+one.ledger", "copy+two.ledger"]
    copy_stage(source, tmp_path / "whole", "abc")
    for name in "abc":
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    with open_stage(JOIN, tmp_path / "joined", QUIET, reads={out: [out / name for name in "abc"]}) as run:
        whole = tmp_path / "joined" / "whole"
        arguments = {"parts": [out / name for name in "abc"], "target": whole}
        run.finish(run.step("join", [Task("whole", join, arguments, (whole,))]).counts)
    (out / "b").unlink()
    with (
        pytest.raises(InputError, match="b, which copy wrote, is missing"),
        open_stage(JOIN, tmp_path / "joined", QUIET, reads={out: [out / "a", out / "c"]}),
    ):
        pass


def test_a_part_removes_its_own_files_alone(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    copy_stage(source, out, "ab", "one")
    copy_stage(source, out, "bc", "two")
    copy_stage(source, out, "a", "one")
    assert names_in(out) == ["a", "b", "c"]  # b is of the other part, too
    copy_stage(source, out, "c", "two")
    assert names_in(out) == ["a", "c"]


@pytest.mark.parametrize(
    ("first", "second", "advice"),
    [("one", "", "out-whole"), ("", "one", "out-parts"), ("one", "one/0-1", "out-parts"), ("one/0-1", "one", "whole")],
)
def test_the_whole_and_its_parts_do_not_share_an_output(
    source: Path, tmp_path: Path, first: str, second: str, advice: str
) -> None:
    """Neither would know which of the files are its own, and the records of one would say nothing of the other's."""
    out = tmp_path / "out"
    copy_stage(source, out, "ab", first)
    name = re.escape(run_name("copy", part=first))
    with pytest.raises(UsageError, match=f"holds what {name} wrote, .*expected the same calls as before; .*{advice}"):
        copy_stage(source, out, "a", second)
    assert names_in(out) == ["a", "b"]
    assert copy_stage(source, out, "ab", first).ran == 0


def test_the_whole_does_not_write_where_a_part_was_killed(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        copy_stage(source, out, "ab", "one", join_and_die)
    assert names_in(out) == ["a"]  # without a record
    with pytest.raises(UsageError, match=r"holds what copy\+one wrote"):
        copy_stage(source, out, "ab")
    copy_stage(source, out, "b", "one")
    assert names_in(out) == ["b"]


def test_an_unfinished_part_marks_its_folder_until_it_has_ended(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        copy_stage(source, out, "ab", "one", interrupt)
    copy_stage(source, out, "c", "two")
    with pytest.raises(InputError, match=r"is not complete: copy\+one, .* Run copy again"):
        reject_unfinished(out)
    copy_stage(source, out, "ab", "one")
    reject_unfinished(out)


def test_outputs_with_a_plus_in_their_names_are_no_parts(source: Path, tmp_path: Path) -> None:
    for label in ("x", "x+y"):
        with open_stage(COPY, tmp_path, QUIET, label=label, files=[tmp_path / label]) as run:
            arguments = {"parts": [source / "a"], "target": tmp_path / label}
            run.finish(run.step("copy", [Task("all", join, arguments, (tmp_path / label,))]).counts)
    with open_stage(COPY, tmp_path, QUIET, label="x", files=[tmp_path / "x"]) as run:
        assert not run.ledger.siblings
        arguments = {"parts": [source / "b"], "target": tmp_path / "x"}
        run.finish(run.step("copy", [Task("all", join, arguments, (tmp_path / "x",))]).counts)
    assert names_in(tmp_path) == ["x", "x+y"]


def test_names_of_parts_are_not_confused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for part in ("a+b", "a/b"):
        copy_stage(source, out, "a", part)
    assert names_in(out / ".gristmill", "*.ledger") == ["copy+a%2Bb.ledger", "copy+a+b.ledger"]
