"""A grid or a cube takes over the axes of the tensor-parallel ranks, the placements and the modules."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from training.experimental.grids.options import GridOptions
from training.experimental.grids.traffic import GridFormulas

if TYPE_CHECKING:  # options are read without torch
    from training.model.decoder import Decoder
    from training.sharding.axis import Axes
    from training.sharding.placement import Placement
    from training.sharding.shard_spec import ShardSpec


class GridExperiment(GridFormulas):
    """Tensor parallelism by blocks of every matrix instead of rows or columns."""

    batch_axes = ("depth", "row")

    def __init__(self, layout: GridOptions) -> None:
        super().__init__(layout)
        self.tp_axes = dict(zip(("depth", "row", "column"), layout.grid, strict=True))
        self.vocabulary_axis = "row" if self.is_cube else "column"

    def placements(self) -> "dict[str, Placement]":
        from training.experimental.grids.placements import cube_table, grid_table

        return cube_table() if self.is_cube else grid_table()

    def shard_modules(self, part: "Decoder", pieces: "Mapping[str, ShardSpec]", axes: "Axes") -> bool:
        from training.experimental.grids.cube_modules import apply_cube
        from training.experimental.grids.grid_modules import apply_grid
        from training.experimental.grids.summa import Grid

        if self.is_cube:
            apply_cube(part, pieces, Grid.of(axes), axes["depth"])
        else:
            apply_grid(part, pieces, Grid.of(axes))
        return True
