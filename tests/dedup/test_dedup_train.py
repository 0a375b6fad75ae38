"""Decontamination: no holdout text stays in the train set, and no other document is lost."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from dedup import dedup_train
from dedup.dedup_train import IN_HOLDOUT, _groups_for
from gristmill.counts import READ, WRITTEN
from gristmill.engine.options import RunOptions
from gristmill.errors import InputError, TooManyMalformed, UsageError
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import KEY_FIELD, CorpusFile
from gristmill.io.files import mark_unfinished
from gristmill.io.lines import read_lines
from gristmill.io.writers import open_jsonl_writer
from gristmill.storage.files import FileInfo
from preprocessing.normalize_text import normalize_text
from tests.gristmill.engine.opens import count_opens
from tests.gristmill.engine.sandbox import sandboxed

QUIET = RunOptions(workers=1, quiet=True)
TRAIN = [("a/x.jsonl@0", "Kept, one."), ("a/x.jsonl@1", "Held out."), ("b/y.jsonl@0", "held out"),
         ("b/y.jsonl@1", "Also held out, elsewhere."), ("b/y.jsonl@2", "Held out.")]  # fmt: skip


def write(path: Path, documents: list[tuple[str, str]]) -> None:
    with open_jsonl_writer(path) as sink:
        for key, text in documents:
            sink.write(msgspec.json.encode({"id": 7, "text": text, KEY_FIELD: key}) + b"\n")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """OUT/train of two chunks and OUT/holdout of two."""
    write(tmp_path / "train/chunk1/a.jsonl.zst", TRAIN)
    write(tmp_path / "train/chunk2/a.jsonl.zst", TRAIN[:1])
    write(tmp_path / "holdout/chunk1/a.jsonl.zst", [("a/x.jsonl@5", "Held out.")])
    write(tmp_path / "holdout/chunk2/a.jsonl.zst", [("b/y.jsonl@9", "Also held out, elsewhere.")])
    return tmp_path


def clean(out: Path, chunk: int = 1) -> object:
    return dedup_train(chunk, out / "train", out / "holdout", out / "train_deduped", options=QUIET)


def test_texts_of_every_chunk_of_the_holdout_are_removed(out: Path) -> None:
    counts = clean(out)
    lines = [msgspec.json.decode(line) for line in read_lines(out / "train_deduped/chunk1/a.jsonl.zst")]
    assert lines == [{"id": 7, "text": text, KEY_FIELD: key} for key, text in (TRAIN[0], TRAIN[2])]
    found = {
        source: [counts.total(reason, source).documents for reason in (READ, WRITTEN, IN_HOLDOUT)]
        for source in counts.tallies
    }
    assert found == {"a": [2, 1, 1], "b": [3, 1, 2]}


@pytest.mark.parametrize("growth", [1, 10, 100])
def test_digests_that_tasks_fetch_are_a_share_of_the_corpus_however_large(growth: int) -> None:
    files = [CorpusFile(Path(f"/t/chunk1/{i}.zst"), f"chunk1/{i}.zst", 60 << 20) for i in range(50 * growth)]
    digests = FileInfo(growth << 20, 0)
    groups = list(_groups_for(digests, files))
    assert [part.name for group in groups for part in group] == [file.name for file in files]
    assert len(groups) * digests.size <= sum(file.size for file in files) / 16 + digests.size
    assert growth > 1 or len(groups) == len(files)


def test_malformed_records_of_all_holdout_files_are_stored(out: Path) -> None:
    for number in (1, 2):
        (out / f"holdout/chunk{number}/b.jsonl").write_text(f"malformed {number}\n")
    with pytest.raises(TooManyMalformed, match="2 of 4 records are malformed"):
        clean(out)
    assert not (out / "train_deduped/chunk1").exists()
    dedup_train(1, out / "train", out / "holdout", out / "train_deduped", options=replace(QUIET, max_malformed=0.5))
    (path,) = out.glob("train_deduped/*/holdout.sha256.malformed")
    found = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    assert [line["raw"] for line in found] == ["malformed 1", "malformed 2"]


def test_a_ledger_is_not_read_for_every_chunk(out: Path) -> None:
    train, reads = out / "normalized", []
    for chunk in range(1, 7):
        shutil.copytree(out / "train/chunk1", out / f"raw/chunk{chunk}")
    normalize_text(out / "raw", train, options=QUIET)
    for chunk in range(1, 7):
        with count_opens(train) as opened:
            dedup_train(chunk, train, out / "holdout", out / "train_deduped", options=QUIET)
        reads.append(opened[str(train / ".gristmill/normalize_text.ledger")])
    assert len(set(reads[1:])) == 1, reads


def test_a_chunk_beside_another_is_left_alone(out: Path) -> None:
    clean(out, 1)
    first = (out / "train_deduped/chunk1/a.jsonl.zst").stat().st_mtime_ns
    clean(out, 2)
    assert (out / "train_deduped/chunk1/a.jsonl.zst").stat().st_mtime_ns == first
    assert len(list(read_lines(out / "train_deduped/chunk2/a.jsonl.zst"))) == 1


def test_another_holdout_is_read_anew(out: Path) -> None:
    clean(out)
    write(out / "holdout/chunk3/a.jsonl.zst", [("a/x.jsonl@6", "Kept, one.")])
    assert clean(out).total(IN_HOLDOUT).documents == 4
    assert len(list(read_lines(out / "train_deduped/chunk1/a.jsonl.zst"))) == 1


def test_a_copied_train_set_is_the_same(out: Path) -> None:
    """The files of a train set that pass2 wrote have a hash; they may be copied, with other times."""
    normalize_text(out / "train", out / "copied/train", options=QUIET)
    for chunk in (1, 2, 1):
        os.utime(out / "copied/train/chunk2/a.jsonl.zst", (chunk, chunk))
        dedup_train(chunk, out / "copied/train", out / "holdout", out / "train_deduped", options=QUIET)
    list_corpus(out / "train_deduped")


def test_a_chunk_that_is_not_there(out: Path) -> None:
    with pytest.raises(UsageError, match=r"chunk9: expected a chunk that pass2 wrote; .* has chunk1, chunk2"):
        clean(out, 9)
    with pytest.raises(UsageError, match="has no chunk"):
        dedup_train(1, out / "nowhere", out / "holdout", out / "train_deduped", options=QUIET)


def test_a_holdout_that_is_not_there(out: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        dedup_train(1, out / "train", out / "nowhere", out / "train_deduped", options=QUIET)


def test_folders_in_each_other_are_refused(out: Path) -> None:
    """With the train set as output, the stage overwrote its input."""
    before = {path: path.read_bytes() for path in out.rglob("*.zst")}
    for source, target, output in [
        ("train", "holdout", "train"), ("train", "holdout", "holdout"), ("train", "holdout", "train/chunk1"),
        ("train", "holdout", "."), ("train", "train", "clean"), ("train", "train/chunk1", "clean"), ("train", ".", "x"),
    ]:  # fmt: skip
        with pytest.raises(UsageError, match=r"give|would lose all documents"):
            dedup_train(1, out / source, out / target, out / output, options=QUIET)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_another_train_set_or_holdout_into_one_output_is_refused(out: Path) -> None:
    clean(out)
    for name in ("train", "holdout"):
        write(out / f"other_{name}/chunk1/a.jsonl.zst", [("a/x.jsonl@7", "Another.")])
    for source, target in (("other_train", "holdout"), ("train", "other_holdout")):
        with pytest.raises(UsageError, match="would lose it"):
            dedup_train(1, out / source, out / target, out / "train_deduped", options=QUIET)


def test_an_unfinished_holdout_is_refused(out: Path) -> None:
    mark_unfinished(out / "holdout", "pass2-chunk2")
    with pytest.raises(InputError, match="holdout is not complete: pass2-chunk2"):
        clean(out)


def test_tasks_open_only_what_they_declare(out: Path) -> None:
    with sandboxed(out) as sandbox:
        assert clean(out).total(IN_HOLDOUT).documents == 3
    assert sandbox.tasks == 2


def test_by_its_command_line_chunks_beside_one_another(run: Callable, out: Path) -> None:
    line = "python dedup/dedup_train.py {chunk} --src_dir {out}/train --tgt_dir {out}/holdout --out_dir {out}/clean"
    with ThreadPoolExecutor(2) as both:
        ended = list(both.map(lambda chunk: run(line.format(chunk=chunk, out=out)), (1, 2)))
    assert "5 read = 2 written + 3 in the holdout" in ended[0].stderr
    assert "1 read = 1 written" in ended[1].stderr
    assert not list((out / "clean").rglob("*.partial"))
    ended = [run(line.format(chunk=3, out=out), fails=2)]
    assert "has chunk1, chunk2" in ended[0].stderr
