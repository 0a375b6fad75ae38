"""Cut an iterable into batches, by count, by total size, or by both; number items; divide 64-bit hashes by range."""

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
            full = [batch]
            batch = []
            total = 0
            yield full.pop()  # the caller's alone, to free what is large
    if batch:
        yield batch


def batched_in_chunks(
    items: Iterable[Item], count: int, size: int, chunk_size: int, size_of: Callable[[Any], int] = len
) -> Iterator[tuple[list[Item], bool]]:
    """Yield the lists of `batched` in chunks of a total size of at least `chunk_size`, and whether one ends its list.

    A last chunk may be empty.

    >>> list(batched_in_chunks(["a", "bb", "ccc", "d"], 3, 6, 2))
    [(['a', 'bb'], False), (['ccc'], True), (['d'], True)]
    """
    chunk: list[Item] = []
    in_batch = total = in_chunk = 0
    for item in items:
        chunk.append(item)
        in_batch = in_batch + 1
        total = total + size_of(item)
        in_chunk = in_chunk + size_of(item)
        del item
        is_last = in_batch == count or total >= size
        if is_last or in_chunk >= chunk_size:
            full = [chunk]
            chunk = []
            in_chunk = 0
            yield full.pop(), is_last  # the caller's alone, to free what is large
        if is_last:
            in_batch = total = 0
    if in_batch:
        yield chunk, True


def numbered(items: Iterable[Item]) -> dict[Item, int]:
    """Return the number of each item, from 0 in their order; no item comes twice.

    >>> numbered("ab")
    {'a': 0, 'b': 1}
    """
    return {item: number for number, item in enumerate(items)}


def partition_of(hashes: NDArray[np.uint64], parts: int) -> NDArray[np.int64]:
    """Range index (n, int64) of each hash (n, uint64), with the 64-bit range cut into `parts` < 2^32 equal ranges.

    >>> partition_of(np.array([0, 2**63, 2**64 - 1], np.uint64), 4).tolist()
    [0, 2, 3]
    """
    return ((hashes >> np.uint64(32)) * np.uint64(parts) >> np.uint64(32)).astype(np.int64)
