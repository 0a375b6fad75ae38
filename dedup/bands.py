"""Command: choose the number of bands and of rows per band, and show the detection curve of a choice."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gristmill.command import command
from gristmill.errors import UsageError

_NODES = 512  # quadrature nodes; exact to rounding for any number of rows and bands
_WIDTH, _HEIGHT = 66, 12  # of the plot, in characters
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_MARK = "#ff8700"


class Bands(NamedTuple):
    """Rows per band and number of bands: `--range` and `--bands` of generate_duplicate_pairs."""

    rows: int
    bands: int


def choose_bands(
    threshold: float = 0.8,
    permutations: int = 128,
    false_positive_weight: float = 0.5,
    range: int | None = None,
    bands: int | None = None,
) -> "Curve":
    """Choose bands for a threshold, or show what a given choice detects.

    Two documents become a candidate pair if they agree in all rows (slots) of at least one band. With Jaccard
    similarity s they agree in a slot with probability s, in `range` slots with s^range, and in one of `bands` bands
    with 1 − (1 − s^range)^bands: an S-shaped curve. More rows per band move it to the right, so fewer pairs are
    found; more bands move it to the left. The choice minimises the weighted area of errors: below the curve left of
    the threshold (false positives) and above it right of the threshold (false negatives).

    The curve is not a step at the threshold: the choice for 0.8, 9 bands of 13 rows, finds 40 % of the pairs at 0.80
    and 93 % at 0.90. To miss fewer pairs, choose for a lower threshold and check the candidates by their exact
    similarity (--verify of generate_duplicates_dict).

    Args:
        threshold: Minimum Jaccard similarity of near-duplicates.
        permutations: Number of slots of a signature; rows × bands is at most this.
        false_positive_weight: Weight w of false positives, 0 to 1; false negatives weigh 1 − w. Below 0.5 finds more.
        range: Rows per band, to show the curve of a given choice; requires --bands.
        bands: Number of bands, to show the curve of a given choice; requires --range.

    Returns:
        The choice and its curve.
    """
    if (range is None) != (bands is None):
        raise UsageError("--range and --bands go together: wanted both, or neither for the best choice")
    if range is None or bands is None:
        return Curve(band_parameters(threshold, permutations, false_positive_weight), threshold, permutations)
    if range < 1 or bands < 1 or range * bands > permutations:
        raise UsageError(
            f"{bands} bands of {range} slots: expected 1 or more of each, and together no more than "
            f"--permutations {permutations}"
        )
    return Curve(Bands(range, bands), threshold, permutations)


def detection(similarity: ArrayLike, rows: int, bands: int) -> NDArray[np.float64]:
    """Probability that documents of Jaccard similarity s share a band: 1 − (1 − s^rows)^bands.

    Source: Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, section 3.4.2. UsageError for a similarity
    below 0 or above 1.

    >>> detection([0.5, 0.8, 0.9], rows=13, bands=9).round(3).tolist()
    [0.001, 0.399, 0.929]
    """
    s = np.asarray(similarity, np.float64)
    if not ((s >= 0) & (s <= 1)).all():
        raise UsageError(f"similarity {similarity!r}: wanted Jaccard similarities, 0 to 1")
    return 1 - (1 - s**rows) ** bands


def band_parameters(threshold: float, permutations: int = 128, false_positive_weight: float = 0.5) -> Bands:
    """The bands with the least weighted area of errors, the same choice as datasketch's MinHashLSH.

    False positives: the integral of `detection` from 0 to the threshold; false negatives: the integral of 1 −
    `detection` from the threshold to 1. Of equal choices the one with fewer bands. UsageError for a value out of range.

    >>> band_parameters(0.8, 128)
    Bands(rows=13, bands=9)
    """
    _check(threshold, permutations, false_positive_weight)
    nodes, weights = np.polynomial.legendre.leggauss(min(permutations // 2 + 1, _NODES))
    below, above = (nodes + 1) / 2 * threshold, 1 - (1 - nodes) / 2 * (1 - threshold)
    wrong = false_positive_weight * threshold / 2 * weights
    missed = (1 - false_positive_weight) * (1 - threshold) / 2 * weights
    best, found = np.inf, Bands(1, 1)
    for count in range(1, permutations + 1):
        rows = np.arange(1, permutations // count + 1)
        errors = wrong @ _detection_of_rows(below, rows, count) + missed @ (1 - _detection_of_rows(above, rows, count))
        least = int(np.argmin(errors))
        if errors[least] < best:
            best, found = float(errors[least]), Bands(int(rows[least]), count)
    return found


def _detection_of_rows(similarity: NDArray[np.float64], rows: NDArray[np.int64], bands: int) -> NDArray[np.float64]:
    """`detection` for all pairs of a similarity and a number of rows (similarities × rows)."""
    return 1 - (1 - similarity[:, None] ** rows) ** bands


def _check(threshold: float, permutations: int, weight: float) -> None:
    if not 0 <= threshold <= 1:
        raise UsageError(f"threshold {threshold}: wanted a Jaccard similarity, 0 to 1")
    if not 1 <= permutations <= 4096:
        raise UsageError(f"permutations {permutations}: wanted the number of slots of the signatures, 1 to 4096")
    if not 0 <= weight <= 1:
        raise UsageError(
            f"false_positive_weight {weight}: wanted 0 (find all pairs) to 1 (no false pairs); 0.5 is usual"
        )


@dataclass(frozen=True)
class Curve:
    """The detection curve of a choice of bands, printable by rich."""

    chosen: Bands
    threshold: float
    permutations: int

    def __rich__(self) -> Group:
        rows, bands = self.chosen
        summary = Text.assemble(
            (f"{bands} bands of {rows} rows", "bold"),
            f", {bands * rows} of {self.permutations} slots: ",
            (f"generate_duplicate_pairs --range {rows} --bands {bands}\n", "green"),
        )
        return Group(summary, *self._plot(), Text(), self._table())

    def _plot(self) -> list[Text]:
        """A bar chart of the probability of detection over similarity; the threshold's bar is highlighted."""
        similarities = np.linspace(0, 1, _WIDTH)
        eighths = np.round(detection(similarities, *self.chosen) * _HEIGHT * 8).astype(int)
        marked = int(np.argmin(np.abs(similarities - self.threshold)))
        lines = []
        for level in reversed(range(_HEIGHT)):
            filled = [_EIGHTHS[min(max(height - level * 8, 0), 8)] for height in eighths]
            label = f"{100 * (level + 1) // _HEIGHT:>4} % " if (level + 1) % 3 == 0 else " " * 7
            line = Text(label + "│", style="dim")
            for column, block in enumerate(filled):
                is_marked = column == marked
                line.append("┊" if is_marked and block == " " else block, style=_MARK if is_marked else "cyan")
            lines.append(line)
        return [*lines, Text(" " * 7 + "└" + "─" * _WIDTH, style="dim"), self._axis()]

    def _axis(self) -> Text:
        axis = [" "] * (_WIDTH + 8)
        for tick in range(0, 11, 2):
            label = f"{tick / 10:.1f}"
            at = 7 + round(tick / 10 * (_WIDTH - 1)) - len(label) // 2 + 1
            axis[at : at + len(label)] = label
        return Text("".join(axis), style="dim")

    def _table(self) -> Table:
        """Similarities and the probability that each is detected, in per cent."""
        shown = sorted({*np.arange(50, 101, 5).tolist(), round(self.threshold * 100)})
        table = Table(
            "Jaccard similarity", *(f"{similarity / 100:.2f}" for similarity in shown), box=None, pad_edge=False
        )
        probabilities = detection(np.array(shown) / 100, *self.chosen)
        table.add_row("detected", *(_percent(probability) for probability in probabilities))
        for column, similarity in zip(table.columns[1:], shown, strict=True):
            column.justify = "right"
            column.style = column.header_style = f"bold {_MARK}" if similarity == round(self.threshold * 100) else ""
        return table


def _percent(probability: float) -> str:
    """A probability in per cent, three digits; one below 1 is never rounded up to 100 %."""
    return (
        "100 %"
        if probability > 1 - 1e-12
        else f"{min(probability * 100, 99.9):.3g} %"
        if probability >= 0.001
        else "<0.1 %"
    )


if __name__ == "__main__":
    command(choose_bands)
