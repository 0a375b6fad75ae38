"""Scaled rows: activations of which each token's are right but for a factor of its own, as of other statistics."""

import numpy as np

from gristmill_parity.recording.assemble import Array, take
from gristmill_parity.recording.evidence import Evidence, likely_axes, ratio_of
from gristmill_parity.recording.files import Key
from gristmill_parity.recording.verdict import Pattern

_SHORTEST_ROW = 8
"""Values of a token in which a factor of its own is more than chance."""
_BETTER = 0.7
"""Share that a factor for each row may leave, of what one factor for all rows leaves of the difference."""


def scaled_rows(evidence: Evidence) -> Pattern | None:
    """Return the pattern of rows with a factor each, and perhaps an offset, if that is what the worst piece has."""
    if evidence.key.kind not in ("input", "output"):
        return None
    expected = take(evidence.expected, evidence.worst.index)
    if expected.ndim < 2 or expected.shape[-1] < _SHORTEST_ROW:
        return None
    values = evidence.worst.values()
    square = np.sum(np.square(expected), axis=-1, keepdims=True)
    factors = np.sum(values * expected, axis=-1, keepdims=True) / np.maximum(square, 1e-300)
    of_one_factor = float(np.linalg.norm(values - ratio_of(values, expected) * expected))
    for nearest in (factors * expected, _nearest_norms(evidence, values, expected)):
        is_better = float(np.linalg.norm(values - nearest)) < _BETTER * of_one_factor
        if is_better and evidence.box_explains(nearest, evidence.worst):
            return _describe(evidence, factors)
    return None


def _describe(evidence: Evidence, factors: Array) -> Pattern:
    last = evidence.expected.ndim - 1
    dividing = [axis for axis, dim in evidence.shards.items() if dim == last and evidence.sizes.get(axis, 1) > 1]
    named = f" of its part along {' and '.join(dividing)}" if dividing else ""
    sentence = (
        f"Each token's values are right but for a factor of its own ({factors.min():.3g} to {factors.max():.3g}): a "
        f"norm's statistics{named}, the denominator of a softmax, or the weights of a choice are others."
    )
    others = [axis for axis in likely_axes(evidence) if axis not in dividing]
    return Pattern("scaled rows", sentence, (*dividing, *others))


def _nearest_norms(evidence: Evidence, values: Array, expected: Array) -> Array:
    """Return what is nearest to `values` of that a norm with other statistics makes of each row.

    Of scale w and bias b it has a (expected - b) + c w + b, with a and c of its own in each row.
    """
    own = evidence.worst.index[-1]
    scale = _vector(evidence, "weight")
    bias = _vector(evidence, "bias")
    known = [np.ones(len(own)) if scale is None else scale]
    if scale is not None and bias is not None:
        known.append(bias)
    rows = values.reshape(-1, len(own))
    right_rows = expected.reshape(-1, len(own))
    nearest = np.empty(rows.shape)
    for number in range(len(rows)):
        columns = np.stack([right_rows[number], *known], axis=1)
        solution = np.linalg.lstsq(columns, rows[number], rcond=None)[0]
        nearest[number] = columns @ solution
    return nearest.reshape(values.shape)


def _vector(evidence: Evidence, leaf: str) -> Array | None:
    """Return the part of a norm's parameter that the worst piece has; None if the module has none of that shape."""
    key = evidence.key
    values = evidence.reference(Key(key.step, f"{key.name}.{leaf}", "used weight"))
    if values is None or values.shape != evidence.expected.shape[-1:]:
        return None
    return values[evidence.worst.index[-1]]
