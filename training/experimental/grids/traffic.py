"""Traffic of grids and cubes: the blocks that a rank has, and what its modules and gradients send in a step."""

from dataclasses import replace

from training.experimental.grids.cube_traffic import CubeTraffic
from training.experimental.grids.grid_traffic import GridSizes, GridTraffic, Passes, vocabulary_part
from training.experimental.grids.options import GridOptions
from training.model.model_config import ModelConfig
from training.parallel.parameter_shapes import ParameterShape, stage_parameters
from training.parallel.traffic_inputs import Formulas, Traffic, TrafficInputs, Volume, add_traffic

_INNER_BIASES = tuple(f".{name}.bias" for name in ("q", "k", "v", "gate", "up"))


class GridFormulas(Formulas):
    """Those of tensor parallelism by blocks of every matrix."""

    def __init__(self, layout: GridOptions) -> None:
        self.layout, self.is_cube, self.side = layout, layout.tensor == "3d", layout.grid[1]

    def parameters(self, model: ModelConfig, layers: range, stage: int, tp_rank: int) -> list[ParameterShape]:
        row, column = self._place(tp_rank)
        ids = vocabulary_part(model, self.side, row if self.is_cube else column)
        every = stage_parameters(model, layers, stage == 0, stage == self.layout.stages - 1)
        return [self._block(p, ids) for p in every]

    def _block(self, p: ParameterShape, ids: int) -> ParameterShape:
        """The block of a parameter that a rank has; of the vocabulary so many `ids`."""
        side, (rows, *inputs) = self.side, p.shape
        if not inputs:
            return p if p.of_heads else replace(p, shape=(rows // side,))
        if p.name.endswith(("positions.weight", "query.weight")):
            return replace(p, shape=(rows, inputs[0] // side), of_heads=False)
        part = ids if p.name in ("embed.tokens.weight", "head.weight") else rows // side
        return replace(p, shape=(part, inputs[0] // (side**2 if self.is_cube else side)), divided=True)

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
        vectors = [p for p in every if not p.divided]
        # biases of products away from the residual stream, which a cube divides over rows
        inner = [p for p in vectors if self.is_cube and p.name.endswith(_INNER_BIASES)]
        summed = {
            "depth": vectors if self.is_cube else every if self.layout.depth > 1 else [],
            "row": [p for p in vectors if p not in inner],
            "column": inner + [p for p in vectors if p.of_heads],
        }
        return {
            (axis, "all-reduce"): Volume(bool(found), sum(map(inputs.own_numel, found)) * inputs.wide)
            for axis, found in summed.items()
        }
