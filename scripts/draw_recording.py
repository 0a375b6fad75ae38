"""The pictures of recordings: docs/pictures/recording.svg and first_wrong.svg; draw_pictures.py draws them."""

from matplotlib.figure import Figure

from scripts.drawing import DATA, LINE, MODEL, NOTE, RANKS, UPDATE, arrow, box_with, new_figure

_WRONG = "#f4c7c3"
_ORDER = (
    ("embed output", DATA), ("block 0 output", MODEL), ("block 1 output", MODEL), ("head output", MODEL),
    ("head output\ngradient", RANKS), ("block 1 output\ngradient", RANKS), ("block 0 output\ngradient", RANKS),
    ("own\ngradients", RANKS), ("summed\ngradients", UPDATE), ("weights", UPDATE),
)  # fmt: skip
_FIRST_WRONG = 6


def draw_recording() -> Figure:
    """Pieces of one tensor on four ranks, put together by their placement, beside the reference's tensor."""
    figure, axes = new_figure(7.2, 2.5, (0, 100), (0, 34))
    for rank, corner in enumerate(((3, 19), (15, 19), (3, 8), (15, 8))):
        half = "left" if rank % 2 == 0 else "right"
        rows = "0, 1" if rank < 2 else "2, 3"
        box_with(axes, corner, (11, 9), RANKS, f"rank {rank}\nsequences {rows}\n{half} features", 6.5)
    axes.text(3, 31, "what each rank records", **NOTE)
    arrow(axes, (28, 18), (37, 18))
    axes.text(28.2, 21, "placement", size=7.5)
    box_with(axes, (38, 8), (20, 20), MODEL, "the whole tensor\nof four ranks", 8)
    box_with(axes, (75, 8), (20, 20), DATA, "the reference's\ntensor, float64", 8)
    axes.annotate("", (74, 18), (59, 18), arrowprops={"arrowstyle": "<|-|>", "color": LINE, "lw": 0.8})
    axes.text(66.5, 20.5, "further apart than\nrounding explains?", size=7, ha="center")
    note = 'here {"dp": Shard(0), "tp": Shard(2)}; terms of a sum are added, copies are compared one by one'
    axes.text(3, 3.5, note, **NOTE)
    return figure


def draw_first_wrong() -> Figure:
    """The tensors of a step in order of computation: the first wrong one is the cause, later ones follow from it."""
    figure, axes = new_figure(7.2, 1.9, (0, 10.4), (-0.5, 2.2))
    for number, (name, color) in enumerate(_ORDER):
        is_wrong = number >= _FIRST_WRONG
        box_with(axes, (number * 1.04 + 0.05, 0.5), (0.94, 0.9), _WRONG if is_wrong else color, name, 5.2)
    x = _FIRST_WRONG * 1.04 + 0.5
    arrow(axes, (x, 2.0), (x, 1.42))
    axes.text(x - 0.15, 1.95, "the first wrong tensor: look here", ha="right", va="center", size=8)
    axes.text(0.05, 0.1, "as in the reference", **NOTE)
    axes.text(x - 0.4, 0.1, "wrong, as what came before was", **NOTE)
    return figure
