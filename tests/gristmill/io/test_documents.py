"""Documents: their keys, the same documents from every format, and other fields unchanged."""

import gzip
import json
import os
from pathlib import Path

import datasets
import msgspec
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gristmill.counts import Counts, Tally
from gristmill.errors import InputError, UsageError
from gristmill.io import readers as reading
from gristmill.io.corpus import ODD_NAME, list_corpus, list_source, scan_corpus
from gristmill.io.documents import DocKey, Document
from gristmill.io.readers import plan_slices, read_documents
from gristmill.io.writers import Rejects, open_jsonl_writer

LINES = [
    b'{"text":"one","meta":{"n":123456789012345678901234567890,"f":1.00,"e":-1E+2}}',
    '{"z":[1,[2,{"a":null}]],"text":"zwei \u00fc","id":"B-7","a":"\u65e5\u672c"}'.encode(),
    b'{"id":0.10,"text":"","ok":true,"escaped":"\\u00e9\\/"}',
]
RECORDS = [{"text": "one", "n": 1, "deep": {"x": [1, 2]}}, {"text": "zwei ü", "n": 2, "deep": {"x": []}}]


def read_all(root: Path) -> list[Document]:
    counts = Counts({}, [])
    rejects = Rejects(root.parent / "rejects")
    return [
        d for file in list_corpus(root) for part in plan_slices(file) for d in read_documents(part, counts, rejects)
    ]


def compress(name: str, data: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(data)
    return zstandard.compress(data) if name.endswith(".zst") else data


@given(st.text(st.characters(categories=["L", "M", "N", "P", "S"]), min_size=1), st.integers(0, 10**18 - 1))
def test_a_key_survives_a_round_trip(file: str, row: int) -> None:
    assert DocKey.parse(str(DocKey(f"s/{file}", row))) == DocKey(f"s/{file}", row)


NO_KEYS = ["", "@3", "a.jsonl", "a@", "a@-1", "a@1.5", "a@x", f"a@{2**63}", "a@" + "9" * 5000]
NO_FILES = ["/a@1", "\ud800/a@1", "\0/a@1", "a\n@1", "a@\N{ARABIC-INDIC DIGIT ONE}"]


@pytest.mark.parametrize("text", [*NO_KEYS, *NO_FILES])
def test_an_invalid_key_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="<file>@<row>"):
        DocKey.parse(text)


@pytest.mark.parametrize("name", ["a@1.jsonl", "with space.jsonl", "ünï—日本.jsonl", "a@b@2 c.jsonl.gz"])
def test_any_file_name_makes_keys(tmp_path: Path, name: str) -> None:
    (tmp_path / "s@x y").mkdir()
    (tmp_path / "s@x y" / name).write_bytes(compress(name, b"\n".join(LINES)))
    keys = [str(document.key) for document in read_all(tmp_path)]
    assert keys == [f"s@x y/{name}@{row}" for row in range(3)]
    assert [DocKey.parse(key).source for key in keys] == ["s@x y"] * 3


@pytest.mark.parametrize("name", ["new\nline.jsonl", "tab\t.jsonl"])
def test_a_name_that_would_break_a_line_of_keys_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(LINES[0])
    with pytest.raises(UsageError, match="Rename"):
        list_corpus(tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_json_fields_survive_byte_for_byte(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(compress(name, b"\n".join(LINES) + b"\n"))
    documents = read_all(tmp_path)
    assert [document.text for document in documents] == ["one", "zwei ü", ""]
    assert b"".join(document.to_json() for document in documents) == b"\n".join(LINES) + b"\n"


def test_a_replaced_text_changes_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES[1])
    (document,) = read_all(tmp_path)
    document.replace_text("new")
    assert document.to_json() == LINES[1].replace("zwei ü".encode(), b"new") + b"\n"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_all_gzip_members_and_zstd_frames_are_read(tmp_path: Path, suffix: str) -> None:
    name = f"a.jsonl{suffix}"
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" if suffix == ".zst" else b""  # pzstd begins with one
    pieces = [compress(name, part) for part in (LINES[0] + b"\n" + LINES[1][:9], b"", LINES[1][9:] + b"\n", LINES[2])]
    (tmp_path / name).write_bytes(skippable + b"".join(pieces) + skippable)
    assert [document.to_json()[:-1] for document in read_all(tmp_path)] == LINES


def test_rows_are_physical_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + LINES[0] + b"\r\n\r\n  \n" + LINES[1] + b"\r\n" + LINES[2])
    documents = read_all(tmp_path)
    assert [document.key.row for document in documents] == [0, 3, 4]
    assert documents[1].to_json() == LINES[1] + b"\n"


