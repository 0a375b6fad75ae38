"""Staging: what a task says of its local copies names the objects that they are copies of."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.counts import Counts, Damage
from gristmill.engine.execution.staging import Scratch, open_scratch, staged
from gristmill.engine.task import Task
from gristmill.errors import DamagedFile, OutputError, wrap_write_errors
from tests.gristmill.engine.upper_stage import join


def test_counts_and_errors_of_a_staged_task_name_objects(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    scratch, task = Scratch(tmp_path / "scratch", is_private=True), Task("one", join, {}, (tmp_path / "out",))
    with (
        pytest.raises(DamagedFile, match=r"^s3://bucket/a\.jsonl: it is torn$") as caught,
        staged(task, {}, scratch) as copy,
    ):
        path = copy.task.outputs[0].parents[len(tmp_path.parts) - 1] / "s3/bucket/a.jsonl"
        counts = copy.name_objects(Counts({}, [f"{path} line 1"], {"a": Damage(str(path), "torn", f"{path} is torn")}))
        assert counts.examples == ["s3:/bucket/a.jsonl line 1"]
        assert counts.damaged["a"] == Damage("s3:/bucket/a.jsonl", "torn", "s3:/bucket/a.jsonl is torn")
        raise DamagedFile(path, "torn", "it is torn")
    assert caught.value.path == Path("s3:/bucket/a.jsonl")


def fill_disk(output: Path) -> None:
    """Task: write to a disk without space."""
    with wrap_write_errors(output):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_scratch_is_named_and_no_output(tmp_path: Path) -> None:
    with open_scratch(tmp_path, None, is_private=True) as scratch, pytest.raises(OutputError) as caught:
        output = Path("s3:/bucket/out")
        task = Task("one", fill_disk, {"output": output}, (output,))
        with staged(task, {}, scratch) as copy:
            copy.task.function(**copy.task.arguments)
    message = str(caught.value)
    assert message.startswith(f"--scratch {tmp_path} is full: its disk has ") and "out" not in message, message
    assert "--scratch_size" in message


def test_a_task_that_ends_after_its_step_puts_nothing_in_place(tmp_path: Path) -> None:
    """As that of a node that was taken for dead and comes back: the fence of the step is gone."""
    fence, task = tmp_path / "fence", Task("one", join, {}, (tmp_path / "out",))
    with open_scratch(tmp_path / "scratch", None, is_private=True) as scratch:
        for is_late in (True, False):
            fence.touch()
            with staged(task, {}, replace(scratch, fence=fence)) as copy:
                copy.task.outputs[0].write_text("late" if is_late else "in time")
                if is_late:
                    fence.unlink()
                    with pytest.raises(OutputError, match="another process has taken over the work"):
                        copy.publish(task.outputs)
                    assert not (tmp_path / "out").exists()
                else:
                    copy.publish(task.outputs)
    assert (tmp_path / "out").read_text() == "in time" and not list((tmp_path / "scratch").iterdir())
