"""Partition 64-bit hashes by equal ranges."""

import numpy as np
from numpy.typing import NDArray


def partition_of(hashes: NDArray[np.uint64], parts: int) -> NDArray[np.int64]:
    """Range index (n, int64) of each hash (n, uint64), with the 64-bit range cut into `parts` < 2^32 equal ranges.

    >>> partition_of(np.array([0, 2**63, 2**64 - 1], np.uint64), 4).tolist()
    [0, 2, 3]
    """
    return ((hashes >> np.uint64(32)) * np.uint64(parts) >> np.uint64(32)).astype(np.int64)
