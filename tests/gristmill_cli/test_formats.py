"""The page on formats: its command, and each reason that it names, which real files of every format have."""

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from gristmill.counts import Counts
from gristmill.engine.options import RunOptions
from gristmill.io import readers
from gristmill.io.readers import read_corpus
from gristmill.io.web import records as web_records
from preprocessing.normalize_text import normalize_text
from tests.gristmill.io.test_web_archives import LONG, page, record, response
from tests.gristmill.io.test_web_bodies import coded
from tests.gristmill_cli.documentation import PAGES, commands, shell

FORMATS = "guides/formats.md"
ARCHIVES = "guides/web-archives.md"
LIMIT = 5000
LINES = [
    b'\xef\xbb\xbf{"id": 1.50, "text": "cafe\\u0301 \\t\\r\\n", "x": [NaN, 123456789012345678901234567890]}', b"",
    b'{"text": "two", "x": 1, "x": "\\ud800"}', b" \t", b'{"text": ""}', b'{"body": "no text"}', b'{"text": null}',
    b'{"text": 5}', b'{"text": "\\ud800"}', b'{"text": "a"} {"text": "b"}', b"[1]", b"7", b'{"text": "a"',
    b'{"text": "a", "x": "\xff"}', b'{"x": ' + b"[" * 2000 + b"]" * 2000 + b', "text": "a"}',
    b'{"text": "' + b"a" * LIMIT + b'"}',
]  # fmt: skip
TABLE = pa.table(
    {
        "text": ["one", None],
        "score": [float("nan"), float("inf")],
        "raw": [b"\0\1", b""],
        "list": [[1, None], []],
    }
)
ROWS = b'\xef\xbb\xbftext,id\r\n"a, ""b""\nc",1\r\n\r\nonly one\r\nx,y,z\r\n\xff,2\r\nlast,3'
IMAGE = b"\x89PNG\r\n\x1a\n" + bytes(99)


@pytest.fixture(scope="module")
def options() -> RunOptions:
    return RunOptions(workers=1, quiet=True, max_malformed=1.0)


