"""Decisions against a plain reference: sets of strings, every document compared with all kept before it."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dedup import generate_duplicates_dict, jaccard, signatures
from dedup.candidates.document_ids import SourceRuns, SourceTallies
from dedup.clustering.keep_policy import ORDINARY
from dedup.clustering.similarity import Features, KeptDocuments, SimilarityCheck, decide_cluster
from dedup.minhash.shingles import shingle_sets
from dedup.removal.clusters import MEMBER
from dedup.removal.decisions import remove_all_but_first
from dedup.removal.removal_table import REASONS
from gristmill.engine.options import RunOptions
from tests.dedup.removal.clustered_corpus import (
    QUIET,
    Key,
    read_removed,
    removed_by,
    shingles,
    verified_plainly,
    write_corpus,
    write_table,
)

WIDTH = 3
THRESHOLDS = [0.1, 1 / 3, 0.5, 0.6, 2 / 3, 0.8, 0.9, 1.0]
# Sentences of few words, so that some are similar to others, and some exactly at a threshold.
_WORDS = st.sampled_from(["grain", "flour", "mill", "wheel", "Water!", "каша", "粉ひき", "a", ""])
_TEXTS = st.lists(st.lists(_WORDS, max_size=12).map(" ".join), max_size=14)


def similarity(measure: str, one: set[str], other: set[str]) -> float:
    whole = one if measure == "containment" else one | other
    return len(one & other) / len(whole) if whole else 0.0


def decided_plainly(texts: list[str], measure: str, threshold: float) -> list[tuple[int, int, float]]:
    found, kept, sets = [], [], [shingles(text, WIDTH) for text in texts]
    for i in range(len(texts)):
        matches = [(j, similarity(measure, sets[i], sets[j])) for j in kept]
        match = next((match for match in matches if match[1] >= threshold), None)
        if match is None:
            kept.append(i)
        found.append((i, *(match or (i, 1.0))))
    return found


def kept_documents(measure: str, threshold: float, memory: int | None = None) -> KeptDocuments:
    return KeptDocuments(SimilarityCheck(measure, threshold, WIDTH, "character"), memory)  # type: ignore[arg-type]


def in_rounds(texts: list[str], kept: KeptDocuments) -> tuple[list[tuple[int, int, float]], int]:
    """The decisions on all texts, and the number of rounds."""
    sets, found, rounds = shingle_sets(texts, WIDTH), [], 0
    left = list(range(len(texts)))
    while left:
        kept.clear()
        decided = list(decide_cluster([(i, Features(sets[i])) for i in left], kept))
        found += [decision for decision in decided if decision[1] is not None]
        left = [i for i, by, _ in decided if by is None]
        rounds += 1
    return sorted(found), rounds


@settings(max_examples=300)
@given(texts=_TEXTS, measure=st.sampled_from(["jaccard", "containment"]), threshold=st.sampled_from(THRESHOLDS))
@example(texts=["", "", "ab", "ab"], measure="jaccard", threshold=0.1)
@example(texts=["mill flour grain", "mill flour", "mill flour grain"], measure="containment", threshold=1.0)
def test_equals_the_reference(texts: list[str], measure: str, threshold: float) -> None:
    found, rounds = in_rounds(texts, kept_documents(measure, threshold))
    assert found == decided_plainly(texts, measure, threshold)
    assert rounds == min(1, len(texts))


@settings(max_examples=150)
@given(texts=_TEXTS, measure=st.sampled_from(["jaccard", "containment"]), memory=st.integers(0, 6000))
def test_rounds_change_nothing(texts: list[str], measure: str, memory: int) -> None:
    assert in_rounds(texts, kept_documents(measure, 0.6, memory))[0] == decided_plainly(texts, measure, 0.6)


def test_without_memory_there_is_a_round_for_each_kept_document() -> None:
    texts = ["grain grain", "flour flour", "a much longer sentence about mills", "x y z", "Flour, flour"]
    found, rounds = in_rounds(texts, kept_documents("jaccard", 0.5, memory=0))
    assert [by for _, by, _ in found] == [0, 1, 2, 3, 1]
    assert rounds == 4


def test_a_chain_is_cut_where_documents_are_no_longer_similar_to_its_first(
    texts_of: Callable[[int, int], list[str]],
) -> None:
    words, others = (text.split() for text in texts_of(2, 0))
    chain = [" ".join(others[:i] + words[i:]) for i in range(0, 120, 4)]
    found, _ = in_rounds(chain, kept_documents("jaccard", 0.8))
    kept = sorted({by for _, by, _ in found})
    assert 2 < len(kept) < len(chain) // 2
    assert all(
        similarity("jaccard", shingles(chain[i], WIDTH), shingles(chain[by], WIDTH)) >= 0.8 for i, by, _ in found
    )


def test_a_document_is_removed_for_the_first_similar_one_not_the_most_similar() -> None:
    texts = ["grain flour mill", "grain flour wheel", "grain flour wheel"]
    assert [by for _, by, _ in in_rounds(texts, kept_documents("jaccard", 0.3))[0]] == [0, 0, 0]
    assert [by for _, by, _ in in_rounds(texts, kept_documents("jaccard", 0.9))[0]] == [0, 1, 1]


def test_containment_is_the_share_of_the_removed_documents_shingles() -> None:
    long, short = "grain flour mill wheel water", "flour mill"
    assert [by for _, by, _ in in_rounds([long, short], kept_documents("containment", 1.0))[0]] == [0, 0]
    assert [by for _, by, _ in in_rounds([short, long], kept_documents("containment", 1.0))[0]] == [0, 1]


@pytest.mark.parametrize(("measure", "threshold"), [("jaccard", 0.8), ("jaccard", 0.5), ("containment", 0.9)])
def test_verified_removals_equal_the_reference(
    chained: tuple, chained_norm: Path, tmp_path: Path, measure: Any, threshold: float
) -> None:
    files, clusters = chained
    table = write_table(tmp_path / "c.parquet", clusters)
    counts = generate_duplicates_dict(
        table, tmp_path / "d.pickle", QUIET, verify=measure, threshold=threshold, corpus=chained_norm
    )
    expected = verified_plainly(files, clusters, measure, threshold)
    assert read_removed(tmp_path / "d.parquet") == expected
    assert {
        (file, row) for file, rows in pickle.loads((tmp_path / "d.pickle").read_bytes()).items() for row in rows
    } == set(expected)
    assert not {kept for kept, _ in expected.values()} & set(expected)
    went = [counts.total(reason).documents for reason in ("read", "kept", "duplicate", "below threshold")]
    assert went == [240, 12, len(expected), 240 - 12 - len(expected)]
    assert len(expected) < 228


@pytest.mark.parametrize("options", [QUIET, RunOptions(workers=2, memory="2MiB", quiet=True)])
def test_of_an_index_the_signatures_are_compared(
    chained: tuple, chained_norm: Path, indexed: tuple, tmp_path: Path, options: RunOptions
) -> None:
    files, (folder, clusters) = chained[0], indexed
    table = write_table(tmp_path / "c.parquet", clusters)
    counts = generate_duplicates_dict(
        table,
        tmp_path / "d.parquet",
        options,
        verify="jaccard",
        threshold=0.7,
        corpus=chained_norm,
        index=(f"2022={folder}",),
    )
    expected = {}
    for cluster in clusters:
        kept: list[Key] = []
        for key in cluster:
            found = None if key[0].startswith("index:") else first_like(files, key, kept)
            if found:
                expected[key] = found
            else:
                kept.append(key)
    rows = pyarrow.parquet.read_table(tmp_path / "d.parquet").to_pylist()
    assert {(r["file"], r["row"]): ((r["kept_file"], r["kept_row"]), r["similarity"]) for r in rows} == expected
    assert {r["measured"] for r in rows} == {"exact", "estimated"}
    assert all((r["measured"] == "estimated") == r["kept_file"].startswith("index:") for r in rows)
    went = [counts.total(reason).documents for reason in ("read", "kept", "duplicate", "below threshold")]
    assert went == [240, 2, len(expected), 238 - len(expected)]


def first_like(files: dict[str, list[str]], key: Key, kept: list[Key]) -> tuple[Key, float] | None:
    text = files[key[0]][key[1]]
    for other in kept:
        file = other[0].removeprefix("index:2022:")
        if file != other[0]:
            values, _ = signatures([text, files[file][other[1]]])
            similarity = jaccard(values[0], values[1])
        else:
            one, two = shingles(text), shingles(files[file][other[1]])
            similarity = len(one & two) / len(one | two)
        if similarity >= 0.7:
            return other, similarity
    return None


def test_ranks_ascend_in_keep_order_however_clusters_are_cut_into_blocks() -> None:
    members = np.zeros(7, MEMBER)
    members["cluster"], members["row"], members["tier"] = [0, 0, 0, 0, 2, 2, 5], [9, 3, 7, 1, 4, 0, 2], ORDINARY
    for size in range(1, 8):
        blocks = [members[start : start + size] for start in range(0, 7, size)]
        found = np.concatenate(list(remove_all_but_first(blocks, SourceTallies(SourceRuns.of(["a"]), REASONS))))
        assert found[["row", "kept_row", "rank"]].tolist() == [(3, 9, 1), (7, 9, 2), (1, 9, 3), (0, 4, 1)]


@pytest.mark.parametrize("verify", [None, "jaccard"])
def test_the_rank_of_a_removed_document_follows_the_policy(tmp_path: Path, verify: str | None) -> None:
    texts = ["the mill grinds the grain" + end for end in ("", "..", "....", ".")]  # of one matching form
    write_corpus(tmp_path / "NORM", {"a/x.jsonl": texts})
    clusters = [[("a/x.jsonl", row) for row in range(4)]]
    found = removed_by(tmp_path, clusters, keep="longest", verify=verify, corpus=tmp_path / "NORM")
    assert found == {("a/x.jsonl", row): ("a/x.jsonl", 2) for row in (0, 1, 3)}
    rows = pyarrow.parquet.read_table(tmp_path / "d.parquet").to_pylist()
    assert [(row["row"], row["rank"]) for row in rows] == [(0, 3), (1, 1), (3, 2)]


def test_ranks_are_in_keep_order_whatever_the_memory(tmp_path: Path) -> None:
    """With little memory, copies of the second document are found in a later round than those of the first."""
    one, other = (" ".join(f"{word}{i}" for i in range(300)) for word in ("grain", "flour"))
    write_corpus(tmp_path / "NORM", {"a/x.jsonl": [one, other] * 3})
    write_table(tmp_path / "c.parquet", [[("a/x.jsonl", row) for row in range(6)]])
    for memory in ("4GiB", "128KiB"):
        options = RunOptions(workers=1, memory=memory, quiet=True)
        out = tmp_path / memory / "d.parquet"
        generate_duplicates_dict(tmp_path / "c.parquet", out, options, verify="jaccard", corpus=tmp_path / "NORM")
        rows = pyarrow.parquet.read_table(out).to_pylist()
        assert [(row["row"], row["kept_row"], row["rank"]) for row in rows] == [(i, i % 2, i) for i in range(2, 6)]
