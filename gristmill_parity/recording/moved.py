"""Moved: right values at other positions than their own, along a dimension or as a whole piece."""

from collections import Counter

import numpy as np

from gristmill_parity.recording.assemble import Array, take
from gristmill_parity.recording.evidence import Evidence, likely_axes
from gristmill_parity.recording.verdict import Pattern

_LONGEST = 2048
"""Slices along a dimension that are matched with each other."""


def shifted(evidence: Evidence) -> Pattern | None:
    """Return slices along a dimension that are those of other indices."""
    for dim in range(evidence.expected.ndim):
        size = evidence.expected.shape[dim]
        if not 1 < size <= _LONGEST:
            continue
        index = evidence.worst.index
        others = [np.arange(size) if each == dim else own for each, own in enumerate(index)]
        right_rows = np.moveaxis(take(evidence.expected, others), dim, 0).reshape(size, -1)
        own_rows = np.moveaxis(evidence.worst.values(), dim, 0).reshape(len(index[dim]), -1)
        off = np.linalg.norm(own_rows - right_rows[index[dim]], axis=1)
        is_wrong = off > max(0.05 * off.max(initial=0.0), evidence.tolerance / size**0.5)
        wrong = index[dim][is_wrong]
        wrong_rows = own_rows[is_wrong]
        if len(wrong) < 2 or right_rows.shape[1] < 2:
            continue
        matched = _matches(wrong_rows, right_rows, right_rows[wrong])
        known = matched >= 0
        if known.mean() < 0.6:
            continue
        shifts = Counter(((matched[known] - wrong[known]) % size).tolist())
        shift, count = shifts.most_common(1)[0]
        if shift > size // 2:
            shift -= size
        axes = tuple(axis for axis, of_axis in evidence.shards.items() if of_axis == dim) or likely_axes(evidence)
        if count > 0.5 * len(wrong) and shift:
            return _describe_shift(evidence, dim, shift, axes)
        if known.mean() > 0.8:
            sentence = (
                f"Along dimension {dim} it has the right values in another order: blocks, heads or tokens are taken "
                "from, or sent to, other ranks than they belong to."
            )
            return Pattern("other order", sentence, axes)
    return None


def _matches(wrong: Array, right: Array, own: Array) -> Array:
    """Return for each wrong row the index of the right row that it equals, or -1."""
    distances = np.sum(wrong**2, 1)[:, None] + np.sum(right**2, 1)[None, :] - 2 * wrong @ right.T
    nearest = distances.argmin(1)
    off = np.sum((wrong - own) ** 2, 1)
    left = np.sum((wrong - right[nearest]) ** 2, 1)
    spread = np.sum((right - right.mean(0)) ** 2, 1).mean()
    return np.where((left <= 0.01 * off) & (off > 1e-3 * spread), nearest, -1)


def _describe_shift(evidence: Evidence, dim: int, shift: int, axes: tuple[str, ...]) -> Pattern:
    index = evidence.worst.index[dim]
    block = len(index)
    is_block = block > 1 and shift % block == 0 and block < evidence.expected.shape[dim]
    amount = f"a block of {abs(shift)}" if is_block else f"{abs(shift)}"
    direction = "later" if shift > 0 else "earlier"
    reason = "positions, masks or labels are counted from another start"
    if is_block:
        reason = "a rank takes its offset as another's, or as zero"
    sentence = f"Along dimension {dim} it has the values that belong {amount} {direction}: {reason}."
    return Pattern("shifted", sentence, axes)


def exchanged(evidence: Evidence) -> Pattern | None:
    """Return a rank's piece that is another rank's."""
    shape = take(evidence.expected, evidence.worst.index).shape
    seen = set[object]()
    for copy in evidence.copies:
        piece = copy.held[0].entry.piece
        if piece.index in seen or copy.held[0].entry.shape != shape or copy is evidence.worst:
            continue
        seen.add(piece.index)
        if evidence.box_explains(take(evidence.expected, copy.index), evidence.worst):
            sentence = (
                f"Rank {evidence.worst.rank} has the piece of rank {copy.rank}: it takes its index along "
                f"{' or '.join(evidence.shards)} as another's."
            )
            return Pattern("shifted", sentence, tuple(evidence.shards))
    return None
