"""Ranges: a task that reads slices of an object fetches their bytes and no others."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from gristmill.counts import Counts
from gristmill.engine.execution.staging import Scratch, staged
from gristmill.engine.task import Task
from gristmill.io import readers
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import Slice
from gristmill.io.readers import plan_slices, read_documents
from gristmill.io.writers import Rejects
from gristmill.storage.objects import upload
from tests.object_store import Store


def read_texts(part: Slice) -> None:
    """Task: stands for one that reads the slice."""


def test_slices_of_a_parquet_object_are_read_from_their_ranges(
    folder: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{i} " + "x" * 100 for i in range(60)]
    (tmp_path / "in").mkdir()
    pa.parquet.write_table(pa.table({"text": texts}), tmp_path / "in/a.parquet", row_group_size=10, compression="none")
    (file,) = list_corpus(tmp_path / "in")
    monkeypatch.setattr(readers, "SLICE_BYTES", file.size // 4)
    remote = folder / "a.parquet"
    seen = {remote: upload(file.path, remote)}
    (tmp_path / "scratch").mkdir()
    found, fetched = [], 0
    for part in plan_slices(file):
        task = Task(part.label, read_texts, {"part": replace(part, path=remote)})
        with staged(task, seen, Scratch(tmp_path / "scratch")) as copy:
            local = copy.task.arguments["part"]
            rejects = Rejects(tmp_path / "rejects")
            found += [document.text for document in read_documents(local, Counts({}, []), rejects)]
            fetched += sum(1 for byte in local.path.read_bytes() if byte)
    assert found == texts
    assert len(store.requests) > 1 and fetched < 1.5 * file.size
