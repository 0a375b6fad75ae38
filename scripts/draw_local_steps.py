"""The picture of local steps: docs/pictures/local_steps.svg; draw_pictures.py draws it with the others."""

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

_LINE, _WEIGHTS, _STEP, _OUTER = "#444444", "#dbe9f6", "#e3f1dd", "#fbe6cf"
_WIDE, _MEET = 2.2, 5.2  # of a step, of an outer step
_TOPS = (0.0, -1.4)  # of the replicas


def draw_local_steps() -> Figure:
    """Two replicas take three steps each between outer steps, two rounds (Douillard et al. 2023, algorithm 1)."""
    figure = Figure(figsize=(7.2, 2.3))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-5, 29.5), ylim=(-3.4, 1.4))
    axes.axis("off")

    def box(left: float, bottom: float, width: float, height: float, color: str, text: str) -> None:
        axes.add_patch(Rectangle((left, bottom), width, height, facecolor=color, edgecolor=_LINE, linewidth=0.7))
        axes.text(left + width / 2, bottom + height / 2, text, ha="center", va="center", size=8)

    left = 0.0
    for number, top in enumerate(_TOPS):
        axes.text(-0.5, top - 0.4, f"replica {number}", ha="right", va="center", size=8)
    for _ in range(2):
        box(left, -2.2, 1.2, 3.0, _WEIGHTS, "S")
        left += 1.2
        for step in range(3):
            for top in _TOPS:
                box(left + step * _WIDE, top - 0.8, _WIDE, 0.8, _STEP, f"step {step + 1}")
        left += 3 * _WIDE
        box(left, -2.2, _MEET, 3.0, _OUTER, "D = mean of S - W\nM = µ M + D\nS = S - η (D + µ M)")
        left += _MEET
    box(left, -2.2, 1.2, 3.0, _WEIGHTS, "S")
    note = "a step: AdamW on the replica's own sequences; only D, the outer gradient, is sent, once in H = 3 steps"
    axes.text(0, -2.9, note, color="#555555", style="italic", size=8, va="center")
    return figure
