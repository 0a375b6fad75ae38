"""Readers: what counts as a document, what as malformed, and what is left of a malformed record."""

import bz2
import gzip
import lzma
import math
import sys
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
import pytest
import zstandard

from gristmill.batches import batched
from gristmill.counts import Counts, Tally
from gristmill.errors import InputError, UsageError
from gristmill.io import arrow_tables, readers
from gristmill.io.arrow_tables import records
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import DocKey, Document, Slice
from gristmill.io.readers import plan_slices, read_corpus, read_documents
from gristmill.io.writers import Rejects


def read_all(root: Path, rejects: Path) -> tuple[list[Document], Counts, list[dict]]:
    """(documents, counts, rejects) of a corpus."""
    counts, sink = Counts({}, []), Rejects(rejects)
    slices = [part for file in list_corpus(root, read_also=("csv",)) for part in plan_slices(file)]
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
    assert counts.total("malformed: line over 2,000 bytes").bytes == len(long) == counts.total("read").bytes - 2
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


def test_infinite_numbers_of_a_table_are_kept_as_those_of_json_are(tmp_path: Path) -> None:
    values = [math.inf, -math.inf, math.nan, 1.5, None]
    columns = {
        "f64": pa.array(values),
        "f32": pa.array(values, pa.float32()),
        "f16": pa.array(np.array([np.inf, -np.inf, np.nan, 1.5, 0], np.float16)),
        "n": pa.array(range(5)),
        "list": pa.array([[1.0, value] for value in values]),
        "fixed": pa.array([[v] for v in values], pa.list_(pa.float32(), 1)),
        "struct": pa.array([{"x": {"y": value}, "é": "é"} for value in values]),
        "map": pa.array([[("k", value)] for value in values], pa.map_(pa.string(), pa.float64())),
    }
    (tmp_path / "in").mkdir()
    pa.parquet.write_table(pa.table({"text": list("abcde"), **columns}), tmp_path / "in" / "a.parquet")
    first, second, third, fourth, _ = read_corpus(tmp_path / "in")
    assert [first.value(name) for name in columns] == [
        math.inf, math.inf, math.inf, 0, [1.0, math.inf], [math.inf], {"x": {"y": math.inf}, "é": "é"},
        [["k", math.inf]],
    ]  # fmt: skip
    assert first.to_json().decode() == (
        '{"text":"a","f64":Infinity,"f32":Infinity,"f16":Infinity,"n":0,"list":[1.0,Infinity],"fixed":[Infinity],'
        '"struct":{"x":{"y":Infinity},"é":"é"},"map":[["k",Infinity]]}\n'
    )
    assert second.to_json() == first.to_json().replace(b"Infinity", b"-Infinity").replace(b'"a"', b'"b"').replace(
        b":0,", b":1,"
    )
    assert third.to_json().count(b"null") == 7 and fourth.fields["list"] == [1.0, 1.5]
    (tmp_path / "again.jsonl").write_bytes(first.to_json())
    (again,) = read_corpus(tmp_path / "again.jsonl")
    assert again.to_json() == first.to_json() and again.value("f64") == math.inf


def test_infinite_numbers_in_types_that_are_not_of_parquet_are_kept(tmp_path: Path) -> None:
    number = pa.array([math.inf, 2.0])
    columns = {
        "dictionary": number.dictionary_encode(),
        "runs": pc.run_end_encode(number),
        "union": pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [number, pa.array([1, 2])]),
        "view": pa.array([[math.inf], [2.0]], pa.list_view(pa.float64())),
        "tensor": pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.float32(), (1,)), pa.array([[math.inf], [2.0]], pa.list_(pa.float32(), 1))
        ),
    }
    for name, column in columns.items():
        found = list(records(pa.record_batch({"text": ["a", "b"], "x": column}), "text"))
        assert b"Infinity" in bytes(found[0]["x"]) and found[1]["x"] in (2, 2.0, [2.0]), name


