"""The picture of the whole: docs/pictures/whole.svg; draw_pictures.py draws it with the others."""

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.drawing import DATA, LINE, MODEL, NOTE, RANKS, UPDATE, arrow, box_with, new_figure

STAGES = [
    ("normalise", "Unicode NFC"),
    ("judge", "rules of quality,\nlanguage, length"),
    ("deduplicate", "MinHash,\nconfirmed on text"),
    ("mix, shuffle", "epochs, bytes or\ntokens a source"),
    ("keep apart", "holdout,\nbenchmarks"),
    ("tokenise", "your tokenizer,\nor a new one"),
]
SOURCES = ("web", "books", "code")
WIDTH, GAP, TOP, LOW = 13.2, 2.0, 22.0, 2.5


def draw_whole() -> Figure:
    """Above the data half, which ends in token shards; below the training half, which begins with them."""
    figure, axes = new_figure(9.6, 4.1, (-1.5, 115), (-7.5, 38))
    axes.text(0, 36, "1  From documents to tokens", weight="bold", size=10, va="center")
    axes.text(34, 36, "gristmill run — on one machine, many, or Ray; on a disk or in a bucket", **NOTE)
    for number, source in enumerate(SOURCES):
        box_with(axes, (0, TOP + 8.2 - 4 * number), (10, 3.2), DATA, source)
    left = 13.5
    for name, what in STAGES:
        arrow(axes, (left - GAP - 1, TOP + 5.8), (left - 0.2, TOP + 5.8))
        box_with(axes, (left, TOP), (WIDTH, 11.4), MODEL, "")
        axes.text(left + WIDTH / 2, TOP + 8.8, name, ha="center", va="center", size=9, weight="bold")
        axes.text(left + WIDTH / 2, TOP + 4.2, what, ha="center", va="center", size=7.5, linespacing=1.4)
        left += WIDTH + GAP + 1.5
    axes.text(0, TOP - 2.6, "each stage: documents read = documents written + left out, by reason", **NOTE)
    axes.text(0, 15, "2  From tokens to a model", weight="bold", size=10, va="center")
    axes.text(34, 15, "gristmill train, under torchrun", **NOTE)
    for number in range(3):
        box_with(axes, (2 - number, LOW + 1 + number), (12, 6.5), DATA, "token\nshards" if number == 2 else "")
    arrow(axes, (14.6, LOW + 5), (20.6, LOW + 5))
    _ranks(axes, 21.5)
    arrow(axes, (62, LOW + 5), (67, LOW + 5))
    _curve(axes, 68)
    arrow(axes, (90.5, LOW + 5), (95.5, LOW + 5))
    box_with(axes, (96, LOW), (18, 10), UPDATE, "a model\nfor transformers")
    note = "any layout gives the losses of one process, to 1e-10: gristmill parity proves it on your machine"
    axes.text(21.5, -4.5, note, **NOTE)
    return figure


def _ranks(axes: Axes, left: float) -> None:
    """Two replicas of two stages of two tensor-parallel ranks."""
    for replica in range(2):
        for stage in range(2):
            for part in range(2):
                corner = left + 20.5 * replica + 9.7 * stage, LOW + 5.2 - 5.2 * part
                box_with(axes, corner, (9, 4.6), RANKS, f"stage {stage + 1}\npart {part + 1}", 6.5)
        axes.text(left + 20.5 * replica + 9.4, LOW - 1.9, f"replica {replica + 1}", ha="center", va="center", size=7.5)


def _curve(axes: Axes, left: float) -> None:
    """A loss that falls."""
    steps = [step / 40 for step in range(41)]
    axes.plot([left, left, left + 22], [LOW + 10, LOW, LOW], color=LINE, linewidth=0.8)
    axes.plot([left + 1 + 20 * x for x in steps], [LOW + 1 + 8 * math.exp(-3.2 * x) for x in steps], color="#2a6f97")
    axes.text(left + 11, LOW + 7.5, "loss", size=8, ha="center", va="center")
    axes.text(left + 11, LOW - 1.9, "steps", size=7.5, ha="center", va="center")
