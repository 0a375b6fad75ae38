"""Sources that differ in folder, format and text field; texts in fields of fields, and of templates."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from gristmill.counts import Counts
from gristmill.engine.options import RunOptions
from gristmill.errors import InputError, UsageError
from gristmill.io.corpus import Corpus, Source, join_corpora, scan_sources
from gristmill.io.readers import read_corpus
from preprocessing.normalize_text import normalize_text
from tests.gristmill.io.test_web_archives import LONG, page


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
    with pytest.raises(UsageError, match=r"has no column 'body.text', only title: give .*--text_column"):
        list(read_corpus(tmp_path, text_column=column))


def test_a_field_of_the_name_to_write_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", {"content": "a", "text": "b"})
    (document,) = read_corpus(tmp_path, text_column="content")
    with pytest.raises(InputError, match=r"a.jsonl line 1 has a field 'text' as well as 'content'.*--text_column"):
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
        ("web", Source(template="{title"), "in braces"),
        ("web", Source(format="pdf"), "format 'pdf': expected one of jsonl, parquet, arrow, warc, wet, txt, md"),
        ("web", Source(encoding="latin-9000"), "encoding 'latin-9000': expected one of text that Python knows"),
        ("web", Source(encoding="rot13"), "expected one of text that Python knows"),
        ("web", Source(encoding="latin-9000", format="txt"), "expected one of text that Python knows"),
        ("web", Source(encoding="rot13", format="html"), "expected one of text that Python knows"),
        ("web", Source(encoding="utf-16"), "that has ASCII as it is; try cp1252, or format"),
        ("web", Source(encoding="cp1252", format="warc"), "encoding has no effect on web archives"),
        ("web", Source(column="chat", message="role"), "expected names of a message's fields in braces"),
        ("web", Source(template="{a}", message="{role}"), "and no template with it"),
        ("web", Source(format="arrow"), "holds no file of the format arrow, only jsonl"),
        ("gone", Source(), "expected a folder, but there is none"),
        ("web", Source(path="web/a.pdf"), "expected a folder, or a"),
    ],
)
def test_a_source_that_cannot_be_is_refused(tmp_path: Path, name: str, source: Source, fault: str) -> None:
    write(tmp_path / "web/a.jsonl", {"text": "a"})
    (tmp_path / "web/a.pdf").write_bytes(b"%PDF")
    with pytest.raises(UsageError, match=fault):
        scan(tmp_path, **{name: source})


def read(root: Path, source: Source, most: float = 0.0) -> tuple[Counts, list[dict]]:
    """The counts of normalisation of the source `own`, and its records."""
    options = RunOptions(workers=1, quiet=True, max_malformed=most)
    counts = normalize_text(root, root.with_name("out"), sources={"own": source}, options=options)
    documents = read_corpus(root.with_name("out"))
    return counts, [{name: document.value(name) for name in document.fields} for document in documents]


def test_pages_and_texts_are_a_document_a_file(tmp_path: Path) -> None:
    (tmp_path / "in/own").mkdir(parents=True)
    (tmp_path / "in/own/a.html").write_text(page(LONG, "Größe"), encoding="utf-8")
    (tmp_path / "in/own/b.md").write_text("# A mill\n\nIt grinds.\n")
    assert read(tmp_path / "in", Source(format="html"))[1] == [{"text": f"{LONG}\n\nGröße"}]
    counts, found = read(tmp_path / "in", Source(format="md"))
    assert found == [{"text": "# A mill\n\nIt grinds.\n"}]
    assert counts.unread_files() == "1 .html (see --read_also)"


def test_a_page_that_is_too_long_is_left_out_by_name(tmp_path: Path) -> None:
    """Of 200 MB, of which no more than the limit is in memory."""
    (tmp_path / "in/own").mkdir(parents=True)
    with (tmp_path / "in/own/a.html").open("wb") as file:
        file.truncate(200_000_000)
    (tmp_path / "in/own/b.html").write_text(page(LONG))
    counts, found = read(tmp_path / "in", Source(format="html"), most=1.0)
    assert len(found) == 1 and counts.total("malformed: page over 67,108,864 bytes").documents == 1
    (rejected,) = (tmp_path / "out").rglob("*.malformed")
    assert "own/a.html" in rejected.read_text()[:200] and rejected.stat().st_size < 1 << 20


@pytest.mark.parametrize(
    ("name", "content", "encoding", "source"),
    [
        ("a.txt", "Größe", "cp1252", {"format": "txt"}),
        ("a.txt", "Größe", "utf-16", {"format": "txt"}),
        ("a.html", page(LONG, "мельница"), "koi8-r", {"format": "html"}),
        ("a.jsonl", '{"text": "粉を挽く\\\\"}\n\n', "shift_jis", {}),
        ("a.jsonl.gz", '{"text": "粉を挽く"}', "gb18030", {}),
        ("a.csv", "text,größe\nmühle,ü\n", "cp1252", {"format": "csv"}),
    ],
)
def test_texts_may_be_in_another_encoding(
    tmp_path: Path, name: str, content: str, encoding: str, source: dict[str, str]
) -> None:
    (tmp_path / "in/own").mkdir(parents=True)
    data = content.encode(encoding)
    (tmp_path / "in/own" / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    wanted = {"a.txt": content, "a.html": f"{LONG}\n\nмельница", "a.csv": "mühle", "a.jsonl": "粉を挽く\\"}
    assert read(tmp_path / "in", Source(**source, encoding=encoding))[1][0]["text"] == wanted.get(name, "粉を挽く")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "ü"), ("a.html", "<p>ü"), ("a.jsonl", '{"text": "ü"}\n{"text": "a"}\n'), ("a.csv", "text\nü\na\n"),
    ],
)  # fmt: skip
def test_an_encoding_that_lies_is_counted_and_the_place_is_named(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "in/own").mkdir(parents=True)
    (tmp_path / "in/own" / name).write_text(content, encoding="utf-8")
    kind = name.partition(".")[2]
    source = Source(format=kind, encoding="ascii")
    counts, found = read(tmp_path / "in", source, most=1.0)
    assert counts.total("malformed: invalid ascii").documents == 1
    assert [record["text"] for record in found] == ["a"] * (kind in ("jsonl", "csv"))
    assert f"/in/own/{name} line " in counts.examples[0] and "invalid ascii" in counts.examples[0]


def test_a_column_of_bytes_is_decoded(tmp_path: Path) -> None:
    texts = ["Größe".encode("cp1252"), "Mühle".encode("cp1252"), b"\x81"]
    write(tmp_path / "in/own/a.parquet", *({"content": text, "id": n} for n, text in enumerate(texts)))
    counts, found = read(tmp_path / "in", Source(column="content", encoding="cp1252"), most=1.0)
    assert found == [{"text": "Größe", "id": 0}, {"text": "Mühle", "id": 1}]
    assert counts.total("malformed: invalid cp1252").documents == 1
    write(tmp_path / "utf8/own/a.parquet", {"meta": {"text": "Größe".encode()}})
    assert [document.text for document in read_corpus(tmp_path / "utf8", text_column="meta.text")] == ["Größe"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_chat_is_one_text(tmp_path: Path, name: str) -> None:
    chat = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "It grinds."}]
    others = [{"messages": [], "id": 2}, {"messages": None, "id": 3}]
    write(tmp_path / "in/own" / name, {"messages": chat, "id": 1}, *others)
    source = Source(column="messages", message="<|{role}|>\n{content}\n")
    counts, found = read(tmp_path / "in", source, most=1.0)
    assert found[0] == {"messages": chat, "id": 1, "text": "<|user|>\nWhy?\n<|assistant|>\nIt grinds.\n"}
    assert [record["text"] for record in found[1:]] == [""]
    assert counts.total("malformed: messages is not a list of messages").documents == 1
    counts, _ = read(tmp_path / "in", Source(column="messages", message="{author}"), most=1.0)
    assert counts.total("malformed: no author").documents == 1