def write_table(path: Path, kind: str) -> None:
    table = pa.Table.from_pylist(RECORDS)
    if kind == "parquet":
        pa.parquet.write_table(table, path.with_suffix(".parquet"))
        return
    maker = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with maker(path.with_suffix(".arrow"), table.schema) as writer:
        for batch in table.to_batches(max_chunksize=1):
            writer.write_batch(batch)


@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
def test_tables_hold_the_same_documents(tmp_path: Path, kind: str) -> None:
    write_table(tmp_path / "a", kind)
    documents = read_all(tmp_path)
    assert [document.text for document in documents] == ["one", "zwei ü"]
    assert [msgspec.json.decode(document.to_json()) for document in documents] == RECORDS
    assert [document.key.row for document in documents] == [0, 1]


def test_a_saved_hugging_face_data_set_is_a_corpus(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_list(RECORDS)
    saved.save_to_disk(tmp_path / "root" / "one")
    datasets.DatasetDict({"train": saved, "test": saved.select([1])}).save_to_disk(tmp_path / "root" / "both")
    (tmp_path / "root" / "one" / "cache-0123.arrow").write_bytes(b"a cache of an operation, no data")
    documents = read_all(tmp_path / "root")
    assert [(document.key.source, document.text) for document in documents] == [
        ("both", "zwei ü"), ("both", "one"), ("both", "zwei ü"), ("one", "one"), ("one", "zwei ü"),
    ]  # fmt: skip


def test_a_table_without_text_says_what_it_has(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.table({"body": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"no column 'text', only body"):
        read_all(tmp_path)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("data", [b"", b"PAR1", b"not a table at all, but longer than a header"])
def test_a_damaged_table_is_named(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=rf"{name}: (not a readable|this is a Parquet file)"):
        read_all(tmp_path)


def test_a_damaged_large_parquet_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "SLICE_BYTES", 4)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no end")
    with pytest.raises(InputError, match=r"a.parquet: not a readable"):
        read_all(tmp_path)


def test_a_table_cell_that_is_not_utf8_is_one_malformed_record(tmp_path: Path) -> None:
    raw = pa.Array.from_buffers(pa.string(), 3, pa.array([b"good", b"bad \xff", b"fine"]).buffers())
    pa.parquet.write_table(pa.table({"text": raw}), tmp_path / "a.parquet")
    counts = Counts({}, [])
    (part,) = plan_slices(list_corpus(tmp_path)[0])
    documents = list(read_documents(part, counts, Rejects(tmp_path / "out")))
    assert [(document.key.row, document.text) for document in documents] == [(0, "good"), (2, "fine")]
    assert counts.malformed == 1 and "invalid UTF-8" in counts.examples[0]


@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_slices_of_a_file_are_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, size: int) -> None:
    records = [{"text": "x" * (i * 7 % 31), "i": i} for i in range(50)]
    if kind == ".jsonl":
        lines = [json.dumps(record) + "\n" * (1 + record["i"] % 3) for record in records]
        (tmp_path / "a.jsonl").write_text("\ufeff" + "".join(lines))
    else:
        pa.parquet.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet", row_group_size=3)
    whole = read_all(tmp_path)
    monkeypatch.setattr(reading, "SLICE_BYTES", size)
    slices = plan_slices(list_corpus(tmp_path)[0])
    assert len(slices) > 1 and len({part.label for part in slices}) == len(slices)
    pieces = read_all(tmp_path)
    assert [(d.key, d.text) for d in pieces] == [(d.key, d.text) for d in whole]
    assert len(whole) == 50


def test_sources_are_first_folders(tmp_path: Path) -> None:
    for name in ("book/deep/er/a.jsonl", "c4/a.jsonl", "a.jsonl", ".hidden/a.jsonl", "book/.a.jsonl", "book/note.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [(file.name, file.source) for file in list_corpus(tmp_path)]
    assert found == [("a.jsonl", "corpus"), ("book/deep/er/a.jsonl", "book"), ("c4/a.jsonl", "c4")]
    of_root, of_folder = list_source(tmp_path, "book"), list_source(tmp_path / "book", "book")
    assert of_root == of_folder and of_root[0].name == "book/deep/er/a.jsonl"


def test_a_folder_named_all_may_be_one_data_set_or_every_one(tmp_path: Path) -> None:
    for source in ("all", "book"):
        (tmp_path / "norm" / source).mkdir(parents=True)
        (tmp_path / "norm" / source / "a.jsonl").write_text("{}")
    with pytest.raises(UsageError, match="may be the data set `all` or every data set"):
        list_source(tmp_path / "norm" / "all", "all")
    assert [file.name for file in list_source(tmp_path / "norm", "all")] == ["all/a.jsonl", "book/a.jsonl"]


def test_a_source_named_like_an_index_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "index:a"
    folder.mkdir()
    (folder / "a.jsonl").touch()
    for listed, source in ((tmp_path, "all"), (folder, "index:a")):
        with pytest.raises(
            UsageError, match=r"1 file name cannot be part of a key: 'index:a/a\.jsonl' \(.*'index:'.*Rename"
        ):
            list_source(listed, source)


@pytest.mark.parametrize("source", ["", ".", "..", "book/", "/book", "a/b"])
def test_a_source_that_is_no_name_is_refused(tmp_path: Path, source: str) -> None:
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "a.jsonl").touch()
    with pytest.raises(UsageError, match="expected the name of a folder in the corpus, or all"):
        list_source(tmp_path / "book", source)


def test_a_source_that_a_corpus_lacks_is_refused(tmp_path: Path) -> None:
    for name in ("norm/book/a.jsonl", "norm/c4/deep/a.jsonl", "own/a.jsonl", "own/deep/a.jsonl", "nested/deep/a.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match=r"data set 'boko': .*norm has another name.* book, c4. Give .* these, or all"):
        list_source(tmp_path / "norm", "boko")
    assert len(list_source(tmp_path / "own", "book")) == 2  # a file directly in it: the data set's own folder
    assert len(list_source(tmp_path / "nested", "nested")) == len(list_source(tmp_path / "norm", "c4")) == 1


def test_names_that_leave_no_room_for_a_suffix_are_refused(tmp_path: Path) -> None:
    (tmp_path / f"{'x' * 194}.jsonl").touch()
    assert len(list_corpus(tmp_path)) == 1
    (tmp_path / ("\u00fc" * 98 + ".jsonl")).touch()
    with pytest.raises(UsageError, match=r"it is longer than 200 bytes.*Rename them"):
        list_corpus(tmp_path)


def test_all_names_that_cannot_be_in_a_key_are_listed_at_once_or_left_out(tmp_path: Path) -> None:
    names = ["a\nb.jsonl", "a\tb.jsonl", os.fsdecode(b"a\xffb.jsonl"), "a@1 :: b.jsonl"]
    for name in [*names, "good.jsonl"]:
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="4 file names cannot be part of a key: ") as refused:
        list_corpus(tmp_path)
    assert all(repr(name) in str(refused.value) for name in names) and "--skip_odd_names" in str(refused.value)
    found = scan_corpus(tmp_path, skip_odd_names=True)
    assert [file.name for file in found.files] == ["good.jsonl"]
    assert [file.reason for file in found.unread] == [ODD_NAME] * 4


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "a.jsonl").touch()
    root = tmp_path / "root"
    (root / "book").mkdir(parents=True)
    (root / "linked").symlink_to(tmp_path / "store")
    (root / "book" / "self").symlink_to(".")
    (root / "book" / "up").symlink_to("../book")
    (root / "c4").mkdir()
    (root / "c4" / "over").symlink_to("../book")
    (root / "book" / "over").symlink_to("../c4")
    (root / "book" / "a.jsonl").touch()
    names = [file.name for file in list_corpus(root)]
    assert names == ["book/a.jsonl", "c4/over/a.jsonl", "linked/a.jsonl"]


