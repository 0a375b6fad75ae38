"""Texts in memory: which are kept, of which the others are duplicates; and the examples in the docstrings."""

import doctest
import importlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import dedup
from dedup import Sketch, deduplicate
from pipeline.errors import UsageError

MODULES = sorted(path.stem for path in Path(dedup.__file__).parent.glob("*.py"))


def test_the_first_of_a_cluster_is_kept(texts_of: Callable[[int, int], list[str]]) -> None:
    a, b, c = texts_of(3, 0)
    found = deduplicate([b, a, c, a.upper(), "short", b + "!", "short", a])
    assert found.duplicate_of.tolist() == [0, 1, 2, 1, 4, 0, 6, 1]
    assert found.kept.tolist() == [0, 1, 2, 4, 6]
    assert [cluster.tolist() for cluster in found.clusters] == [[0, 5], [1, 3, 7]]
    assert {found.kept.dtype, found.duplicate_of.dtype, *(c.dtype for c in found.clusters)} == {np.dtype(np.int64)}


def test_a_chain_of_near_duplicates_is_one_cluster(texts_of: Callable[[int, int], list[str]]) -> None:
    words, others = (text.split() for text in texts_of(2, 0))
    chain = [" ".join(others[:i] + words[i:]) for i in range(0, 120, 2)]
    found = deduplicate(chain)
    assert found.kept.tolist() == [0]
    assert deduplicate([chain[0], chain[-1]]).kept.tolist() == [0, 1]


@pytest.mark.parametrize("texts", [[], [""], ["same", "same"]])
def test_nothing_to_compare(texts: list[str]) -> None:
    found = deduplicate(texts)
    assert found.kept.tolist() == found.duplicate_of.tolist() == list(range(len(texts)))
    assert found.clusters == []


def test_both_families_find_the_same_copies(texts_of: Callable[[int, int], list[str]]) -> None:
    texts = [*texts_of(5, 0), *texts_of(3, 2)]
    found = [deduplicate(texts, Sketch(hash)).duplicate_of.tolist() for hash in ("xxh32", "sha1")]
    assert found == [[0, 1, 2, 3, 4, 2, 3, 4]] * 2


def test_bands_beyond_the_permutations() -> None:
    with pytest.raises(UsageError, match="64 permutations"):
        deduplicate(["a text of some length"], Sketch(permutations=64))


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module: str) -> None:
    name = "dedup" if module == "__init__" else f"dedup.{module}"
    assert doctest.testmod(importlib.import_module(name)).failed == 0
