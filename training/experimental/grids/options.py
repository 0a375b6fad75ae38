"""Options of grids and cubes of tensor-parallel ranks, and the check that a model fits one."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from gristmill.config import Range
from gristmill.errors import require
from training.model.model_config import ModelConfig
from training.parallel.layout import Layout
from training.parallel.size_error import require_size
from training.parallel.tensor.options import possible_sizes


@dataclass(frozen=True)
class GridOptions(Layout):
    """A layout whose tensor-parallel ranks may form a grid or a cube."""

    tensor: Literal["1d", "2d", "2.5d", "3d"] = field(default="1d", repr=False)
    """How tp ranks divide matrices: 1d, by rows or columns; 2d, into blocks on a grid of q x q ranks (Xu et al. 2021,
    Optimus); 2.5d, on `depth` layers of such a grid, between which sequences are divided (Wang et al. 2021,
    Tesseract); 3d, on a cube of l x l x l ranks (Bian et al. 2021)."""
    depth: int = field(default=1, repr=False)
    """For 2.5d: layers of the grid; tp is q x q x depth."""
    RANGES: ClassVar[dict[str, Range]] = {**Layout.RANGES, "depth": Range(1, 2**31 - 1)}

    @property
    def on_grid(self) -> bool:
        """Return True on a grid or a cube."""
        return self.tensor != "1d"

    @property
    def grid(self) -> tuple[int, int, int]:
        """Return the depth, rows and columns of the grid of tensor-parallel ranks; 1, 1, 1 without one."""
        if self.tensor == "3d":
            side = round(self.tp ** (1 / 3))
            return side, side, side
        side = math.isqrt(self.tp // self.depth) if self.on_grid else 1
        return (self.depth if self.on_grid else 1), side, side

    @property
    def batch_shards(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def feature_shards(self) -> int:
        return self.grid[2]

    def describe_tensor(self) -> list[str]:
        grid = f" ({self.tensor}, {' x '.join(map(str, self.grid))})"
        return [f"tp {self.tp}{grid}"] if self.on_grid and self.tp > 1 else super().describe_tensor()

    def unused(self) -> set[str]:
        return super().unused() | (set() if self.on_grid else {"tensor", "depth"})

    def check_tensor(self, model: ModelConfig, seq_len: int) -> None:
        if not self.on_grid:
            require(self.depth == 1, f"parallel.depth {self.depth} with parallel.tensor 1d; try --parallel.tensor 2.5d")
            super().check_tensor(model, seq_len)
            return
        _check_ranks(self)
        require(
            not model.own_names,
            f"{' and '.join(model.own_names)} with parallel.tensor {self.tensor}: parts of yours are not divided on a "
            "grid; try --parallel.tensor 1d",
        )
        require(
            not model.experts,
            f"model.experts {model.experts} and parallel.tensor {self.tensor}: experts are not divided on a grid; "
            "try --parallel.tensor 1d",
        )
        require(
            not model.kv_lora_rank,
            f"model.kv_lora_rank {model.kv_lora_rank} and parallel.tensor {self.tensor}: latent attention is not "
            "divided on a grid; try --parallel.tensor 1d",
        )
        require(
            not model.sinks,
            f"model.sinks and parallel.tensor {self.tensor}: they are not divided on a grid; try --parallel.tensor 1d",
        )
        _check_sizes(self, model)
        require(
            self.cp == 1,
            f"parallel.cp {self.cp} and parallel.tensor {self.tensor}: a grid divides sequences among its rows, and "
            "not yet their tokens; try --parallel.tensor 1d",
        )

    def check_run(self, precision: str, recompute: str, compiled: bool) -> None:
        super().check_run(precision, recompute, compiled)
        require(
            not self.on_grid or not compiled,
            f"compile and parallel.tensor {self.tensor}: blocks whose products broadcast are not compiled yet; "
            "try --compile false, or --parallel.tensor 1d",
        )
        require(
            not self.on_grid or recompute != "selective",
            f"memory.recompute selective and parallel.tensor {self.tensor}: it keeps the results of products, and on "
            "a grid a product is several that are added up; try --memory.recompute full, or --parallel.tensor 1d",
        )


def _check_ranks(layout: GridOptions) -> None:
    tensor = layout.tensor
    tp = layout.tp
    depth = layout.depth
    require(
        (depth > 1) == (tensor == "2.5d"),
        f"parallel.depth {depth} with parallel.tensor {tensor}: a 2d grid has one layer, a 2.5d one two or more, and "
        "a 3d one as many as rows; try "
        + ("--parallel.tensor 2.5d" if depth > 1 else "--parallel.tensor 2d, or --parallel.depth 2 with 8 ranks"),
    )
    cube = tensor == "3d"
    side = max(2, layout.grid[1])
    expected = side**3 if cube else depth * side * side
    kind = "cube of l x l x l ranks" if cube else f"grid of q x q ranks times parallel.depth {depth}"
    sides = [*range(side, 1, -1), side + 1]
    sizes = [size**3 if cube else depth * size * size for size in sides]
    require_size(tp == expected, f"parallel.tp {tp} is no {kind}", "tp", sizes, "--parallel.tensor 1d")
    require(
        not layout.sequence_parallel,
        f"parallel.sequence_parallel with parallel.tensor {tensor}: a grid divides all activations already; "
        "try --parallel.sequence_parallel false",
    )


def _check_sizes(layout: GridOptions, model: ModelConfig) -> None:
    side = layout.grid[1]
    inputs = side * side if layout.tensor == "3d" else side  # of matrices, which layers of a cube divide once more
    heads = inputs if model.q_width % inputs else side
    parts = {"heads": heads, "kv_heads": side, "width": inputs, "ffn_width": inputs}
    for name, count in parts.items():
        size = getattr(model, name)
        require(
            size % count == 0,
            f"model.{name} {size} is not divisible by {count}, as {layout.tensor} on parallel.tp {layout.tp} ranks "
            f"divides it; try {_sizes_that_fit(model, parts)}, or {_without_grid(layout, model)}",
        )
    require(
        model.vocab_size >= side * side,
        f"a vocabulary of {model.vocab_size} is too small for a grid of {side} columns; "
        f"try {_without_grid(layout, model)}",
    )


def _sizes_that_fit(model: ModelConfig, parts: dict[str, int]) -> str:
    """Return options that make each size divisible by its `parts`, by as little as heads and their features allow."""
    kv_heads = _multiple(model.kv_heads, parts["kv_heads"])
    heads = _multiple(model.heads, math.lcm(parts["heads"], kv_heads))
    is_given = model.head_dim * model.heads != model.width
    features = 1 if is_given else 2 * heads  # an even number a head, as rotary positions need
    width = _multiple(model.width, math.lcm(parts["width"], features))
    sizes = {"heads": heads, "kv_heads": kv_heads, "width": width}
    sizes["ffn_width"] = _multiple(model.ffn_width, parts["ffn_width"])
    changed = {name for name, size in sizes.items() if size != getattr(model, name)}
    # defaults that follow from another size
    changed |= {"ffn_width"} if "width" in changed else set()
    changed |= {"kv_heads"} if "heads" in changed else set()
    return " ".join(f"--model.{name} {size}" for name, size in sizes.items() if name in changed)


def _without_grid(layout: GridOptions, model: ModelConfig) -> str:
    """Return the options of 1d on as many of the ranks as divide the model."""
    tp = max(n for n in possible_sizes(model) if layout.tp % n == 0)
    depth = " --parallel.depth 1" if layout.depth > 1 else ""
    return f"--parallel.tensor 1d{depth} --parallel.tp {tp}"


def _multiple(size: int, parts: int) -> int:
    return -(-size // parts) * parts