def test_a_table_with_two_columns_of_the_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    two = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pa.parquet.write_table(two, tmp_path / "in" / "a.parquet")
    (tmp_path / "b.csv").write_text("text,text\na,b\n")
    for path in (tmp_path / "in" / "a.parquet", tmp_path / "b.csv"):
        with pytest.raises(InputError, match=rf"{path.name} has several columns 'text': rename all but"):
            next(read_corpus(path))


def test_a_table_with_two_columns_of_one_name_is_an_error(tmp_path: Path) -> None:
    """A record has one value of a name: the others would be lost."""
    two = pa.table([pa.array(["a"]), pa.array([1]), pa.array([2])], names=["text", "n", "n"])
    pa.parquet.write_table(two, tmp_path / "a.parquet")
    with pa.ipc.new_file(tmp_path / "b.arrow", two.schema) as writer:
        writer.write_table(two)
    (tmp_path / "c.csv").write_text("text,n,n\na,1,2\n")
    for path in tmp_path.iterdir():
        with pytest.raises(InputError, match=rf"{path.name} has several columns 'n': rename all but one"):
            next(read_corpus(path))


def test_a_table_with_two_fields_of_one_name_in_a_struct_is_an_error(tmp_path: Path) -> None:
    two = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["n", "n"])
    table = pa.table({"text": ["a"], "all": pa.ListArray.from_arrays([0, 1], two)})
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(tmp_path / "b.arrow", table.schema) as writer:
        writer.write_table(table)
    for path in tmp_path.iterdir():
        with pytest.raises(
            InputError, match=rf"{path.name}: not a readable .*(duplicate field names|several fields of one name)"
        ):
            next(read_corpus(path))


def test_the_line_of_a_malformed_row_of_a_csv_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, "a.csv", b"text,n", b'"one', b'two",1', b"", b"three")
    with pytest.raises(InputError, match=r"a.csv line 5 is malformed: fewer values than columns"):
        list(read_corpus(tmp_path / "a.csv"))
    write(tmp_path, "a.csv", b"text,n", b'"one', b'two",1', b'"three', b"four,2")
    with pytest.raises(InputError, match=r"after record 1 \(.*, in the record that begins in line 4\)"):
        list(read_corpus(tmp_path / "a.csv"))


def test_the_line_of_a_malformed_row_of_a_csv_file_is_kept_with_it(tmp_path: Path) -> None:
    write(tmp_path / "in", "a.csv", b"text,n", b"one", b'"two', b'lines",1', b"a,1,2")
    documents, counts, rejects = read_all(tmp_path / "in", tmp_path / "out")
    assert [document.key.row for document in documents] == [1]
    assert [(reject["line"], reject["raw"]) for reject in rejects] == [(2, "one"), (5, "a,1,2")]
    assert [example.partition(": ")[0].rpartition(" ")[2] for example in counts.examples] == ["2", "5"]


def test_invalid_utf8_beside_a_text_that_looks_like_a_record_is_malformed(tmp_path: Path) -> None:
    bad = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
    (tmp_path / "in").mkdir()
    pa.parquet.write_table(pa.table({"text": ['{"text": "not a document"}'], "x": bad}), tmp_path / "in" / "a.parquet")
    documents, counts, rejects = read_all(tmp_path / "in", tmp_path / "out")
    assert documents == [] and counts.malformed == 1
    assert rejects[0]["reason"] == "invalid UTF-8" and rejects[0]["raw"] == '{"text": "not a document"}'


RECORD = b'{"text":"a"}'
FILES = {
    "a.JSONL": RECORD, "b.json": RECORD, "c.ndjson": RECORD, "d.jsonl.bz2": bz2.compress(RECORD), "e.JSON.GZ":
    gzip.compress(RECORD), "f.jsonl.xz": lzma.compress(RECORD), "g.jsonl.zstd": zstandard.compress(RECORD),
}  # fmt: skip


