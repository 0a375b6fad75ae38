"""Staging: what a task says of its local copies names the objects that they are copies of."""

from pathlib import Path

import pytest

from gristmill.counts import Counts, Damage
from gristmill.engine.staging import Scratch, staged
from gristmill.engine.task import Task
from gristmill.errors import DamagedFile
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
