"""Evidence: a wrong tensor and what is expected of it, as patterns look at them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gristmill_parity.recording.assemble import Array, Copy, coordinate, put, take, whole
from gristmill_parity.recording.files import Key, Recording

EXPLAINED = 0.05
"""Share of a difference that a pattern may leave."""
LEFT_IN_NOISE = 0.6
"""Share that a pattern may leave of a difference below the tolerance, of which rounding is a part."""
ALONG = 0.25
"""How far the length of a difference along a pattern may be from the pattern's, as a share."""


@dataclass
class Evidence:
    """A wrong tensor: what is expected, and the copies of its boxes; `worst` is off most."""

    recording: Recording
    key: Key
    expected: Array
    copies: Sequence[Copy]
    worst: Copy
    tolerance: float
    reference: Callable[[Key], Array | None]

    def __post_init__(self) -> None:
        own = [copy for copy in self.copies if copy.coordinates == self.worst.coordinates]
        self.values = whole(own, self.expected.shape, self.expected)
        put(self.values, self.worst.index, self.worst.values())
        self.off = float(np.linalg.norm(self.values - self.expected))
        self.sizes = self.recording.axis_sizes
        piece = self.worst.held[0].entry.piece
        self.shards = piece.shards
        self.replicated = piece.replicated
        self.partial = tuple(piece.partial)

    def explains(self, other: Array) -> bool:
        """Return whether the tensor is `other`, up to rounding."""
        return self._explains(self.values, self.expected, other, self.tolerance)

    def box_explains(self, other: Array, copy: Copy) -> bool:
        """Return whether the values of a copy are `other`, a box, up to rounding, and not what is expected."""
        values = copy.values()
        tolerance = self.tolerance * (values.size / max(1, self.expected.size)) ** 0.5
        return self._explains(values, take(self.expected, copy.index), other, tolerance)

    @staticmethod
    def _explains(values: Array, expected: Array, other: Array, tolerance: float) -> bool:
        """Return whether the difference from what is expected is that of `other`.

        In 16 bits rounding may be half of it, but does not look like `other`: along the direction of that it is small.
        """
        if values.shape != other.shape:
            return False
        difference = values - expected
        off = float(np.linalg.norm(difference))
        left = float(np.linalg.norm(values - other))
        if not off or np.isnan(left):
            return False
        if left <= EXPLAINED * off:
            return True
        direction = other - expected
        along = float(np.sum(difference * direction)) / (float(np.sum(np.square(direction))) or 1.0)
        return left <= min(tolerance, LEFT_IN_NOISE * off) and abs(along - 1) < ALONG

    def wrong_slices(self, dim: int) -> Array:
        """Return the indices along a dimension whose slices are off."""
        off = np.moveaxis(self.values - self.expected, dim, 0).reshape(self.expected.shape[dim], -1)
        norms = np.linalg.norm(off, axis=1)
        return np.flatnonzero(norms > max(0.05 * norms.max(), self.tolerance / max(1, len(norms)) ** 0.5))

    def where(self) -> str:
        """Describe the part of the tensor that is off: of each dimension the indices, if not all."""
        if not self.expected.ndim or not self.expected.size:
            return ""
        parts = list[str]()
        for dim, size in enumerate(self.expected.shape):
            wrong = self.wrong_slices(dim)
            if not 0 < len(wrong) < size:
                continue
            indices = f"{wrong[0]}" if len(wrong) == 1 else f"{wrong[0]} to {wrong[-1]}"
            has_gaps = len(wrong) <= wrong[-1] - wrong[0]
            amount = f" ({len(wrong)} of {size})" if has_gaps else ""
            parts.append(f"dimension {dim} at {indices}{amount}")
        described = ", ".join(parts) or "everywhere"
        own = list[str]()
        coordinates = self.worst.held[0].rank.axes
        for axis in self.shards:
            if self.sizes.get(axis, 1) > 1:
                own.append(f"its {axis} {coordinates[axis][0]} of {self.sizes[axis]}")
        where = f" ({', '.join(own)})" if own else ""
        return f"in {described}, of shape {list(self.expected.shape)}{where}"


def ratio_of(values: Array, expected: Array) -> float:
    """Return the multiple of `expected` that is nearest to `values`."""
    square = float(np.sum(np.square(expected)))
    return float(np.sum(values * expected)) / square if square else 1.0


def likely_axes(evidence: Evidence) -> tuple[str, ...]:
    """Return the axes of several ranks that may have done it, the likeliest first.

    Those along which one rank's part is wrong and another's is not; then those along which ranks differ at all.
    """
    dividing = (*evidence.shards, *evidence.replicated)
    off: dict[str, dict[int, float]] = {axis: {} for axis in dividing}  # by axis and index along it
    for copy in evidence.copies:
        expected = take(evidence.expected, copy.index)
        norm = float(np.linalg.norm(copy.values() - expected))
        for axis in dividing:
            index = coordinate(copy.held[0], axis)
            off[axis][index] = off[axis].get(index, 0.0) + norm
    scores = dict[str, float]()
    for axis, norms in off.items():
        scores[axis] = max(norms.values()) / (min(norms.values()) + 1e-300) if norms else 1.0
    for axis in evidence.partial:
        scores[axis] = 1.0
    several = [axis for axis in scores if evidence.sizes.get(axis, 1) > 1]
    others = [axis for axis, size in evidence.sizes.items() if size > 1 and axis not in several]
    several.sort(key=lambda axis: -min(scores[axis], 1e6))
    return (*several, *others)
