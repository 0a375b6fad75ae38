"""Marks: no stage reads what another has not finished writing, a folder at any depth or a single file."""

from pathlib import Path

import pytest

from gristmill.engine.run import open_stage
from gristmill.engine.staleness.ledger import Ledger
from gristmill.engine.task import Stage, Task
from gristmill.errors import InputError, OutputError, UsageError
from gristmill.io.files import STATE_DIR, mark_unfinished, reject_unfinished
from tests.gristmill.engine.upper_stage import QUIET, join, upper_stage

JOINED = Stage("joined", libraries=())


def interrupt(parts: list[Path], target: Path) -> None:
    raise KeyboardInterrupt(parts, target)


def fail(parts: list[Path], target: Path) -> None:
    raise OSError(parts, target)


def join_stage(parts: list[Path], target: Path, *, first=join, last=join, part: str = "") -> None:
    """Join files twice, first into a temporary file; then into `target`, a single file."""
    with open_stage(JOINED, target.parent, QUIET, label=target.name, part=part, reads=parts, files=[target]) as run:
        temporary, whole = run.work / "joined", "joined.whole"
        run.step("first", [Task("joined", first, {"parts": parts, "target": temporary}, (temporary,))])
        step = run.step("last", [Task(whole, last, {"parts": [temporary], "target": target}, (target,))])
        run.finish(step.counts)


@pytest.mark.parametrize("killed", ["first", "last"])
def test_a_file_of_a_killed_stage_is_refused_until_it_has_ended(source: Path, tmp_path: Path, killed: str) -> None:
    out = tmp_path / "out"
    join_stage([source / "b"], out / "joined")
    join_stage([source / "c"], out / "other")
    (source / "b").write_text("text of b\n")
    with pytest.raises(KeyboardInterrupt):
        join_stage([source / "b"], out / "joined", **{killed: interrupt})
    with pytest.raises(InputError, match=r"out/joined is not up to date: joined-joined, .* was interrupted"):
        join_stage([out / "joined"], tmp_path / "next")
    join_stage([out / "other"], tmp_path / "next")  # of the same folder
    reject_unfinished(out)
    (out / STATE_DIR / "joined-joined.unfinished.0123abcd.partial").touch()  # of a run that was killed just here
    (done := out / STATE_DIR / "joined-joined.done").mkdir(exist_ok=True)
    (done / "0123.json.0123abcd.partial").touch()  # of a task that is not planned any more
    join_stage([source / "b"], out / "joined")
    join_stage([out / "joined"], tmp_path / "then")
    assert not list(out.rglob("*.partial")) and not done.exists()
    assert (tmp_path / "then").read_text() == "text of b\n"


def test_the_files_of_a_stage_that_changed_nothing_are_not_marked(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/joined").write_text("somebody's own file\n")
    with pytest.raises(OutputError, match="joined did not write it"):
        join_stage([source / "a"], tmp_path / "out/joined")
    with pytest.raises(OSError, match="joined"):
        join_stage([source / "a"], tmp_path / "out/joined", first=fail)
    join_stage([tmp_path / "out/joined"], tmp_path / "next")
    with pytest.raises(OSError, match="changed"):
        join_stage([source / "a"], tmp_path / "changed", last=fail)
    with pytest.raises(InputError, match="not up to date"):
        join_stage([tmp_path / "changed"], tmp_path / "then")


def test_a_file_made_of_another_input_is_not_replaced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        join_stage([source / "a"], out / "joined")
    with pytest.raises(UsageError, match=rf"what joined-joined made of .*/a, .*or remove {out}/joined first"):
        join_stage([source / "b"], out / "joined")
    (out / "joined").unlink()
    for _ in range(2):
        join_stage([source / "b"], out / "joined")
    with pytest.raises(UsageError, match=r"what joined-joined made of .*/b, "):
        join_stage([source / "a"], out / "joined")


def test_a_run_of_the_whole_does_not_write_the_file_of_parts(source: Path, tmp_path: Path) -> None:
    """Their marks would stay on a file that only they could finish."""
    with pytest.raises(KeyboardInterrupt):
        join_stage([source / "a"], tmp_path / "out/joined", part="book", last=interrupt)
    with pytest.raises(UsageError, match=r"holds what joined-joined\+book wrote, .*; give another output file$"):
        join_stage([source / "a"], tmp_path / "out/joined")
    join_stage([source / "a"], tmp_path / "out/joined", part="book")
    join_stage([tmp_path / "out/joined"], tmp_path / "next")


def interrupted_upper(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_folder_is_marked_while_temporary_files_are_made(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All outputs are as the last run left them, and outdated."""
    upper_stage(source, tmp_path / "out")
    (tmp_path / "out/whole").unlink()
    monkeypatch.setattr("tests.gristmill.engine.upper_stage.upper", interrupted_upper)
    with pytest.raises(KeyboardInterrupt):
        upper_stage(source, tmp_path / "out")
    with pytest.raises(InputError, match="is not complete: upper"):
        reject_unfinished(tmp_path / "out")


def test_a_mark_is_found_at_any_depth(tmp_path: Path) -> None:
    (tmp_path / "a" / "b" / "c" / "d").mkdir(parents=True)
    mark_unfinished(tmp_path / "a" / "b" / "c", "stage")
    for folder in (tmp_path / "a", tmp_path / "a/b/c", tmp_path / "a/b/c/d"):
        with pytest.raises(InputError, match=r"stage, which writes .*/a/b/c, was interrupted"):
            reject_unfinished(folder)


def test_what_killed_workers_left_beside_finished_outputs_is_removed(source: Path, tmp_path: Path) -> None:
    upper_stage(source, tmp_path / "out")
    left = [tmp_path / "out" / name for name in ("b.0123abcd.partial", "b.malformed.0123abcd.partial")]
    for path in left:
        path.touch()
    assert upper_stage(source, tmp_path / "out").ran == 0
    assert not any(path.exists() for path in left)


def two_folders(source: Path, first: Path, second: Path) -> int:
    """Write a file to each of two folders; return how many tasks ran."""
    with open_stage(JOINED, first, QUIET, reads=[source], publishes=[first, second]) as run:
        targets = [folder / "whole" for folder in (first, second)]
        arguments = [{"parts": [source / "a"], "target": target} for target in targets]
        tasks = [Task(str(i), join, arguments[i], (target,)) for i, target in enumerate(targets)]
        run.finish(run.step("join", tasks).counts)
    return run.ran


@pytest.mark.parametrize("runs_before", [0, 1])
def test_a_second_folder_says_what_it_holds_if_a_run_was_killed_before_it_wrote_that(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs_before: int
) -> None:
    first, second = tmp_path / "train", tmp_path / "holdout"
    for _ in range(runs_before):
        two_folders(source, first, second)
    (source / "a").write_text("another text\n")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Ledger, "announce", interrupt)
        two_folders(source, first, second)
    with pytest.raises(InputError, match="is not complete: joined"):
        reject_unfinished(second)
    (second / STATE_DIR / "joined.ledger-elsewhere.0123abcd.partial").touch()
    assert two_folders(source, first, second) == 0
    assert not list(second.rglob("*.partial"))
    first.rename(tmp_path / "elsewhere")  # the second folder is alone
    join_stage([second / "whole"], tmp_path / "next")
    (second / "whole").unlink()
    with (
        pytest.raises(InputError, match="holdout/whole, which joined wrote, is missing"),
        open_stage(JOINED, tmp_path / "then", QUIET, reads={second: []}),
    ):
        pass
