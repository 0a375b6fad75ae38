"""Cut an iterable into batches, by count, by total size, or by both; and 64-bit hashes into equal ranges."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item")


def batched(
    items: Iterable[Item],
    count: int | None = None,
    size: int | None = None,
    size_of: Callable[[Any], int] = len,
) -> Iterator[list[Item]]:
    """Yield lists of consecutive items; a list ends once it has `count` items or a total size of at least `size`.

    The total size of a list is the sum of `size_of(item)`; it exceeds `size` by less than its last
    item. The last list may be shorter; no list is empty.

    >>> list(batched("abcde", count=2))
    [['a', 'b'], ['c', 'd'], ['e']]
    >>> list(batched(["a", "bb", "ccc", "d"], count=3, size=3))
    [['a', 'bb'], ['ccc'], ['d']]
    """
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        if size is not None:
            total += size_of(item)
        del item  # a large one is not held while the next is read
        if len(batch) == count or (size is not None and total >= size):
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def partition_of(hashes: NDArray[np.uint64], parts: int) -> NDArray[np.int64]:
    """Range index (n, int64) of each hash (n, uint64), with the 64-bit range cut into `parts` < 2^32 equal ranges.

    >>> partition_of(np.array([0, 2**63, 2**64 - 1], np.uint64), 4).tolist()
    [0, 2, 3]
    """
    return ((hashes >> np.uint64(32)) * np.uint64(parts) >> np.uint64(32)).astype(np.int64)
