"""Draw the pictures of the documentation, docs/pictures/*.svg: `python scripts/draw_pictures.py`."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from gristmill_planner.pipeline_simulator import PassCosts, pipeline_layout, simulate
from scripts.draw_compression import draw_compression
from scripts.draw_grids import draw_crossings, draw_cube, draw_grid, draw_layers
from scripts.draw_local_steps import draw_local_steps
from scripts.draw_recording import draw_first_wrong, draw_recording
from scripts.draw_server import draw_server
from scripts.draw_whole import draw_whole
from scripts.drawing import DATA, LINE, MODEL, NOTE, RANKS, UPDATE, arrow, box_with, new_figure

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
_STYLE = {"font.family": "DejaVu Sans", "font.size": 9, "svg.hashsalt": "gristmill", "svg.fonttype": "none"}
RING = (DATA, MODEL, RANKS, UPDATE)
STEP = [  # what happens, by which function, what comes out, colour
    ("A window of the token shard", "TokenSequences.batch", "tokens (B, T + 1) int64", DATA),
    ("The sequences of this rank and step", "Batches.read", "ids, targets (B, T); sample_ids (B)", DATA),
    ("Read ahead, in a thread", "PrefetchLoader.batch", "TokenBatch, on the device", DATA),
    ("Tokens and learned positions", "Embedding.forward", "features (B, T, D)", MODEL),
    ("Attention and MLP, layer by layer", "Block.forward", "features (B, T, D)", MODEL),
    ("Norm, output matrix and loss, fused", "Head.loss", "summed loss in nats (1)", MODEL),
    ("Gradients, summed over replicas", "GradReducer.backward_pass", "gradients of this rank's shards", RANKS),
    ("Other sums: tied, sequence parallel", "RemainingSums.run", "gradients of this rank's shards", RANKS),
    ("Loss, norm and stop: one all-reduce", "StepSums.of", "mean loss, gradient norm", RANKS),
    ("Skip a bad step, else clip gradients", "Stability.accepts", "the step counts, or not", UPDATE),
    ("Update of the float32 shards", "Optimizer.step", "master weights", UPDATE),
    ("Cast, all-gather with ZeRO-1 and 2", "ParallelModel.start_all_gather", "weights in the compute dtype", UPDATE),
]


def draw_step() -> Figure:
    """One training step, from a token shard to the update, in the order of the code."""
    figure, axes = new_figure(7.2, 6.9, (0, 100), (-len(STEP) - 0.1, 0.75))
    for x, title in ((2, "what happens"), (43, "by which code"), (73, "what comes out")):
        axes.text(x, 0.45, title, color="#555555", style="italic", va="center")
    for row, (what, code, result, color) in enumerate(STEP):
        middle = -row - 0.5
        box = FancyBboxPatch((0.6, middle - 0.33), 37, 0.66, "round,pad=0,rounding_size=0.15")
        box.set(facecolor=color, edgecolor=LINE, linewidth=0.7)
        axes.add_patch(box)
        axes.text(2, middle, what, va="center")
        axes.text(43, middle, code, va="center", family="DejaVu Sans Mono", size=7.5)
        axes.text(73, middle, result, va="center", size=8)
        if row + 1 < len(STEP):
            arrow(axes, (19, middle - 0.34), (19, middle - 0.66))
    return figure


def draw_data_parallel() -> Figure:
    """Gradients are summed bucket by bucket while the backward pass goes on (Li et al. 2020, section 3.2)."""
    figure, axes = new_figure(7.2, 2.7, (-9, 32.5), (-4.55, 1.1))
    axes.text(0, 0.75, "two replicas with different sequences; time goes to the right", **NOTE)
    passes = [(f"F{block}", 1.5, DATA) for block in (1, 2, 3, 4)]
    passes += [(f"B{block}", 3.0, MODEL) for block in (4, 3, 2, 1)]
    buckets = [("blocks 4, 3", 12.0, 5.0), ("blocks 2, 1", 18.0, 5.0)]
    update = buckets[-1][1] + buckets[-1][2] + 0.9
    for replica, top in ((0, 0.0), (1, -3.0)):
        axes.text(-0.6, top - 0.45, f"replica {replica}", ha="right", va="center", size=8)
        left = 0.0
        for name, width, color in passes:
            box_with(axes, (left, top - 0.9), (width, 0.9), color, name)
            left += width
        box_with(axes, (update, top - 0.9), (3.0, 0.9), UPDATE, "update")
    axes.text(-0.6, -1.95, "all-reduce", ha="right", va="center", size=8)
    for name, left, width in buckets:
        box_with(axes, (left, -2.4), (width, 0.9), RANKS, name)
        for start in (-0.9, -3.0):  # of both replicas: its gradients are there
            arrow(axes, (left, start), (left + 0.6, -1.5 if start > -2 else -2.4))
    arrow(axes, (buckets[-1][1] + 5.0, -1.95), (update + 0.02, -0.94))
    arrow(axes, (buckets[-1][1] + 5.0, -1.95), (update + 0.02, -2.96))
    note = "F, B: forward and backward pass of a block; the first bucket is sent while blocks 2 and 1 compute"
    axes.text(0, -4.25, note, **NOTE)
    return figure


def draw_zero() -> Figure:
    """What each of n replicas holds of a model under ZeRO (Rajbhandari et al. 2020, figure 1): float32 training."""
    figure, axes = new_figure(7.2, 2.6, (-13, 133), (-3.5, 1.0))
    parts = [("parameters", DATA), ("gradients", MODEL), ("optimizer's moments", RANKS)]
    widths, share = (20, 20, 40), 1 / 8
    sent = ("2Ψ", "2Ψ", "2Ψ", "3Ψ")
    for stage in range(4):
        left = 0.0
        axes.text(-2, -stage, f"ZeRO-{stage}", ha="right", va="center")
        for number, ((name, color), width) in enumerate(zip(parts, widths, strict=True)):
            held = width * (share if stage >= 3 - number else 1)
            box_with(axes, (left, -stage - 0.3), (held, 0.6), color, name if stage == 0 else "")
            left += held
        formula = " + ".join(f"{n}Ψ/n" if stage >= 3 - i else f"{n}Ψ" for i, n in enumerate((4, 4, 8)))
        axes.text(84, -stage, formula, va="center", size=8)
        axes.text(114, -stage, f"{sent[stage]} (n − 1)/n", va="center", size=8)
    axes.text(0, 0.75, "drawn for Ψ parameters and n = 8 replicas", **NOTE)
    axes.text(84, 0.75, "bytes held", **NOTE)
    axes.text(114, 0.75, "numbers sent", **NOTE)
    return figure


def draw_matrices() -> Figure:
    """The MLP's two products on two tensor-parallel ranks (Shoeybi et al. 2019, figure 3a)."""
    figure, axes = new_figure(7.2, 2.75, (-2, 122), (-24, 22))
    colors = (DATA, RANKS)

    def matrix(left: float, size: tuple[float, float], parts: Sequence[str], by: str, title: str, shape: str) -> None:
        width, height = size
        for number, name in enumerate(parts):
            share = 1 / len(parts)
            color = colors[number] if len(parts) > 1 else MODEL
            if by == "columns":
                box_with(axes, (left + number * width * share, -height / 2), (width * share, height), color, name)
            else:
                box_with(axes, (left, height / 2 - (number + 1) * height * share), (width, height * share), color, name)
        axes.text(left + width / 2, 14.5, title, ha="center", va="center", size=8)
        axes.text(left + width / 2, -14.5, shape, ha="center", va="center", size=7.5, color="#555555")

    tokens, width, inner = 10, 12, 24
    matrix(0, (width, tokens), ["X"], "columns", "features", "T × D")
    matrix(18, (inner, width), ["$A_0$", "$A_1$"], "columns", "up, by columns", "D × F")
    matrix(48, (inner, tokens), ["$Y_0$", "$Y_1$"], "columns", "Y = act(X A)", "T × F")
    matrix(78, (width, inner), ["$B_0$", "$B_1$"], "rows", "down, by rows", "F × D")
    matrix(104, (width, tokens), ["Z"], "columns", "sum over ranks", "T × D")
    for x, sign in ((15, "×"), (45, "="), (75, "×"), (97, "=")):
        axes.text(x, 0, sign, ha="center", va="center", size=11)
    axes.text(0, 20, "blue: rank 0, orange: rank 1, green: on both", **NOTE)
    axes.text(0, -21.5, r"$Z = Y_0 B_0 + Y_1 B_1$: each rank computes one term, of its own columns of Y", **NOTE)
    return figure