@pytest.fixture(autouse=True)
def small_limits() -> Iterator[None]:
    """Records of a few thousand bytes are too long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "MAX_LINE_BYTES", LIMIT)
        patch.setattr(readers, "MAX_PAGE_BYTES", LIMIT)
        patch.setattr(web_records, "MAX_PAGE_BYTES", LIMIT)
        yield


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def reasons(counts: Counts) -> set[str]:
    """The reasons why records were not written; limits are those of the pages."""
    found = {reason for reason in counts.reasons if reason.startswith(("malformed", "skipped"))}
    limits = {f"line over {LIMIT:,}": "line over 1,073,741,824", f"file over {LIMIT:,}": "file over 1,073,741,824",
              f"page over {LIMIT:,}": "page over 67,108,864"}  # fmt: skip
    for small, limit in limits.items():
        found = {reason.replace(small, limit) for reason in found}
    return found


def named(name: str, heading: str = "") -> set[str]:
    """The reasons that a page, or a section of it, names."""
    section = PAGES[name].partition(f"\n## {heading}\n")[2].partition("\n## ")[0] if heading else PAGES[name]
    return set(re.findall(r"`((?:malformed|skipped): [^`]+)`", section))


def test_the_command_does_what_the_page_says(tmp_path: Path) -> None:
    (command,) = commands(FORMATS)
    done = shell(command, on_one_core=True, OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"\n```\n(\{.*?)```", PAGES[FORMATS], re.DOTALL)[0]
    assert done.stdout.endswith(shown)
    assert "2 read = 1 written + 1 malformed: no text" in done.stdout + done.stderr


def test_lines_of_json(tmp_path: Path, options: RunOptions) -> None:
    write(tmp_path / "in", {"a/a.jsonl": b"\r\n".join(LINES)})
    counts = normalize_text(tmp_path / "in", tmp_path / "out", options=options)
    assert reasons(counts) == named(FORMATS, "Lines of JSON")
    assert (tmp_path / "out/a/a.jsonl").read_bytes().splitlines() == [
        '{"id":1.50,"text":"café \\t\\r\\n","x":[NaN, 123456789012345678901234567890]}'.encode(),
        b'{"text":"two","x":"\\ud800"}',
        b'{"text":""}',
    ]
    rejected = [json.loads(line) for line in (tmp_path / "out/a/a.jsonl.malformed").read_bytes().splitlines()]
    assert [entry["line"] for entry in rejected] == list(range(6, 17))
    write(tmp_path / "array", {"a.json": b'[{"text": "a"},\n{"text": "b"}]'})
    with pytest.raises(Exception, match=r"holds one JSON array: .* convert it: jq"):
        normalize_text(tmp_path / "array", tmp_path / "none", options=options)


def test_tables(tmp_path: Path, options: RunOptions) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(TABLE, tmp_path / "in/a.parquet")
    with pa.OSFile(str(tmp_path / "in/b.arrow"), "wb") as file, pa.ipc.new_file(file, TABLE.schema) as writer:
        writer.write_table(TABLE)
    pq.write_table(pa.table({"text": [1]}), tmp_path / "in/c.parquet")
    broken = pa.array([b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"text": broken}), tmp_path / "in/d.parquet")
    counts = normalize_text(tmp_path / "in", tmp_path / "out", options=options)
    assert reasons(counts) == named(FORMATS, "Parquet and Arrow")
    expected = {"score": None, "raw": "AAE=", "list": [1, None]}
    for document in read_corpus(tmp_path / "out"):
        assert document.text == "one" and {name: document.value(name) for name in expected} == expected
    assert counts.total("written").documents == 2


def test_rows_of_csv(tmp_path: Path, options: RunOptions) -> None:
    write(tmp_path / "in", {"a.csv": ROWS, "b.tsv": b"id\ttext\n1\tb"})
    counts = normalize_text(tmp_path / "in", tmp_path / "out", options=options, read_also=("csv", "tsv"))
    assert reasons(counts) == named(FORMATS, "CSV and TSV")
    found = [(document.text, document.value("id")) for document in read_corpus(tmp_path / "out")]
    assert found == [('a, "b"\nc', "1"), ("last", "3"), ("b", "1")]


def test_files_that_are_documents(tmp_path: Path, options: RunOptions) -> None:
    files = {
        "a.txt": b"\xef\xbb\xbfline 1\r\n  line 2\n", "b.md": b"# *Title*\n", "c.txt": b"\xff", "d.txt": b"",
        "e.html": b"<meta charset=utf-8>" + page(LONG).encode() + b"\xff", "f.html": IMAGE,
        "g.html": b"<meta charset=hz-gb-2312><p>a",
        "h.html": b"a" * (LIMIT + 1), "i.md": b"a" * (LIMIT + 1),
    }  # fmt: skip
    write(tmp_path / "in", files)
    counts = normalize_text(tmp_path / "in", tmp_path / "out", options=options, read_also=("txt", "md", "html"))
    assert reasons(counts) == named(FORMATS, "Text, Markdown and HTML files")
    found = [(document.text, document.value("replaced_characters")) for document in read_corpus(tmp_path / "out")]
    assert found == [("line 1\r\n  line 2\n", None), ("# *Title*\n", None), ("", None), (f"{LONG}\n\n\ufffd", 1)]


def test_web_archives(tmp_path: Path, options: RunOptions) -> None:
    content = page(LONG).encode()
    records = [
        response("http://a/kept", content),
        response("http://a/gone", content, status=404),
        response("http://a/image", IMAGE, "image/png"),
        record("response", "dns:a", b"1.2.3.4", "text/dns"),
        record("revisit", "http://a/kept", b"", "application/http"),
        record("resource", "http://a/kept", content, "text/html"),
        record("of another kind", "http://a/kept", content, "text/html"),
        response("http://a/binary", IMAGE),
        coded("Content-Encoding: gzip", gzip.compress(content)[:-20]),
        coded("Content-Encoding: gzip", gzip.compress(content)[:20] + b"rubbish" * 9),
        coded("Transfer-Encoding: chunked", b"5\r\nabcdefgh"),
        response("http://a/chinese", content, "text/html; charset=hz-gb-2312"),
        response("http://a/long", b"a" * (LIMIT + 1)),
        record("response", "http://a/bare", b"any", "application/http"),
        record("response", "http://a/damaged", b"any", "text/html").replace(b"Content-Length: ", b"Content-Length: ?"),
        record("metadata", "http://a/kept", b"a: b", "application/warc-fields"),
    ]
    write(tmp_path / "in", {"a.warc": b"".join(records)})
    counts = normalize_text(tmp_path / "in", tmp_path / "out", options=options)
    assert reasons(counts) == named(ARCHIVES)
    assert counts.total("read").documents == len(records) - 1


def test_compressed_and_damaged_files(tmp_path: Path, options: RunOptions) -> None:
    line = b'{"text": "a"}\n'
    packed = gzip.compress(line)
    files = {
        "a.jsonl.gz": packed + packed + bytes(99), "b.jsonl.bz2": bz2.compress(line), "c.jsonl": lzma.compress(line),
        "d.jsonl.gz": zstandard.compress(line), "cut.jsonl.gz": packed[:-9], "empty.jsonl.xz": b"",
    }  # fmt: skip
    write(tmp_path / "in", files)
    counts = normalize_text(tmp_path / "in", tmp_path / "out", options=options)
    assert counts.total("written").documents == 5
    assert set(counts.damaged) == {"cut.jsonl.gz", "empty.jsonl.xz"}


def test_files_that_are_not_read(tmp_path: Path, options: RunOptions) -> None:
    files = {
        "a.jsonl": b'{"text": "a"}\n', ".hidden/b.jsonl": b'{"text": "a"}\n', "c.txt": b"a", "d.zip": b"PK",
        "dataset_infos.json": b"{}", "cache-1.arrow": b"",
    }  # fmt: skip
    write(tmp_path / "in", files)
    counts = normalize_text(tmp_path / "in", tmp_path / "out", options=options)
    section = PAGES[FORMATS].partition("## Files that are not read")[2].partition("\n## ")[0].replace("\n", " ")
    unread = {reason for _, reason, _ in counts.rows() if reason.startswith("not read: ")}
    assert {f"not read: {reason}" for reason in re.findall(r"`([^`]+)`", section)} == unread
    assert counts.documents_read() == 1
