"""Traffic theory: the collectives and bytes of a training step of any layout, by the papers' formulas.

It uses nothing of the code that it predicts, but what the options say: sizes, the stages' layers, the order of passes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from training.distributed.layout import ParallelConfig
from training.formulas.cube_traffic import CubeTraffic, cube_parameters, is_inner
from training.formulas.grid_traffic import GridSizes, GridTraffic, Passes, grid_parameters
from training.formulas.parameter_shapes import ParameterShape, pack_buckets, stage_parameters
from training.memory.memory_config import Recompute
from training.model.model_config import ModelConfig
from training.parity.traffic import Traffic, Volume


@dataclass(frozen=True)
class Coordinates:
    """This rank's index along three axes of the mesh."""

    pp: int
    shard: int
    tp: int


@dataclass(frozen=True)
class TrafficInputs:
    """Inputs of the formulas, for one rank.

    `sequences`: per step and replica. `passes`: for each of its pipeline stages the passes in order: F forward, B
    backward; if backward is split, I for inputs and W for weights. Bytes per element: `itemsize` of activations and
    copies of weights, `wide` of gradient sums and the loss, `reduced` of what replicas sum.
    """

    config: ModelConfig
    layout: ParallelConfig
    rank: Coordinates
    sequences: int
    seq_len: int
    itemsize: int
    wide: int
    reduced: int
    recompute: Recompute
    stage_layers: Sequence[range]
    passes: Mapping[int, str]
    bucket_bytes: int = 25 << 20
    """Of gradient sums in a bucket."""
    chunk_bytes: int = 32 << 20
    """Of the logits that the loss has at a time."""
    parameters: dict[int, list[ParameterShape]] = field(init=False, repr=False)
    """By stage: sharded by tensor parallelism, not yet by ZeRO."""

    def __post_init__(self) -> None:
        ends, layout = self.layout.stages - 1, self.layout
        found = {
            n: stage_parameters(self.config, self.stage_layers[n], n == 0, n == ends, *self._cut) for n in self.stages
        }
        if layout.tensor != "1d":
            cut = cube_parameters if layout.tensor == "3d" else grid_parameters
            found = {n: list(cut(self.grid, whole)) for n, whole in found.items()}
        object.__setattr__(self, "parameters", found)

    @property
    def _cut(self) -> tuple[int, int]:
        """Parts by which 1D tensor parallelism divides parameters, and this rank's."""
        return (self.layout.tp, self.rank.tp) if self.layout.tensor == "1d" else (1, 0)

    @property
    def grid(self) -> GridSizes:
        """This rank's place on a grid of tensor-parallel ranks."""
        side = self.layout.grid[1]
        sequences = self.sequences // (self.layout.micro_batches * self.layout.batch_shards)
        row, column = self.rank.tp // side % side, self.rank.tp % side
        tokens = sequences * self.seq_len
        return GridSizes(self.config, side, row, column, tokens, self.itemsize, self.wide, sequences)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states between two blocks, for all sequences of the replica."""
        return self.sequences * self.seq_len * self.config.width * self.itemsize

    @property
    def stages(self) -> list[int]:
        """This rank's pipeline stages."""
        return self.layout.stages_of_rank(self.rank.pp)

    def holds_stage(self, stage: int) -> bool:
        """True if this rank holds the stage; -1 is the last stage."""
        return stage % self.layout.stages in self.stages


def expected_traffic(inputs: TrafficInputs) -> Traffic:
    """Return this rank's traffic of one step, from the forward pass to the updated parameters."""
    on_grid = inputs.layout.tensor != "1d"
    parts = [
        _grid(inputs) if on_grid else _tensor_parallel(inputs),
        _grid_gradients(inputs) if on_grid else _tensor_parallel_gradients(inputs),
        _zero3(inputs) if inputs.layout.zero == 3 else _data_parallel(inputs),
        _pipeline_parallel(inputs),
        _tied_embedding(inputs),
    ]
    total: Traffic = {}
    for part in parts:
        for key, volume in part.items():
            total[key] = total.get(key, Volume(0, 0)) + volume
    return {key: volume for key, volume in total.items() if volume.calls}


