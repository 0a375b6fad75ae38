"""Stages: finished tasks are skipped, changed ones run again, stale outputs are removed, unknown files rejected."""

import os
from pathlib import Path

import pytest

from gristmill.counts import READ, WRITTEN, Counts
from gristmill.engine import stage
from gristmill.engine.stage import (
    RunOptions,
    Task,
    code_version,
    parse_size,
    reject_overlapping_folders,
    reject_unknown_files,
    run_stage,
)
from gristmill.errors import ConservationError, OutputError, UsageError
from gristmill.io.files import atomic_write, atomic_write_bytes
from gristmill.io.writers import Rejects

QUIET = RunOptions(workers=1, quiet=True)


def copy_upper(source: Path, target: Path, log: Path, suffix: str = "") -> Counts:
    counts = Counts({}, [])
    data = source.read_bytes()
    atomic_write_bytes(target, data.upper() + suffix.encode())
    counts.add("a", READ, len(data))
    counts.add("a", WRITTEN, len(data))
    with log.open("a") as file:
        file.write(target.name + "\n")
    return counts


def lose_a_document(source: Path) -> Counts:
    counts = Counts({}, [])
    counts.add("a", READ, source.stat().st_size)
    return counts


@pytest.fixture
def task(tmp_path: Path) -> Task:
    (tmp_path / "in").write_text("text")
    return make_task(tmp_path)


def make_task(folder: Path, name: str = "one", target: str = "out/one", suffix: str = "") -> Task:
    arguments = {"source": folder / "in", "target": folder / target, "log": folder / "log", "suffix": suffix}
    return Task(name, copy_upper, arguments, (folder / "in",), (folder / target,))


def runs(folder: Path, *tasks: Task, stale_prefix: str | None = "") -> int:
    """Number of tasks that ran."""
    log = folder / "log"
    before = len(log.read_text().splitlines()) if log.exists() else 0
    counts = run_stage("stage", tasks, folder / "state", QUIET, stale_prefix)
    assert counts.total(READ).documents == len(tasks)  # counts are of all, done before or now
    return (len(log.read_text().splitlines()) if log.exists() else 0) - before


def test_a_finished_task_does_not_run_again(tmp_path: Path, task: Task) -> None:
    assert [runs(tmp_path, task), runs(tmp_path, task)] == [1, 0]
    assert (tmp_path / "out" / "one").read_text() == "TEXT"


def change_size(folder: Path) -> Task:
    (folder / "in").write_text("longer text")
    return make_task(folder)


def change_mtime(folder: Path) -> Task:
    os.utime(folder / "in", ns=(1, 1))
    return make_task(folder)


def change_arguments(folder: Path) -> Task:
    return make_task(folder, suffix="!")


def change_function(folder: Path) -> Task:
    task = make_task(folder)
    return Task(task.name, copy_again, task.arguments, task.inputs, task.outputs)


def remove_output(folder: Path) -> Task:
    (folder / "out" / "one").unlink()
    return make_task(folder)


def truncate_output(folder: Path) -> Task:
    (folder / "out" / "one").write_text("TEX")
    return make_task(folder)


def lose_ledger(folder: Path) -> Task:
    (folder / "state" / "stage.jsonl").unlink()
    return make_task(folder)


def copy_again(source: Path, target: Path, log: Path, suffix: str = "") -> Counts:
    return copy_upper(source, target, log, suffix)


@pytest.mark.parametrize(
    "change",
    [change_size, change_mtime, change_arguments, change_function, remove_output, truncate_output, lose_ledger],
    ids=lambda change: change.__name__,
)
def test_a_changed_task_runs_again(tmp_path: Path, task: Task, change) -> None:
    runs(tmp_path, task)
    changed = change(tmp_path)
    assert [runs(tmp_path, changed), runs(tmp_path, changed)] == [1, 0]
    assert (tmp_path / "out" / "one").read_text().startswith("TEXT" if change is not change_size else "LONGER")