def draw_tensor_parallel() -> Figure:
    """The collectives of a block (Shoeybi et al. 2019, figure 4; Korthikanti et al. 2022, figure 5)."""
    figure, axes = new_figure(7.2, 2.8, (-1, 107), (-2.6, 1.05))
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
            box_with(axes, (left, middle - 0.4), (width, 0.8), color, text, 6.5)
            if number + 1 < len(places):
                arrow(axes, (left + width, middle), (left + width + 4, middle))
            left += width + 4
        axes.text(57, middle - 0.6, "heads / n on each rank", ha="center", va="center", size=7, color="#555555")
    return figure


def draw_context(ranks: int = 4) -> Figure:
    """Ring attention in zigzag order: in which step each block of queries meets each block of keys."""
    chunks = 2 * ranks
    figure, axes = new_figure(7.2, 3.3, (-7, 27), (-chunks - 2.2, 1.6))
    holder = [min(chunk, chunks - 1 - chunk) for chunk in range(chunks)]
    axes.text(chunks / 2, 1.2, "chunks of keys, and their rank", ha="center", va="center", size=8)
    for row in range(chunks):
        axes.text(-0.4, -row - 0.5, f"queries {row}, rank {holder[row]}", ha="right", va="center", size=8)
        axes.text(row + 0.5, 0.35, f"{holder[row]}", ha="center", va="center", size=8)
        for column in range(row + 1):
            step = (holder[row] - holder[column]) % ranks
            box_with(axes, (column, -row - 1), (1, 1), RING[step], str(step))
    lines = ["step of the ring in which they meet:", *(f"step {step}" for step in range(ranks))]
    for number, line in enumerate(lines):
        if number:
            box_with(axes, (10, -number - 1.3), (0.8, 0.8), RING[number - 1], str(number - 1))
        axes.text(10 + (number > 0) * 1.2, -number - 0.9, line, va="center", size=8)
    axes.text(10, -6.6, "each rank has two blocks in every step but the first,", **NOTE)
    axes.text(10, -7.3, "in which it has one whole and two halves", **NOTE)
    axes.text(0, -chunks - 1.5, f"{ranks} ranks hold two of {chunks} chunks each; white: later tokens, unseen", **NOTE)
    return figure


