"""shuffle_holdout: exact epochs and holdout, a uniform shuffle, every document accounted for."""

import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from gristmill.counts import READ, REPEATED, WRITTEN
from gristmill.engine.options import RunOptions
from gristmill.errors import InputError, OutputError, UsageError
from gristmill.io import readers as reading
from gristmill.io.artefacts import write_table
from gristmill.io.keys import write_keys
from preprocessing import shuffle_holdout as stage
from preprocessing.datasets import shares_table
from preprocessing.mixing.shuffle_buckets import BucketManifest, manifest_path
from preprocessing.shuffle_holdout import pass1, pass2
from tests.preprocessing.conftest import keys_of, write_provenance

ALL = 10**9


def test_without_weights_every_document_is_written_once_with_all_fields(tmp_path: Path, corpus, mix, read) -> None:
    norm = corpus(book=30, c4=25)
    keys = mix(norm, holdout=0.1)
    assert sorted(keys) == sorted(set(keys)) and len(keys) == 55
    before = {f"{s}/{i % 2}.jsonl@{i // 2}": (s, i) for s, n in (("book", 30), ("c4", 25)) for i in range(n)}
    assert set(keys) == set(before)
    for record in read(tmp_path / "mixed" / "train"):
        source, number = before[record["gristmill_key"]]
        assert record["id"] == number and record["text"].startswith(f"{source} document {number} ")


@pytest.mark.parametrize("slices", [False, True])
def test_weights_are_exact(corpus, mix, monkeypatch: pytest.MonkeyPatch, slices: bool) -> None:
    if slices:
        monkeypatch.setattr(reading, "SLICE_BYTES", 400)
    norm = corpus(once=10, more=40, quarter=80, none=10, third=10)
    times = Counter(mix(norm, weights="more=2.5,quarter=0.25,none=0,third=0.33"))
    copies = {source: Counter() for source in ("once", "more", "quarter", "none", "third")}
    for key, many in times.items():
        copies[key.split("/")[0]][many] += 1
    assert copies == {"once": {1: 10}, "more": {2: 20, 3: 20}, "quarter": {1: 20}, "none": {}, "third": {1: 3}}


