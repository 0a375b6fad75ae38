"""Rank parameters: the blocks of a pipeline stage's parameters that one tensor-parallel rank holds, of any layout."""

from training.model.model_config import ModelConfig
from training.parallel.grid.cube_traffic import cube_parameters
from training.parallel.grid.traffic import GridSizes, grid_parameters
from training.parallel.layout import ParallelConfig
from training.parallel.parameter_shapes import ParameterShape, stage_parameters


def rank_parameters(
    model: ModelConfig, layout: ParallelConfig, layers: range, stage: int, tp_rank: int = 0
) -> list[ParameterShape]:
    """Parameters of a stage, in the order of the forward pass; of a vocabulary rank 0 has the most."""
    ends = stage == 0, stage == layout.stages - 1
    if layout.tensor == "1d":
        return stage_parameters(model, layers, *ends, layout.tp, tp_rank)
    side = layout.grid[1]
    place = GridSizes(model, side, tp_rank // side % side, tp_rank % side, tokens=0, itemsize=0, wide=0)
    cut = cube_parameters if layout.tensor == "3d" else grid_parameters
    return list(cut(place, stage_parameters(model, layers, *ends)))