def _tensor_parallel(inputs: TrafficInputs) -> Traffic:
    """Tensor parallelism: per layer two all-reduces of the hidden states forward and two backward.

    (Shoeybi et al. 2019, figure 4.) With sequence parallelism each is an all-gather and a reduce-scatter (Korthikanti
    et al. 2022, figure 5). One more forward for the embedding and one more backward for the output matrix. The loss
    takes two all-reduces a chunk of tokens, of three numbers per token together.
    """
    layout = inputs.layout
    if layout.tp == 1:
        return {}
    micro_batches, each = layout.micro_batches, inputs.hidden_bytes // layout.micro_batches
    # number of times hidden states enter and leave a tensor-parallel region, in the forward and the backward pass
    entries = exits = backward_entries = backward_exits = 0
    for stage in inputs.stages:
        layers, recomputed = _layer_count(inputs, stage), _recomputations(inputs, stage)
        # recomputing a block stops before its last all-reduce, unless dropout after it is needed
        recomputed_exits = 2 if inputs.config.dropout else 1
        entries += layers * (2 * micro_batches + 2 * recomputed)
        exits += layers * (2 * micro_batches + recomputed_exits * recomputed)
        backward_entries += 2 * layers * micro_batches
        backward_exits += 2 * layers * micro_batches
    if inputs.holds_stage(0):
        exits, backward_exits = exits + micro_batches, backward_exits + micro_batches
    if inputs.holds_stage(-1):
        entries, backward_entries = entries + micro_batches, backward_entries + micro_batches
    chunks = 2 * micro_batches * _loss_chunks(inputs)
    loss = Volume(chunks, 3 * inputs.sequences * inputs.seq_len * inputs.wide)
    loss = loss if inputs.holds_stage(-1) else Volume(0, 0)
    if layout.sequence_parallel:
        gathers, scatters = entries + backward_exits, exits + backward_entries
        return {
            ("tp", "all-gather"): Volume(gathers, gathers * each),
            ("tp", "reduce-scatter"): Volume(scatters, scatters * each),
            ("tp", "all-reduce"): loss,
        }
    sums = exits + backward_entries  # entries forward and exits backward communicate nothing
    return {("tp", "all-reduce"): Volume(sums, sums * each) + loss}


def _grid(inputs: TrafficInputs) -> Traffic:
    """2D, 2.5D and 3D: what each module communicates (grid_traffic.py, cube_traffic.py), times the passes."""
    kind, times = CubeTraffic if inputs.layout.tensor == "3d" else GridTraffic, inputs.layout.micro_batches
    found = kind(inputs.grid)
    for stage in inputs.stages:
        layers, recomputed, begun = (f(inputs, stage) for f in (_layer_count, _recomputations, _backward_passes))
        found.blocks(Passes(layers * (times + recomputed), layers * times, layers * begun))
        if stage == inputs.layout.stages - 1:
            found.norms(1, times, times)
            found.output(Passes(times, times, begun))
            if inputs.config.query_layer and isinstance(found, GridTraffic):
                found.learned_queries(inputs.seq_len, times, times, recomputed)
    if inputs.holds_stage(0):
        found.embedding(times)
        found.norms(bool(inputs.config.embed_norm), times, times)
    return {key: Volume(calls, found.bytes[key]) for key, calls in found.calls.items()}


def _grid_gradients(inputs: TrafficInputs) -> Traffic:
    """Layers of a grid sum the gradients of all that they hold, rows those of vectors; columns those of head norms.

    Products of a cube sum the gradients of matrices over layers, and columns of a cube those of the inner biases.
    """
    every = [p for stage in inputs.parameters.values() for p in stage]
    vectors, cube = [p for p in every if not p.divided], inputs.layout.tensor == "3d"
    inner = [p for p in vectors if cube and is_inner(p)]
    summed = {
        "depth": vectors if cube else every if inputs.layout.depth > 1 else [],
        "row": [p for p in vectors if p not in inner],
        "column": inner + [p for p in vectors if p.of_heads],
    }
    return {
        (axis, "all-reduce"): Volume(bool(found), sum(_own_numel(inputs, p) for p in found) * inputs.wide)
        for axis, found in summed.items()
    }


