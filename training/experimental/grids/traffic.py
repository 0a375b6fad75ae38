"""Traffic of grids and cubes: the blocks that a rank has, and what its modules and gradients send in a step.

On a grid (2D, 2.5D): for X of n x h and W of h x h' on q x q ranks a product, or one of its two gradients, is q
collectives of X's block and q of W's; (q - 1) / q of their elements come from, or go to, other ranks: (q - 1) (n h + h
h') / q^2 (Xu et al. 2021, table 1). In 2.5D n is the tokens of one layer of the grid (Wang et al. 2021).

On a cube (3D) of l x l x l ranks a product gathers X's block and W's, and reduce-scatters Y's: of each gathered tensor
(l - 1) / l comes from other ranks, (l - 1) (n h + h h' + n h') / l^3 in all (Bian et al. 2021).
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace

from training.experimental.grids.options import GridOptions
from training.model.model_config import ModelConfig
from training.parallel.experiment import Experiment
from training.parallel.parameter_shapes import ParameterShape, stage_parameters
from training.parallel.traffic_inputs import Traffic, TrafficInputs, Volume, add_traffic

_INT64 = 8
_INNER_BIASES = tuple(f".{name}.bias" for name in ("q", "k", "v", "gate", "up"))


@dataclass(frozen=True)
class GridSizes:
    """A model on one rank of a grid: `side` q, `row` i and `column` j; `tokens` of a micro-batch that its row has."""

    model: ModelConfig
    side: int
    row: int
    column: int
    tokens: int
    itemsize: int
    """Bytes of an element of activations and weights."""
    wide: int
    """Bytes of a statistic."""
    sequences: int = 0
    """Of a micro-batch that its row has."""


@dataclass(frozen=True)
class Passes:
    """How often something is computed."""

    forward: int
    backward: int
    begun: int
    """Backward passes: one for the gradients of inputs and one for those of weights are two."""


@dataclass
class ModuleTraffic:
    """Calls and bytes by axis and operation."""

    sizes: GridSizes
    volumes: Traffic = field(default_factory=lambda: defaultdict(lambda: Volume(0, 0)))

    def add(self, axis: str, operation: str, calls: int, size: int) -> None:
        """Add so many calls, of `size` bytes together."""
        self.volumes[axis, operation] += Volume(calls, size)

    def norms(self, count: int, forward: int, backward: int) -> None:
        """Norms of the stream: one statistic a token, of LayerNorm two; backward as many, at once."""
        each = 1 if self.sizes.model.norm == "rms" else 2
        numbers = count * each * (forward + backward) * self.sizes.tokens
        self.add("column", "all-reduce", count * (each * forward + backward), numbers * self.sizes.wide)


class GridTraffic(ModuleTraffic):
    """Traffic of a rank of a grid."""

    def blocks(self, passes: Passes) -> None:
        """Transformer layers."""
        model = self.sizes.model
        forward = passes.forward
        backward = passes.backward
        width = model.width
        queries = model.q_width
        keys = 2 * model.kv_width
        for inputs, outputs in (
            (width, queries + keys),
            (queries, width),
            (width, model.ffn_width * (2 if model.is_gated else 1)),
            (model.ffn_width, width),
        ):
            self.product(inputs, outputs // self.sizes.side, forward, backward)
        self.norms(2, forward, backward)

    def learned_queries(self, seq_len: int, forward: int, backward: int, recomputed: int) -> None:
        """Count what a query layer has in addition to any other's: a product for its queries, one for each position.

        Its first norm is that of the decoder's end, and is repeated with it.
        """
        own = GridTraffic(replace(self.sizes, tokens=seq_len), self.volumes)
        own.product(self.sizes.model.width, 0, forward + recomputed, backward)
        self.norms(1, recomputed, 0)

    def product(self, inputs: int, outputs: int, forward: int, backward: int) -> None:
        """A product with weights of `inputs` and this column's `outputs`, so many times, and its two gradients."""
        sizes = self.sizes
        q = self.sizes.side
        x = sizes.tokens * (inputs // q) * sizes.itemsize
        w = inputs // q * outputs * sizes.itemsize
        times = q * (forward + backward)
        self.add("column", "broadcast", times, times * x)
        self.add("row", "broadcast", times, times * w)
        self.add("column", "reduce", q * backward, q * backward * x)
        self.add("row", "reduce", q * backward, q * backward * w)

    def embedding(self, times: int) -> None:
        """The embedding and its gradient: the tokens' ids, then features between ranks of a row, and transposed."""
        sizes = self.sizes
        q = self.sizes.side
        features = times * sizes.tokens * (sizes.model.width // q) * sizes.itemsize
        self.add("row", "all-gather", times, times * q * sizes.tokens * _INT64)
        self.add("column", "reduce-scatter", times, q * features)
        self.add("column", "all-gather", times, q * features)
        if sizes.row != sizes.column:
            self.add("tp", "send", 2 * times, 2 * features)
            self.add("tp", "receive", 2 * times, 2 * features)

    def output(self, passes: Passes) -> None:
        """The output matrix, and three numbers a token of the loss in two calls."""
        sizes = self.sizes
        times = passes.backward
        self.product(sizes.model.width, _vocabulary_part(sizes.model, sizes.side, sizes.column), times, times)
        self.add("column", "all-reduce", 2 * times, 3 * times * sizes.tokens * sizes.wide)


class CubeTraffic(ModuleTraffic):
    """Traffic of a rank of a cube; its sizes are those of its layer's grid."""

    def blocks(self, passes: Passes) -> None:
        """Transformer layers; attention exchanges the ids of sequences, if dropout needs them."""
        model = self.sizes.model
        side = self.sizes.side
        width = model.width
        queries = model.q_width
        hidden = model.ffn_width
        self.turn("column", "row", width, (queries + 2 * model.kv_width) // side, passes)
        self.turn("row", "column", queries, width // side, passes)
        self.turn("column", "row", width, hidden * (2 if model.is_gated else 1) // side, passes)
        self.turn("row", "column", hidden, width // side, passes)
        self.norms(2, passes.forward, passes.backward)
        if model.dropout:
            self.exchange(passes.forward, self.sizes.sequences * _INT64)

    def turn(self, into: str, out: str, inputs: int, outputs: int, passes: Passes) -> None:
        """A product of features of axis `into`, `inputs` of all, to `outputs` of this rank along axis `out`."""
        sizes = self.sizes
        side = self.sizes.side
        forward = passes.forward
        backward = passes.backward
        x = sizes.tokens * inputs * sizes.itemsize  # gathered
        w = inputs // side * outputs * sizes.itemsize
        y = sizes.tokens * side * outputs * sizes.itemsize
        self.add(out, "all-gather", forward + backward, (forward + backward) * x)
        self.add("depth", "all-gather", forward + backward, (forward + backward) * w)
        self.add(into, "reduce-scatter", forward, forward * y)
        self.add(into, "all-gather", passes.begun, passes.begun * y)
        self.add(out, "reduce-scatter", backward, backward * x)
        self.add("depth", "reduce-scatter", backward, backward * w)

    def embedding(self, times: int) -> None:
        """The tokens' ids and the matrix's features are gathered, and what is looked up summed; and the gradients."""
        sizes = self.sizes
        features = times * sizes.tokens * sizes.model.width * sizes.itemsize
        matrix = times * self._ids * (sizes.model.width // sizes.side) * sizes.itemsize
        self.add("row", "all-gather", 2 * times, times * sizes.side * sizes.tokens * _INT64 + features)
        self.add("row", "reduce-scatter", times, features)
        self.add("depth", "all-gather", times, matrix)
        self.add("depth", "reduce-scatter", times, matrix)

    def output(self, passes: Passes) -> None:
        """The output matrix and the loss, whose targets are those of other sequences."""
        sizes = self.sizes
        times = passes.backward
        self.turn("column", "row", sizes.model.width, self._ids, passes)
        self.add("row", "all-reduce", 2 * times, 3 * times * sizes.tokens * sizes.wide)
        self.exchange(times, sizes.tokens * _INT64)

    def exchange(self, times: int, size: int) -> None:
        """A tensor of `size` bytes for that of the rank that is this one with row and column exchanged."""
        if self.sizes.row != self.sizes.column:
            self.add("tp", "send", times, times * size)
            self.add("tp", "receive", times, times * size)

    @property
    def _ids(self) -> int:
        return _vocabulary_part(self.sizes.model, self.sizes.side, self.sizes.row)


def _vocabulary_part(model: ModelConfig, side: int, index: int) -> int:
    """Return the ids of a grid's column, or of a cube's row; the last one may have fewer."""
    part = -(-model.vocab_size // side)
    return min(part, model.vocab_size - index * part)


class GridFormulas(Experiment):
    """The formulas of tensor parallelism by blocks of every matrix."""

    def __init__(self, layout: GridOptions) -> None:
        self.layout = layout
        self.is_cube = layout.tensor == "3d"
        self.side = layout.grid[1]

    def parameters(self, model: ModelConfig, layers: range, stage: int, tp_rank: int) -> list[ParameterShape]:
        row, column = self._place(tp_rank)
        ids = _vocabulary_part(model, self.side, row if self.is_cube else column)
        every = stage_parameters(model, layers, stage == 0, stage == self.layout.stages - 1)
        return [self._block(p, ids) for p in every]

    def _block(self, p: ParameterShape, ids: int) -> ParameterShape:
        """Return the block of a parameter that a rank has; of the vocabulary so many `ids`."""
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
        """Return the traffic of each module, times the passes."""
        times = self.layout.micro_batches
        sequences = inputs.sequences // (times * self.layout.batch_shards)
        coordinates = self._place(inputs.rank["tp"])
        tokens = sequences * inputs.seq_len
        sizes = GridSizes(inputs.config, self.side, *coordinates, tokens, inputs.itemsize, inputs.wide, sequences)
        traffic = CubeTraffic(sizes) if self.is_cube else GridTraffic(sizes)
        for stage in inputs.stages:
            layers = len(inputs.stage_layers[stage])
            recomputed = inputs.recomputations(stage)
            begun = inputs.backward_passes(stage)
            traffic.blocks(Passes(layers * (times + recomputed), layers * times, layers * begun))
            if stage == self.layout.stages - 1:
                traffic.norms(1, times, times)
                traffic.output(Passes(times, times, begun))
                if inputs.config.query_layer and isinstance(traffic, GridTraffic):
                    traffic.learned_queries(inputs.seq_len, times, times, recomputed)
        if inputs.holds_stage(0):
            traffic.embedding(times)
            traffic.norms(bool(inputs.config.embed_norm), times, times)
        return traffic.volumes

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
            (axis, "all-reduce"): Volume(bool(weights), sum(map(inputs.own_numel, weights)) * inputs.wide)
            for axis, weights in summed.items()
        }
