"""Which bytes of texts repeat, by a suffix array of all of them: sorted by prefixes that double in length."""

import numpy as np
from numpy.typing import NDArray


def ranks_of_windows(data: NDArray[np.uint8], size: int) -> NDArray[np.int64]:
    """Return for each byte the rank of the `size` bytes from there on among all; -1 where there are fewer."""
    ranks = data.astype(np.int64)
    length = 1
    while 2 * length <= size:
        ranks = _join_ranks(ranks[: len(ranks) - length], ranks[length:])
        length *= 2
    if length < size:
        shift = size - length
        ranks = _join_ranks(ranks[: len(ranks) - shift], ranks[shift:])
    return np.concatenate([ranks, np.full(len(data) - len(ranks), -1)])


def _join_ranks(left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ranks of pairs (n)."""
    pairs = left * (int(right.max(initial=0)) + 1) + right
    suffixes = np.argsort(pairs, kind="stable")
    ordered = pairs[suffixes]
    ranks = np.empty(len(pairs), np.int64)
    ranks[suffixes] = np.cumsum(np.append(False, ordered[1:] != ordered[:-1]))[: len(pairs)]
    return ranks


def repeated_bytes(texts: list[bytes], size: int) -> list[NDArray[np.bool_]]:
    """Return for each text which of its bytes are in `size` bytes that occur earlier, there or in a text before."""
    data = np.frombuffer(b"".join(texts), np.uint8)
    ranks = ranks_of_windows(data, size)
    lengths = np.array([len(text) for text in texts])
    ends = np.cumsum(lengths)
    crosses = np.repeat(ends, lengths) - np.arange(len(data)) < size  # into the next text
    places = np.flatnonzero(~crosses)
    _, firsts = np.unique(ranks[places], return_index=True)
    is_repeat = np.zeros(len(data), bool)
    is_repeat[places] = True
    is_repeat[places[firsts]] = False
    changes = np.zeros(len(data) + 1, np.int64)
    starts = np.flatnonzero(is_repeat)
    np.add.at(changes, starts, 1)
    np.add.at(changes, starts + size, -1)
    covered = np.cumsum(changes[:-1]) > 0
    return np.split(covered, ends[:-1])
