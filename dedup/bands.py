"""Command: choose the number of bands and of rows per band, and show the detection curve of a choice."""

import sys
from dataclasses import dataclass
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from dedup.clustering.lsh import Bands, band_parameters, check_bands, detection
from gristmill.command import command
from gristmill.errors import UsageError

_WIDTH = 66  # of the plot, in characters
_HEIGHT = 12  # of the plot, in lines
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_MARK = "#ff8700"


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
        raise UsageError("--range and --bands go together: expected both, or neither for the best choice")
    if range is not None and false_positive_weight != 0.5:
        raise UsageError("--false_positive_weight has no effect on given bands: leave out --range and --bands, or it")
    if range is None or bands is None:
        return Curve(band_parameters(threshold, permutations, false_positive_weight), threshold, permutations)
    check_bands(range, bands, permutations)
    return Curve(Bands(range, bands), threshold, permutations)


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
        """Return a bar chart of the probability of detection over similarity, with the threshold's bar highlighted."""
        similarities = np.linspace(0, 1, _WIDTH)
        eighths = np.round(detection(similarities, *self.chosen) * _HEIGHT * 8).astype(int)
        marked = int(np.argmin(np.abs(similarities - self.threshold)))
        lines = []
        for level in reversed(range(_HEIGHT)):
            filled = [_EIGHTHS[min(max(height - level * 8, 0), 8)] for height in eighths]
            label = " " * 7
            if (level + 1) % 3 == 0:
                label = f"{100 * (level + 1) // _HEIGHT:>4} % "
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
        """Return a table of similarities and the probability that each is detected, in per cent."""
        shown = sorted({*np.arange(50, 101, 5).tolist(), round(self.threshold * 100)})
        table = Table(
            "Jaccard similarity", *(f"{similarity / 100:.2f}" for similarity in shown), box=None, pad_edge=False
        )
        probabilities = detection(np.array(shown) / 100, *self.chosen)
        table.add_row("detected", *(_percent(probability) for probability in probabilities))
        for column, similarity in zip(table.columns[1:], shown, strict=True):
            column.justify = "right"
            style = f"bold {_MARK}" if similarity == round(self.threshold * 100) else ""
            column.style = style
            column.header_style = style
        return table


def _percent(probability: float) -> str:
    """Return a probability in per cent, three digits; one below 1 is never rounded up to 100 %."""
    if probability > 1 - 1e-12:
        return "100 %"
    if probability < 0.001:
        return "<0.1 %"
    return f"{min(probability * 100, 99.9):.3g} %"


if __name__ == "__main__":
    command(choose_bands)
