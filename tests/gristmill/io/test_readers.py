"""Readers: what counts as a document, what as malformed, and what is left of a malformed record."""

from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet
import pytest

from gristmill.counts import READ, Counts
from gristmill.io import readers
from gristmill.io.documents import Document, list_corpus
from gristmill.io.readers import plan_slices, read_documents
from gristmill.io.writers import Rejects


def read_all(root: Path, rejects: Path) -> tuple[list[Document], Counts, list[dict]]:
    """(documents, counts, rejects) of a corpus."""
    counts, sink = Counts({}, []), Rejects(rejects)
    slices = [part for file in list_corpus(root) for part in plan_slices(file)]
    documents = [document for part in slices for document in read_documents(part, counts, sink)]
    lines = sink.path.read_bytes().splitlines() if sink.path.exists() else []
    return documents, counts, [msgspec.json.decode(line) for line in lines]


def write(root: Path, name: str, *lines: bytes) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(b"\n".join(lines) + b"\n")


def test_a_line_over_the_limit_is_malformed_and_only_its_beginning_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 2000)
    long = b'{"text":"' + b"x" * 3000 + b'"}'
    write(tmp_path / "in", "a.jsonl", b'{"text":"a"}', long, b'{"text":"b"}')
    documents, counts, rejects = read_all(tmp_path / "in", tmp_path / "out")
    assert [(d.text, d.key.row) for d in documents] == [("a", 0), ("b", 2)]
    assert counts.total("malformed: line over 2,000 bytes").bytes == len(long) == counts.total(READ).bytes - 2
    (reject,) = rejects
    assert reject["line"] == 2 and reject["raw"] == long[:1024].decode()


def test_a_table_of_times_that_python_cannot_hold_is_read(tmp_path: Path) -> None:
    far = pa.array([2**62, -(2**62)], pa.int64())
    columns = {name: far.view(kind) for name, kind in (("ns", pa.timestamp("ns")), ("s", pa.timestamp("s", "UTC")))}
    table = pa.table({"text": ["a", "b"], **columns, "long": far.view(pa.duration("s"))})
    (tmp_path / "in").mkdir()
    pa.parquet.write_table(table.drop(["s", "long"]), tmp_path / "in" / "a.parquet")
    with pa.ipc.new_stream(tmp_path / "in" / "b.arrow", table.schema) as writer:
        writer.write_table(table)
    documents, counts, _ = read_all(tmp_path / "in", tmp_path / "out")
    assert [d.text for d in documents] == ["a", "b", "a", "b"] and counts.malformed == 0
    assert documents[0].fields["ns"] == documents[2].fields["ns"] == "2116-02-20T23:53:38.427387904"


def test_invalid_utf8_beside_a_text_that_looks_like_a_record_is_malformed(tmp_path: Path) -> None:
    bad = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
    (tmp_path / "in").mkdir()
    pa.parquet.write_table(pa.table({"text": ['{"text": "not a document"}'], "x": bad}), tmp_path / "in" / "a.parquet")
    documents, counts, rejects = read_all(tmp_path / "in", tmp_path / "out")
    assert documents == [] and counts.malformed == 1
    assert rejects[0]["reason"] == "invalid UTF-8" and rejects[0]["raw"] == '{"text": "not a document"}'
