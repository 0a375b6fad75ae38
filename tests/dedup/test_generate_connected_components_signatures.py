"""Clusters from signatures equal those from pair files, for any memory and either output format."""

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from dedup import Sketch, generate_connected_components, generate_duplicate_pairs, generate_duplicates_dict
from dedup.candidates import band_join
from dedup.candidates.document_ids import ALONE
from dedup.candidates.signature_shards import write_shard
from dedup.generate_connected_components import CLUSTERED
from gristmill.counts import READ
from gristmill.engine.options import RunOptions
from gristmill.engine.staleness.ledger import Ledger
from gristmill.errors import UsageError
from gristmill.io.artefacts import load_pickle
from gristmill.io.files import STATE_DIR
from tests.gristmill.engine.sandbox import sandboxed

QUIET = RunOptions(workers=1, quiet=True)
SHARDS, EACH = 5, 3000


@pytest.fixture(scope="module")
def minhash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random signatures, a fifth of which copy one band of another document; rows with gaps, two shards of one file."""
    chance, folder = np.random.default_rng(0), tmp_path_factory.mktemp("MINHASH")
    values = chance.integers(0, 2**32, (SHARDS * EACH, 128), np.uint32)
    for i in chance.choice(len(values), len(values) // 5, replace=False):
        band, other = chance.integers(9), chance.integers(len(values))
        values[i, band * 13 : band * 13 + 13] = values[other, band * 13 : band * 13 + 13]
    for number, part in enumerate(np.split(values, SHARDS)):
        file, start = ("s0/a.jsonl", number * 3 * EACH) if number < 2 else (f"s{number}/b c.jsonl", 0)
        with write_shard(folder / f"s{number}.signatures.arrow", file, Sketch()) as shard:
            for some in range(0, EACH, 500):
                shard.add(np.arange(some, some + 500) * 3 + start, part[some : some + 500])
    return folder


@pytest.fixture(scope="module")
def by_pairs(minhash: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("DUP")
    generate_duplicate_pairs(minhash, folder / "duplicate_pairs.txt", options=QUIET)
    for name in ("c.parquet", "c.pickle"):
        generate_connected_components(folder, folder / name, options=QUIET)
    return folder


@pytest.mark.parametrize("memory", ["4G", "50K"])
def test_documents_without_a_signature_are_counted_beside_those_that_have_one(
    minhash: Path, tmp_path: Path, memory: str
) -> None:
    """Copies that --skip left out: rows 0, 3, … of s2 to s4 are signed, the others and u/ are in pairs alone."""
    lines = [f"s2/b c.jsonl@{row} :: s{3 + row % 2}/b c.jsonl@{row + 1}" for row in range(0, 3000, 3)]
    lines += [f"s2/b c.jsonl@0 :: u/copies.jsonl@{row}" for row in range(7)]
    (tmp_path / "duplicate_pairs_exact.txt").write_text("".join(f"{line}\n" for line in lines))
    counts = generate_connected_components(
        tmp_path, tmp_path / "c.parquet", minhash, options=replace(QUIET, memory=memory)
    )
    members = Counter(pq.read_table(tmp_path / "c.parquet").column("file").to_pylist())
    read = {name: counts.total(READ, name).documents for name in ("s0", "s2", "s3", "s4", "u")}
    assert read == {"s0": 2 * EACH, "s2": EACH, "s3": EACH + 500, "s4": EACH + 500, "u": 7}
    for name in ("s2", "s3", "s4", "u"):
        together = sum(many for file, many in members.items() if file.startswith(f"{name}/"))
        assert counts.total(CLUSTERED, name).documents == together
        assert counts.total(ALONE, name).documents == read[name] - together


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["c.parquet", "c.pickle"])
@pytest.mark.parametrize(("memory", "workers"), [("4G", 1), ("1M", 1), ("300M", 2), ("50K", 2)])
def test_the_same_bytes_by_any_way(
    minhash: Path, by_pairs: Path, tmp_path: Path, name: str, memory: str, workers: int
) -> None:
    options = replace(QUIET, memory=memory, workers=workers)
    counts = generate_connected_components(tmp_path, tmp_path / name, minhash, options=options)
    assert (tmp_path / name).read_bytes() == (by_pairs / name).read_bytes()
    assert counts.total(READ).documents == SHARDS * EACH
    counts = generate_connected_components(by_pairs, by_pairs / f"both-{name}", minhash, options=options)
    assert counts.total(READ).documents == SHARDS * EACH  # all in pairs have signatures
    generate_connected_components(by_pairs, by_pairs / f"again-{name}", options=options)
    assert (by_pairs / f"again-{name}").read_bytes() == (by_pairs / name).read_bytes()


def test_bands_of_many_documents_are_joined_in_parallel_whatever_the_memory(
    minhash: Path, by_pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process would take minutes for them, where all others wait."""
    steps = list[set[str]]()
    for documents in (SHARDS * EACH, SHARDS * EACH - 1):
        monkeypatch.setattr(band_join, "_IN_ONE_PROCESS", documents)
        folder = tmp_path / str(documents)
        folder.mkdir()
        generate_connected_components(folder, folder / "c.parquet", minhash, options=replace(QUIET, memory="4G"))
        assert (folder / "c.parquet").read_bytes() == (by_pairs / "c.parquet").read_bytes()
        steps.append({cost.step for ledger in Ledger.all_in(folder / STATE_DIR) for cost in ledger.costs()})
    assert steps[1] - steps[0] == {"bands", "edges"}


