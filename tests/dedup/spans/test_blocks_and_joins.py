"""Blocks, windows and their joins, against all windows of the texts compared with each other."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import dedup.spans.blocks
from dedup.candidates.repeated_spans import CORPUS_BLOCK, CORPUS_WINDOW, resolve_windows
from dedup.spans.blocks import cut_pieces, digest_windows, find_blocks
from dedup.spans.joins import OPEN, PLACE, SPAN, KeepSpan, reduce_spans, resolve_blocks
from gristmill.io.external_sort import HeldRecords
from tests.dedup.spans.brute_force import first_places, repeated_runs

SIZE = 16


def in_blocks(records: NDArray, rows: int) -> list[NDArray]:
    """The records sorted by digest, as an external sort would yield them: a few at a time."""
    ordered = records[np.lexsort([records["low"], records["high"]])]
    return np.split(ordered, range(rows, len(ordered), rows)) if len(ordered) else []


def find_spans(texts: list[bytes], size: int, keep: KeepSpan = "first", rows: int = 3, limit: int = 2) -> NDArray:
    """The SPANs of some texts, each the row of its number."""
    pieces = [piece for number, text in enumerate(texts) for piece in cut_pieces(text, number, size)]
    blocks = find_blocks(pieces, size, CORPUS_BLOCK)
    blocks["group"] = 0
    with HeldRecords(Path(tempfile.mkdtemp()) / "held", limit) as held:
        spans = np.concatenate([np.empty(0, SPAN), *resolve_blocks(in_blocks(blocks, rows), keep, held)])
    is_open = spans["first_group"] == OPEN
    opened = np.sort(spans[is_open], order=PLACE)
    pieces = []
    for span in opened:
        row = int(span["row"])
        pieces += cut_pieces(texts[row], row, size, int(span["offset"]), int(span["windows"]))
    windows = digest_windows(pieces, size, CORPUS_WINDOW)
    windows["group"] = 0
    resolved = np.concatenate([spans[:0], *resolve_windows(in_blocks(windows, rows), keep)])
    return np.sort(np.concatenate([spans[~is_open], resolved]), order=PLACE)


def runs_of(spans: NDArray, texts: list[bytes], size: int) -> list[list[tuple[int, int]]]:
    """The runs of bytes of each text that are in a window of the spans."""
    runs = list[list[tuple[int, int]]]()
    for number, _ in enumerate(texts):
        of_text = list[tuple[int, int]]()
        for span in spans[spans["row"] == number]:
            start = int(span["offset"])
            end = start + int(span["windows"]) + size - 1
            if of_text and start <= of_text[-1][1]:
                start, end = of_text[-1][0], max(end, of_text.pop()[1])
            of_text.append((start, end))
        runs.append(of_text)
    return runs


WORDS = [b"a", b"ab", b"mill ", b"the grain of the mill ", b"\xf0\x9f\x8c\xbe", "磨坊".encode(), b"0123456789abcdef"]
TEXTS = st.lists(st.lists(st.sampled_from(WORDS), max_size=25).map(b"".join), max_size=8)


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(SIZE, 40), st.sampled_from(["first", "none"]), st.integers(1, 9))
@example([b"a" * 15, b"a" * 16, b"a" * 17], SIZE, "first", 1)
@example([b"ab" * 40, b"xab" * 30], SIZE, "first", 2)
def test_runs_equal_those_of_all_windows(texts: list[bytes], size: int, keep: KeepSpan, rows: int) -> None:
    spans = find_spans(texts, size, keep, rows)
    assert runs_of(spans, texts, size) == repeated_runs(texts, size, keep)
    places = first_places(texts, size)
    for span in spans:
        for number in range(int(span["windows"])):
            text = texts[span["row"]]
            at = int(span["offset"]) + number
            first = (int(span["first_row"]), int(span["first_offset"]) + number)
            assert places[text[at : at + size]] == first
    reduced = np.concatenate([spans[:0], *reduce_spans(np.split(spans, range(rows, len(spans), rows)), size)])
    at_once = np.concatenate([spans[:0], *reduce_spans([spans], size)])
    assert reduced.tolist() == at_once.tolist()
    assert runs_of(reduced, texts, size) == runs_of(spans, texts, size)
    assert len(reduced) <= sum(2 * len(text) // size for text in texts)


def test_a_long_text_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup.spans.blocks, "PIECE_BYTES", 37)
    random = np.random.Generator(np.random.PCG64(3))
    letters = random.integers(97, 100, 1500, np.uint8).tobytes()
    texts = [letters[:700], letters[200:500] + letters, letters[100:1300]]
    assert runs_of(find_spans(texts, 20), texts, 20) == repeated_runs(texts, 20)


def test_every_window_is_in_one_block() -> None:
    random = np.random.Generator(np.random.PCG64(4))
    text = random.integers(0, 256, 300_000, np.uint8).tobytes()
    blocks = find_blocks(cut_pieces(text, 5, 100), 100, CORPUS_BLOCK)
    assert blocks["windows"].sum() == len(text) - 99
    assert (np.diff(blocks["offset"]) == blocks["windows"][:-1]).all()
    assert len(text) / len(blocks) > 24  # a block for about 26 windows, where a gram is half a window


def test_text_of_one_byte_takes_linear_time() -> None:
    blocks = find_blocks(cut_pieces(b"=" * 200_000, 0, 60_000), 60_000, CORPUS_BLOCK)
    assert blocks["windows"].sum() == 140_001
    assert len(np.unique(blocks[["high", "low"]])) == 1


def test_equal_texts_have_equal_digests_and_others_do_not() -> None:
    texts = [bytes([65 + number % 26]) * 16 + str(number).encode() * 8 for number in range(2000)]
    pieces = [piece for number, text in enumerate(texts * 2) for piece in cut_pieces(text[:20], number, 20)]
    windows = digest_windows(pieces, 20, CORPUS_WINDOW)
    assert (windows[:2000][["high", "low"]] == windows[2000:][["high", "low"]]).all()
    distinct = len({text[:20] for text in texts})
    assert len(np.unique(windows["high"])) == len(np.unique(windows["low"])) == distinct
