"""Sources that differ in folder, format and text field; texts in fields of fields, and of templates."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from gristmill.errors import InputError, UsageError
from gristmill.io.documents import Corpus
from gristmill.io.readers import read_corpus
from gristmill.io.sources import Source, join_corpora, scan_sources


def write(path: Path, *records: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pa.parquet.write_table(pa.Table.from_pylist(list(records)), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def scan(root: Path, **sources: Source) -> Corpus:
    return join_corpora(scan_sources(root, sources))


RECORD = {"title": "On mills", "n": 12345678901234567890123, "meta": {"text": "They grind.", "none": None}}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("title", "On mills"),
        ("meta.text", "They grind."),
        ("{title}\n\n{meta.text}", "On mills\n\nThey grind."),
        ("{title}{meta.none}", "On mills"),
    ],
)
def test_a_text_is_taken_from_a_field_or_a_field_of_a_field_or_made_of_several(
    tmp_path: Path, name: str, column: str, text: str
) -> None:
    write(tmp_path / name, RECORD if name == "a.jsonl" else RECORD | {"n": 5})
    (document,) = read_corpus(tmp_path, text_column=column)
    assert document.text == text
    document.rename_text("body")
    written = json.loads(document.to_json())
    assert (
        written["body"] == text
        and written["meta"]["text"] == "They grind."
        and ("title" in written) == (column != "title")
    )


def test_a_field_whose_name_has_a_dot_comes_first(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", {"meta.text": "its own", "meta": {"text": "another"}})
    assert [document.text for document in read_corpus(tmp_path, text_column="meta.text")] == ["its own"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"title": "a"}, "no meta.text, only title"),
        ({"meta": 5}, "no meta.text, only meta"),
        ({"meta": {"text": None}}, "meta.text is null"),
        ({"meta": {"text": 5}}, "meta.text is not a string"),
        ({"meta": {"text": "\ud800"}}, "lone surrogate"),
    ],
)
def test_a_record_without_the_inner_text_is_malformed(tmp_path: Path, record: dict, reason: str) -> None:
    write(tmp_path / "a.jsonl", record)
    with pytest.raises(InputError, match=f"line 1 is malformed: {reason}"):
        list(read_corpus(tmp_path, text_column="meta.text"))


@pytest.mark.parametrize("column", ["body.text", "{title} {body.text}"])
def test_a_table_without_the_outer_column_says_what_it_has(tmp_path: Path, column: str) -> None:
    write(tmp_path / "a.parquet", {"title": "a"})
    with pytest.raises(InputError, match=r"has no column 'body.text', only title: give .*--text_column"):
        list(read_corpus(tmp_path, text_column=column))


def test_a_field_of_the_name_to_write_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", {"content": "a", "text": "b"})
    (document,) = read_corpus(tmp_path, text_column="content")
    with pytest.raises(InputError, match=r"a.jsonl line 1 has a field 'text' beside 'content'.*--text_column"):
        document.rename_text("text")


def test_sources_have_folders_files_and_formats_of_their_own(tmp_path: Path) -> None:
    write(tmp_path / "raw/books/v2/a.jsonl", {"content": "a"})
    (tmp_path / "raw/books/notes.txt").write_text("a note")
    write(tmp_path / "elsewhere/b.parquet", {"text": "b"})
    write(tmp_path / "raw/web/c.jsonl", {"text": "c"})
    write(tmp_path / "raw/web/c.parquet", {"text": "c"})
    found = scan(
        tmp_path / "raw", book=Source(path="books", column="content"), notes=Source(path="books", format="txt"),
        table=Source(path=str(tmp_path / "elsewhere/b.parquet")), web=Source(format="jsonl"),
    )  # fmt: skip
    assert [(file.name, file.text_column) for file in found.files] == [
        ("book/v2/a.jsonl", "content"), ("notes/notes.txt", "text"), ("table/b.parquet", "text"),
        ("web/c.jsonl", "text"),
    ]  # fmt: skip
    assert [(file.name, file.reason) for file in found.unread] == [
        ("book/notes.txt", ".txt (see --read_also)"), ("notes/v2/a.jsonl", "not txt"), ("web/c.parquet", "not jsonl")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        ("a/b", Source(), "expected the name of a folder"),
        ("web", Source(column="a", template="{a}"), "a column and a template"),
        ("web", Source(template="title"), "in braces"),
        ("web", Source(format="pdf"), "format 'pdf': expected one of jsonl, parquet, arrow, txt, csv, tsv"),
        ("web", Source(format="arrow"), "holds no file of the format arrow, only jsonl"),
        ("gone", Source(), "expected a folder, and there is none"),
        ("web", Source(path="web/a.pdf"), "expected a folder, or a"),
    ],
)
def test_a_source_that_cannot_be_is_refused(tmp_path: Path, name: str, source: Source, fault: str) -> None:
    write(tmp_path / "web/a.jsonl", {"text": "a"})
    (tmp_path / "web/a.pdf").write_bytes(b"%PDF")
    with pytest.raises(UsageError, match=fault):
        scan(tmp_path, **{name: source})
