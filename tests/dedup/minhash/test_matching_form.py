"""The compiled matching form equals gristmill.text's, for every code point and in every context."""

import string
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup.minhash.matching_form import CHUNK_BYTES, find_units, form_size, pack, write_form
from gristmill.text import matching_form


def forms(texts: list[str]) -> list[bytes]:
    found = []
    for _, data, offsets in pack(texts):
        form = np.empty(form_size(int(np.max(np.diff(offsets)))), np.uint8)
        for start, end in pairwise(offsets):
            size, is_ascii = write_form(data[start:end], form)
            found.append(form[:size].tobytes())
            assert is_ascii == found[-1].isascii()
    return found


def assert_as_python_does(texts: list[str]) -> None:
    expected = [matching_form(text).encode("utf-8", "surrogatepass") for text in texts]
    for text, ours, wanted in zip(texts, forms(texts), expected, strict=True):
        assert ours == wanted, ascii(text)


def test_every_code_point_between_others() -> None:
    for first in range(0, 0x110000, 0x4000):
        codes = [
            f"A{chr(code)}b{chr(code)}{chr(code)} {chr(code)}.É{chr(code)}" for code in range(first, first + 0x4000)
        ]
        assert_as_python_does(["".join(codes[i : i + 16]) for i in range(0, len(codes), 16)])


def test_every_code_point_at_either_end() -> None:
    for first in range(0, 0x20000, 0x4000):  # none beyond has another case, or is a space: see above
        assert_as_python_does([chr(code) + "x" * 64 + chr(code) for code in range(first, first + 0x4000)])


@pytest.mark.parametrize("neighbour", ["", "Α", "a", ".", "'", "\u0301", "1", " ", "\u00ad", "İ", "\u2019"])
def test_a_capital_sigma_in_every_context(neighbour: str) -> None:
    sides = ["", "Α", "α", " ", ".", "'", "\u0301", "\u00ad", "1", "Σ"]
    assert_as_python_does([f"{a}{neighbour}Σ{neighbour}{b}" for a in sides for b in sides])


def test_cases_that_change_their_size() -> None:
    assert_as_python_does(["Ⱥ" * 999, "Ⱦ" * CHUNK_BYTES, "\u212a\u212b" * 99, "İ" * 99, "ẞ", "Ω" * 99, "\u1e9e\u2126"])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(max_size=200), max_size=5))
def test_any_text(texts: list[str]) -> None:
    assert_as_python_does(texts)


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from(string.punctuation + " \t\n\x1c\u2003aB\u00c9\u6f22"), max_size=200))
def test_spaces_and_punctuation(text: str) -> None:
    assert_as_python_does([text])


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=80), st.booleans())
def test_units(text: str, by_word: bool) -> None:
    form = matching_form(text)
    data = np.frombuffer(form.encode("utf-8", "surrogatepass"), np.uint8)
    starts = np.empty(len(data) + 1, np.int32)
    count = find_units(data, len(data), by_word, starts)
    units = form.split(" ") if by_word and form else list(form)
    found = [data[starts[i] : starts[i + 1] - by_word].tobytes() for i in range(count)]
    assert found == [unit.encode("utf-8", "surrogatepass") for unit in units]


def test_texts_are_packed_a_few_at_a_time() -> None:
    texts = ["a" * (CHUNK_BYTES // 3)] * 7 + ["", "b" * (3 * CHUNK_BYTES), "", "c"]
    packed = [(some, data.tobytes()) for some, data, _ in pack(texts)]
    assert [i for some, _ in packed for i in range(some.start, some.stop)] == list(range(len(texts)))
    assert all(data.decode() == "".join(texts[some]) for some, data in packed)
    assert max(len(data) for some, data in packed if "b" not in texts[some.start]) <= CHUNK_BYTES
    assert list(pack([])) == []
