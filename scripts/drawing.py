"""Drawing: boxes, arrows and colours that the pictures of the documentation share."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

LINE = "#444444"
NOTE: dict[str, Any] = {"color": "#555555", "style": "italic", "size": 8, "va": "center"}
DATA, MODEL, RANKS, UPDATE = "#dbe9f6", "#e3f1dd", "#fbe6cf", "#ece2f3"


def new_figure(width: float, height: float, x: tuple[float, float], y: tuple[float, float]) -> tuple[Figure, Axes]:
    """A figure of so many inches, and axes without frame over all of it, with these limits."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1), xlim=x, ylim=y)
    axes.axis("off")
    return figure, axes


def box_with(
    axes: Axes, corner: tuple[float, float], size: tuple[float, float], color: str, text: str, points: float = 8
) -> None:
    """A box with its lower left corner there, and a text in its middle."""
    box = Rectangle(corner, *size)
    box.set(facecolor=color, edgecolor=LINE, linewidth=0.7)
    axes.add_patch(box)
    axes.text(corner[0] + size[0] / 2, corner[1] + size[1] / 2, text, ha="center", va="center", size=points)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "-|>", "color": LINE, "lw": 0.8, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=style)
