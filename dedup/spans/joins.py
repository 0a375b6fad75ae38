"""Repeats among digests of blocks and windows that were sorted: pure functions of arrays of records.

A SPAN says that some consecutive windows of a document repeat, and where the text occurs first in the corpus. An open
one says that this is not known: its windows have to be compared one by one.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dedup.spans.blocks import GRAM_BITS
from gristmill.kernels import kernel

KeepSpan = Literal["first", "none"]
PLACE = ("group", "row", "offset")  # of a document's first window
FIRST_PLACE = tuple(f"first_{name}" for name in PLACE)
SPAN = np.dtype([(name, "<u4") for name in (*PLACE, "windows", *FIRST_PLACE)])
STRETCH = np.dtype([(name, "<u4") for name in ("row", "start", "end")])  # bytes of a document in a group
_FIELDS = len(SPAN.fields or ())
OPEN = 0xFFFFFFFF  # first_group of a span that is open


class Held(Protocol):
    """Records that wait, such as external_sort.HeldRecords."""

    def add(self, records: NDArray) -> None:
        """Append records."""

    def take(self) -> Iterator[NDArray]:
        """Yield all records, in their order, and forget them."""


def resolve_blocks(blocks: Iterable[NDArray], keep: KeepSpan, held: Held) -> Iterator[NDArray]:
    """Yield the SPANs of blocks sorted by digest and then by place, which are open where a gram has different blocks.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from gristmill.io.external_sort import HeldRecords
    >>> numbers = [(name, "<u4") for name in ("row", "offset", "windows", "group")]
    >>> records = np.zeros(6, [("high", "<u8"), ("low", "<u8"), *numbers])
    >>> records["high"] = [1 << 16, 1 << 16, 2 << 16, 3 << 16, 3 << 16, 3 << 16]
    >>> records["low"] = [7, 7, 8, 8, 9, 9]
    >>> records["row"] = range(6)
    >>> with HeldRecords(Path(tempfile.mkdtemp()) / "held") as held:
    ...     spans = np.concatenate(list(resolve_blocks([records[:1], records[1:]], "first", held)))
    >>> spans["row"].tolist(), spans["first_row"].tolist(), (spans["first_group"] == OPEN).tolist()
    ([1, 3, 4, 5], [0, 0, 0, 0], [False, True, True, True])
    """
    last: NDArray | None = None  # first record of the gram that the block before ended with
    has_several = False  # different blocks have this gram
    for block in blocks:
        grams = block["high"] >> np.uint64(64 - GRAM_BITS)
        starts = np.flatnonzero(np.append(True, grams[1:] != grams[:-1]))
        ends = np.append(starts[1:], len(block))
        if last is not None and last["high"][0] >> np.uint64(64 - GRAM_BITS) == grams[0]:
            end = int(ends[0])
            segment = block[:end]
            if not has_several and not _is_same(segment, last).all():
                has_several = True
                yield from map(_open, held.take())
            if has_several:
                yield _open(segment)
            else:
                held.add(segment)
            starts = starts[1:]
            ends = ends[1:]
            if not len(starts):
                continue
        yield from _repeats_of(held.take(), keep)
        inner = block[starts[0] : starts[-1]]
        yield _resolve_inner(inner, starts[:-1] - starts[0], keep)
        segment = block[starts[-1] :]
        last = segment[:1].copy()
        has_several = not _is_same(segment, last).all()
        if has_several:
            yield _open(segment)
        else:
            held.add(segment)
    yield from _repeats_of(held.take(), keep)


def reduce_spans(blocks: Iterable[NDArray], size: int) -> Iterator[NDArray]:
    """Yield as few of SPANs sorted by place as have all bytes of their windows, of `size` bytes; neighbours are joined.

    Neighbours are those of which one continues the other, here and where they occur first. How the spans are cut into
    blocks changes nothing.

    >>> spans = np.zeros(4, SPAN)
    >>> spans["offset"], spans["windows"], spans["first_offset"] = [5, 6, 8, 9], [1, 2, 1, 8], [1, 2, 9, 7]
    >>> for span in np.concatenate(list(reduce_spans([spans[:2], spans[2:]], 5))):
    ...     int(span["offset"]), int(span["windows"]), int(span["first_offset"])
    (5, 3, 1)
    (9, 8, 7)
    """
    held = np.zeros((2, _FIELDS), np.uint32)  # the span that may be continued, the one that may be needed
    state = np.zeros(3, np.int64)  # whether there are these, and where what was yielded ends
    for block in blocks:
        records = np.ascontiguousarray(block).view(np.uint32).reshape(-1, _FIELDS)
        reduced = np.empty((len(records) + 2, _FIELDS), np.uint32)
        count = _reduce(records, size, held, state, reduced)
        yield reduced[:count].reshape(-1).view(SPAN)
    last = [held[number] for number in (1, 0) if state[number]]
    if len(last) == 2 and _is_covered(last[1], last[0], state[2]):
        del last[0]
    if last:
        yield np.concatenate(last).view(SPAN)


def join_open(blocks: Iterable[NDArray]) -> Iterator[NDArray]:
    """Yield the open ones of SPANs sorted by place, those as one whose windows continue each other.

    >>> spans = np.zeros(4, SPAN)
    >>> spans["offset"], spans["windows"], spans["first_group"] = [5, 6, 8, 9], [1, 2, 1, 8], [OPEN, OPEN, 0, OPEN]
    >>> [tuple(span)[2:4] for span in np.concatenate(list(join_open([spans[:1], spans[1:]]))).tolist()]
    [(5, 3), (9, 8)]
    """
    last: NDArray | None = None
    for block in blocks:
        spans = block[block["first_group"] == OPEN]
        if last is not None:
            spans = np.concatenate([last, spans])
        if not len(spans):
            continue
        continues = spans["offset"][1:] == spans["offset"][:-1] + spans["windows"][:-1]
        continues &= (spans["row"][1:] == spans["row"][:-1]) & (spans["group"][1:] == spans["group"][:-1])
        starts = np.flatnonzero(np.append(True, ~continues))
        joined = spans[starts].copy()
        joined["windows"] = np.add.reduceat(spans["windows"], starts)
        yield joined[:-1]
        last = joined[-1:]
    if last is not None:
        yield last


@kernel
def _reduce(records: np.ndarray, size: int, held: np.ndarray, state: np.ndarray, reduced: np.ndarray) -> int:
    """Write the spans that are needed to `reduced`; return how many there are."""
    count = 0
    for number in range(len(records)):
        record = records[number]
        if state[0] and _continues(held[0], record):
            held[0, 3] += record[3]
            continue
        if state[0]:
            count = _take(held[0], size, held, state, reduced, count)
        held[0] = record
        state[0] = 1
    return count


@kernel
def _take(span: np.ndarray, size: int, held: np.ndarray, state: np.ndarray, reduced: np.ndarray, count: int) -> int:
    """Make a span the one that may be needed, after the one before has been written if it is."""
    candidate = held[1]
    if state[1] and not _is_covered(span, candidate, state[2]):
        reduced[count] = candidate
        count += 1
        end = np.int64(candidate[2]) + np.int64(candidate[3]) + size - 1
        is_near = candidate[0] == span[0] and candidate[1] == span[1] and np.int64(span[2]) <= end
        state[2] = end if is_near else np.int64(span[2])
    if not state[1]:
        state[2] = np.int64(span[2])
    held[1] = span
    state[1] = 1
    return count


@kernel
def _is_covered(span: np.ndarray, candidate: np.ndarray, end: int) -> bool:
    """Return whether a candidate is not needed, as a later span of the document begins before `end`, too."""
    is_same = candidate[0] == span[0] and candidate[1] == span[1]
    return bool(is_same and np.int64(span[2]) <= end)


@kernel
def _continues(span: np.ndarray, record: np.ndarray) -> bool:
    """Return whether a record goes on where a span ends, in the document and where both occur first."""
    windows = span[3]
    is_same = span[0] == record[0] and span[1] == record[1] and span[4] == record[4] and span[5] == record[5]
    return is_same and span[2] + windows == record[2] and span[6] + windows == record[6]


def _is_same(records: NDArray, first: NDArray) -> NDArray[np.bool_]:
    """Return for each record whether its digest is that of the first."""
    same: NDArray[np.bool_] = (records["high"] == first["high"]) & (records["low"] == first["low"])
    return same


def _resolve_inner(records: NDArray, starts: NDArray[np.int64], keep: KeepSpan) -> NDArray:
    """Return the SPANs of all records of some grams, which start at `starts`."""
    if not len(records):
        return np.empty(0, SPAN)
    sizes = np.diff(np.append(starts, len(records)))
    first = np.repeat(starts, sizes)
    has_several = np.repeat(np.logical_or.reduceat(~_is_same(records, records[first]), starts), sizes)
    repeats = ~has_several & np.repeat(sizes > 1, sizes)
    if keep == "first":
        repeats &= np.arange(len(records)) > first
    return np.concatenate([span_of(records[repeats], records[first[repeats]]), _open(records[has_several])])


def _repeats_of(blocks: Iterable[NDArray], keep: KeepSpan) -> Iterator[NDArray]:
    """Yield the SPANs of all records of one gram, all in equal blocks."""
    first: NDArray | None = None
    total = 0
    for records in blocks:
        if first is None:
            first = records[:1].copy()
            records = records[1:]
        total += len(records)
        yield span_of(records, np.repeat(first, len(records)))
    if first is not None and total and keep == "none":
        yield span_of(first, first)


def _open(records: NDArray) -> NDArray:
    spans = span_of(records, records)
    spans["first_group"] = OPEN
    spans["first_row"] = 0
    spans["first_offset"] = 0
    return spans


def span_of(records: NDArray, firsts: NDArray, windows: int | None = None) -> NDArray:
    """Return the SPANs of blocks or windows (n) and the SPANs that they repeat (n)."""
    spans = np.empty(len(records), SPAN)
    for name in PLACE:
        spans[name] = records[name]
        spans[f"first_{name}"] = firsts[name]
    spans["windows"] = records["windows"] if windows is None else windows
    return spans


def stretches_of(spans: NDArray, size: int) -> NDArray:
    """Return the STRETCHes where the text of SPANs occurs first, given those of a group sorted by that.

    >>> spans = np.zeros(3, SPAN)
    >>> spans["first_offset"], spans["windows"] = [0, 0, 9], [1, 3, 1]
    >>> stretches_of(spans, 5).tolist()
    [(0, 0, 7), (0, 9, 14)]
    """
    row = spans["first_row"].astype(np.uint64) << np.uint64(32)
    starts = row | spans["first_offset"]
    ends = np.maximum.accumulate(row | (spans["first_offset"] + spans["windows"] + np.uint32(size - 1)))
    is_new = np.append(True, starts[1:] > ends[:-1])[: len(spans)]
    firsts = np.flatnonzero(is_new)
    stretches = np.empty(len(firsts), STRETCH)
    stretches["row"] = spans["first_row"][firsts]
    stretches["start"] = spans["first_offset"][firsts]
    stretches["end"] = ends[np.append(firsts[1:], len(spans))[: len(firsts)] - 1].astype(np.uint32)
    return stretches
