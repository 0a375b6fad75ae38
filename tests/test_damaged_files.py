"""Damaged files of a raw corpus: every stage leaves them out as a whole, names them, and reads them once mended."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from dedup.candidates.signature_shards import SUFFIX, open_shard
from dedup.generate_exact_pairs import generate_exact_pairs
from dedup.to_hash import to_hash
from gristmill.counts import NOT_READ, READ, Counts
from gristmill.engine.options import RunOptions
from gristmill.errors import InputError, TooManyMalformed
from gristmill.io import readers
from gristmill.io.readers import read_corpus
from gristmill.io.token_shards import TokenShard
from preprocessing.apply import apply
from preprocessing.filter import filter
from preprocessing.normalize_text import normalize_text
from preprocessing.shuffle_holdout import pass1, pass2
from preprocessing.tokenize_corpus import tokenize_corpus
from preprocessing.train_tokenizer import train_tokenizer

LENIENT = RunOptions(workers=1, quiet=True, max_malformed=0.9)
BAD = "book/m"  # stem of the damaged file: in the middle of its group


def lines(name: str, count: int = 40) -> bytes:
    random = np.random.default_rng(len(name))
    texts = [f"{name} number {i}: {random.integers(1 << 60, size=6).tolist()}" for i in range(count)]
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in ["short", *texts])


def table(path: Path, content: bytes, rows: int = 8) -> bytes:
    """The content as a .parquet or .arrow file."""
    found = pa.Table.from_pylist([json.loads(line) for line in content.splitlines()])
    if path.suffix == ".parquet":
        pa.parquet.write_table(found, path, row_group_size=rows, compression="zstd", use_dictionary=False)
    else:
        with pa.ipc.new_stream(path, found.schema) as writer:
            writer.write_table(found, max_chunksize=rows)
    return path.read_bytes()


def damage_page(data: bytes) -> bytes:
    """Overwrite the pages of the last row groups."""
    at = len(data) * 2 // 3
    metadata = pa.parquet.read_metadata(pa.BufferReader(data))
    last = metadata.row_group(metadata.num_row_groups - 2).column(0)
    at = last.data_page_offset + last.total_compressed_size // 2
    return data[:at] + b"\xff" * 20 + data[at + 20 :]


def damaged(folder: Path, kind: str, content: bytes) -> Path:
    """Write a damaged file of a kind such as 'jsonl.gz'; 'pages.parquet' has a damaged page, others are truncated."""
    path = folder / f"{BAD}.{kind.rpartition('-')[2]}"
    if kind == "page-parquet":
        path.write_bytes(damage_page(table(path, content)))
    elif kind in ("parquet", "arrow"):
        path.write_bytes(table(path, content)[:-30])
    else:
        compress = {"gz": gzip.compress, "zst": zstandard.compress, "bz2": bz2.compress, "xz": lzma.compress}
        path.write_bytes(compress[kind.rpartition(".")[2]](content)[:-9])
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Callable[..., Path]:
    """A corpus of small files that one task reads; with a file of a `kind` of damage among them, or without."""

    def corpus(name: str, kind: str = "", files: str = "aky") -> Path:
        folder = tmp_path / name
        (folder / "book").mkdir(parents=True)
        for file in files:
            (folder / "book" / f"{file}.jsonl").write_bytes(lines(file))
        if kind:
            bad = lines("bad").replace(b'"short"', b"null")  # a malformed record before the damage
            damaged(folder, kind, bad + lines("a"))
        return folder

    return corpus


KINDS = {
    "jsonl.gz": "truncated gz", "jsonl.zst": "truncated zst", "jsonl.bz2": "truncated bz2", "jsonl.xz": "truncated xz",
    "parquet": "unreadable parquet", "page-parquet": "unreadable parquet", "arrow": "unreadable arrow",
}  # fmt: skip


def check(counts: Counts, kind: str, sound: Counts) -> None:
    """Check that the counts are those of the corpus without the file, and of a file that is not read."""
    name = f"{BAD}.{kind.rpartition('-')[2]}"
    assert {file: found.fault for file, found in counts.damaged.items()} == {name: KINDS[kind]}
    assert counts.unread_files() == f"1 damaged: {KINDS[kind]}" and counts.malformed == 0
    assert (counts.total(READ), counts.stored) == (sound.total(READ), sound.stored)
    counts.check_conserved("stage")


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_left_out_as_a_whole(tmp_path: Path, corpus, kind: str, capsys) -> None:
    sound = normalize_text(corpus("sound"), tmp_path / "wanted", options=LENIENT)
    source = corpus("in", kind)
    (source / "other").mkdir()
    (source / "other" / "b.jsonl.gz").write_bytes(b"\x1f\x8b")  # another group, with nothing else in it
    (source / "other" / "c.jsonl").write_bytes(b"")
    (source / "other" / "d.jsonl.gz").write_bytes(b"")  # as downloads leave that were interrupted
    found = {}
    for workers in (1, 2) if kind == "jsonl.gz" else (1,):
        out = tmp_path / f"out{workers}"
        counts = normalize_text(source, out, options=replace(LENIENT, workers=workers, quiet=False))
        found[workers] = {path.name: path.read_bytes() for path in out.rglob("*.jsonl*")}
    assert found[1] == found[workers]
    assert [counts.damaged.pop(f"other/{name}.jsonl.gz").fault for name in "bd"] == ["truncated gz"] * 2
    counts.tallies.pop("other")
    check(counts, kind, sound)
    for path in (tmp_path / "wanted").rglob("*.jsonl"):
        assert found[1].pop(path.name) == path.read_bytes()
    assert all(zstandard.ZstdDecompressor().decompressobj().decompress(data) == b"" for name, data in found[1].items()
               if name.endswith(".zst"))  # fmt: skip
    assert not list(tmp_path.rglob("*.malformed")) and len(found[1]) == 4
    errors = capsys.readouterr().err
    assert f"left out: {BAD}." in errors and "other/b.jsonl.gz (truncated gz)" in errors
    normalize_text(source, tmp_path / "out1", options=replace(LENIENT, quiet=False))
    assert "done already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("m.csv", b'id,text\n1,"one"\n2,"not closed\n3,lost\n'),
        ("m.tsv.gz", gzip.compress(b'id\ttext\n1\t"not" closed\n')),
        ("m.csv", "text,größe\na,1\n".encode("latin-1")),
        ("m.csv", b"text,id\ra,1\rb,2\r"),
    ],
    ids=["quote", "compressed", "encoding", "line ends"],
)
def test_a_csv_file_that_cannot_be_read_to_its_end_is_left_out(
    tmp_path: Path, corpus, name: str, content: bytes
) -> None:
    sound = normalize_text(corpus("sound"), tmp_path / "wanted", options=LENIENT)
    source, kind = corpus("in"), name.split(".")[1]
    (source / "book" / name).write_bytes(content)
    counts = normalize_text(source, tmp_path / "out", read_also=("csv", "tsv"), options=LENIENT)
    assert counts.unread_files() == f"1 damaged: unreadable {kind}" and counts.total(READ) == sound.total(READ)
    assert not list(tmp_path.rglob("*.malformed")) and not list(read_corpus(tmp_path / "out/book/m.jsonl.zst"))
    with pytest.raises(TooManyMalformed, match=rf"book/{name}: not readable as .{kind} after record \d"):
        normalize_text(source, tmp_path / "out", read_also=("csv", "tsv"), options=replace(LENIENT, max_malformed=0))


def test_every_stage_leaves_it_out(tmp_path: Path, corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    sound, source, kind = corpus("sound"), corpus("in", "jsonl.gz"), "jsonl.gz"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "careless.py").write_text(
        "def keep(documents):\n    try:\n        yield from documents\n    except Exception as error:\n"
        "        raise KeyError('lost') from error\n"
    )
    model = tmp_path / "whole" / "tokenizer.model"
    train_tokenizer(sound, tmp_path / "whole", 400, exact=False, options=LENIENT)
    outputs = []
    for root in (sound, source):
        out = tmp_path / f"of_{root.name}"
        counts = [
            apply(root, out / "kept", "careless:keep", LENIENT),
            filter(root, out / "short.pickle", 0, "all", 6, LENIENT),
            to_hash("all", root, out / "hash", 0, "0", 0, 99, options=LENIENT),
            generate_exact_pairs(root, out / "dup" / "duplicate_pairs_exact.txt", options=LENIENT),
            tokenize_corpus(root, model, out / "tokens", LENIENT),
            train_tokenizer(root, out / "model", 400, exact=False, options=LENIENT),
        ]
        rows = {path.name: open_shard(path).batches for path in (out / "hash").rglob("*.arrow")}
        left_out = rows.pop(f"m.{kind}+0{SUFFIX}", ())
        assert sum(len(batch) for batch in left_out) == 0
        outputs.append(
            (
                {path.name: path.read_bytes() for path in (out / "kept").rglob("*.jsonl")}, rows,
                *((out / name).read_bytes() for name in (
                    "short.pickle", "dup/duplicate_pairs_exact.txt", "tokens/tokens_00000.bin", "model/tokenizer.model"
                )), counts,
            )
        )  # fmt: skip
    *wanted, sound_counts = outputs[0]
    *found, counts = outputs[1]
    assert found == wanted and wanted[2]
    for mine, theirs in zip(counts, sound_counts, strict=True):
        check(mine, kind, theirs)
    assert len(TokenShard(tmp_path / "of_in" / "tokens" / "tokens_00000")) == 3 * 41


def test_no_slice_of_a_large_table_is_left(tmp_path: Path, corpus, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(readers, "SLICE_BYTES", 1200)
    sound = to_hash("all", corpus("sound"), tmp_path / "sound_hash", 0, "0", 0, 99, options=LENIENT)
    for kind in ("page-parquet", "parquet"):
        source, out, signed = corpus(kind, kind), tmp_path / f"{kind}_out", tmp_path / f"{kind}_hash"
        loud = replace(LENIENT, quiet=False)
        for _ in range(2):
            check(normalize_text(source, out, options=loud), kind, sound)
            check(to_hash("all", source, signed, 0, "0", 0, 99, options=loud), kind, sound)
        assert capsys.readouterr().err.count("done already") == 2
        with pytest.raises(InputError, match=r"m\.parquet: not a readable"):
            pass1(source, tmp_path / f"{kind}_mixed", options=LENIENT)
        assert zstandard.ZstdDecompressor().decompressobj().decompress((out / "book/m.jsonl.zst").read_bytes()) == b""
        shards = list(signed.glob("book/m.parquet+*"))
        assert len(shards) > 3 or kind == "parquet"
        assert sum(len(batch) for shard in shards for batch in open_shard(shard).batches) == 0
        table(source / f"{BAD}.parquet", lines("new", 90))
        counts = to_hash("all", source, signed, 0, "0", 0, 99, options=LENIENT)
        assert counts.total(READ).documents == sound.total(READ).documents + 91 and not counts.damaged
        assert normalize_text(source, out, options=LENIENT).total(READ) == counts.total(READ)


def test_only_the_task_of_a_mended_file_runs_again(tmp_path: Path, corpus, capsys) -> None:
    source = corpus("in", "jsonl.zst")
    for name in ("c4", "wiki"):  # groups of their own
        (source / name).mkdir()
        (source / name / "a.jsonl").write_bytes(lines(name))
    normalize_text(source, tmp_path / "out", options=LENIENT)
    (source / f"{BAD}.jsonl.zst").write_bytes(zstandard.compress(lines("new")))
    counts = normalize_text(source, tmp_path / "out", options=replace(LENIENT, quiet=False))
    assert "2 of 3 tasks done before" in capsys.readouterr().err
    assert counts.total(READ).documents == 6 * 41 and not counts.damaged and not counts.unread_files()


def test_the_limit_is_of_the_bytes_on_disk(tmp_path: Path, corpus) -> None:
    source = corpus("in")
    (source / "book" / "large.jsonl").write_bytes(lines("large", 4000))
    path = damaged(source, "jsonl.gz", lines("x", 1))
    share = path.stat().st_size / sum(file.stat().st_size for file in source.rglob("*.jsonl*"))
    assert share < 0.001
    assert normalize_text(source, tmp_path / "out", options=RunOptions(workers=1, quiet=True)).damaged
    for limit in (0.0, share * 0.99):  # also where all is done before
        with pytest.raises(TooManyMalformed, match=r"damaged files \(1\) hold 0.0\d%.*m\.jsonl\.gz: .*fetch"):
            normalize_text(source, tmp_path / "out", options=replace(LENIENT, max_malformed=limit))
        with pytest.raises(InputError, match="damaged input than --max_malformed allows"):
            to_hash("all", tmp_path / "out", tmp_path / "hash", 0, "0", 0, 99, options=LENIENT)
    normalize_text(source, tmp_path / "out", options=replace(LENIENT, max_malformed=share * 1.01))
    path.write_bytes(b"")
    path.rename(path.with_name("m.parquet"))  # damaged, of no bytes
    with pytest.raises(TooManyMalformed, match="not a readable"):
        normalize_text(source, tmp_path / "out", options=replace(LENIENT, max_malformed=0))


def test_a_damaged_output_of_a_stage_is_an_error_that_names_the_stage(tmp_path: Path, corpus) -> None:
    normalize_text(corpus("in"), tmp_path / "out", zst=True, options=LENIENT)
    path = tmp_path / "out" / "book" / "k.jsonl.zst"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    for _ in range(2):
        with pytest.raises(InputError, match=r"k\.jsonl\.zst is not what normalize_text wrote: .* run normalize_text"):
            to_hash("book", tmp_path / "out", tmp_path / "hash", 0, "0", 0, 99, options=LENIENT)
    with pytest.raises(InputError, match=r"k\.jsonl\.zst is not what normalize_text wrote"):
        pass1(tmp_path / "out", tmp_path / "mixed", options=LENIENT)
    normalize_text(tmp_path / "in", tmp_path / "out", zst=True, options=LENIENT)
    assert path.read_bytes() == whole
    assert to_hash("book", tmp_path / "out", tmp_path / "hash", 0, "0", 0, 99, options=LENIENT).unread_files() == ""


def test_the_second_output_of_a_stage_is_no_raw_corpus(tmp_path: Path, corpus) -> None:
    mixed, train, held_out = (tmp_path / name for name in ("mixed", "train", "held_out"))
    pass1(corpus("in"), mixed, options=LENIENT)
    pass2(0, 99, 1, mixed, train, held_out, holdout=0.5, options=LENIENT)
    path = next(held_out.rglob("*.jsonl.zst"))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(InputError, match=r"is not what pass2 wrote"):
        to_hash("all", held_out, tmp_path / "hash", 0, "0", 0, 99, options=LENIENT)


def test_the_counts_of_damaged_files_are_stored() -> None:
    counts = Counts({}, [])
    assert msgspec.json.decode(b'{"tallies":{},"examples":[]}', type=Counts) == counts  # of an older ledger
    assert counts.damaged_files() == "" and not counts.reasons and NOT_READ
