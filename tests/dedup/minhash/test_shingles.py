"""Shingle sets equal those computed with Python strings."""

import random

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup.minhash.matching_form import CHUNK_BYTES, MAX_WORD, Unit
from dedup.minhash.shingles import shingle_sets
from dedup.minhash.signatures import Sketch, jaccard, signatures
from gristmill.errors import UsageError
from gristmill.text import matching_form

ODD = ["", "a", "...", "Hello, wörld! ΟΔΟΣ İ", "漢字" * 30, "👍" * 20, "one two three four five six seven " * 9]


def hashes_of(text: str, width: int, unit: Unit) -> list[int]:
    form = matching_form(text)
    units, joint = (form, "") if unit == "character" else (form.split(), " ")
    if unit == "word" and sum(map(len, units)) > MAX_WORD * len(units):
        units, joint, width = form, "", 13
    windows = {joint.join(units[i : i + width]) for i in range(len(units) - width + 1)}
    return sorted(xxhash.xxh64_intdigest(window.encode("utf-8", "surrogatepass")) for window in windows)


@pytest.mark.parametrize("unit", ["character", "word"])
@pytest.mark.parametrize("width", [1, 2, 5, 13, 32, 40])
def test_sets_are_those_of_python(width: int, unit: Unit) -> None:
    for text, found in zip(ODD, shingle_sets(ODD, width, unit), strict=True):
        assert found.dtype == np.uint64
        assert found.tolist() == hashes_of(text, width, unit), text


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=60), max_size=4), st.integers(1, 8), st.sampled_from(["character", "word"]))
def test_any_text(texts: list[str], width: int, unit: Unit) -> None:
    assert [found.tolist() for found in shingle_sets(texts, width, unit)] == [
        hashes_of(text, width, unit) for text in texts
    ]


def test_a_text_without_spaces_has_shingles_of_characters_in_place_of_words() -> None:
    chance = random.Random(1)
    lines = ["".join(map(chr, chance.choices(range(0x4E00, 0x9F00), k=40))) for _ in range(9)]
    text, other = "\n".join(lines), "\n".join([*lines[:8], lines[8][:30]])
    found = shingle_sets([text, other, "only four words here"], 5, "word")
    assert [len(shingles) for shingles in found] == [len(text) - 12, len(other) - 12, 0]
    assert len(np.intersect1d(*found[:2])) / len(np.union1d(*found[:2])) > 0.9
    values, shingles = signatures([text, other], Sketch(unit="word", width=5))
    assert shingles.tolist() == [len(text) - 12, len(other) - 12]
    assert jaccard(*values) > 0.9
    assert (values == signatures([text, other])[0]).all()


def test_more_texts_than_are_packed_at_a_time() -> None:
    long = "".join(random.Random(1).choices("abcdefgh ", k=CHUNK_BYTES + 9))
    texts = ["a short one, and yet", long, "a short one, and yet"] * 2
    together = shingle_sets(texts)
    assert [len(found) for found in together] == [len(hashes_of(text, 13, "character")) for text in texts]
    assert all((found == shingle_sets([text])[0]).all() for found, text in zip(together, texts, strict=True))
    assert shingle_sets([]) == []


@pytest.mark.parametrize("bad", [{"width": 0}, {"width": 1.5}, {"unit": "line"}, {"texts": [1]}])
def test_shingles_that_cannot_be(bad: dict) -> None:
    with pytest.raises(UsageError, match="expected"):
        shingle_sets(**{"texts": ["text"]} | bad)
