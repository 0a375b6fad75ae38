"""Reference: the tensors of a right run, and the tolerance of each: how far its perturbed runs are off."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gristmill_parity.recording.assemble import Array, copies_of, views_of, whole
from gristmill_parity.recording.files import Key, Recording, RecordingError
from gristmill_parity.recording.perturb import BASE, EPSILON, PERTURBED

OWN_PRECISION = 2.0
"""Spreads that a large tensor may be off, of a reference in the run's own precision: right layouts are off by one."""
OTHER_PRECISION = 6.0
"""Spreads allowed beside a reference of higher precision, whose noise at borders of modules stands for all rounding."""
_OF_ROWS = 2.0
"""A row may be off by so many times more: its spread is estimated from fewer numbers."""
_OF_COPIES = 1.0
"""Spreads that copies may differ among ranks, which compute them from the same numbers or receive them."""
_ROUNDING = 0.6
"""Epsilons that a tensor is off by being stored: at most half of one."""
_ROUNDING_OF_A_SUM = 4.0
"""Epsilons that a single number may be off: it is a sum, as the loss, and layouts add its terms in another order."""
_PRECISION = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Tolerance:
    """Tolerance of a tensor: the difference that rounding explains, as 2-norms."""

    of_tensor: float
    of_rows: Array
    """Tolerance of each row of the last dimension."""
    of_copies: float
    """Tolerance of the difference of two ranks' copies."""


class Reference:
    """The reference's tensors, and how far each is off when its rounding is perturbed."""

    def __init__(self, folder: Path, run: Recording) -> None:
        """`run` is what is compared with it."""
        base = folder / BASE
        self.base = Recording(base if base.is_dir() else folder)
        self.perturbed = [Recording(path) for path in sorted(folder.glob(f"{PERTURBED}-*"))]
        if not self.perturbed:
            raise RecordingError(
                f"{folder} has no perturbed run of the reference, so no tolerance; record with the folders and "
                "perturbations that reference_runs() gives"
            )
        is_own_precision = _dtypes(self.base, run) == _dtypes(run, self.base)
        self._spreads = OWN_PRECISION if is_own_precision else OTHER_PRECISION

    def tensor(self, key: Key) -> Array | None:
        """Return a tensor; None if it was not recorded whole."""
        return _assembled(self.base, key)

    def sketch(self, recording: Recording, key: Key) -> Array:
        """Return the sketch of a tensor of one of the reference's runs."""
        copies = copies_of(recording.tensors[key], recording)
        _, first = next(views_of(copies))
        total: Array = np.sum([copy.sketch() for copy in first], axis=0)
        return total

    def tolerance(self, key: Key, expected: Array, epsilon: float) -> Tolerance:
        """Return the tolerance of a tensor, of which the run has values rounded to `epsilon`."""
        spread, of_rows = self._spread(key, expected)
        norm = float(np.linalg.norm(expected))
        norms = np.linalg.norm(rows_of(expected), axis=1)
        stored = (_ROUNDING if expected.size > 1 else _ROUNDING_OF_A_SUM) * epsilon
        of_tensor = self._spreads_of(expected.size) * spread + stored * norm
        row_spreads = of_rows + spread / max(1.0, len(of_rows) ** 0.5)
        rows = _OF_ROWS * self._spreads * row_spreads + stored * norms
        return Tolerance(of_tensor, rows, _OF_COPIES * spread + stored * norm)

    def tolerance_of_sketch(self, key: Key, expected: Array, epsilon: float) -> float:
        """Return the tolerance of a tensor's sketch."""
        sketches = [self.sketch(recording, key) for recording in self.perturbed if key in recording.tensors]
        spread = max((float(np.linalg.norm(sketch - expected)) for sketch in sketches), default=0.0)
        return 2 * OTHER_PRECISION * spread + 4 * epsilon * float(np.linalg.norm(expected))

    def _spreads_of(self, size: int) -> float:
        """Return the spreads that a tensor of `size` numbers may be off: three runs say little of a single number."""
        return max(self._spreads, OWN_PRECISION * (1 + 2 / max(1, size) ** 0.5))

    def _spread(self, key: Key, base: Array) -> tuple[float, Array]:
        """Return how far perturbed runs are off: the largest 2-norm, and that of each row of the last dimension."""
        largest = 0.0
        rows = np.zeros(len(rows_of(base)))
        for recording in self.perturbed:
            other = _assembled(recording, key)
            if other is None:
                continue
            off = np.linalg.norm(rows_of(other - base), axis=1)
            largest = max(largest, float(np.linalg.norm(off)))
            rows = np.maximum(rows, off)
        return largest, rows

    def uncertain(self, key: Key) -> Array | None:
        """Return where a weight's gradient is smaller than what rounding changes of it: Adam's update has any sign."""
        steps = {"weight": key.step, "used weight": key.step - 1}
        gradient = Key(steps.get(key.kind, 0), key.name, "gradient")
        base = _assembled(self.base, gradient)
        if base is None:
            return None
        off = np.zeros(base.shape)
        for recording in self.perturbed:
            other = _assembled(recording, gradient)
            if other is not None:
                off = np.maximum(off, np.abs(other - base))
        uncertain: Array = np.abs(base) < 2 * OTHER_PRECISION * off
        return uncertain


def epsilon_of(dtype: str) -> float:
    """Return the distance of 1 and the next larger number; integers are exact in what they are compared in."""
    return EPSILON[_PRECISION.get(dtype, "fp64")]


def rows_of(values: Array) -> Array:
    """Return a tensor as the rows of its last dimension."""
    return values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)


def _dtypes(recording: Recording, other: Recording) -> dict[Key, str]:
    """Return the types of the tensors that another recording has, too."""
    return {key: pieces[0].entry.dtype for key, pieces in recording.tensors.items() if key in other.tensors}


def _assembled(recording: Recording, key: Key) -> Array | None:
    """Return a tensor from its pieces; None if it was not recorded, or not whole."""
    pieces = recording.tensors.get(key)
    if not pieces or any(piece.entry.offset < 0 for piece in pieces):
        return None
    copies = copies_of(pieces, recording)
    _, first = next(views_of(copies))
    shape = pieces[0].entry.piece.shape
    is_whole = len(first) == 1 and first[0].held[0].entry.shape == shape
    return first[0].values() if is_whole else whole(first, shape)