def test_the_number_of_parts_is_that_of_the_text_after_weights(
    tmp_path: Path, corpus, quiet: RunOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pass 2 holds a part in memory: 100 epochs need as many parts as a corpus 100 times as large."""
    norm = corpus(book=20)
    monkeypatch.setattr(stage, "MAX_PART_BYTES", sum(path.stat().st_size for path in norm.rglob("*.jsonl")))
    for weight, parts in ((1, 20), (0.5, 20), (100, 100)):
        pass1(norm, tmp_path / "out", weights=f"book={weight}", options=quiet)
        assert BucketManifest.load(manifest_path(tmp_path / "out")).parts == parts


def test_weights_apply_to_documents_that_are_not_dropped(tmp_path: Path, corpus, mix) -> None:
    """Half of a source is half of its documents that are neither short nor duplicates."""
    norm = corpus(files=1, book=30)
    write_keys(tmp_path / "short.pickle", {"book/0.jsonl": np.arange(6)})
    write_keys(tmp_path / "dup.pickle", {"book/0.jsonl": np.arange(4, 10)})
    keys = mix(norm, weights="book=0.5", short_docs=tmp_path / "short.pickle", duplicates=tmp_path / "dup.pickle")
    assert len(keys) == 10
    assert all(int(key.partition("@")[2]) >= 10 for key in keys)


def test_counts_by_reason(tmp_path: Path, quiet: RunOptions, corpus) -> None:
    norm = corpus(files=1, book=20, c4=8)
    write_keys(tmp_path / "short.pickle", {"book/0.jsonl": np.arange(4)})
    write_keys(tmp_path / "dup.parquet", {"c4/0.jsonl": np.arange(2)})
    with pytest.raises(InputError, match="no column kept_file, kept_row"):
        pass1(norm, tmp_path / "out", tmp_path / "dup.parquet", tmp_path / "short.pickle", options=quiet)
    write_provenance(tmp_path / "dup.parquet", [("c4/0.jsonl", 0, "c4/0.jsonl", 5), ("c4/0.jsonl", 1, "c4/0.jsonl", 5)])
    counts = pass1(
        norm, tmp_path / "out", tmp_path / "dup.parquet", tmp_path / "short.pickle", "book=1.5", options=quiet
    )
    of = {reason: counts.total(reason).documents for reason in counts.reasons}
    assert of == {READ: 28, REPEATED: 8, WRITTEN: 30, "short": 4, "duplicate": 2}


def test_shares_table(tmp_path: Path, quiet: RunOptions, write) -> None:
    write(tmp_path / "norm" / "book" / "a.jsonl", [{"text": "x" * 10}] * 30)
    write(tmp_path / "norm" / "c4" / "a.jsonl", [{"text": "x" * 30}] * 10)
    counts = pass1(tmp_path / "norm", tmp_path / "out", weights="c4=3", options=quiet)
    console = Console(width=120)
    with console.capture() as shown:
        console.print(shares_table({"book": 1.0, "c4": 3.0}, counts))
    rows = [line.split() for line in shown.get().splitlines() if line.startswith(("book", "c4"))]
    assert rows == [
        ["book", "1", "30", "50.00%", "→", "50.00%", "25.00%", "→", "25.00%"],
        ["c4", "3", "30", "50.00%", "→", "50.00%", "75.00%", "→", "75.00%"],
    ]


def test_the_summary_adds_repeated_documents_to_those_that_were_read(tmp_path: Path, corpus, capsys) -> None:
    counts = pass1(corpus(book=4, c4=4), tmp_path / "out", weights="book=2.5", options=RunOptions(workers=1))
    assert counts.total(REPEATED).documents == 6
    assert "pass1: 8 read + 6 repeated = 14 written | " in capsys.readouterr().err


def test_weights_from_a_file(tmp_path: Path, corpus, mix) -> None:
    (tmp_path / "mix.toml").write_text("book = 2\n'c4' = 0.5\n")
    times = Counter(key.split("/")[0] for key in mix(corpus(book=4, c4=4), weights=str(tmp_path / "mix.toml")))
    assert times == {"book": 8, "c4": 2}


def test_another_seed_samples_and_orders_differently(corpus, mix) -> None:
    norm = corpus(book=40)
    one, again, two = (mix(norm, name, weights="book=0.5", seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert one == again and sorted(one) != sorted(two)


@pytest.mark.parametrize("given", [".pickle", ".parquet"])
def test_short_kept_document_is_replaced(tmp_path: Path, corpus, mix, given: str) -> None:
    norm = corpus(files=1, book=12)
    file = "book/0.jsonl"
    # clusters {0, 3, 5} and {1, 4} with a short first document, {2, 7} without; {6, 8} all short
    write_keys(tmp_path / "short.pickle", {file: np.array([0, 1, 3, 6, 8])})
    write_keys(tmp_path / "dup.pickle", {file: np.array([3, 4, 5, 7, 8])})
    pairs = [(3, 0), (4, 1), (5, 0), (7, 2), (8, 6)]
    write_provenance(tmp_path / "dup.parquet", [(file, row, file, kept) for row, kept in pairs])
    keys = mix(norm, duplicates=tmp_path / f"dup{given}", short_docs=tmp_path / "short.pickle")
    assert sorted(int(key.partition("@")[2]) for key in keys) == [2, 4, 5, 9, 10, 11]


def test_provenance_written_after_the_first_run_is_used(tmp_path: Path, corpus, mix) -> None:
    norm = corpus(files=1, book=6)
    write_keys(tmp_path / "short.pickle", {"book/0.jsonl": np.array([0])})
    write_keys(tmp_path / "dup.pickle", {"book/0.jsonl": np.array([3])})
    sets = {"duplicates": tmp_path / "dup.pickle", "short_docs": tmp_path / "short.pickle"}
    assert len(mix(norm, **sets)) == 4
    write_provenance(tmp_path / "dup.parquet", [("book/0.jsonl", 3, "book/0.jsonl", 0)])
    assert len(mix(norm, **sets)) == 5


def test_a_document_kept_in_a_source_of_weight_0_is_replaced(tmp_path: Path, corpus, mix) -> None:
    norm, book, c4 = corpus(files=1, book=4, c4=4), "book/0.jsonl", "c4/0.jsonl"
    write_keys(tmp_path / "dup.pickle", {book: np.array([2]), c4: np.array([0, 1, 3])})
    kept = [(book, 2, c4, 2), (c4, 0, book, 0), (c4, 1, book, 0), (c4, 3, book, 1)]
    write_provenance(tmp_path / "dup.parquet", kept)
    keys = mix(norm, duplicates=tmp_path / "dup.pickle", weights="book=0")
    assert sorted(keys) == [f"{c4}@0", f"{c4}@2", f"{c4}@3"]


def test_provenance_of_other_duplicates_is_not_used(
    tmp_path: Path, corpus, mix, capsys: pytest.CaptureFixture[str]
) -> None:
    norm = corpus(files=1, book=6)
    write_keys(tmp_path / "short.pickle", {"book/0.jsonl": np.array([0])})
    write_keys(tmp_path / "dup.pickle", {"book/0.jsonl": np.array([3])})
    write_provenance(tmp_path / "dup.parquet", [("book/0.jsonl", 4, "book/0.jsonl", 0)])
    sets = {"duplicates": tmp_path / "dup.pickle", "short_docs": tmp_path / "short.pickle"}
    assert len(mix(norm, **sets)) == 4
    pass1(norm, tmp_path / "out", options=RunOptions(workers=1), **sets)
    assert "dup.parquet does not list the keys of " in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".pickle", ".parquet"])
def test_empty_key_sets(tmp_path: Path, corpus, mix, suffix: str) -> None:
    write_keys(tmp_path / f"short{suffix}", {})
    write_keys(tmp_path / "dup.pickle", {})
    none = {"file": pa.array([], pa.string()), "row": pa.array([], pa.int64())}
    write_table(tmp_path / "dup.parquet", none | {"kept_file": none["file"], "kept_row": none["row"]})
    sets = {"duplicates": tmp_path / f"dup{suffix}", "short_docs": tmp_path / f"short{suffix}"}
    assert len(mix(corpus(book=5), **sets)) == 5


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"other/0.jsonl": [1]}, "names 'other/0.jsonl', a file that the corpus does not have"),
        ({"book/0.jsonl": [0, 99]}, "name 2 documents, and 1 of them are in the corpus"),
    ],
)
@pytest.mark.parametrize("option", ["duplicates", "short_docs"])
def test_key_sets_of_another_corpus_are_rejected(
    tmp_path, quiet: RunOptions, corpus, keys, wanted: str, option: str
) -> None:
    write_keys(tmp_path / "keys.pickle", {file: np.array(rows) for file, rows in keys.items()})
    with pytest.raises(InputError, match=wanted):
        pass1(corpus(book=6), tmp_path / "out", options=quiet, **{option: tmp_path / "keys.pickle"})


def test_missing_key_sets_are_rejected(tmp_path: Path, quiet: RunOptions, corpus) -> None:
    for option in ("duplicates", "short_docs"):
        with pytest.raises(UsageError, match="run the stage that writes it"):
            pass1(corpus(book=6), tmp_path / "out", options=quiet, **{option: tmp_path / "none.pickle"})


def test_ranges_of_parts_give_the_same_output_as_all_parts(
    tmp_path: Path, quiet: RunOptions, corpus, read, digest
) -> None:
    norm, out = corpus(book=60, c4=30), tmp_path / "out"
    pass1(norm, out / "pass1", options=quiet)
    for chunk, (start, end) in enumerate([(10, 20), (0, 3), (3, 10)], 1):
        pass2(start, end, chunk, out / "pass1", out / "train", out / "holdout", 0.1, quiet)
    keys = keys_of(read(out / "train")) + keys_of(read(out / "holdout"))
    assert len(keys) == 90 == len(set(keys))
    pass2(0, ALL, 1, out / "pass1", out / "train1", out / "holdout1", 0.1, quiet)
    whole = {Path(name).name: value for name, value in (digest(out / "train1") | digest(out / "holdout1")).items()}
    assert {
        Path(name).name: value for name, value in (digest(out / "train") | digest(out / "holdout")).items()
    } == whole


def test_a_part_is_in_one_chunk(tmp_path: Path, quiet: RunOptions, corpus, read) -> None:
    norm, out = corpus(book=60), tmp_path / "out"
    pass1(norm, out / "pass1", options=quiet)
    for parts in ((0, 10, 1), (10, 20, 2), (10, 20, 2)):
        pass2(*parts, out / "pass1", out / "train", out / "holdout", 0.1, quiet)
    with pytest.raises(
        OutputError, match=r"example_train_5\.jsonl\.zst was .* would be there twice: remove .*/train/chunk1, and run"
    ):
        pass2(5, 8, 2, out / "pass1", out / "train", out / "holdout", 0.1, quiet)
    with pytest.raises(UsageError, match=r"holds what pass2\+chunk.* wrote, and pass2 would do some of the same work"):
        pass2(0, 20, 3, out / "pass1", out / "train", out / "holdout", 0.1, quiet)
    assert len(set(keys_of(read(out / "train")) + keys_of(read(out / "holdout")))) == 60


@pytest.mark.parametrize(("fraction", "held"), [(0.1, 4), (0.0017, 1), (0.26, 10), (0.0, 0)])
def test_the_holdout_is_exact(tmp_path: Path, corpus, mix, read, fraction: float, held: int) -> None:
    mix(corpus(book=40, one=1, two=2), holdout=fraction)
    found = Counter(key.split("/")[0] for key in keys_of(read(tmp_path / "mixed" / "holdout")))
    two = max(round(2 * fraction), 1 if fraction else 0)
    assert found == Counter(book=held, two=two)


def test_at_most_one_copy_of_a_document_is_held_out(tmp_path: Path, corpus, mix, read) -> None:
    mix(corpus(book=40), holdout=0.5, weights="book=3")
    held = keys_of(read(tmp_path / "mixed" / "holdout"))
    assert len(held) == 20 == len(set(held))


def test_smaller_holdout_is_a_subset_of_a_larger_one(tmp_path: Path, quiet: RunOptions, corpus, read) -> None:
    pass1(corpus(book=60), tmp_path / "pass1", options=quiet)
    held = []
    for fraction in (0.1, 0.3):
        pass2(0, ALL, 1, tmp_path / "pass1", tmp_path / "train", tmp_path / "holdout", fraction, quiet)
        held.append(set(keys_of(read(tmp_path / "holdout"))))
    assert len(held[0]) == 6 and len(held[1]) == 18 and held[0] < held[1]


@pytest.mark.parametrize("size", [0, 1, 2, 10])
def test_the_smallest_corpora_work(tmp_path: Path, corpus, mix, write, size: int) -> None:
    norm = corpus(files=1, book=size, c4=3)
    write(norm / "empty" / "a.jsonl", [])
    keys = mix(norm, holdout=0.0017, weights="book=0.5,empty=1.5")
    assert len(keys) == 3 + round(size / 2)


def test_the_order_is_a_shuffle(tmp_path: Path, quiet: RunOptions, corpus, read) -> None:
    norm, out = corpus(book=300, c4=300), tmp_path / "out"
    pass1(norm, out / "pass1", options=quiet)
    pass2(0, ALL, 1, out / "pass1", out / "train", out / "holdout", 0.0, quiet)
    sizes = [len(path.read_bytes()) for path in sorted((out / "train").rglob("*.zst"))]
    assert len(sizes) == 20 and min(sizes) > 100  # every part has its share of 30 on average
    keys = keys_of(read(out / "train"))
    is_book = np.array([key.startswith("book") for key in keys])
    changes = (is_book[1:] != is_book[:-1]).sum()
    assert 240 < changes < 360  # 300 ± 12 in a random order, 1 in the order of input, 19 if parts were not mixed
    places = np.array([int(key.partition("@")[2]) for key in keys])
    ascending = (np.diff(places) > 0).mean()
    assert 0.42 < ascending < 0.58
    assert abs(np.corrcoef(places, np.arange(len(keys)))[0, 1]) < 0.2


def test_order_within_a_part_is_random(tmp_path: Path, quiet: RunOptions, corpus, read) -> None:
    pass1(corpus(book=300), tmp_path / "pass1", options=quiet)
    pass2(3, 4, 1, tmp_path / "pass1", tmp_path / "train", tmp_path / "holdout", 0.0, quiet)
    keys = keys_of(read(tmp_path / "train"))
    assert len(keys) > 4 and keys != sorted(keys)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [((5, 5), "0 ≤ start < end"), ((-1, 5), "0 ≤ start"), ((20, 21), "the 20 parts that pass1 made: 0 20 for all")],
)
def test_parts_that_do_not_exist_are_rejected(
    tmp_path: Path, quiet: RunOptions, corpus, arguments, wanted: str
) -> None:
    pass1(corpus(book=6), tmp_path / "pass1", options=quiet)
    with pytest.raises(UsageError, match=wanted):
        pass2(*arguments, 1, tmp_path / "pass1", tmp_path / "train", tmp_path / "holdout", options=quiet)


def test_twentieths_of_a_large_corpus_are_all_of_its_parts(
    tmp_path: Path, quiet: RunOptions, corpus, read, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(stage, "MAX_PART_BYTES", 300)  # 27 parts or more
    pass1(corpus(book=100), tmp_path / "pass1", options=quiet)
    parts = BucketManifest.load(manifest_path(tmp_path / "pass1")).parts
    assert parts > 20 and parts % 20
    for chunk, (start, end) in enumerate(((0, 7), (7, 8), (8, 20))):
        options = replace(quiet, quiet=False)
        pass2(start, end, chunk, tmp_path / "pass1", tmp_path / "train", tmp_path / "holdout", 0.0, options)
        assert ("parts are in no chunk yet" in capsys.readouterr().err) == (end < 20)
    pass2(0, 20, 1, tmp_path / "pass1", tmp_path / "train1", tmp_path / "holdout1", 0.0, quiet)
    assert sorted(keys_of(read(tmp_path / "train"))) == sorted(keys_of(read(tmp_path / "train1")))
    assert len(keys_of(read(tmp_path / "train1"))) == 100


def test_invalid_arguments_of_pass_2_are_rejected(tmp_path: Path, quiet: RunOptions, corpus) -> None:
    folders = (tmp_path / "train", tmp_path / "holdout")
    with pytest.raises(UsageError, match="Run pass1"):
        pass2(0, 5, 1, tmp_path / "none", *folders, options=quiet)
    pass1(corpus(book=6), tmp_path / "pass1", options=quiet)
    with pytest.raises(UsageError, match="--holdout 1"):
        pass2(0, 5, 1, tmp_path / "pass1", *folders, 1.0, quiet)
    with pytest.raises(UsageError, match="give two separate folders"):
        pass2(0, 5, 1, tmp_path / "pass1", tmp_path / "x", tmp_path / "x", options=quiet)


@pytest.mark.parametrize("damage", ["bucket file", "bucket file gone", "numbers", "numbers gone", "manifest"])
def test_damaged_output_of_pass_1_is_an_error(tmp_path: Path, quiet: RunOptions, corpus, damage: str) -> None:
    folder = tmp_path / "pass1"
    pass1(corpus(book=60), folder, options=quiet)
    suffix = {"bucket file": ".bucket", "numbers": ".holdout.zst", "manifest": ".json"}[damage.removesuffix(" gone")]
    path = next(path for path in sorted(folder.rglob(f"*{suffix}")) if ".gristmill" not in path.parts)
    if damage.endswith("gone"):
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InputError):
        pass2(0, ALL, 1, folder, tmp_path / "train", tmp_path / "holdout", options=quiet)


def test_missing_provenance_gives_a_note(tmp_path: Path, corpus, capsys: pytest.CaptureFixture[str]) -> None:
    norm = corpus(files=1, book=3)
    (tmp_path / "d.pickle").write_bytes(pickle.dumps({}))
    pass1(norm, tmp_path / "out", tmp_path / "d.pickle", options=RunOptions(workers=1))
    assert "note: there is no " in capsys.readouterr().err
