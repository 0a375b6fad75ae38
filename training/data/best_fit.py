"""Best-fit-decreasing packing of pieces into rows (Ding et al. 2024, "Fewer Truncations Improve Language Modeling")."""

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel


def best_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The row of each piece, (n,) int64, numbered from 0: longest pieces first, each into the fullest row with room.

    `lengths` (n,) int64, 1 … capacity. Of equal pieces the first is packed first, of equally full rows the last one
    is filled. O(n log capacity) time: a tree over the room that rows have left finds the row (the paper's section 3).
    """
    order = np.argsort(-lengths, kind="stable")
    rows = np.empty(len(lengths), np.int64)
    rows[order] = _pack(lengths[order], capacity)
    return rows


@kernel
def _pack(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return the row of each of `lengths`, which descend."""
    leaves = 1
    while leaves <= capacity:
        leaves *= 2
    rows_below = np.zeros(2 * leaves, np.int64)  # of a binary tree over the rooms left: node i has 2i and 2i + 1
    top = np.full(capacity + 1, -1)  # by room left: the row to fill next, from which `below` continues
    below = np.full(len(lengths), -1)
    rows = np.empty(len(lengths), np.int64)
    count = 0
    for piece in range(len(lengths)):
        length = lengths[piece]
        room = _least_room(rows_below, leaves, length)
        if room < 0:
            room = capacity
            row = count
            count += 1
        else:
            row = top[room]
            top[room] = below[row]
            _count(rows_below, leaves + room, -1)
        rows[piece] = row
        room -= length
        below[row], top[room] = top[room], row
        _count(rows_below, leaves + room, 1)
    return rows


@kernel
def _least_room(rows_below: NDArray[np.int64], leaves: int, length: int) -> int:
    """Return the least room of any row that is at least `length`; -1 if there is none."""
    node = leaves + length
    while rows_below[node] == 0:
        while node % 2:  # a right child: what follows is beyond its parent
            node //= 2
        if node == 0:
            return -1
        node += 1
    while node < leaves:
        node *= 2
        if rows_below[node] == 0:
            node += 1
    return node - leaves


@kernel
def _count(rows_below: NDArray[np.int64], node: int, change: int) -> None:
    """Add `change` to a node and all above it."""
    while node:
        rows_below[node] += change
        node //= 2