def test_both_files_say_the_same(by_pairs: Path) -> None:
    components, count, keys = load_pickle(by_pairs / "c.pickle")
    table = pq.read_table(by_pairs / "c.parquet").to_pydict()
    found: dict[int, list[str]] = {}
    for cluster, file, row in zip(table["cluster"], table["file"], table["row"], strict=True):
        found.setdefault(cluster, []).append(f"{file}@{row}")
    assert list(found) == list(range(count))
    assert [[keys[node] for node in component] for component in components] == list(found.values())
    assert len(components) == count > 1000
    assert sorted(node for component in components for node in component) == list(range(len(keys)))


def test_pairs_and_signatures_together(minhash: Path, by_pairs: Path, tmp_path: Path) -> None:
    """As where exact copies were paired, and not signed."""
    lines = (by_pairs / "duplicate_pairs.txt").read_text().splitlines()
    (tmp_path / "duplicate_pairs_exact.txt").write_text("s0/a.jsonl@0 :: extra/z.jsonl@99999\n" + lines[0] + "\n")
    for memory in ("4G", "1M"):
        options = replace(QUIET, memory=memory)
        generate_connected_components(tmp_path, tmp_path / f"{memory}.pickle", minhash, options=options)
    assert (tmp_path / "4G.pickle").read_bytes() == (tmp_path / "1M.pickle").read_bytes()
    components, _, keys = load_pickle(tmp_path / "4G.pickle")
    expected, _, _ = load_pickle(by_pairs / "c.pickle")
    assert any({"s0/a.jsonl@0", "extra/z.jsonl@99999"} <= {keys[node] for node in some} for some in components)
    assert len(expected) <= len(components) <= len(expected) + 1


@pytest.mark.parametrize("memory", ["4G", "1M"])
def test_an_index_gives_the_clusters_it_shares_with_the_corpus(minhash: Path, tmp_path: Path, memory: str) -> None:
    for path in minhash.glob("*.arrow"):
        folder = tmp_path / ("new" if path.name < "s3" else "old")
        folder.mkdir(exist_ok=True)
        (folder / path.name).symlink_to(path)
    index, options = (f"2023={tmp_path / 'old'}",), replace(QUIET, memory=memory)
    counts = generate_connected_components(
        tmp_path, tmp_path / "c.parquet", tmp_path / "new", index=index, options=options
    )
    generate_duplicate_pairs(tmp_path / "new", tmp_path / "duplicate_pairs.txt", index=index, options=options)
    generate_connected_components(tmp_path, tmp_path / "by_pairs.parquet", options=options)
    assert (tmp_path / "c.parquet").read_bytes() == (tmp_path / "by_pairs.parquet").read_bytes()
    table = pq.read_table(tmp_path / "c.parquet").to_pydict()
    firsts = dict(zip(table["cluster"][::-1], table["file"][::-1], strict=True))
    has_index = {c for c, file in zip(table["cluster"], table["file"], strict=True) if file.startswith("index:2023:s")}
    assert {cluster for cluster, file in firsts.items() if file.startswith("index:")} == has_index != set()
    assert counts.total(READ).documents == 3 * EACH
    assert counts.total("clustered").documents == sum(not file.startswith("index:") for file in table["file"])


