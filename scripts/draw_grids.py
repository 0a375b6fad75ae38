"""Draw grids and cubes of ranks, and where ways of dividing a layer cross, by the planner's model.

python scripts/draw_pictures.py draws them with the others; python scripts/draw_grids.py prints the crossings' figures.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

from matplotlib.figure import Figure

from gristmill_planner.break_even import layer_seconds
from gristmill_planner.fitted_constants import fitted_constants
from gristmill_planner.hardware import find_device
from scripts.drawing import DATA, MODEL, NOTE, RANKS, arrow, box_with, new_figure
from training.model.model_config import ModelConfig

_COLORS = {
    "1D": "#444444",
    "2D": "#0072B2",
    "2.5D": "#56B4E9",
    "3D": "#009E73",
    "ring": "#D55E00",
    "Ulysses": "#CC79A7",
}
_GPU, _SEQUENCES, _USUAL = "h100", 16, 4096
_RANKS = (4, 8, 16, 32, 64)
_LENGTHS = tuple(2**n for n in range(11, 18))
_OF_LENGTHS = 64  # ranks over which sequences of each length are divided
_MODEL = ModelConfig(preset="llama", layers=80, width=8192, heads=64, kv_heads=64, ffn_width=28672, context=1 << 20)


def draw_grid(side: int = 3, turn: int = 1) -> Figure:
    """One round of SUMMA, the product of tensor parallelism on a grid (Xu et al. 2021, Optimus, algorithm 1)."""
    figure, axes = new_figure(7.2, 2.9, (-3, 119), (-26, 23))
    block = 9
    blocks = [
        (0, "X", "features: tokens by rows", [(i, turn) for i in range(side)]),
        (43, "A", "matrix: inputs by rows", [(turn, j) for j in range(side)]),
        (86, "Y", "Y = X A", []),
    ]
    for left, name, title, sent in blocks:
        axes.text(left + side * block / 2, 17, title, ha="center", va="center", size=8)
        for i in range(side):
            for j in range(side):
                color = RANKS if (i, j) in sent else MODEL if name == "Y" else DATA
                corner = (left + j * block, (side / 2 - i - 1) * block)
                box_with(axes, corner, (block, block), color, f"${name}_{{{i}{j}}}$")
    for x, sign in ((35, "×"), (78, "→")):
        axes.text(x, 0, sign, ha="center", va="center", size=12)
    middle = (turn + 0.5) * block
    for i in range(side):  # along the rows of X, and the columns of A
        y = (side / 2 - i - 0.82) * block
        arrow(axes, (middle + 3, y), (side * block - 1.5, y))
        arrow(axes, (middle - 3, y), (1.5, y))
    for j in range(side):
        x = 43 + (j + 0.85) * block
        arrow(axes, (x, 3), (x, side * block / 2 - 1.2))
        arrow(axes, (x, -3), (x, -side * block / 2 + 1.2))
    axes.text(
        0, 21.5, f"round {turn} of {side}, from 0; each rank of a grid of {side} × {side} holds one block", **NOTE
    )
    text = (
        rf"orange blocks are broadcast as the arrows show; rank (i, j) adds $X_{{i{turn}}} A_{{{turn}j}}$ to $Y_{{ij}}$"
    )
    axes.text(0, -22, text, **NOTE)
    return figure


def draw_layers(depth: int = 2, side: int = 2) -> Figure:
    """What the layers of a 2.5D grid hold of a product, and what they sum (Wang et al. 2021)."""
    figure, axes = new_figure(7.2, 3.1, (-4, 123), (-36, 25))
    width, height = 8.5, 9.5
    tensors = (
        (0, "X", "$t_{{{k}{i}}}$  $f_{{{j}}}$", DATA),
        (42, "W", "$f_{{{i}}}$  $o_{{{j}}}$", RANKS),
        (84, "Y", "$t_{{{k}{i}}}$  $o_{{{j}}}$", MODEL),
    )
    for left, name, block, color in tensors:
        axes.text(left + side * width, 22, name, ha="center", va="center", size=10)
        for k in range(depth):
            at = left + k * (side * width + 2)
            axes.text(at + side * width / 2, 16.5, f"layer {k}", ha="center", va="center", size=7.5, color="#555555")
            for i in range(side):
                for j in range(side):
                    text = block.format(k=k, i=i, j=j)
                    box_with(axes, (at + j * width, 3.5 - i * height), (width, height), color, text, 7)
    for x, sign in ((39, "×"), (81, "→")):
        axes.text(x, 3.5, sign, ha="center", va="center", size=12)
    middle, below = 42 + side * width / 2, -13.5
    arrow(axes, (middle + side * width, -8), (middle, below))
    arrow(axes, (middle, -8), (middle + side * width, below))
    axes.text(42 + side * width + 1, below - 2.5, "gradients: summed once a step", ha="center", va="center", size=8)
    for line, text in enumerate((
        f"rank (k, i, j): layer, row, column of {depth} × {side} × {side}; t: tokens, f: features of X, o: of Y",
        "each layer multiplies its tokens as a 2D grid of its own; W is the same on all",
    )):  # fmt: skip
        axes.text(0, -24 - 6 * line, text, **NOTE)
    return figure


def draw_cube(side: int = 2) -> Figure:
    """What the ranks of a cube hold of a 3D product, and along which axis (Bian et al. 2021)."""
    figure, axes = new_figure(7.2, 3.1, (-4, 123), (-34, 25))
    width, height = 8.5, 9.5
    tensors = (
        (0, "X", "$t_{{{k}{i}}}$  $f_{{{j}}}$", DATA, "gathered along i"),
        (42, "W", "$o_{{{i}}}$  $n_{{{j}{k}}}$", RANKS, "gathered along k"),
        (84, "Y", "$t_{{{k}{j}}}$  $o_{{{i}}}$", MODEL, "summed along j"),
    )
    for left, name, block, color, moved in tensors:
        axes.text(left + side * width, 22, name, ha="center", va="center", size=10)
        for k in range(side):
            at = left + k * (side * width + 2)
            axes.text(at + side * width / 2, 16.5, f"layer {k}", ha="center", va="center", size=7.5, color="#555555")
            for i in range(side):
                for j in range(side):
                    text = block.format(k=k, i=i, j=j)
                    box_with(axes, (at + j * width, 3.5 - i * height), (width, height), color, text, 7)
        axes.text(left + side * width + 1, -11, moved, ha="center", va="center", size=8)
    for x, sign in ((39, "×"), (81, "→")):
        axes.text(x, 3.5, sign, ha="center", va="center", size=12)
    for line, text in enumerate((
        f"rank (k, i, j): layer, row, column of {side} × {side} × {side}; t: tokens, f and n: features of X, o: of Y",
        "Y has the tokens of (k, j) and the features of i; the next product takes rows and columns back",
    )):  # fmt: skip
        axes.text(0, -20 - 6 * line, text, **NOTE)
    return figure


def draw_crossings() -> Figure:
    """Times of a layer relative to 1D: over more ranks, and for longer sequences."""
    figure = Figure(figsize=(7.2, 3.3), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _lines(left, _RANKS, [(ranks, _USUAL) for ranks in _RANKS])
    left.set(xlabel="ranks, in nodes of 8", ylabel="seconds of a layer / those of 1D")
    left.set_title(f"sequences of {_USUAL:,} tokens", size=8)
    left.axvline(8, color="#bbbbbb", linewidth=0.8, linestyle=":")
    _lines(right, _LENGTHS, [(_OF_LENGTHS, length) for length in _LENGTHS])
    right.set(xlabel="tokens of a sequence")
    right.set_title(f"{_OF_LENGTHS} ranks", size=8)
    for axes in (left, right):
        axes.set_ylim(0, 2)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return figure


def _lines(axes: Any, across: Sequence[int], places: Sequence[tuple[int, int]]) -> None:
    """A line for each division: at each place (ranks, tokens) its time relative to 1D's."""
    times = [seconds(*place) for place in places]
    for name, color in _COLORS.items():
        points = [(x, time[name][0] / time["1D"][0]) for x, time in zip(across, times, strict=True) if name in time]
        axes.plot(*zip(*points, strict=True), "o-", color=color, label=name, markersize=3, linewidth=1.3)
    axes.set_xscale("log", base=2)
    axes.set_xticks(across, [f"{x // 1024}k" if x >= 1024 else str(x) for x in across], size=8)


def seconds(ranks: int, seq_len: int) -> dict[str, tuple[float, float]]:
    """Of a layer of 2.8 billion numbers and a micro-batch, by name of the division."""
    model = _MODEL.resolve(128_256, seq_len)
    return layer_seconds(model, find_device(_GPU), ranks, _SEQUENCES, seq_len, fitted_constants())


def main() -> None:
    """Print the milliseconds of both panels, and the share of collectives that nothing hides."""
    for place in [(ranks, _USUAL) for ranks in _RANKS] + [(_OF_LENGTHS, length) for length in _LENGTHS]:
        cells = [
            f"{name} {1e3 * whole:.1f} ({100 * sent / whole:.0f} %)" for name, (whole, sent) in seconds(*place).items()
        ]
        print("{} ranks, {:,} tokens:".format(*place), ", ".join(cells))


if __name__ == "__main__":
    main()