def test_formats_and_compressions_are_read_in_any_case(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, data in FILES.items():
        (tmp_path / "in" / name).write_bytes(data)
    documents, counts, _ = read_all(tmp_path / "in", tmp_path / "out")
    assert [(d.key.file, d.text) for d in documents] == [(name, "a") for name in FILES]
    assert counts.total("read") == Tally(len(FILES), len(FILES), len(FILES))


@pytest.mark.parametrize(
    "data", [b'[{"text":"a"},\n{"text":"b"}]', b'\n [{"text":"a"}]', b'{\n  "text": "a"\n}', b"[\n"]
)
def test_a_json_file_that_is_one_value_says_how_to_convert_it(tmp_path: Path, data: bytes) -> None:
    write(tmp_path / "in", "a.json", data)
    with pytest.raises(InputError, match=r"a.json holds one JSON .*expected one record per line.*jq -c"):
        read_all(tmp_path / "in", tmp_path / "out")


def test_text_and_csv_files_are_read_if_asked_for(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", b"\xef\xbb\xbfone\r\ndocument")
    write(tmp_path, "b.csv", b"\xef\xbb\xbf", b'"id",text', b'1,"a, ""b""', b'c"', b"", b"2", b"3,d\r")
    (tmp_path / "c.tsv.gz").write_bytes(gzip.compress(b"text\tn\n" + b"x" * 200_000 + b"\t1\nbad \xff\t2\n"))
    write(tmp_path, "d.txt", b"\xff")
    write(tmp_path, "e.jsonl", RECORD)
    assert [d.text for d in read_corpus(tmp_path)] == ["a"]
    documents = list(read_corpus(tmp_path, read_also=("txt", "csv", "tsv"), on_malformed="skip"))
    found = [(str(d.key), d.text) for d in documents]
    assert found == [
        ("a.txt@0", "one\r\ndocument\n"), ("b.csv@0", 'a, "b"\nc'), ("b.csv@2", "d"),
        ("c.tsv.gz@0", "x" * 200_000), ("e.jsonl@0", "a"),
    ]  # fmt: skip
    assert documents[1].to_json() == b'{"id":"1","text":"a, \\"b\\"\\nc"}\n'
    with pytest.raises(InputError, match=r"b.csv line 6 is malformed: fewer values than columns"):
        list(read_corpus(tmp_path / "b.csv"))
    assert [d.text for d in read_corpus(tmp_path, read_also="tsv", on_malformed="skip")] == ["x" * 200_000, "a"]
    with pytest.raises(UsageError, match="--read_also pdf: expected one of txt, md, html, csv, tsv"):
        list(read_corpus(tmp_path, read_also=("pdf",)))


def test_a_csv_file_whose_quotes_do_not_match_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, "a.csv", b"text", b"good", b'"not closed', b"lost")
    with pytest.raises(InputError, match=r"a.csv: not readable as .csv after record 1"):
        list(read_corpus(tmp_path / "a.csv"))


@pytest.mark.parametrize("data", ["text,größe\na,1\n".encode("latin-1"), b"text,id\ra,1\rb,2\r"])
def test_a_csv_file_of_another_encoding_or_other_line_ends_says_what_is_wanted(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(InputError, match=r"a.csv: not readable as .csv .* expected UTF-8, lines that end in \\n"):
        list(read_corpus(tmp_path / "a.csv"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv"])
def test_any_column_may_hold_the_text(tmp_path: Path, name: str) -> None:
    if name == "a.parquet":
        pa.parquet.write_table(pa.table({"text": ["no"], "body": ["yes"]}), tmp_path / name)
    else:
        lines = [b"text,body", b"no,yes"] if name == "a.csv" else [b'{"text":"no","body":"yes"}']
        write(tmp_path, name, *lines)
    (document,) = read_corpus(tmp_path / name, text_column="body")
    document.replace_text("new")
    assert msgspec.json.decode(document.to_json()) == {"text": "no", "body": "new"}
    refused = InputError if name == "a.jsonl" else UsageError  # a record is malformed; a column was typed wrong
    with pytest.raises(refused, match=r"no (column ')?title.*, only text, body"):
        list(read_corpus(tmp_path / name, text_column="title"))


def test_read_corpus_yields_every_document_with_its_fields(tmp_path: Path) -> None:
    write(tmp_path, "book/a.jsonl", b'{"text":"a","n":NaN,"url":"http:\\/\\/x"}', b"{}", b'{"text":"b"}')
    with pytest.raises(InputError, match=r"a.jsonl line 2 is malformed: no text, only no fields"):
        list(read_corpus(tmp_path))
    one, two = read_corpus(tmp_path, on_malformed="skip")
    assert (one.source, one.key, one.text) == ("book", DocKey("book/a.jsonl", 0), "a")
    assert one.value("url") == "http://x" and math.isnan(one.value("n")) and two.value("url") is None
    with pytest.raises(UsageError, match="known format"):
        list(read_corpus(Path(__file__)))
    with pytest.raises(UsageError, match="expected a folder, but there is none"):
        list(read_corpus(tmp_path / "gone"))


def test_a_cut_file_is_counted_as_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "SLICE_BYTES", 10)
    write(tmp_path / "in", "a.JSON", *[RECORD] * 5)
    documents, counts, _ = read_all(tmp_path / "in", tmp_path / "out")
    assert [d.key.row for d in documents] == [0, 1, 2, 3, 4]
    assert counts.total("read") == Tally(5, 5, 1)


def test_a_document_is_the_callers_alone(tmp_path: Path) -> None:
    write(tmp_path, "book/a.jsonl", b'{"text":"a"}', b'{"text":"b"}')
    (part,) = plan_slices(list_corpus(tmp_path)[0])
    documents = read_documents(part, Counts({}, []), Rejects(tmp_path / "out"))
    document = next(documents)
    assert sys.getrefcount(document) == 2  # the variable and the call
    batches = batched(iter([document]), 1)
    batch = next(batches)
    assert sys.getrefcount(batch) == 2
    documents.close()


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_a_slice_reads_its_ranges_alone_and_slices_share_only_the_footer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    texts = [f"{i} " + "x" * (i % 97) * 7 for i in range(900)]
    path = tmp_path / "in" / name
    path.parent.mkdir()
    if name == "a.parquet":
        table = pa.table({"text": texts, "id": range(900)})
        pa.parquet.write_table(table, path, row_group_size=50, compression="none", write_page_index=True)
    else:
        path.write_text("".join(f'{{"text": "{text}", "id": {i}}}\n' for i, text in enumerate(texts)))
    data = path.read_bytes()
    monkeypatch.setattr(readers, "SLICE_BYTES", len(data) // 5)
    (file,) = list_corpus(tmp_path / "in")
    slices = plan_slices(file)
    assert len(slices) >= 4
    assert [(doc.text, doc.key.row) for part in slices for doc in _read_ranges(part, data)] == [
        (text, row) for row, text in enumerate(texts)
    ]
    read = sum((len(data) if end is None else end) - start for part in slices for start, end in part.ranges)
    footer = int.from_bytes(data[-8:-4], "little") + 8 if name == "a.parquet" else 0
    assert read <= len(data) + len(slices) * footer


def _read_ranges(part: Slice, data: bytes) -> list[Document]:
    """The documents of a slice of a file of which all other bytes are gone."""
    kept = bytearray(len(data))
    for start, end in part.ranges:
        kept[start:end] = data[start:end]
    part.path.write_bytes(kept)
    return [*read_documents(part, Counts({}, []), Rejects(part.path.with_name("rejects")))]


def test_row_groups_in_another_order_than_in_the_file_are_read_with_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    pa.parquet.write_table(
        pa.table({"text": ["a" * 99, "b" * 99, "c" * 99]}), tmp_path / "in/a.parquet", row_group_size=1
    )
    monkeypatch.setattr(readers, "SLICE_BYTES", 1)
    monkeypatch.setattr(arrow_tables, "_first_byte", lambda group: -group.num_rows)
    (file,) = list_corpus(tmp_path / "in")
    assert {part.ranges for part in plan_slices(file)} == {((0, None),)}
