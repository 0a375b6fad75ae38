"""Readers: what counts as a document, what as malformed, and what is left of a malformed record."""

from pathlib import Path

import msgspec
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
