"""Runs of equal values in sorted records: where each begins, and the first record of each."""

import numpy as np
from numpy.typing import NDArray


def is_start_of_run(values: NDArray) -> NDArray[np.bool_]:
    """Return whether each value (n) differs from the one before it.

    >>> is_start_of_run(np.array([3, 3, 5])).tolist()
    [True, False, True]
    """
    is_start = np.ones(len(values), np.bool_)
    is_start[1:] = values[1:] != values[:-1]
    return is_start


def starts_of_runs(values: NDArray) -> NDArray[np.int64]:
    """Return the positions at which runs of equal values begin.

    >>> starts_of_runs(np.array([3, 3, 5])).tolist()
    [0, 2]
    """
    return np.flatnonzero(is_start_of_run(values))


def first_of_runs(is_start: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each record (n) the position of the first of its run, given which begin one.

    >>> first_of_runs(np.array([True, False, True])).tolist()
    [0, 0, 2]
    """
    positions = np.arange(len(is_start))
    return np.maximum.accumulate(np.where(is_start, positions, 0))
