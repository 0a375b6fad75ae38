"""What a step of a layout has to communicate, from the papers' formulas: to be compared with what is counted."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from training.distributed.layout import ParallelConfig
from training.distributed.mesh import World
from training.memory.memory_config import Recompute
from training.model.model_config import ModelConfig
from training.parallel.data_parallel import BUCKET_BYTES
from training.parallel.pipeline_stages import rank_of_stage, split_stages, stage_layers, stages_of_rank
from training.parallel.tensor_parallel import tp_dim, tp_shard
from training.parity.traffic import Traffic, Volume
from training.sharding.shard_spec import ShardSpec

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One process's view of a step: `sequences` of `seq_len` tokens, all of its replica's; numbers of `itemsize` bytes.

    `orders`: for each stage of this process of a pipeline its passes in their order: F forward, B backward, and
    where that is split I for the inputs' gradients and W for the weights'.
    """

    config: ModelConfig
    layout: ParallelConfig
    world: World
    sequences: int
    seq_len: int
    itemsize: int
    recompute: Recompute
    orders: Mapping[int, str]

    @property
    def features(self) -> int:
        """Bytes of the features between two blocks, of the replica's whole batch."""
        return self.sequences * self.seq_len * self.config.width * self.itemsize

    @property
    def stages(self) -> list[int]:
        return stages_of_rank(self.layout, self.world.axis("pp").rank)

    def holds(self, stage: int) -> bool:
        return stage % self.layout.stages in self.stages


def expected_traffic(step: Step) -> Traffic:
    """What this process takes part in from the forward pass to the updated weights, by axis and operation."""
    parameters = _parameters(step)
    parts = [
        _tensor(step),
        _sequence_sums(step, parameters),
        _zero3(step, parameters) if step.layout.zero == 3 else _replicas(step, parameters),
        _pipeline(step),
        _tied(step),
    ]
    total: Traffic = {}
    for part in parts:
        for key, volume in part.items():
            total[key] = total.get(key, Volume(0, 0)) + volume
    return {key: volume for key, volume in total.items() if volume.calls}


def _tensor(step: Step) -> Traffic:
    """Two sums forward and two backward a layer, of the whole features (Shoeybi et al. 2019, figure 4); with
    sequence parallelism each is a gather and a scatter (Korthikanti et al. 2022, figure 5). One sum more for the
    embedding, forward, and for the output matrix, backward; for the loss two of three numbers a token."""
    layout = step.layout
    if layout.tp == 1:
        return {}
    rounds, each = layout.micro_batches, step.features // layout.micro_batches
    inward = outward = backward_in = backward_out = 0  # how often features enter, leave what is divided
    for stage in step.stages:
        layers, again = _layers(step, stage), _computed_again(step, stage)
        # the last sum of a block that is computed again is not: nothing after it is needed, but by dropout
        leaving = 2 if step.config.dropout else 1
        inward += layers * (2 * rounds + 2 * again)
        outward += layers * (2 * rounds + leaving * again)
        backward_in += 2 * layers * rounds
        backward_out += 2 * layers * rounds
    if step.holds(0):
        outward, backward_out = outward + rounds, backward_out + rounds
    if step.holds(-1):
        inward, backward_in = inward + rounds, backward_in + rounds
    tokens = step.sequences * step.seq_len * step.itemsize
    loss = Volume(2 * rounds, 3 * tokens) if step.holds(-1) else Volume(0, 0)
    if layout.sequence_parallel:
        gathers, scatters = inward + backward_out, outward + backward_in
        return {
            ("tp", "all-gather"): Volume(gathers, gathers * each),
            ("tp", "reduce-scatter"): Volume(scatters, scatters * each),
            ("tp", "all-reduce"): loss,
        }
    sums = outward + backward_in  # entering forward and leaving backward are free
    return {("tp", "all-reduce"): Volume(sums, sums * each) + loss}


def _computed_again(step: Step, stage: int) -> int:
    """How often a stage's blocks run once more for their backward pass: for both halves, where that is split."""
    if step.recompute == "none":
        return 0
    order = step.orders.get(stage, "B" * step.layout.micro_batches)
    return sum(order.count(kind) for kind in ("BIW" if stage else "BW"))  # the first stage's input has no gradient


def _sequence_sums(step: Step, parameters: Mapping[int, Mapping[str, Shape]]) -> Traffic:
    """What is used where the sequence is divided has a gradient from each part of it: one sum of all of them."""
    if not step.layout.sequence_parallel:
        return {}
    alike = [_own_numel(step, s) for named in parameters.values() for n, s in named.items() if tp_dim(n) is None]
    return {("tp", "all-reduce"): Volume(bool(alike), sum(alike) * step.itemsize)}


