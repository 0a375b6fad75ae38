"""Traffic theory: the collectives and bytes of a training step of any layout, by the papers' formulas."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from training.distributed.layout import ParallelConfig
from training.distributed.mesh import World
from training.memory.memory_config import Recompute
from training.model.decoder import meta_decoder
from training.model.model_config import ModelConfig
from training.parallel.data_parallel import BUCKET_BYTES
from training.parallel.pipeline_stages import split_stages, stage_layers
from training.parallel.placement_table import placement_table
from training.parity.traffic import Traffic, Volume
from training.sharding.placement import Placement
from training.sharding.shard_spec import ShardSpec

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TrafficInputs:
    """Inputs of the formulas, for one rank.

    `sequences`: per step and replica. `itemsize`: bytes per element. `passes`: for each of its pipeline stages the
    passes in order: F forward, B backward; if backward is split, I for inputs and W for weights.
    """

    config: ModelConfig
    layout: ParallelConfig
    world: World
    sequences: int
    seq_len: int
    itemsize: int
    recompute: Recompute
    passes: Mapping[int, str]

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states between two blocks, for all sequences of the replica."""
        return self.sequences * self.seq_len * self.config.width * self.itemsize

    @cached_property
    def placements(self) -> dict[str, Placement]:
        """The placement table."""
        return placement_table(meta_decoder(self.config), self.layout)

    @property
    def stages(self) -> list[int]:
        """This rank's pipeline stages."""
        return self.layout.stages_of_rank(self.world.axis("pp").rank)

    def holds_stage(self, stage: int) -> bool:
        """True if this rank holds the stage; -1 is the last stage."""
        return stage % self.layout.stages in self.stages