class TestCodeVersion:
    """The hash of the code that a task's output depends on: its top-level package and gristmill."""

    @pytest.fixture
    def root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A folder with packages, gristmill among them, next to a script."""
        root = tmp_path / "root"
        for name in (
            "gristmill/engine/stage", "gristmill/text", "dedup/to_hash", "dedup/minhash/kernels", "training/train"
        ):  # fmt: skip
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).with_suffix(".py").write_text(name)
        (tmp_path / "script.py").write_text("a script")
        monkeypatch.setattr(stage, "__file__", str(root / "gristmill/engine/stage.py"))
        return root

    def version(self, root: Path, file: str) -> str:
        return code_version.__wrapped__(str(root / file))  # without the cache: files change while the test runs

    @pytest.mark.parametrize(
        "changed", ["dedup/to_hash.py", "dedup/minhash/kernels.py", "dedup/minhash/new.py",
                    "gristmill/text.py", "gristmill/engine/stage.py", "gristmill/io/new.py"]
    )  # fmt: skip
    @pytest.mark.parametrize("own", ["dedup/to_hash.py", "dedup/minhash/kernels.py"])
    def test_changes_with_any_module_of_the_package_and_of_gristmill(self, root: Path, own: str, changed: str) -> None:
        before = self.version(root, own)
        (root / changed).parent.mkdir(exist_ok=True)
        (root / changed).write_text("changed")
        assert self.version(root, own) != before

    @pytest.mark.parametrize("changed", ["training/train.py", "preprocessing/filter.py", "run.py", "dedup/notes.txt"])
    def test_does_not_change_with_other_files(self, root: Path, changed: str) -> None:
        before = self.version(root, "dedup/to_hash.py")
        (root / changed).parent.mkdir(exist_ok=True)
        (root / changed).write_text("changed")
        assert self.version(root, "dedup/to_hash.py") == before

    def test_of_a_function_outside_the_project(self, root: Path) -> None:
        versions = [self.version(root, "../script.py")]
        (root / "dedup/to_hash.py").write_text("changed")
        assert self.version(root, "../script.py") == versions[0]
        for changed in ("../script.py", "gristmill/text.py"):
            (root / changed).write_text("changed")
            versions.append(self.version(root, "../script.py"))
        assert len(set(versions)) == 3

    def test_decides_whether_a_task_is_done(self, tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
        assert runs(tmp_path, task) == 1
        monkeypatch.setattr(stage, "code_version", lambda file: f"another version of {file}")
        assert [runs(tmp_path, task), runs(tmp_path, task)] == [1, 0]


def test_outputs_of_tasks_no_longer_planned_are_removed(tmp_path: Path, task: Task) -> None:
    two = make_task(tmp_path, "two", "out/two")
    runs(tmp_path, task, two)
    (tmp_path / "out" / "mine").write_text("not written by the stage")
    runs(tmp_path, task)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["mine", "one"]


def test_outputs_with_another_prefix_are_kept(tmp_path: Path, task: Task) -> None:
    book = [make_task(tmp_path, f"book/{i}", f"out/book{i}") for i in range(2)]
    web = make_task(tmp_path, "web/0", "out/web0")
    runs(tmp_path, *book, stale_prefix="book/")
    runs(tmp_path, web, stale_prefix="web/")
    runs(tmp_path, book[0], stale_prefix="book/")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["book0", "web0"]
    runs(tmp_path, task, stale_prefix=None)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["book0", "one", "web0"]


def test_the_old_output_of_a_task_that_now_writes_elsewhere_is_removed(tmp_path: Path, task: Task) -> None:
    runs(tmp_path, task)
    runs(tmp_path, make_task(tmp_path, target="elsewhere/one"), stale_prefix=None)
    assert not (tmp_path / "out" / "one").exists() and (tmp_path / "elsewhere" / "one").exists()


def test_a_stage_that_loses_a_document_fails(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("text")
    task = Task("one", lose_a_document, {"source": tmp_path / "in"}, (tmp_path / "in",), ())
    with pytest.raises(ConservationError):
        run_stage("stage", [task], tmp_path / "state", QUIET)
    assert not (tmp_path / "state" / "stage.jsonl").exists()  # nor is it done


def test_unknown_files_are_rejected(tmp_path: Path, task: Task) -> None:
    out, ledger = tmp_path / "out", tmp_path / "state" / "stage.jsonl"
    runs(tmp_path, task)
    reject_unknown_files(out, [], ("one", "other"), ledger)  # the ledger knows it
    (out / "other").touch()
    reject_unknown_files(out, [out / "other"], ("one", "other"), ledger)  # the plan does
    with pytest.raises(OutputError, match="1 files that stage did not write, 'other'"):
        reject_unknown_files(out, [], ("one", "other"), ledger)


@pytest.mark.parametrize("target", [".", "below", "below/more", "../root/x"])
def test_an_output_in_the_input_is_refused(tmp_path: Path, target: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(UsageError, match="outside it"):
        reject_overlapping_folders(root, root / target)
    reject_overlapping_folders(root, tmp_path / "root2")


@pytest.mark.parametrize(
    ("text", "size"), [("512MiB", 512 << 20), ("4G", 4 << 30), ("1000", 1000), ("1.5k", 1536), ("2 GB", 2 << 30)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1G", "much", "1X", "nan", "inf", "1e999"])
def test_an_invalid_size_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


def test_fewer_than_one_worker_is_refused(tmp_path: Path, task: Task) -> None:
    with pytest.raises(UsageError, match="--workers 0"):
        run_stage("stage", [task], tmp_path / "state", RunOptions(workers=0, quiet=True))


@pytest.mark.parametrize("below_a_file", [True, False])
def test_an_output_that_cannot_be_written_is_an_error(tmp_path: Path, below_a_file: bool) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    target = tmp_path / "file" / "x" if below_a_file else tmp_path / "folder"
    with pytest.raises(OutputError, match="cannot write"), atomic_write(target) as temporary:
        temporary.touch()
    assert not list(tmp_path.rglob("*.partial"))


def reject_half(source: Path, target: Path, log: Path) -> Counts:
    Rejects(target).add("in", 0, "no text", b"{}")
    return copy_upper(source, target, log)


def test_malformed_records_are_kept_and_do_not_make_the_task_run_again(tmp_path: Path, task: Task) -> None:
    arguments = {key: value for key, value in task.arguments.items() if key != "suffix"}
    rejecting = Task("one", reject_half, arguments, task.inputs, task.outputs)
    assert [runs(tmp_path, rejecting), runs(tmp_path, rejecting)] == [1, 0]
    assert (tmp_path / "out" / "one.malformed").read_bytes().count(b"\n") == 1
    (tmp_path / "out" / "one.malformed").unlink()
    assert runs(tmp_path, rejecting) == 1
    assert runs(tmp_path, make_task(tmp_path, target="out/two")) == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["two"]
