"""Boxes of shards as arrays: which of them overlap, found by a sweep instead of comparing every pair.

A box is an offset and a size per dimension; n boxes of d dimensions are an (n, 2, d) int64 array.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size
Boxes = NDArray[np.int64]


def box_array(boxes: Sequence[Box], dims: int) -> Boxes:
    """Build the (n, 2, dims) array of n boxes."""
    return np.array(boxes, np.int64).reshape(len(boxes), 2, dims)


def numel(boxes: Boxes) -> NDArray[np.int64]:
    """Number of elements of each box: (n,) int64."""
    return boxes[:, 1].prod(axis=1)


def intersect(box: Box, boxes: Boxes) -> Boxes:
    """Intersection of `box` with each of `boxes`: (n, 2, d), of size 0 where they do not overlap.

    >>> intersect(((0, 0), (4, 4)), box_array([((2, 1), (4, 2))], 2)).tolist()
    [[[2, 1], [2, 2]]]
    """
    offset, size = np.array(box, np.int64)
    start = np.maximum(boxes[:, 0], offset)
    stop = np.minimum(boxes.sum(axis=1), offset + size)
    return np.stack([start, np.maximum(stop - start, 0)], axis=1)


def sweep_pairs(boxes: Boxes) -> NDArray[np.int64]:
    """Pairs of boxes, (k, 2), that share a coordinate of the dimension with the most distinct offsets; d >= 1.

    Only these can overlap. Of n boxes that partition a tensor into rows there are none, of a square grid n * sqrt(n):
    the sweep costs n log n and what it returns. No box may be empty.
    """
    dim = max(range(boxes.shape[2]), key=lambda dim: len(np.unique(boxes[:, 0, dim])))
    order = np.argsort(boxes[:, 0, dim], kind="stable")
    start, size = boxes[order, :, dim].T
    number = np.arange(len(boxes))
    later = np.searchsorted(start, start + size) - number - 1  # how many of those after it begin within it
    first = np.repeat(number, later)
    second = np.arange(len(first)) - np.repeat(np.cumsum(later) - later, later) + first + 1
    return order[np.stack([first, second], axis=1)]


def any_overlap(boxes: Boxes) -> bool:
    """Whether two of the boxes share an element; empty ones share none."""
    boxes = boxes[numel(boxes) > 0]
    if boxes.shape[2] == 0 or len(boxes) < 2:
        return len(boxes) > 1
    one, other = boxes[sweep_pairs(boxes)].swapaxes(0, 1)
    start, stop = np.maximum(one[:, 0], other[:, 0]), np.minimum(one.sum(axis=1), other.sum(axis=1))
    return bool((start < stop).all(axis=1).any())
