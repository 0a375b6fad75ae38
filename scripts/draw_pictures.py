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
from matplotlib.patches import FancyBboxPatch, Rectangle

from training.planner.timeline.pipeline_simulator import PassCosts, pipeline_layout, simulate

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
    ("Cast, all-gather with ZeRO-1 and 2", "ParallelModel.start_publishing", "weights in the compute dtype", UPDATE),
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


def draw_zero() -> Figure:
    """What each of n replicas holds of a model under ZeRO (Rajbhandari et al. 2020, figure 1): float32 training."""
    figure, axes = _figure(7.2, 2.9, (-33, 112), (-3.9, 1.2))
    parts = [("parameters", DATA), ("gradients", MODEL), ("optimizer's moments", RANKS)]
    widths, share = (20, 20, 40), 1 / 8
    for stage in range(4):
        left = 0.0
        axes.text(-2, -stage, f"ZeRO-{stage}", ha="right", va="center")
        for number, ((name, color), width) in enumerate(zip(parts, widths, strict=True)):
            held = width * (share if stage >= 3 - number else 1)
            axes.add_patch(Rectangle((left, -stage - 0.3), held, 0.6, facecolor=color, edgecolor=_LINE, linewidth=0.7))
            if stage == 0:
                axes.text(left + width / 2, 0, name, ha="center", va="center", size=8)
            left += held
        formula = " + ".join(f"{n}Ψ/n" if stage >= 3 - i else f"{n}Ψ" for i, n in enumerate((4, 4, 8)))
        axes.text(left + 2, -stage, formula, va="center", size=8)
    axes.text(0, 0.75, "bytes on each replica, of Ψ parameters; drawn for n = 8", color="#555555", style="italic")
    return figure


def draw_tensor_parallel() -> Figure:
    """The collectives of a block (Shoeybi et al. 2019, figure 4; Korthikanti et al. 2022, figure 5)."""
    figure, axes = _figure(7.2, 3.0, (-1, 107), (-3.1, 1.15))
    places = [("norm", 9), ("entry", 17), ("q, k, v\nattention, o", 20), ("exit", 17), ("add, norm", 13)]
    rows = [
        ("tensor parallel", "copy\n(all-reduce back)", "all-reduce\n(copy back)", "all tokens on\nevery rank"),
        (
            "sequence parallel",
            "all-gather\n(reduce-scatter back)",
            "reduce-scatter\n(all-gather back)",
            "T / n tokens\non each",
        ),
    ]
    for row, (title, entry, leave, outside) in enumerate(rows):
        middle, left = -1.7 * row - 0.1, 13.0
        axes.text(0, middle + 0.75, title, weight="bold", va="center")
        axes.text(0, middle, outside, va="center", size=7.5, color="#555555")
        for number, (name, width) in enumerate(places):
            text, color = {"entry": (entry, RANKS), "exit": (leave, RANKS)}.get(
                name, (name, MODEL if number == 2 else DATA)
            )
            box = FancyBboxPatch((left, middle - 0.4), width, 0.8, "round,pad=0,rounding_size=0.15")
            box.set(facecolor=color, edgecolor=_LINE, linewidth=0.7)
            axes.add_patch(box)
            axes.text(left + width / 2, middle, text, ha="center", va="center", size=6.5)
            if number + 1 < len(places):
                _arrow(axes, (left + width, middle), (left + width + 4, middle))
            left += width + 4
        axes.text(53.5 + 6, middle - 0.62, "heads / n on each rank", ha="center", va="center", size=7, color="#555555")
    return figure


def draw_pipeline(ranks: int = 4) -> Figure:
    """1F1B (Narayanan et al. 2021, figure 4): who computes which micro-batch when; a backward pass takes two units."""
    timeline = simulate(pipeline_layout("1f1b", ranks, 2 * ranks), [PassCosts()] * ranks)
    figure, axes = _figure(7.2, 1.9, (-6.5, timeline.seconds + 1), (-ranks - 0.7, 0.3))
    for rank, passes in enumerate(timeline.ranks):
        axes.text(-0.6, -rank - 0.55, f"rank {rank}", ha="right", va="center", size=8)
        for each in passes:
            box = Rectangle((each.start, -rank - 1), each.end - each.start, 0.92)
            box.set(facecolor=DATA if each.kind == "F" else MODEL, edgecolor=_LINE, linewidth=0.6)
            axes.add_patch(box)
            middle = (each.start + each.end) / 2
            axes.text(middle, -rank - 0.55, str(each.micro_batch + 1), ha="center", va="center", size=7)
    legend = "blue: forward, green: backward, numbers: micro-batches, white: bubble"
    axes.text(0, -ranks - 0.4, legend, color="#555555", size=7.5, va="center")
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


DRAWN: dict[str, Callable[[], Figure]] = {
    "step": draw_step,
    "zero": draw_zero,
    "tensor_parallel": draw_tensor_parallel,
    "pipeline": draw_pipeline,
}


def draw_all(folder: Path) -> None:
    """Write every picture to `folder`, the same bytes each time."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_STYLE):
        for name, draw in DRAWN.items():
            draw().savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    draw_all(PICTURES)
