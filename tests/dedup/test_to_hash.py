"""Signature shards: contents, choice of files, and errors."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest

from dedup import Sketch, generate_duplicate_pairs, signatures, to_hash
from dedup.candidates.input_shards import SignatureShard, summarize_shards
from dedup.candidates.signature_shards import open_shard, reject_mixed_sketches, shard_paths, write_shard
from dedup.minhash.schemes import Hash
from dedup.minhash.signatures import DATATROVE
from dedup.to_hash import SIGNED, SKIPPED, TOO_SHORT
from gristmill.counts import READ, Counts
from gristmill.engine.options import RunOptions
from gristmill.engine.task import FileSet
from gristmill.errors import InputError, UsageError
from gristmill.io.keys import write_keys
from tests.gristmill.engine.opens import count_opens
from tests.gristmill.engine.sandbox import sandboxed

QUIET = RunOptions(workers=1, quiet=True)
Write = Callable[[Path, list[str]], None]


def sign(norm: Path, out: Path, source: str = "all", **arguments: object) -> Counts:
    return to_hash(source, norm, out, 0, "0", 0, 9999, options=QUIET, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("hash", get_args(Hash))
def test_a_shard_holds_the_signatures_of_its_file(
    norm: Path, tmp_path: Path, planted: dict[str, list[str]], hash: Hash
) -> None:
    counts = sign(norm, tmp_path, hash=hash, seed=7, batch=2)
    shards = {shard.header.file: shard for shard in map(open_shard, shard_paths(tmp_path))}
    assert sorted(shards) == sorted(planted)
    for name, texts in planted.items():
        values, shingles = signatures(texts, Sketch(hash, seed=7))
        assert (np.concatenate(list(shards[name].signatures())) == values[shingles > 0]).all()
        assert shards[name].rows().tolist() == np.flatnonzero(shingles).tolist()
    found = [counts.total(reason).documents for reason in (READ, SIGNED, TOO_SHORT)]
    assert found == [15, 10, 5]


@pytest.mark.parametrize("batch", [1, 3, 10_000])
def test_a_batch_changes_no_signature(norm: Path, tmp_path: Path, batch: int) -> None:
    sign(norm, tmp_path / "one")
    sign(norm, tmp_path / "other", batch=batch)
    for one, other in zip(shard_paths(tmp_path / "one"), shard_paths(tmp_path / "other"), strict=True):
        both = [np.concatenate(list(open_shard(path).signatures())) for path in (one, other)]
        assert (both[0] == both[1]).all()


def test_indices_choose_files(write: Write, texts_of: Callable, tmp_path: Path) -> None:
    for number, text in enumerate(texts_of(5, 0)):
        write(tmp_path / f"NORM/wiki/{number}.jsonl", [text])
    for start, end in ((1, 3), (3, 99), (0, 1)):
        to_hash("wiki", tmp_path / "NORM/wiki", tmp_path / "out", 0, "job", start, end, options=QUIET)
        found = [open_shard(path).header.file for path in shard_paths(tmp_path / "out")]
        wanted = {1: ["1", "2"], 3: ["1", "2", "3", "4"], 0: ["0", "1", "2", "3", "4"]}[start]
        assert found == [f"wiki/{number}.jsonl" for number in wanted]


@pytest.mark.parametrize(("start", "end"), [(3, 9), (1, 1), (2, 1), (-1, 2)])
def test_indices_that_choose_nothing(norm: Path, tmp_path: Path, start: int, end: int) -> None:
    with pytest.raises(UsageError, match=f"files {start} to {end}"):
        to_hash("all", norm, tmp_path, 0, "0", start, end, options=QUIET)


def test_a_folder_of_all_data_sets_or_of_one(norm: Path, tmp_path: Path) -> None:
    sign(norm, tmp_path / "all")
    sign(norm, tmp_path / "root", "arxiv")
    sign(norm, tmp_path / "named/arxiv", "arxiv")
    sign(norm / "arxiv", tmp_path / "other", "arxiv")
    shards = {path.name: path.read_bytes() for path in shard_paths(tmp_path / "all/arxiv")}
    for folder in ("root/arxiv", "named/arxiv", "other"):
        assert {path.name: path.read_bytes() for path in (tmp_path / folder).glob("*.arrow")} == shards


def test_data_sets_signed_one_after_the_other_are_all_there(
    norm: Path, tmp_path: Path, contents: Callable, capsys: pytest.CaptureFixture
) -> None:
    sign(norm, tmp_path / "one", "arxiv")
    sign(norm, tmp_path / "one", "book")
    sign(norm, tmp_path / "all")
    assert contents(tmp_path / "one") == contents(tmp_path / "all")
    for folder, source in (("all", "all"), ("one", "book"), ("one", "arxiv")):
        to_hash(source, norm, tmp_path / folder, 0, "0", 0, 99, options=replace(QUIET, quiet=False))
        assert "done already" in capsys.readouterr().err
    assert contents(tmp_path / "one") == contents(tmp_path / "all")


def test_a_second_input_does_not_replace_the_first(
    norm: Path, tmp_path: Path, write: Write, contents: Callable
) -> None:
    write(tmp_path / "NORM/book/a.jsonl", ["another text of a book"])
    sign(norm / "arxiv", tmp_path / "flat", "arxiv")
    sign(norm, tmp_path / "out")
    before = contents(tmp_path)
    for source, folder, out, message in (
        ("book", tmp_path / "NORM/book", tmp_path / "flat", "would lose it if"),
        ("book", tmp_path / "NORM", tmp_path / "out", "holds what to_hash wrote"),
        ("all", tmp_path / "NORM", tmp_path / "out", "would lose it if"),
    ):
        with pytest.raises(UsageError, match=message):
            sign(folder, out, source)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["", ".", "arxiv/", "arxiv/2022"])
def test_a_data_set_is_a_folder_in_the_corpus(norm: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="the name of a folder in the corpus"):
        sign(norm, tmp_path, name)


def test_shards_are_not_written_into_the_corpus(write: Write, tmp_path: Path) -> None:
    write(tmp_path / "NORM/a.jsonl", ["a text of some length"])
    with pytest.raises(UsageError, match="lies in it"):
        sign(tmp_path / "NORM", tmp_path / "NORM/minhash")


def test_a_share_of_the_files_removes_no_shard(write: Write, texts_of: Callable, tmp_path: Path) -> None:
    for number, text in enumerate(texts_of(5, 0)):
        write(tmp_path / f"NORM/wiki/{number}.jsonl", [text])
    for start, end, shards in ((0, 2, 2), (2, 99, 5), (1, 2, 5)):
        to_hash("wiki", tmp_path / "NORM", tmp_path / "out", 0, "0", start, end, options=QUIET)
        assert len(shard_paths(tmp_path / "out")) == shards
    with pytest.raises(UsageError, match=r"holds what to_hash\+wiki\+.* wrote, and to_hash\+wiki would"):
        to_hash("wiki", tmp_path / "NORM", tmp_path / "out", 0, "0", 0, 99, options=QUIET)


def test_signatures_of_files_that_are_gone_are_removed(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.io.readers.SLICE_BYTES", 1 << 10)

    def share(start: int) -> None:
        to_hash("wiki", tmp_path / "NORM", tmp_path / "out", 0, "0", start, start + 1, options=QUIET)

    for name in "ab":
        write(tmp_path / f"NORM/wiki/{name}.jsonl", [f"a text of some length {number}" for number in range(60)])
    share(0)
    slices = len(shard_paths(tmp_path / "out"))
    share(1)
    write(tmp_path / "NORM/wiki/a.jsonl", ["a text of some length"])  # one slice now
    share(0)  # its own shards
    assert len(shard_paths(tmp_path / "out")) == 1 + slices
    generate_duplicate_pairs(tmp_path / "out", tmp_path / "dup/duplicate_pairs.txt", options=QUIET)
    sign(tmp_path / "NORM", tmp_path / "whole", "wiki")
    (tmp_path / "NORM/wiki/a.jsonl").rename(tmp_path / "NORM/wiki/c.jsonl")
    sign(tmp_path / "NORM", tmp_path / "whole", "wiki")
    share(0)
    share(1)
    whole = [path.name for path in shard_paths(tmp_path / "whole")]
    assert [path.name for path in shard_paths(tmp_path / "out")] == whole


def test_an_interrupted_run_is_not_taken_for_a_whole_one(
    write: Write, texts_of: Callable, tmp_path: Path, contents: Callable
) -> None:
    """And when it has been completed, by the same calls, it is."""
    write(tmp_path / "NORM/book/a.jsonl", texts_of(2, 0))
    write(tmp_path / "NORM/wiki/a.jsonl", texts_of(2, 2))
    (tmp_path / "NORM/wiki/b.jsonl.zst").write_bytes(b"no zstd" * 9999)
    with pytest.raises(InputError, match="fetch the file again"):
        sign(tmp_path / "NORM", tmp_path / "out", "wiki")
    with pytest.raises(InputError, match="is not complete: to_hash"):
        shard_paths(tmp_path / "out")
    write(tmp_path / "NORM/wiki/b.jsonl.zst", texts_of(2, 4))
    sign(tmp_path / "NORM", tmp_path / "out", "wiki")
    sign(tmp_path / "NORM", tmp_path / "out", "book")
    sign(tmp_path / "NORM", tmp_path / "whole")
    assert len(shard_paths(tmp_path / "out")) == 3
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_tasks_open_only_what_they_name(norm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "exact.parquet"
    write_keys(keys, {"arxiv/a.jsonl": np.array([0])})
    monkeypatch.setattr("gristmill.io.readers.SLICE_BYTES", 1 << 10)
    with sandboxed(norm, tmp_path) as sandbox:
        sign(norm, tmp_path / "out", skip=keys)
    assert sandbox.tasks > 4


def test_a_file_that_changed_is_signed_again_and_one_that_went_is_forgotten(
    write: Write, texts_of: Callable, tmp_path: Path
) -> None:
    one, other = tmp_path / "NORM/wiki/a.jsonl", tmp_path / "NORM/wiki/b.jsonl"
    write(one, texts_of(2, 0))
    write(other, texts_of(2, 5))
    sign(tmp_path / "NORM", tmp_path / "out")
    write(one, texts_of(3, 0))
    sign(tmp_path / "NORM", tmp_path / "out")
    assert len(open_shard(shard_paths(tmp_path / "out")[0])) == 3
    other.unlink()
    sign(tmp_path / "NORM", tmp_path / "out")
    assert len(shard_paths(tmp_path / "out")) == 1


@pytest.mark.parametrize(
    "change",
    [{"hash": "sha1"}, {"width": 12}, {"permutations": 130}, {"seed": 2}, {"unit": "word"}, {"hash": "fss"}],
    ids=str,
)
def test_shards_that_cannot_be_compared_are_both_named(norm: Path, tmp_path: Path, change: dict) -> None:
    sign(norm, tmp_path / "arxiv", "arxiv")
    sign(norm, tmp_path / "book", "book", **change)
    with pytest.raises(UsageError, match=r"cannot be compared: .*arxiv/.* holds xxh32 .*; .*book/.* holds "):
        reject_mixed_sketches({path: open_shard(path).header for path in shard_paths(tmp_path)})


def test_shingles_of_words(norm: Path, tmp_path: Path, planted: dict[str, list[str]], run: Callable) -> None:
    run(f"python dedup/to_hash.py all {norm} {tmp_path} 0 0 0 99 --unit word -w 5 --permutations 112 --quiet")
    for shard in map(open_shard, shard_paths(tmp_path)):
        assert (shard.header.unit, shard.header.width, shard.header.permutations) == ("word", 5, 112)
        values, shingles = signatures(planted[shard.header.file], DATATROVE)
        assert (np.concatenate(list(shard.signatures())) == values[shingles > 0]).all()


def test_documents_without_a_signature_are_said(norm: Path, tmp_path: Path, run: Callable) -> None:
    ended = run(f"python dedup/to_hash.py all {norm} {tmp_path}/out 0 0 0 99")
    assert (
        "33.3% of the documents (5 of 15) have no signature, as they are shorter than a shingle of 13" in ended.stderr
    )


@pytest.mark.parametrize("suffix", [".pickle", ".parquet"])
@pytest.mark.parametrize("batch", [1, 10_000])
def test_documents_that_are_skipped(
    norm: Path, tmp_path: Path, planted: dict[str, list[str]], suffix: str, batch: int
) -> None:
    keys = tmp_path / f"exact{suffix}"
    write_keys(
        keys, {"arxiv/a.jsonl": np.array([1, 2]), "arxiv/b.jsonl.zst": np.array([3, 99]), "web/x": np.array([0])}
    )
    counts = sign(norm, tmp_path / "out", skip=keys, batch=batch)
    sign(norm, tmp_path / "all")
    rows = {shard.header.file: shard.rows().tolist() for shard in map(open_shard, shard_paths(tmp_path / "out"))}
    assert rows["arxiv/a.jsonl"] == [0, 3]
    assert rows["arxiv/b.jsonl.zst"] == [0, 1]
    found = [counts.total(reason).documents for reason in (READ, SIGNED, SKIPPED, TOO_SHORT)]
    assert found == [15, 8, 3, 4]
    assert counts.total(SKIPPED).bytes == sum(
        len(text.encode()) for text in (*planted["arxiv/a.jsonl"][1:3], planted["arxiv/b.jsonl.zst"][3])
    )
    for one, other in zip(shard_paths(tmp_path / "out"), shard_paths(tmp_path / "all"), strict=True):
        ours, everything = open_shard(one), open_shard(other)
        kept = np.isin(everything.rows(), ours.rows())
        both = [np.concatenate(list(shard.signatures())) for shard in (ours, everything)]
        assert (both[0] == both[1][kept]).all()


def test_keys_to_skip_are_not_read_by_every_task(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.engine.slices.SMALL_BYTES", 0)
    for number in range(12):
        write(tmp_path / f"NORM/a/{number:02}.jsonl", ["a text of some length", "another text of some length"])
    write_keys(tmp_path / "exact.pickle", {f"a/{number:02}.jsonl": np.array([1]) for number in range(12)})
    with count_opens(tmp_path) as found:
        counts = sign(tmp_path / "NORM", tmp_path / "out", skip=tmp_path / "exact.pickle")
    assert counts.total(SKIPPED).documents == counts.total(SIGNED).documents == 12
    assert found[str(tmp_path / "exact.pickle")] <= 3


def test_keys_that_changed_are_skipped_anew(norm: Path, tmp_path: Path) -> None:
    keys = tmp_path / "exact.parquet"
    write_keys(keys, {"arxiv/a.jsonl": np.array([0])})
    assert sign(norm, tmp_path / "out", skip=keys).total(SKIPPED).documents == 1
    write_keys(keys, {"arxiv/a.jsonl": np.array([0, 1, 3])})
    assert sign(norm, tmp_path / "out", skip=keys).total(SKIPPED).documents == 3
    assert sign(norm, tmp_path / "out").total(SKIPPED).documents == 0


def test_keys_of_other_files_are_pointed_out(norm: Path, tmp_path: Path, run: Callable) -> None:
    keys = tmp_path / "exact.pickle"
    write_keys(keys, {"a.jsonl": np.array([0])})
    ended = run(f"python dedup/to_hash.py all {norm} {tmp_path}/out 0 0 0 99 --skip {keys}")
    assert "none was skipped" in ended.stderr


@pytest.mark.parametrize(
    ("name", "message"), [("keys.txt", "expected a name"), ("absent.pickle", "no file"), ("a.parquet", "no file")]
)
def test_keys_that_cannot_be_read(norm: Path, tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sign(norm, tmp_path / "out", skip=tmp_path / name)


def test_a_folder_without_shards(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run to_hash first"):
        shard_paths(tmp_path)
    with pytest.raises(UsageError, match="none of that name"):
        shard_paths(tmp_path / "absent")


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "a.signatures.arrow"
    with write_shard(path, "wiki/a.jsonl", Sketch()) as writer:
        writer.add([4, 9], signatures(["thirteen or more characters", "in each of these texts"])[0])
        writer.add([], np.empty((0, 128), np.uint32))
    return path


def test_a_shard_is_read_as_written(shard: Path) -> None:
    opened = open_shard(shard)
    assert (len(opened), opened.rows().tolist(), opened.header.file) == (2, [4, 9], "wiki/a.jsonl")
    assert [part.shape for part in opened.signatures()] == [(2, 128), (0, 128)]


@pytest.mark.parametrize("keep", [0, 1, 7, 100, 500, 0.5, 0.9, -1])
def test_a_truncated_shard(shard: Path, keep: float) -> None:
    size = shard.stat().st_size
    os.truncate(shard, size + keep if keep < 0 else int(keep * size) if isinstance(keep, float) else keep)
    with pytest.raises(InputError, match=r"a\.signatures\.arrow is not a readable signature shard.*run to_hash again"):
        open_shard(shard)


@pytest.mark.parametrize("data", [b"not arrow at all" * 99, bytes(5000)])
def test_a_file_that_is_no_shard(shard: Path, data: bytes) -> None:
    shard.write_bytes(data)
    with pytest.raises(InputError, match="not a readable signature shard"):
        open_shard(shard)


def test_arrow_files_of_others(shard: Path) -> None:
    with pa.ipc.new_file(str(shard), pa.schema({"row": pa.int64()})):
        pass
    with pytest.raises(InputError, match="not a readable signature shard"):
        open_shard(shard)


ROWS = pa.array([0, 4], pa.int64())
SLOTS = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(256), pa.uint32()), 128)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"row": pa.array([-5, -4])}, "rows do not ascend from 0"),
        ({"row": pa.array([4, 0])}, "rows do not ascend from 0"),
        ({"row": pa.array([0, 0])}, "rows do not ascend from 0"),
        ({"row": pa.array([0, 1 << 62])}, "rows do not ascend from 0 to less than"),
        ({"row": pa.array([0, None], pa.int64())}, "has nulls"),
        ({"row": pa.array(["0", "4"])}, "holds row: string"),
        ({"signature": SLOTS.cast(pa.list_(pa.uint64(), 128))}, "expected row: int64, signature: .*uint32"),
        ({"signature": SLOTS.cast(pa.list_(pa.float32(), 128))}, "expected row: int64, signature: .*uint32"),
        ({"signature": pa.array([None, [7] * 128], pa.list_(pa.uint32(), 128))}, "has nulls"),
        ({"signature": pa.array([[None] * 128] * 2, pa.list_(pa.uint32(), 128))}, "has nulls"),
        ({"signature": pa.array([[7] * 64] * 2, pa.list_(pa.uint32(), 64))}, r"\[64\]: expected .*\[128\]"),
    ],
)
def test_shards_that_would_lead_kernels_astray(shard: Path, columns: dict[str, pa.Array], message: str) -> None:
    metadata = pa.ipc.open_file(shard).schema.metadata
    table = pa.table({"row": ROWS, "signature": SLOTS, **columns}).replace_schema_metadata(metadata)
    with pa.ipc.new_file(str(shard), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(InputError, match=message):
        summarize_shards(FileSet((shard,)))


def test_rows_that_appear_after_the_headers_were_read(shard: Path) -> None:
    header = open_shard(shard).header
    assert [rows.tolist() for rows, _ in SignatureShard(shard, header, header.file, 2, 10).batches()] == [[4, 9]]
    with pytest.raises(InputError, match=r"^\S*a\.signatures\.arrow is not .*less than 9\): run to_hash again$"):
        list(SignatureShard(shard, header, header.file, 2, 9).batches())


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("absent")])
def test_a_shard_that_is_no_regular_file(shard: Path, make: Callable[[Path], None]) -> None:
    make(shard.with_name("b.signatures.arrow"))
    with pytest.raises(InputError, match=r"b\.signatures\.arrow is a dangling link or not a regular file"):
        shard_paths(shard.parent)


def test_how_it_runs_changes_no_byte(norm: Path, tmp_path: Path) -> None:
    sign(norm, tmp_path / "one")
    to_hash("all", norm, tmp_path / "other", 0, "0", 0, 99, options=replace(QUIET, workers=2, memory="1MiB"))
    for one, other in zip(shard_paths(tmp_path / "one"), shard_paths(tmp_path / "other"), strict=True):
        assert one.read_bytes() == other.read_bytes()
