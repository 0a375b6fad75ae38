"""Content tags and records: of outputs in other folders than the ledger's, and of runs that were killed."""

from pathlib import Path

import pytest

from gristmill.counts import Counts
from gristmill.engine.options import RunOptions
from gristmill.engine.run import StageRun, open_stage
from gristmill.engine.task import Stage, Task
from gristmill.errors import InputError
from gristmill.storage.local import atomic_write_bytes
from tests.gristmill.engine.upper_stage import upper_stage

QUIET = RunOptions(workers=1, quiet=True)


def copy(source: Path, target: Path) -> None:
    if source.read_text() == "kill":
        raise KeyboardInterrupt
    atomic_write_bytes(target, source.read_bytes())


def run_copy(tmp_path: Path, *targets: str) -> StageRun:
    tasks = [
        Task(name, copy, {"source": tmp_path / name, "target": tmp_path / target}, (tmp_path / target,))
        for name, target in zip("abc", targets, strict=False)
    ]
    with open_stage(Stage("copy"), tmp_path / "out", QUIET) as run:
        run.step("copy", tasks)
        run.finish(Counts({}, []))
    return run


def test_an_output_outside_of_the_folder_of_the_ledger_is_done(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("data")
    assert run_copy(tmp_path, "elsewhere/a").ran == 1
    assert run_copy(tmp_path, "elsewhere/a").ran == 0
    (tmp_path / "elsewhere" / "a").touch()
    assert run_copy(tmp_path, "elsewhere/a").ran == 0
    (tmp_path / "elsewhere" / "a").write_text("atad")
    assert run_copy(tmp_path, "elsewhere/a").ran == 1


def test_tasks_that_a_killed_run_finished_are_done(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text("data" if name != "c" else "kill")
    with pytest.raises(KeyboardInterrupt):
        run_copy(tmp_path, "out/a", "out/b", "out/c")
    (tmp_path / "c").write_text("data")
    assert run_copy(tmp_path, "out/a", "out/b", "out/c").ran == 1


def test_an_input_beside_a_link_to_itself_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "a").write_text("data")
    assert run_copy(tmp_path, "out/a").ran == 1
    (tmp_path / "a").write_text("atad")
    assert run_copy(tmp_path, "out/a").ran == 1
    assert (tmp_path / "out/a").read_text() == "atad"


@pytest.mark.parametrize("name", [".gristmill/copy.ledger", ".gristmill/x.unfinished", ".gristmill"])
def test_a_state_that_cannot_be_read_is_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").write_text("data")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to(tmp_path / name)
    with pytest.raises(InputError, match=rf"cannot read {tmp_path}/{name}: "):
        run_copy(tmp_path, "out/a")


def test_a_folder_given_through_a_link_and_two_dots_is_the_one_that_is_written(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far/below").mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/below")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/c").write_text("the user's own\n")
    source.rename(tmp_path / "far/in")
    monkeypatch.chdir(tmp_path)
    given = Path("link/../in"), Path("link/../out")
    assert upper_stage(*given).ran == 7
    (tmp_path / "far/in/b").write_text("longer than before\n")
    (tmp_path / "far/in/c").unlink()
    assert upper_stage(*given).ran > 0
    assert (tmp_path / "far/out/whole").read_text() == "TEXT A\nLONGER THAN BEFORE\n"
    assert sorted(path.name for path in (tmp_path / "far/out").iterdir()) == [".gristmill", "a", "b", "whole"]
    assert (tmp_path / "out/c").read_text() == "the user's own\n"
    assert upper_stage(tmp_path / "far/in", tmp_path / "far/out").ran == 0
