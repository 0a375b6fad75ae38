"""Repeated spans of texts, found by comparing all windows: the definition that the join is tested against."""

from typing import NamedTuple


class Place(NamedTuple):
    """A byte of a text: the text's number, and the byte's."""

    text: int
    byte: int


def first_places(texts: list[bytes], size: int) -> dict[bytes, Place]:
    """Return where each window of `size` bytes occurs first."""
    places: dict[bytes, Place] = {}
    for number, text in enumerate(texts):
        for at in range(len(text) - size + 1):
            places.setdefault(text[at : at + size], Place(number, at))
    return places


def repeated_runs(texts: list[bytes], size: int, keep: str = "first") -> list[list[tuple[int, int]]]:
    """Return for each text the runs of bytes that are in a window which occurs earlier (none: which occurs twice)."""
    places = first_places(texts, size)
    counts: dict[bytes, int] = {}
    for text in texts:
        for at in range(len(text) - size + 1):
            window = text[at : at + size]
            counts[window] = counts.get(window, 0) + 1
    runs = list[list[tuple[int, int]]]()
    for number, text in enumerate(texts):
        marked = bytearray(len(text) + 1)
        for at in range(len(text) - size + 1):
            window = text[at : at + size]
            is_first = places[window] == (number, at)
            if not is_first or (keep == "none" and counts[window] > 1):
                marked[at : at + size] = b"\1" * size
        of_text = list[tuple[int, int]]()
        start = -1
        for at, mark in enumerate(marked):
            if mark and start < 0:
                start = at
            if not mark and start >= 0:
                of_text.append((start, at))
                start = -1
        runs.append(of_text)
    return runs
