"""Bands, edges and union-find equal plain references; the detection rate follows its formula."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup import Sketch, deduplicate, jaccard, signatures
from dedup.clustering.lsh import BAND_RECORD, band_digests, bucket_edges, check_bands, union_buckets
from dedup.clustering.union_find import UnionFind
from gristmill.errors import UsageError

SETS = Sketch(width=1)
_CHARACTERS = [chr(code) for code in [*range(0x4E00, 0x9FA0), *range(0xAC00, 0xD700)]]


@pytest.mark.parametrize(("rows", "bands"), [(13, 10), (129, 1), (0, 9), (13, 0), (-1, -9)])
def test_bands_that_do_not_fit(rows: int, bands: int) -> None:
    with pytest.raises(UsageError, match=rf"--range {rows} × --bands {bands}.*128 permutations"):
        check_bands(rows, bands, 128)


@pytest.mark.parametrize(("rows", "bands"), [(13, 9), (128, 1), (1, 128), (1, 1)])
def test_bands_that_fit(rows: int, bands: int) -> None:
    check_bands(rows, bands, 128)


def test_a_digest_depends_on_every_row_of_its_band_and_on_nothing_else() -> None:
    values = np.random.default_rng(0).integers(0, 2**32, (1, 128), np.uint32)
    before = band_digests(values, 13, 9)
    for slot in range(128):
        changed = values.copy()
        changed[0, slot] ^= 1
        differs = band_digests(changed, 13, 9)[:, 0] != before[:, 0]
        assert differs.tolist() == [band == slot // 13 for band in range(9)]


def test_digests_depend_on_the_order_of_rows() -> None:
    values = np.array([[1, 2], [2, 1], [1, 2]], np.uint32)
    one, other, again = band_digests(values, 2, 1)[0]
    assert one == again != other


@given(st.lists(st.integers(0, 5), max_size=40))
def test_edges_link_each_bucket_to_its_first(buckets: list[int]) -> None:
    records = [(bucket << 60, document) for document, bucket in enumerate(buckets)]
    edges = bucket_edges(np.array(records, BAND_RECORD)).tolist()
    firsts = {bucket: buckets.index(bucket) for bucket in buckets}
    ordered = sorted(range(len(buckets)), key=lambda document: (buckets[document], document))
    assert edges == [[i, firsts[buckets[i]]] for i in ordered if firsts[buckets[i]] != i]


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60_000), st.integers(0, 100))
def test_buckets_unite_as_their_edges_do(seed: int, count: int, first: int) -> None:
    digests = np.random.default_rng(seed).integers(0, count, count).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    records = np.empty(count, BAND_RECORD)
    records["digest"], records["document"] = digests, np.arange(count)
    edges = bucket_edges(records)
    union_find = UnionFind(count)
    union_buckets(digests, np.arange(count, dtype=np.uint32), union_find.parent, first)
    by_edges = UnionFind(count)
    by_edges.union(edges[edges[:, 0] >= first])
    assert union_find.roots().tolist() == by_edges.roots().tolist()


@pytest.mark.parametrize(("common", "each"), [(600, 120), (640, 80), (720, 40), (760, 20)])
def test_pairs_are_found_as_often_as_the_curve_says(common: int, each: int) -> None:
    """Shingles of one character make sets of any similarity: `common` characters shared, `each` its own."""
    chance, pairs, sketch = random.Random(common), 400, SETS
    similarity = common / (common + 2 * each)
    texts = []
    for _ in range(pairs):
        characters = chance.sample(_CHARACTERS, common + 2 * each)
        texts += ["".join(characters[: common + each]), "".join(characters[:common] + characters[common + each :])]
    found = deduplicate(texts, sketch, verify=None).duplicate_of.reshape(-1, 2)
    rate = np.mean(found[:, 1] == found[:, 0])
    expected = 1 - (1 - similarity**13) ** 9
    assert abs(rate - expected) < 4 * (expected * (1 - expected) / pairs) ** 0.5 + 1 / pairs
    agreement = [jaccard(*signatures(texts[i : i + 2], sketch)[0]) for i in range(0, 100, 2)]
    assert abs(np.mean(agreement) - similarity) < 0.02