def draw_pipeline(ranks: int = 4) -> Figure:
    """1F1B, and with two stages a rank (Narayanan et al. 2021, figure 4): who computes which micro-batch when."""
    figure, axes = new_figure(7.2, 3.9, (-5, 33.6), (-2 * ranks - 3.4, 0.9))
    one = simulate(pipeline_layout("1f1b", ranks, 2 * ranks), [PassCosts()] * ranks)
    two = simulate(pipeline_layout("interleaved-1f1b", ranks, 2 * ranks, 2), [PassCosts(0.5, 0.5, 0.5)] * 2 * ranks)
    timelines = [("1F1B", one), ("interleaved, two stages on each rank", two)]
    shades = {("F", 0): DATA, ("F", 1): "#9fc5e8", ("B", 0): MODEL, ("B", 1): "#a9d18e"}
    for number, (title, timeline) in enumerate(timelines):
        top = -number * (ranks + 1.2)
        bubble = f"bubble {timeline.bubble_ratio:.1%} of the computing time"
        axes.text(0, top + 0.35, f"{title}: {bubble}", size=8, va="center")
        for rank, passes in enumerate(timeline.ranks):
            axes.text(-0.5, top - rank - 0.55, f"rank {rank}", ha="right", va="center", size=8)
            for each in passes:
                color = shades[each.kind, each.stage // ranks]
                corner, size = (each.start, top - rank - 1), (each.end - each.start, 0.92)
                box_with(axes, corner, size, color, str(each.micro_batch + 1), 7 if number == 0 else 5.5)
    bottom, left = -2 * ranks - 2.4, 0.0
    for kind, stage in shades:
        text = {"F": "forward", "B": "backward"}[kind] + ", second stage" * stage
        box_with(axes, (left, bottom - 0.3), (0.9, 0.6), shades[kind, stage], "")
        axes.text(left + 1.3, bottom, text, size=7.5, va="center", color="#555555")
        left += 5.2 if stage == 0 else 8.6
    axes.text(0, bottom - 0.75, "numbers: micro-batches; white: bubble", **NOTE | {"size": 7.5})
    return figure


DRAWN: dict[str, Callable[[], Figure]] = {
    "whole": draw_whole,
    "step": draw_step,
    "data_parallel": draw_data_parallel,
    "local_steps": draw_local_steps,
    "zero": draw_zero,
    "matrices": draw_matrices,
    "tensor_parallel": draw_tensor_parallel,
    "grid": draw_grid,
    "layers": draw_layers,
    "cube": draw_cube,
    "context": draw_context,
    "compression": draw_compression,
    "server": draw_server,
    "recording": draw_recording,
    "first_wrong": draw_first_wrong,
    "pipeline": draw_pipeline,
    "crossings": draw_crossings,
}


def draw_all(folder: Path) -> None:
    """Write every picture to `folder`, the same bytes each time."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_STYLE):
        for name, draw in DRAWN.items():
            draw().savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    draw_all(PICTURES)
