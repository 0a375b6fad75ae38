"""Cuts: whole words and characters go, none are joined, and every byte that goes repeats."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup.spans.cuts import CUT, keeps_any, plan_cuts, trim, without
from dedup.spans.joins import SPAN, STRETCH

FLAG, FAMILY, WAVE = "🇫🇷", "👨‍👩‍👧", "👋🏽"  # a flag, three people joined, a hand with a tone
HEART = "❤️"
WHOLE = [
    "mill",
    " ",
    "\n\n",
    "3.14,",
    "don't",
    "e\u0301te",
    "磨",
    "坊",
    "。",
    FLAG,
    FAMILY,
    WAVE,
    HEART,
    "นี้",
    "हिन्दी",
    "\r\n",
]


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(WHOLE), min_size=1, max_size=14), st.data())
def test_a_cut_leaves_whole_words_and_characters(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces).encode()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    begin, stop = trim(text, start, end)
    assert start <= begin <= stop <= end or begin == stop
    left = (text[:begin] + text[stop:]).decode()
    cut = text[begin:stop].decode()
    assert not cut or cut.strip()
    for whole in (FLAG, FAMILY, WAVE, HEART):
        assert left.count(whole) + cut.count(whole) == text.decode().count(whole)
    latin = re.compile(r"[^\s磨坊。นี้🇦-🇿👨👩👧👋🏽❤️\u200d]+")
    assert set(latin.findall(left)) <= set(latin.findall(text.decode()))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("The article ends.<\n\nAccept all cookies\n>\nNext page", "The article ends.\n\nNext page"),
        ("The article ends.\n\n<Accept all cookies\n>Next page", "The article ends.\n\nNext page"),
        ("It <costs 3.1>4 euros", "It 3.14 euros"),
        ("see https://exa<mple.org/a and b >c", "see https://example.org/a c"),
        ("one< two >three", "one three"),
        ("水<車が回る>。", "水。"),
        ("abc<磨坊>def", "abc磨def"),
        ("so<good\u200b>ness", "sogood\u200bness"),
        ("<all of it>", ""),
        ("one <   \n> two", "one    \n two"),
        (f"<{FAMILY}{FLAG[:1]}>{FLAG[1:]}", FLAG),
    ],
)
def test_what_is_kept_reads_on(text: str, kept: str) -> None:
    before, _, rest = text.partition("<")
    span, _, after = rest.partition(">")
    whole = f"{before}{span}{after}".encode()
    start = len(before.encode())
    begin, stop = trim(whole, start, start + len(span.encode()))
    assert (whole[:begin] + whole[stop:]).decode() == kept


def test_a_run_is_as_few_parts_as_there_can_be() -> None:
    text = b"one two three four five six seven"
    spans = np.zeros(3, SPAN)
    spans["offset"] = [0, 4, 8]
    spans["windows"] = [3, 2, 4]
    spans["first_row"] = [7, 8, 9]
    spans["first_offset"] = [100, 200, 300]
    cuts = plan_cuts(text, spans, 16)
    assert cuts.tolist() == [(0, 18, 0, 7, 100), (18, 27, 0, 9, 310)]  # the second is not needed
    assert without(text, cuts) == b" seven"


def test_whether_something_is_left_that_others_lost() -> None:
    cuts = np.array([(10, 20, 0, 0, 0), (30, 40, 0, 0, 0)], CUT)
    for start, end, most in ((10, 20, 0), (12, 38, 10), (30, 41, 1), (0, 5, 5), (35, 40, 0), (2, 45, 10), (5, 24, 5)):
        stretch = np.array([(0, start, end)], STRETCH)
        assert [keeps_any(stretch, cuts, size, 50) for size in (most or 1, most + 1)] == [most > 0, False]
    stretches = np.array([(0, 0, 12), (0, 18, 23), (0, 25, 31), (0, 38, 46)], STRETCH)
    assert [keeps_any(stretches, cuts, size, 50) for size in (10, 11)] == [True, False]
    ended = np.append(cuts, np.array([(40, 50, 0, 0, 0)], CUT))
    assert not keeps_any(np.array([(0, 42, 45)], STRETCH), ended, 1, 50)