def test_every_file_of_a_folder_is_read_or_has_a_reason_why_not(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in (
        "a.jsonl", "book/b.JSON", "book/b.csv", "book/README.md", "book/LICENSE", "book/dataset_infos.json", "data.gz",
        "web/x.tar.gz", "web/part.0001", ".git/config", "web/.gitattributes", "book/a.jsonl.malformed",
        "book/.gristmill/normalize_text.jsonl", "web/cache-12.arrow", "web/notes.txt.xz",
    ):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"12345")
    (root / "web" / "loop").symlink_to("../web")
    (root / "web" / "gone").symlink_to("nowhere")
    (root / "web" / "self").symlink_to("self")
    os.mkfifo(root / "pipe.jsonl")
    corpus = scan_corpus(root)
    assert [file.name for file in corpus.files] == ["a.jsonl", "book/b.JSON"]
    assert [(file.name, file.reason) for file in corpus.unread] == [
        (".git", "hidden"), ("book/LICENSE", "without suffix"), ("book/README.md", ".md (see --read_also)"),
        ("book/a.jsonl.malformed", ".malformed"), ("book/b.csv", ".csv (see --read_also)"),
        ("book/dataset_infos.json", "metadata of Hugging Face datasets"), ("data.gz", ".gz"),
        ("pipe.jsonl", "not a regular file"), ("web/.gitattributes", "hidden"),
        ("web/cache-12.arrow", "cache of Hugging Face datasets"), ("web/gone", "dangling link"),
        ("web/loop", "link to a parent folder"), ("web/notes.txt.xz", ".txt (see --read_also)"),
        ("web/part.0001", "without suffix"), ("web/self", "dangling link"),
        ("web/x.tar.gz", ".tar.gz"),
    ]  # fmt: skip
    counts = corpus.count_unread()
    assert counts.total("not read: .csv (see --read_also)", "book") == Tally(0, 5, 1)
    read_also = scan_corpus(root, "x/", "body", ("csv", "txt"))
    assert [(file.name, file.text_column) for file in read_also.files[2:]] == [
        ("x/book/b.csv", "body"), ("x/web/notes.txt.xz", "body"),
    ]  # fmt: skip


def test_a_folder_without_a_corpus_file_says_what_it_holds(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv", "README.md"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match=r"It holds 2 .csv \(see --read_also\), 1 .md"):
        list_corpus(tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_round_trip_gives_the_same_documents_and_bytes(tmp_path: Path, name: str) -> None:
    for folder in ("one", "two"):
        with open_jsonl_writer(tmp_path / folder / name) as sink:
            for line in LINES:
                sink.write(line + b"\n")
    assert [d.to_json()[:-1] for d in read_all(tmp_path / "one")] == LINES
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_file_is_not_published_after_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(RuntimeError), open_jsonl_writer(tmp_path / name) as sink:
        sink.write(LINES[0])
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_folder_name_that_is_too_long_is_named(tmp_path: Path) -> None:
    for name in ("x" * 300, "x/" * 3000):
        with pytest.raises(InputError, match=f"cannot read {tmp_path}/x.*: File name too long"):
            list_source(tmp_path / name, "book")
