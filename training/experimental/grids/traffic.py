"""Traffic of grids and cubes: the blocks that a rank has, and what its modules and gradients send in a step."""

from training.experimental.grids.cube_traffic import CubeTraffic, cube_parameters, summed_parameters
from training.experimental.grids.grid_traffic import GridSizes, GridTraffic, Passes, grid_parameters
from training.experimental.grids.options import GridOptions
from training.model.model_config import ModelConfig
from training.parallel.parameter_shapes import ParameterShape, stage_parameters
from training.parallel.traffic_inputs import Formulas, Traffic, TrafficInputs, Volume, add_traffic


class GridFormulas(Formulas):
    """Those of tensor parallelism by blocks of every matrix."""

    def __init__(self, layout: GridOptions) -> None:
        self.layout, self.is_cube, self.side = layout, layout.tensor == "3d", layout.grid[1]

    def parameters(self, model: ModelConfig, layers: range, stage: int, tp_rank: int) -> list[ParameterShape]:
        place = GridSizes(model, self.side, *self._place(tp_rank), tokens=0, itemsize=0, wide=0)
        cut = cube_parameters if self.is_cube else grid_parameters
        return list(cut(place, stage_parameters(model, layers, stage == 0, stage == self.layout.stages - 1)))

    def tensor_traffic(self, inputs: TrafficInputs) -> Traffic:
        return add_traffic([self._modules(inputs), self._gradients(inputs)])

    def _place(self, tp_rank: int) -> tuple[int, int]:
        """Row and column of a tensor-parallel rank."""
        return tp_rank // self.side % self.side, tp_rank % self.side

    def _modules(self, inputs: TrafficInputs) -> Traffic:
        """What each module communicates, times the passes."""
        times = self.layout.micro_batches
        sequences = inputs.sequences // (times * self.layout.batch_shards)
        place = self._place(inputs.rank.tp)
        tokens = sequences * inputs.seq_len
        sizes = GridSizes(inputs.config, self.side, *place, tokens, inputs.itemsize, inputs.wide, sequences)
        found = CubeTraffic(sizes) if self.is_cube else GridTraffic(sizes)
        for stage in inputs.stages:
            layers, recomputed = len(inputs.stage_layers[stage]), inputs.recomputations(stage)
            begun = inputs.backward_passes(stage)
            found.blocks(Passes(layers * (times + recomputed), layers * times, layers * begun))
            if stage == self.layout.stages - 1:
                found.norms(1, times, times)
                found.output(Passes(times, times, begun))
                if inputs.config.query_layer and isinstance(found, GridTraffic):
                    found.learned_queries(inputs.seq_len, times, times, recomputed)
        if inputs.holds_stage(0):
            found.embedding(times)
            found.norms(bool(inputs.config.embed_norm), times, times)
        return {key: Volume(calls, found.bytes[key]) for key, calls in found.calls.items()}

    def _gradients(self, inputs: TrafficInputs) -> Traffic:
        """Layers of a grid sum the gradients of all that they have, rows those of vectors; columns of head norms.

        Products of a cube sum the gradients of matrices over layers, and columns of a cube those of inner biases.
        """
        every = [p for stage in inputs.parameters.values() for p in stage]
        return {
            (axis, "all-reduce"): Volume(bool(summed), sum(inputs.own_numel(p) for p in summed) * inputs.wide)
            for axis, summed in summed_parameters(every, self.is_cube, self.layout.depth).items()
        }