def _loss_chunks(inputs: TrafficInputs) -> int:
    """Chunks of tokens in which the loss takes a micro-batch, by the largest logits of a rank; one token at least."""
    rows = -(-inputs.config.vocab_size // inputs.layout.tp)
    tokens = inputs.sequences // inputs.layout.micro_batches * inputs.seq_len
    return -(-tokens // max(1, inputs.chunk_bytes // (rows * inputs.wide)))


def _recomputations(inputs: TrafficInputs, stage: int) -> int:
    """Number of times a stage's blocks are recomputed: once per backward pass, twice if backward is split."""
    return 0 if inputs.recompute == "none" else _backward_passes(inputs, stage)


def _backward_passes(inputs: TrafficInputs, stage: int) -> int:
    """Number of a stage's backward passes; those for inputs and for weights are two."""
    order = inputs.passes.get(stage, "B" * inputs.layout.micro_batches)
    return sum(order.count(kind) for kind in ("BIW" if stage else "BW"))  # the first stage's input has no gradient


def _tensor_parallel_gradients(inputs: TrafficInputs) -> Traffic:
    """Sequence parallelism: replicated parameters have a partial gradient on each rank; one all-reduce sums them.

    Norms of the queries and keys of each head have one without it, too.
    """
    if inputs.layout.tp == 1:
        return {}
    every = [p for stage in inputs.parameters.values() for p in stage if not p.divided]
    sizes = [_own_numel(inputs, p) for p in every if inputs.layout.sequence_parallel or p.of_heads]
    return {("tp", "all-reduce"): Volume(bool(sizes), sum(sizes) * inputs.wide)}


def _data_parallel(inputs: TrafficInputs) -> Traffic:
    """DDP: one all-reduce of a bucket of gradients (Li et al. 2020). ZeRO-1 and 2: reduce-scatter, then all-gather.

    (Rajbhandari et al. 2020, section 7.) ZeRO-2 reduce-scatters after each micro-batch: it keeps no full gradients.
    Gradients travel in the dtype in which replicas sum them, parameters in that of activations.
    """
    layout = inputs.layout
    if layout.dp == 1:
        return {}
    buckets = [numel for stage in inputs.parameters.values() for numel in _buckets(inputs, stage)]
    calls, gradients, parameters = len(buckets), sum(buckets) * inputs.reduced, sum(buckets) * inputs.itemsize
    times = layout.micro_batches if layout.zero == 2 else 1
    if layout.zero_group == 1:
        return {("replicate", "all-reduce"): Volume(calls, gradients)}
    between = times * (layout.zero_group < layout.dp)
    return {
        ("shard", "reduce-scatter"): Volume(times * calls, times * gradients),
        ("shard", "all-gather"): Volume(calls, parameters),
        ("replicate", "all-reduce"): Volume(between * calls, between * gradients // layout.zero_group),
    }


def _buckets(inputs: TrafficInputs, parameters: Sequence[ParameterShape]) -> list[int]:
    """Elements of each bucket, padded."""
    packed = pack_buckets(parameters, inputs.bucket_bytes // inputs.wide)
    return [sum(p.padded_numel(inputs.layout.zero_group) for p in bucket) for bucket in packed]


def _zero3(inputs: TrafficInputs) -> Traffic:
    """ZeRO-3: all-gathers parameters per unit, and reduce-scatters gradients after each micro-batch.

    (Zhao et al. 2023, section 3.2.) Blocks are freed after the forward pass and gathered again. The last unit is kept
    for its backward pass, which follows; that of an embedding needs no parameters. A pipeline gathers once a step.
    """
    layout, micro_batches = inputs.layout, inputs.layout.micro_batches
    gathered = scattered = between = Volume(0, 0)
    for parameters in inputs.parameters.values():
        units: dict[str, int] = {}
        for p in parameters:
            unit = "head" if inputs.config.tied and layout.stages == 1 and p.unit == "embed" else p.unit
            units[unit] = units.get(unit, 0) + p.padded_numel(layout.zero_group)
        for unit, numel in units.items():
            times = 1 if layout.pp > 1 else micro_batches if unit in ("embed", "head") else 2 * micro_batches
            gathered += Volume(times, times * numel * inputs.itemsize)
            scattered += Volume(micro_batches, micro_batches * numel * inputs.reduced)
            between += Volume(micro_batches, micro_batches * numel * inputs.reduced // layout.zero_group)
    return {
        ("shard", "all-gather"): gathered,
        ("shard", "reduce-scatter"): scattered,
        ("replicate", "all-reduce"): between if layout.zero_group < layout.dp else Volume(0, 0),
    }


def _pipeline_parallel(inputs: TrafficInputs) -> Traffic:
    """Pipeline: hidden states forward and their gradients backward, between ranks (Huang et al. 2019)."""
    layout, rank = inputs.layout, inputs.rank.pp
    parts = layout.tp if layout.sequence_parallel or layout.tensor != "1d" else 1
    each = inputs.hidden_bytes // (layout.micro_batches * parts)
    borders = sum(
        1
        for stage in inputs.stages
        for other in (stage - 1, stage + 1)
        if 0 <= other < layout.stages and layout.stage_ranks[other] != rank
    )
    volume = Volume(borders * layout.micro_batches, borders * layout.micro_batches * each)
    return {("pp", "send"): volume, ("pp", "receive"): volume}


def _tied_embedding(inputs: TrafficInputs) -> Traffic:
    """First and last stage all-reduce the gradient of the tied embedding (Narayanan et al. 2021, section 3.2)."""
    ends = inputs.layout.stage_ranks[0], inputs.layout.stage_ranks[-1]
    if not inputs.config.tied or ends[0] == ends[1] or inputs.rank.pp not in ends:
        return {}
    names = ("embed.tokens.weight", "head.weight")
    shared = next(p for stage in inputs.parameters.values() for p in stage if p.name in names)
    return {("tied", "all-reduce"): Volume(1, _own_numel(inputs, shared) * inputs.wide)}


def _layer_count(inputs: TrafficInputs, stage: int) -> int:
    return len(inputs.stage_layers[stage])


def _own_numel(inputs: TrafficInputs, p: ParameterShape) -> int:
    """Number of elements in the rows that this rank updates."""
    return p.rows_numel(inputs.layout.zero_group, inputs.rank.shard)