def expected_traffic(inputs: TrafficInputs) -> Traffic:
    """Return this rank's traffic of one step, from the forward pass to the updated parameters."""
    parameters = _parameter_shapes(inputs)
    parts = [
        _tensor_parallel(inputs),
        _sequence_parallel_gradients(inputs, parameters),
        _zero3(inputs, parameters) if inputs.layout.zero == 3 else _data_parallel(inputs, parameters),
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
    takes two all-reduces, of three numbers per token together.
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
    tokens = inputs.sequences * inputs.seq_len * inputs.itemsize
    loss = Volume(2 * micro_batches, 3 * tokens) if inputs.holds_stage(-1) else Volume(0, 0)
    if layout.sequence_parallel:
        gathers, scatters = entries + backward_exits, exits + backward_entries
        return {
            ("tp", "all-gather"): Volume(gathers, gathers * each),
            ("tp", "reduce-scatter"): Volume(scatters, scatters * each),
            ("tp", "all-reduce"): loss,
        }
    sums = exits + backward_entries  # entries forward and exits backward communicate nothing
    return {("tp", "all-reduce"): Volume(sums, sums * each) + loss}


def _recomputations(inputs: TrafficInputs, stage: int) -> int:
    """Number of times a stage's blocks are recomputed: once per backward pass, twice if backward is split."""
    if inputs.recompute == "none":
        return 0
    order = inputs.passes.get(stage, "B" * inputs.layout.micro_batches)
    return sum(order.count(kind) for kind in ("BIW" if stage else "BW"))  # the first stage's input has no gradient


def _sequence_parallel_gradients(inputs: TrafficInputs, parameters: Mapping[int, Mapping[str, Shape]]) -> Traffic:
    """Sequence parallelism: replicated parameters have a partial gradient on each rank; one all-reduce sums them."""
    if not inputs.layout.sequence_parallel:
        return {}
    named = [item for stage in parameters.values() for item in stage.items()]
    table = inputs.placements
    sizes = [_local_numel(inputs, shape) for name, shape in named if "tp" in table[name].gradient_sum]
    return {("tp", "all-reduce"): Volume(bool(sizes), sum(sizes) * inputs.itemsize)}


def _data_parallel(inputs: TrafficInputs, parameters: Mapping[int, Mapping[str, Shape]]) -> Traffic:
    """DDP: one all-reduce of a stage's gradients (Li et al. 2020). ZeRO-1 and 2: reduce-scatter, then all-gather.

    (Rajbhandari et al. 2020, section 7.) ZeRO-2 reduce-scatters after each micro-batch: it keeps no full gradients.
    """
    layout, stages = inputs.layout, len(parameters)
    if layout.dp == 1:
        return {}
    numels = [sum(_padded_numel(s, layout.zero_group) for s in named.values()) for named in parameters.values()]
    sizes = [numel * inputs.itemsize for numel in numels]
    assert max(sizes) < BUCKET_BYTES, "the formulas hold for stages that fit in one bucket"
    times = layout.micro_batches if layout.zero == 2 else 1
    if layout.zero_group == 1:
        return {("replicate", "all-reduce"): Volume(stages, sum(sizes))}
    between = times * (layout.zero_group < layout.dp)
    return {
        ("shard", "reduce-scatter"): Volume(times * stages, times * sum(sizes)),
        ("shard", "all-gather"): Volume(stages, sum(sizes)),
        ("replicate", "all-reduce"): Volume(between * stages, between * sum(sizes) // layout.zero_group),
    }


def _zero3(inputs: TrafficInputs, parameters: Mapping[int, Mapping[str, Shape]]) -> Traffic:
    """ZeRO-3: all-gathers parameters per unit, and reduce-scatters gradients after each micro-batch.

    (Zhao et al. 2023, section 3.2.) Blocks are freed after the forward pass and gathered again. The last unit is kept
    for its backward pass, which follows; that of an embedding needs no parameters. A pipeline gathers once a step.
    """
    layout, micro_batches = inputs.layout, inputs.layout.micro_batches
    gathered = scattered = between = Volume(0, 0)
    for named in parameters.values():
        units: dict[str, int] = {}
        for name, shape in named.items():
            unit = _unit(name, tied=bool(inputs.config.tied) and layout.stages == 1)
            units[unit] = units.get(unit, 0) + _padded_numel(shape, layout.zero_group) * inputs.itemsize
        for unit, size in units.items():
            times = 1 if layout.pp > 1 else micro_batches if unit in ("embedding", "output") else 2 * micro_batches
            gathered += Volume(times, times * size)
            scattered += Volume(micro_batches, micro_batches * size)
            between += Volume(micro_batches, micro_batches * size // layout.zero_group)
    return {
        ("shard", "all-gather"): gathered,
        ("shard", "reduce-scatter"): scattered,
        ("replicate", "all-reduce"): between if layout.zero_group < layout.dp else Volume(0, 0),
    }


def _unit(name: str, tied: bool) -> str:
    """The unit of a parameter: its block, or the embedding or the output, which are one unit if they are `tied`."""
    if name.startswith("blocks."):
        return name.split(".")[1]
    return "embedding" if name.startswith("embed.") and not tied else "output"


def _pipeline_parallel(inputs: TrafficInputs) -> Traffic:
    """Pipeline: hidden states forward and their gradients backward, between ranks (Huang et al. 2019)."""
    layout, rank = inputs.layout, inputs.world.axis("pp").rank
    each = inputs.hidden_bytes // (layout.micro_batches * (layout.tp if layout.sequence_parallel else 1))
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
    if not inputs.config.tied or ends[0] == ends[1] or inputs.world.axis("pp").rank not in ends:
        return {}
    shape = (inputs.config.vocab_size, inputs.config.width)
    numel = inputs.placements["embed.tokens.weight"].piece(shape, inputs.world.axes).numel
    return {("tied", "all-reduce"): Volume(1, numel * inputs.itemsize)}


def _parameter_shapes(inputs: TrafficInputs) -> dict[int, dict[str, Shape]]:
    """Shapes of this rank's parameters by stage and name: sharded by tensor parallelism, not yet by ZeRO."""
    table, axes, rank = inputs.placements, inputs.world.axes, inputs.world.axis("pp").rank
    parts = zip(inputs.stages, split_stages(meta_decoder(inputs.config), inputs.layout, rank), strict=True)
    return {
        stage: {n: table[n].without("shard").piece(tuple(p.shape), axes).size for n, p in part.named_parameters()}
        for stage, part in parts
    }


def _layer_count(inputs: TrafficInputs, stage: int) -> int:
    return len(stage_layers(inputs.config, inputs.layout.stages)[stage])


def _padded_numel(shape: Sequence[int], parts: int) -> int:
    """Number of elements of a parameter whose rows are padded to equal shards."""
    return -(-shape[0] // parts) * parts * math.prod(shape[1:])


def _local_numel(inputs: TrafficInputs, shape: Shape) -> int:
    """Number of elements in the rows that this rank updates."""
    shard = inputs.world.axis("shard")
    return ShardSpec.whole(shape).shard(0, shard.size, shard.rank).numel