def _replicas(step: Step, parameters: Mapping[int, Mapping[str, Shape]]) -> Traffic:
    """Gradients summed once (Li et al. 2020), or each process's rows of them and then the parameters gathered
    (Rajbhandari et al. 2020, section 7); with ZeRO-2 after each micro-batch, as nothing else is kept."""
    layout, shapes = step.layout, [shape for named in parameters.values() for shape in named.values()]
    if layout.dp == 1:
        return {}
    bytes_ = sum(_padded(shape, layout.zero_group) for shape in shapes) * step.itemsize
    assert bytes_ < BUCKET_BYTES, "one bucket: larger models are not what this is for"
    times = layout.micro_batches if layout.zero == 2 and layout.pp == 1 else 1
    if layout.zero_group == 1:
        return {("replicate", "all-reduce"): Volume(times, times * bytes_)}
    between = times * (layout.zero_group < layout.dp)
    return {
        ("shard", "reduce-scatter"): Volume(times, times * bytes_),
        ("shard", "all-gather"): Volume(1, bytes_),
        ("replicate", "all-reduce"): Volume(between, between * bytes_ // layout.zero_group),
    }


def _zero3(step: Step, parameters: Mapping[int, Mapping[str, Shape]]) -> Traffic:
    """Parameters gathered for each pass that does not find them, block by block and the rest at once; freed after
    the forward pass, but for the rest; gradients scattered once a step (Zhao et al. 2023, section 3.2)."""
    layout = step.layout
    gathered = scattered = between = Volume(0, 0)
    for stage, named in parameters.items():
        blocks: dict[str, int] = {}
        for name, shape in named.items():
            unit = name.split(".")[1] if name.startswith("blocks.") else "rest"
            blocks[unit] = blocks.get(unit, 0) + _padded(shape, layout.zero_group) * step.itemsize
        for unit, size in blocks.items():
            times = _gathers(step, stage, keeps=unit == "rest")
            gathered += Volume(times, times * size)
            scattered += Volume(1, size)
            between += Volume(1, size // layout.zero_group)
    return {
        ("shard", "all-gather"): gathered,
        ("shard", "reduce-scatter"): scattered,
        ("replicate", "all-reduce"): between if layout.zero_group < layout.dp else Volume(0, 0),
    }


def _gathers(step: Step, stage: int, keeps: bool) -> int:
    """A pipeline frees after a backward pass only with the step's last one; without, after each."""
    order = step.orders.get(stage, "FB" * step.layout.micro_batches)
    count, here = 0, False
    for kind in order:
        count += not here
        here = (kind == "F" and keeps) or (kind != "F" and step.layout.pp > 1)
    return count


def _pipeline(step: Step) -> Traffic:
    """Features forward and their gradients backward over each border between two processes (Huang et al. 2019)."""
    layout, rank = step.layout, step.world.axis("pp").rank
    each = step.features // (layout.micro_batches * (layout.tp if layout.sequence_parallel else 1))
    borders = sum(
        1
        for stage in step.stages
        for other in (stage - 1, stage + 1)
        if 0 <= other < layout.stages and rank_of_stage(layout, other) != rank
    )
    volume = Volume(borders * layout.micro_batches, borders * layout.micro_batches * each)
    return {("pp", "send"): volume, ("pp", "receive"): volume}


def _tied(step: Step) -> Traffic:
    """The two ends of a pipeline add up the gradients of the matrix they share (Narayanan et al. 2021, section 3.2)."""
    ends = rank_of_stage(step.layout, 0), rank_of_stage(step.layout, step.layout.stages - 1)
    if not step.config.tied or ends[0] == ends[1] or step.world.axis("pp").rank not in ends:
        return {}
    shape = (step.config.vocab_size, step.config.width)
    numel = _own_numel(step, tp_shard("embed.tokens.weight", shape, step.world.axis("tp")).size)
    return {("tied", "all-reduce"): Volume(1, numel * step.itemsize)}


def _parameters(step: Step) -> dict[int, dict[str, Shape]]:
    """What this process has of its stages' parameters, before the replicas divide it."""
    parts = zip(step.stages, split_stages(step.config, step.layout, step.world.axis("pp").rank), strict=True)
    tp = step.world.axis("tp")
    return {
        stage: {name: tp_shard(name, tuple(p.shape), tp).size for name, p in part.named_parameters()}
        for stage, part in parts
    }


def _layers(step: Step, stage: int) -> int:
    return len(stage_layers(step.config, step.layout.stages)[stage])


def _padded(shape: Sequence[int], parts: int) -> int:
    """Elements that travel where rows are divided: as many for each."""
    return -(-shape[0] // parts) * parts * math.prod(shape[1:])


def _own_numel(step: Step, shape: Shape) -> int:
    """Elements of the rows that this process updates."""
    shard = step.world.axis("shard")
    return ShardSpec.whole(shape).shard(0, shard.size, shard.rank).numel