def test_bands_that_do_not_fit(minhash: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--range 20 × --bands 9"):
        generate_connected_components(tmp_path, tmp_path / "c.parquet", minhash, range=20, options=QUIET)


@pytest.mark.parametrize("memory", ["4G", "10K"])
@pytest.mark.parametrize("signed", [0, 3])
@pytest.mark.parametrize("in_index", [None, 0, 3])
def test_files_without_a_signature(tmp_path: Path, memory: str, signed: int, in_index: int | None) -> None:
    """As of files whose documents are all short, or copies that were skipped: to_hash writes a batch of no rows."""
    value, options = np.arange(128, dtype=np.uint32), replace(QUIET, memory=memory)
    index = () if in_index is None else (f"old={tmp_path / 'dump=2024-01/old'}",)
    for folder, count in [("new", signed), ("dump=2024-01/old", in_index or 0)]:
        for file, many in [("s/a.jsonl", 0), ("s/b.jsonl", count), ("s/c.jsonl", 0)]:
            with write_shard(tmp_path / folder / f"{file}.signatures.arrow", file, Sketch()) as shard:
                shard.add(np.arange(many), np.tile(value, (many, 1)))
    counts = generate_connected_components(
        tmp_path, tmp_path / "c.parquet", tmp_path / "new", index=index, options=options
    )
    assert counts.total(READ).documents == counts.total("clustered").documents == signed
    generate_duplicate_pairs(tmp_path / "new", tmp_path / "duplicate_pairs.txt", index=index, options=options)
    with_index = bool(signed and in_index)
    assert len(set((tmp_path / "duplicate_pairs.txt").read_text().splitlines())) == max(signed - 1, 0) + with_index
    generate_duplicates_dict(tmp_path / "c.parquet", tmp_path / "d.pickle", options=options)
    assert sum(map(len, load_pickle(tmp_path / "d.pickle").values())) == max(signed - 1, 0) + with_index
    if in_index is not None:
        corpus = tmp_path / "NORM/s"
        corpus.mkdir(parents=True)
        (corpus / "b.jsonl").write_text('{"text": "the mill grinds the grain"}\n' * 3)
        arguments = {"corpus": tmp_path / "NORM", "verify": "jaccard", "index": index, "options": options}
        generate_duplicates_dict(tmp_path / "c.parquet", tmp_path / "v.pickle", **arguments)


@pytest.mark.parametrize("memory", ["4G", "50K"])
def test_tasks_open_only_what_they_name(minhash: Path, by_pairs: Path, tmp_path: Path, memory: str) -> None:
    shutil.copy(by_pairs / "duplicate_pairs.txt", tmp_path)
    with sandboxed(minhash, tmp_path) as sandbox:
        generate_connected_components(tmp_path, tmp_path / "c.pickle", minhash, options=replace(QUIET, memory=memory))
    assert sandbox.tasks > 2
    assert (tmp_path / "c.pickle").read_bytes() == (by_pairs / "c.pickle").read_bytes()


def test_a_file_without_signatures_is_in_no_cluster(minhash: Path, by_pairs: Path, tmp_path: Path) -> None:
    """Every document too short, or a copy that was skipped."""
    shutil.copytree(minhash, tmp_path / "minhash")
    for name in ("s0/0.jsonl", "s9/b.jsonl"):
        with write_shard(tmp_path / f"minhash/{name}.signatures.arrow", name, Sketch()) as shard:
            shard.add([], np.empty((0, 128), np.uint32))
    for memory in ("4G", "50K"):
        generate_connected_components(
            tmp_path, tmp_path / f"{memory}.pickle", tmp_path / "minhash", options=replace(QUIET, memory=memory)
        )
        assert (tmp_path / f"{memory}.pickle").read_bytes() == (by_pairs / "c.pickle").read_bytes()
