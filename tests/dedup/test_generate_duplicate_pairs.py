"""Candidate pairs are the same for any memory, workers and earlier runs with other bands."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dedup import Sketch, generate_duplicate_pairs
from dedup.candidates.document_ids import ALONE
from dedup.candidates.input_shards import parse_indexes
from dedup.candidates.signature_shards import write_shard
from dedup.generate_duplicate_pairs import PAIRED, write_pairs
from gristmill.counts import READ
from gristmill.engine.options import RunOptions
from gristmill.engine.task import FileSet
from gristmill.errors import InputError, UsageError
from gristmill.io.files import STATE_DIR, mark_unfinished
from tests.gristmill.engine.opens import count_opens
from tests.gristmill.engine.sandbox import sandboxed

QUIET = RunOptions(workers=1, quiet=True)
SHARDS, EACH = 3, 200
NAMED = write_pairs.__module__  # `dedup.generate_duplicate_pairs` is the function


@pytest.fixture(scope="module")
def minhash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of random signatures, a third of which share bands with others."""
    chance, folder = np.random.default_rng(0), tmp_path_factory.mktemp("MINHASH")
    values = chance.integers(0, 2**32, (SHARDS * EACH, 128), np.uint32)
    for i in range(0, len(values), 6):
        for copy in (i + 1, len(values) - 1 - i):
            bands = chance.choice(9, chance.integers(1, 4), replace=False)
            for band in bands:
                values[copy, band * 13 : band * 13 + 13] = values[i, band * 13 : band * 13 + 13]
    for number, part in enumerate(np.split(values, SHARDS)):
        with write_shard(folder / f"{number}.signatures.arrow", f"s{number}/a.jsonl", Sketch()) as shard:
            shard.add(range(EACH), part)
    np.save(folder / "values.npy", values)
    return folder


def pairs_of(values: np.ndarray, rows: int, bands: int) -> list[set[tuple[int, int]]]:
    """A plain reference: of each band, (document, first document of its bucket)."""
    found = []
    for band in range(bands):
        first: dict[bytes, int] = {}
        keys = [row[band * rows : band * rows + rows].tobytes() for row in values]
        found.append({(i, first[key]) for i, key in enumerate(keys) if first.setdefault(key, i) != i})
    return found


def key(document: int) -> str:
    return f"s{document // EACH}/a.jsonl@{document % EACH}"


@pytest.mark.parametrize(("rows", "bands"), [(13, 9), (4, 30), (128, 1)])
def test_pairs_are_those_of_a_plain_search(minhash: Path, tmp_path: Path, rows: int, bands: int) -> None:
    out = tmp_path / "duplicate_pairs.txt"
    counts = generate_duplicate_pairs(minhash, out, rows, bands, options=QUIET)
    expected = pairs_of(np.load(minhash / "values.npy"), rows, bands)
    lines = out.read_text().splitlines()
    assert sorted(lines) == sorted(f"{key(a)} :: {key(b)}" for band in expected for a, b in band)
    paired = {document for band in expected for pair in band for document in pair}
    found = [counts.total(reason).documents for reason in (READ, PAIRED, ALONE)]
    assert found == [SHARDS * EACH, len(paired), SHARDS * EACH - len(paired)]


