"""Draw the pictures of the documentation: docs/pictures/*.svg.

python scripts/draw_pictures.py
"""

import sys
from collections.abc import Callable
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
_STYLE = {"font.family": "DejaVu Sans", "font.size": 9, "svg.hashsalt": "gristmill", "svg.fonttype": "none"}
_LINE = "#444444"
DATA, MODEL, RANKS, UPDATE = "#dbe9f6", "#e3f1dd", "#fbe6cf", "#ece2f3"
STEP = [  # what happens, by which function, what comes out, colour
    ("A window of the token shard", "TokenSequences.batch", "tokens (B, T + 1) int64", DATA),
    ("The sequences of this rank and step", "Batches.read", "ids, targets (B, T); sample_ids (B)", DATA),
    ("Read ahead, in a thread", "PrefetchLoader.batch", "Batch, on the device", DATA),
    ("Tokens and learned positions", "Embedding.forward", "features (B, T, D)", MODEL),
    ("Attention and MLP, layer by layer", "Block.forward", "features (B, T, D)", MODEL),
    ("Norm, output matrix and loss, fused", "Head.loss", "summed loss in nats (1)", MODEL),
    ("Gradients, summed over replicas", "GradReducer.backward_pass", "gradients of this rank's shards", RANKS),
    ("Other sums: tied, sequence parallel", "RemainingSums.run", "gradients of this rank's shards", RANKS),
    ("Loss, norm and stop: one all-reduce", "Trainer._all_reduce_metrics", "mean loss, gradient norm", RANKS),
    ("Skip a bad step, else clip gradients", "Stability.accepts", "the step counts, or not", UPDATE),
    ("Update of the float32 shards", "AdamW.step", "master weights", UPDATE),
    ("Cast, and all-gather with ZeRO-1 and 2", "ParallelModel.publish_params", "weights in the compute dtype", UPDATE),
]


def draw_step() -> Figure:
    """One training step, from a token shard to the update, in the order of the code."""
    figure, axes = _figure(7.2, 6.9, (0, 100), (-len(STEP) - 0.1, 0.75))
    for x, title in ((2, "what happens"), (43, "by which code"), (73, "what comes out")):
        axes.text(x, 0.45, title, color="#555555", style="italic", va="center")
    for row, (what, code, result, color) in enumerate(STEP):
        middle = -row - 0.5
        box = FancyBboxPatch((0.6, middle - 0.33), 37, 0.66, "round,pad=0,rounding_size=0.15")
        box.set(facecolor=color, edgecolor=_LINE, linewidth=0.7)
        axes.add_patch(box)
        axes.text(2, middle, what, va="center")
        axes.text(43, middle, code, va="center", family="DejaVu Sans Mono", size=7.5)
        axes.text(73, middle, result, va="center", size=8)
        if row + 1 < len(STEP):
            _arrow(axes, (19, middle - 0.34), (19, middle - 0.66))
    return figure


def _figure(width: float, height: float, x: tuple[float, float], y: tuple[float, float]) -> tuple[Figure, Axes]:
    """A figure of so many inches, and axes without frame over all of it, with these limits."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1), xlim=x, ylim=y)
    axes.axis("off")
    return figure, axes


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "-|>", "color": _LINE, "lw": 0.8, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=style)


DRAWN: dict[str, Callable[[], Figure]] = {"step": draw_step}


def draw_all(folder: Path) -> None:
    """Write every picture to `folder`, the same bytes each time."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_STYLE):
        for name, draw in DRAWN.items():
            draw().savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    draw_all(PICTURES)
