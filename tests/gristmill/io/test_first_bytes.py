"""Files that are not what their names say: read where they can be, or else told what they are."""

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from gristmill.counts import Counts
from gristmill.errors import DamagedFile
from gristmill.io import readers
from gristmill.io.corpus import list_corpus
from gristmill.io.readers import plan_slices, read_corpus, read_documents
from gristmill.io.writers import Rejects

LINES = b'{"text": "one"}\n{"text": "two"}\n'
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress, "zst": zstandard.compress, "bz2": bz2.compress, "xz": lzma.compress, "": bytes,
}  # fmt: skip
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE = b"\n<!DOCTYPE html>\n<html><body>404: not found</body></html>\n"


def texts(root: Path) -> list[str]:
    return [document.text for document in read_corpus(root)]


@pytest.mark.parametrize("named", ["jsonl", "jsonl.gz", "jsonl.zst", "jsonl.bz2", "json.xz"])
@pytest.mark.parametrize("is_really", COMPRESS)
def test_a_compression_that_the_name_does_not_say_is_read(tmp_path: Path, named: str, is_really: str) -> None:
    (tmp_path / f"a.{named}").write_bytes(COMPRESS[is_really](LINES))
    assert texts(tmp_path) == ["one", "two"]


def test_a_large_compressed_file_that_is_named_plain_is_not_cut(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(readers, "SLICE_BYTES", 50)
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(b"".join(b'{"text": "%d"}\n' % (i**7) for i in range(99))))
    (file,) = list_corpus(tmp_path)
    (part,) = plan_slices(file)
    counts = Counts({}, [])
    assert len(list(read_documents(part, counts, Rejects(tmp_path / "rejects")))) == 99


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (POINTER, "this is a pointer of Git LFS, and not the file itself: fetch it with git lfs pull"),
        (PAGE, "this is an HTML page, as a server sends"),
        (b"PAR1" + bytes(99), "this is a Parquet file, whatever its name says: name it"),
        (b"ARROW1\0\0" + bytes(99), "this is an Arrow file, whatever its name says: name it"),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_what_stands_in_for_lines_is_named(tmp_path: Path, name: str, content: bytes, fault: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DamagedFile, match=fault):
        texts(tmp_path)


@pytest.mark.parametrize(
    ("content", "fault"),
    [(POINTER, "a pointer of Git LFS"), (PAGE, "an HTML page"), (LINES, "this is JSON, and no table: name it .jsonl")],
)
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_what_stands_in_for_a_table_is_named(tmp_path: Path, name: str, content: bytes, fault: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DamagedFile, match=fault):
        texts(tmp_path)


def test_a_damaged_table_is_damaged_as_before(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[:-5])
    with pytest.raises(DamagedFile, match=r"not a readable \.parquet file"):
        texts(tmp_path)


def test_a_text_file_may_be_a_page(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(PAGE)
    (document,) = read_corpus(tmp_path, read_also=("txt",))
    assert document.text == PAGE.decode()