@pytest.mark.parametrize(("memory", "workers"), [("10K", 1), ("3K", 2)])
def test_many_partitions_give_the_same_bytes(
    minhash: Path, tmp_path: Path, memory: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate_duplicate_pairs(minhash, tmp_path / "one.txt", options=QUIET)
    used: list[int] = []

    def counted(edges: FileSet, **arguments: object) -> object:
        used.append(len(edges))
        return write_pairs(edges, **arguments)

    monkeypatch.setattr(sys.modules[NAMED], "write_pairs", counted)
    generate_duplicate_pairs(minhash, tmp_path / "other.txt", options=replace(QUIET, memory=memory, workers=workers))
    assert (tmp_path / "one.txt").read_bytes() == (tmp_path / "other.txt").read_bytes()
    assert used[0] >= 9 * 4
    monkeypatch.setattr(sys.modules[NAMED], "write_pairs", write_pairs)
    (tmp_path / "other.txt").unlink()
    generate_duplicate_pairs(minhash, tmp_path / "other.txt", options=QUIET)  # other partitions
    assert (tmp_path / "one.txt").read_bytes() == (tmp_path / "other.txt").read_bytes()


def test_other_bands_are_other_work(minhash: Path, tmp_path: Path) -> None:
    out = tmp_path / "duplicate_pairs.txt"
    generate_duplicate_pairs(minhash, out, 13, 9, options=QUIET)
    first = out.read_bytes()
    generate_duplicate_pairs(minhash, out, 4, 30, options=QUIET)
    assert out.read_bytes() != first
    generate_duplicate_pairs(minhash, out, 13, 9, options=QUIET)
    assert out.read_bytes() == first


def test_done_for_any_budget(minhash: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    generate_duplicate_pairs(minhash, tmp_path / "pairs.txt", options=QUIET)
    generate_duplicate_pairs(
        minhash, tmp_path / "pairs.txt", options=RunOptions(workers=2, memory="3K")
    )  # another plan, the same result
    assert "done already" in capsys.readouterr().err
    assert not list((tmp_path / STATE_DIR).glob("*.work"))


def test_tasks_open_only_what_they_name(minhash: Path, tmp_path: Path) -> None:
    with sandboxed(minhash, tmp_path) as sandbox:
        generate_duplicate_pairs(minhash, tmp_path / "pairs.txt", options=replace(QUIET, memory="10K"))
    assert sandbox.tasks > 9 * 4
    generate_duplicate_pairs(minhash, tmp_path / "other.txt", options=QUIET)
    assert (tmp_path / "pairs.txt").read_bytes() == (tmp_path / "other.txt").read_bytes()


def test_opens_grow_no_faster_than_the_corpus(tmp_path: Path) -> None:
    chance, opens = np.random.default_rng(0), []
    for shards in (24, 96):
        root = tmp_path / str(shards)
        for number in range(shards):
            with write_shard(root / f"MINHASH/{number:03}.signatures.arrow", f"a/{number:03}.jsonl", Sketch()) as shard:
                shard.add(range(20), chance.integers(0, 2, (20, 128), np.uint32))
        with count_opens(root) as found:
            generate_duplicate_pairs(root / "MINHASH", root / "pairs.txt", 4, 2, options=replace(QUIET, memory="8K"))
        opens.append(sum(found.values()) / shards)
    assert opens[1] <= 1.1 * opens[0], opens


@pytest.mark.parametrize("index", [(), ("old",)])
def test_shards_of_an_interrupted_run_are_refused(minhash: Path, tmp_path: Path, index: tuple[str, ...]) -> None:
    for folder in ("new", "old"):
        (tmp_path / folder).symlink_to(shutil.copytree(minhash, tmp_path / f"{folder}-shards"))
    mark_unfinished(tmp_path / (index or ("new",))[0], "to_hash")
    folders = tuple(str(tmp_path / name) for name in index)
    with pytest.raises(InputError, match="is not complete: to_hash"):
        generate_duplicate_pairs(tmp_path / "new", tmp_path / "pairs.txt", index=folders, options=QUIET)


@pytest.mark.parametrize(("rows", "bands"), [(13, 10), (0, 9), (13, -1)])
def test_bands_that_do_not_fit(minhash: Path, tmp_path: Path, rows: int, bands: int) -> None:
    with pytest.raises(UsageError, match="128 permutations"):
        generate_duplicate_pairs(minhash, tmp_path / "pairs.txt", rows, bands, options=QUIET)


def test_two_numbers_of_workers_are_refused(minhash: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--processes 3 has no effect with --workers 1"):
        generate_duplicate_pairs(minhash, tmp_path / "pairs.txt", processes=3, options=replace(QUIET, workers=1))


def test_a_damaged_shard_is_named(minhash: Path, tmp_path: Path) -> None:
    for path in minhash.glob("*.arrow"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "1.signatures.arrow").write_bytes(b"ARROW1\0\0 and no more")
    with pytest.raises(InputError, match=r"1\.signatures\.arrow is not a readable"):
        generate_duplicate_pairs(tmp_path, tmp_path / "pairs.txt", options=QUIET)
    assert not (tmp_path / "pairs.txt").exists()


def test_two_shards_of_the_same_documents(minhash: Path, tmp_path: Path) -> None:
    shutil.copytree(minhash, tmp_path / "MINHASH/old")
    shutil.copy(minhash / "1.signatures.arrow", tmp_path / "MINHASH/copy.signatures.arrow")
    with pytest.raises(UsageError, match=r"copy\.signatures.* both hold signatures of a file s1/a\.jsonl"):
        generate_duplicate_pairs(tmp_path / "MINHASH", tmp_path / "pairs.txt", options=QUIET)


@pytest.mark.parametrize("place", ["other/a.signatures.arrow", "b.signatures.arrow"])
@pytest.mark.parametrize("rows", [range(3), range(5, 9)])
def test_shards_of_two_corpora_with_files_of_one_name(tmp_path: Path, place: str, rows: range) -> None:
    """Their documents have the same keys, and would be taken for one another."""
    for name, signed in (("a.signatures.arrow", range(5)), (place, rows)):
        with write_shard(tmp_path / "MINHASH" / name, "web/a.jsonl", Sketch()) as shard:
            shard.add(list(signed), np.full((len(signed), 128), 7, np.uint32))
    if place.startswith("b") and rows[0] == 5:  # the next part of one file
        assert generate_duplicate_pairs(tmp_path / "MINHASH", tmp_path / "pairs.txt", options=QUIET).total(READ)
    else:
        with pytest.raises(UsageError, match=r"both hold signatures of a file web/a\.jsonl.*--index NAME=FOLDER"):
            generate_duplicate_pairs(tmp_path / "MINHASH", tmp_path / "pairs.txt", options=QUIET)


def test_shards_without_a_signature(tmp_path: Path) -> None:
    with write_shard(tmp_path / "a.signatures.arrow", "a.jsonl", Sketch()):
        pass
    counts = generate_duplicate_pairs(tmp_path, tmp_path / "pairs.txt", options=QUIET)
    assert (tmp_path / "pairs.txt").read_bytes() == b""
    assert list(counts.tallies) == ["corpus"]


def test_an_index_comes_first_and_is_not_paired_within(minhash: Path, tmp_path: Path) -> None:
    for number, folder in enumerate(["old", "old", "new"]):
        (tmp_path / folder).mkdir(exist_ok=True)
        shutil.copy(minhash / f"{number}.signatures.arrow", tmp_path / folder)
    counts = generate_duplicate_pairs(
        tmp_path / "new", tmp_path / "pairs.txt", index=(str(tmp_path / "old"),), options=QUIET
    )
    expected = set()
    for band in pairs_of(np.load(minhash / "values.npy"), 13, 9):
        expected |= {(a, b) for a, b in band if a >= 2 * EACH}
    names = [f"index:old:{key(i)}" if i < 2 * EACH else key(i) for i in range(SHARDS * EACH)]
    lines = (tmp_path / "pairs.txt").read_text().splitlines()
    assert sorted(set(lines)) == sorted(f"{names[a]} :: {names[b]}" for a, b in expected)
    assert counts.total(READ).documents == EACH
    assert counts.total(PAIRED).documents == len({end for pair in expected for end in pair if end >= 2 * EACH})


@pytest.mark.parametrize(
    ("index", "wanted"),
    [
        (("nowhere",), "nowhere: expected the folder"),
        (("MINHASH", "a=MINHASH", "MINHASH"), "a different name for each"),
        (("a:b=MINHASH",), "without : or /"),
        (("old=MINHASH/arxiv",), "old=MINHASH/arxiv: these signatures, in .*, are of the corpus itself"),
    ],
)
def test_an_index_that_cannot_be(
    minhash: Path, tmp_path: Path, index: tuple[str, ...], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "MINHASH").symlink_to(minhash)
    with pytest.raises(UsageError, match=wanted):
        generate_duplicate_pairs(minhash, tmp_path / "pairs.txt", index=index, options=QUIET)


@pytest.mark.parametrize(
    ("text", "name", "folder"),
    [
        ("old=/data/dump=2024-01/minhash", "old", "/data/dump=2024-01/minhash"),
        ("/data/dump=2024-01", "dump=2024-01", "/data/dump=2024-01"),
        ("/data/old", "old", "/data/old"),
    ],
)
def test_a_folder_of_an_index_may_have_an_equals_sign(text: str, name: str, folder: str) -> None:
    assert parse_indexes([text]) == [(name, Path(folder))]


def test_an_index_made_otherwise(minhash: Path, tmp_path: Path) -> None:
    with write_shard(tmp_path / "old/a.signatures.arrow", "a.jsonl", Sketch(width=5)) as shard:
        shard.add([0], np.zeros((1, 128), np.uint32))
    with pytest.raises(UsageError, match=r"cannot be compared.*5-character.*that the index was made with"):
        generate_duplicate_pairs(minhash, tmp_path / "pairs.txt", index=(str(tmp_path / "old"),), options=QUIET)


def test_per_source_compares_within_sources_only(minhash: Path, tmp_path: Path) -> None:
    generate_duplicate_pairs(minhash, tmp_path / "pairs.txt", scope="per-source", options=QUIET)
    values = np.load(minhash / "values.npy")
    expected = []
    for source in range(SHARDS):
        for band in pairs_of(values[source * EACH : source * EACH + EACH], 13, 9):
            expected += [f"{key(source * EACH + a)} :: {key(source * EACH + b)}" for a, b in band]
    assert sorted((tmp_path / "pairs.txt").read_text().splitlines()) == sorted(expected)
    assert expected
