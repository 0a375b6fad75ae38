"""Memory of training: paper-level formulas of the bytes on a rank, by kind, for any layout.

They are for people, and for the search, which leaves out what does not fit: states (weights, masters, moments) are
within 2 % of live bytes, peaks within 15 % (docs/training-memory.md); exact bytes are those of a dry run of the real
code. P is the number of parameters of a rank before ZeRO shards them over n ranks, e the bytes of an element in the
compute dtype, N the tokens of a micro-batch on a rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import le, mul
from typing import Literal

from training.config import Precision
from training.experimental.parallel_config import ParallelConfig
from training.kernels.precision import COMPUTE_DTYPES, accumulation_dtype
from training.memory.memory_config import OffloadTarget, Recompute
from training.model.model_config import ModelConfig
from training.parallel.parameter_shapes import ParameterShape
from training.parallel.pipeline.schedules import Schedule, pipeline_passes
from training.parallel.traffic_inputs import rank_parameters

LOGIT_CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}  # of the logits at a time
TensorGrid = Literal["1d", "2d", "2.5d", "3d"]
_MLP_TENSORS = {"swiglu": 4, "geglu": 5, "gelu-fast": 3, "relu": 1}  # of ffn_width features; others keep 2
_FLOAT32, _INT64 = 4, 8


@dataclass(frozen=True)
class MemoryInputs:
    """What decides the memory of one rank; `model` and `layout` are resolved. What dropout keeps is not counted."""

    model: ModelConfig
    layout: ParallelConfig
    sequences: int
    """Sequences per step and replica."""
    seq_len: int
    stage_layers: Sequence[range]
    """Layers of each pipeline stage; one range without a pipeline."""
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    rank: int = 0
    """Pipeline rank."""
    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    ema: bool = False
    """True with an average of the weights."""
    moments: OffloadTarget = "device"
    """Where AdamW's moments are."""
    device: Literal["cpu", "cuda"] = "cpu"
    bucket_bytes: int = 25 << 20
    """Of gradient sums in a bucket."""

    @cached_property
    def itemsize(self) -> int:
        """e: bytes of an element in the compute dtype."""
        return COMPUTE_DTYPES[self.precision].itemsize

    @cached_property
    def wide(self) -> int:
        """Bytes of an element of masters, moments, gradient sums, statistics and the loss."""
        return accumulation_dtype(COMPUTE_DTYPES[self.precision]).itemsize

    @property
    def shards(self) -> int:
        """n: ranks over which ZeRO shards."""
        return self.layout.shards

    @property
    def parts(self) -> int:
        """t: parts into which tensor parallelism divides heads, the MLP's features and the vocabulary."""
        return self.layout.tp if self.layout.tensor == "1d" else self.layout.grid[1]

    @cached_property
    def tokens(self) -> int:
        """N."""
        layout = self.layout
        return self.sequences // (layout.micro_batches * layout.batch_shards) * (self.seq_len // layout.cp)

    @cached_property
    def stages(self) -> list[int]:
        """The stages of this rank."""
        return self.layout.stages_of_rank(self.rank)

    @property
    def has_loss(self) -> bool:
        """True if the last stage is this rank's."""
        return self.layout.stages - 1 in self.stages

    @property
    def hidden(self) -> int:
        """Bytes of a micro-batch's residual stream: with sequence parallelism or on a grid 1 / t of the features."""
        divided = self.layout.sequence_parallel or self.layout.tensor != "1d"
        return self.tokens * self.model.width // (self.parts if divided else 1) * self.itemsize

    @property
    def vocabulary(self) -> int:
        """Ids of the rank that has most of them."""
        return -(-self.model.vocab_size // self.parts)

    @cached_property
    def held(self) -> "HeldParameters":
        """The parameters of this rank."""
        layout = self.layout
        layers = sum(len(self.stage_layers[stage]) for stage in self.stages)
        ends = 0 in self.stages, self.has_loss
        return _held_parameters(self.model, (layout.tp, layout.tensor, layout.depth), layers, ends, layout.stages == 1)


@dataclass(frozen=True)
class HeldParameters:
    """Numbers of parameters on a rank, before ZeRO shards them."""

    total: int
    """P."""
    matrices: int
    """Of blocks' matrices, which Muon updates."""
    block: int
    """Of one block."""
    end: int
    """Of the embedding, or of the last norm and the output matrix, whichever is larger."""
    largest: int
    """Of the largest parameter."""
    largest_in_block: int
    sides: tuple[int, int]
    """Of the largest matrix of a block, before tensor parallelism divides it; the longer one first."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of each kind at its own peak within a step."""

    weights: int
    master: int
    moments: int
    gradients: int
    gathered: int
    activations: int
    logits: int
    peak: int
    """Of all of them and of what operations work with, together."""


def estimate_memory(inputs: MemoryInputs) -> MemoryEstimate:
    """Bytes of each kind on one rank, and of all kinds at the fullest moment of a step.

    That is in the loss, where all activations are there; in the first block of a backward pass, with what is computed
    again; when a backward pass ends, with all gradients; or when the optimizer updates. Gradients of earlier
    micro-batches are there all along.
    """
    weights, master, moments = weight_bytes(inputs), master_bytes(inputs), moment_bytes(inputs)
    gradients, gathered, activations, logits = (
        f(inputs) for f in (gradient_bytes, gathered_bytes, activation_bytes, logit_bytes)
    )
    summed = _summed_bytes(inputs) if inputs.layout.micro_batches > 1 else 0
    if inputs.layout.zero == 2 and inputs.layout.pp > 1:  # a pipeline waits for the last ones in its next backward pass
        summed += _buckets_on_way(inputs)
    units = gathered if inputs.layout.zero == 3 else 0
    one = max(_stage_bytes(inputs, stage) for stage in inputs.stages)  # of which a backward pass frees all
    kept = activations - _computed_again(inputs)
    moments_of_step = (
        kept + logits + summed + units,
        activations + 2 * inputs.tokens * inputs.itemsize * inputs.model.ffn_width // inputs.parts + summed + units,
        max(0, kept - one) + gradients + units,
        _summed_bytes(inputs, after_reduction=True) + max(gathered, _update_bytes(inputs), _grid_sum_bytes(inputs)),
    )
    peak = weights + master + moments + max(moments_of_step)
    return MemoryEstimate(weights, master, moments, gradients, gathered, activations, logits, peak)


# states


def weight_bytes(inputs: MemoryInputs) -> int:
    """The modules' parameters: e P; under ZeRO-3 none outlives its use (Rajbhandari et al. 2020, section 5.3)."""
    return 0 if inputs.layout.zero == 3 else inputs.itemsize * inputs.held.total


def master_bytes(inputs: MemoryInputs) -> int:
    """What the optimizer updates: 4 P / n in 16 bits, and under ZeRO-3; elsewhere the weights themselves.

    (Micikevicius et al. 2018, section 3.1; Rajbhandari et al. 2020, section 3.1.)
    """
    is_weights = inputs.layout.zero < 3 and inputs.itemsize == inputs.wide
    return 0 if is_weights else inputs.wide * inputs.held.total // inputs.shards


def moment_bytes(inputs: MemoryInputs) -> int:
    """AdamW's two moments, 8 P / n; Muon's momentum, 4 P / n of its matrices; an average of the weights, 4 P / n.

    Of local steps also what replicas share, weights and outer momentum: 8 P / n (Douillard et al. 2023, algorithm 1).
    """
    held, here = inputs.held, inputs.moments == "device" or (inputs.device, inputs.moments) == ("cpu", "cpu")
    of_muon = held.matrices if inputs.optimizer == "muon" else 0
    moments = 2 * (held.total - of_muon) if inputs.optimizer != "sgd" and here else 0
    others = held.total * (inputs.ema + 2 * (inputs.layout.local_steps > 0))
    return inputs.wide * (of_muon + moments + others) // inputs.shards


# gradients, and parameters that ranks gather from each other


def gradient_bytes(inputs: MemoryInputs) -> int:
    """Gradients at their peak (Rajbhandari et al. 2020, section 5.2): sums, and those that are on their way into them.

    4 P where they are summed in place or all-reduced (ZeRO-0), and in ZeRO-1 with micro-batches; 4 P / n and three
    buckets on their way in ZeRO-1 and 2; in ZeRO-3 4 P / n, a unit's gradients and the copy that is sent. The loss
    computes the output matrix's gradient in the forward pass: each micro-batch that awaits its backward pass has one.
    A tied matrix has two gradients until the backward pass ends.
    """
    held, wide, e = inputs.held, inputs.wide, inputs.itemsize
    tied = e * inputs.vocabulary * inputs.model.width if inputs.model.tied and inputs.layout.stages == 1 else 0
    summed, several = _summed_bytes(inputs), inputs.layout.micro_batches > 1
    waiting = 0
    if inputs.has_loss and several and inputs.layout.tensor == "1d":
        in_flight = max(numbers[len(inputs.stages) - 1] for numbers in _passes_in_flight(inputs))
        waiting = (in_flight - 1) * e * inputs.vocabulary * inputs.model.width
    if inputs.layout.zero == 3:
        unit = max(held.block, held.end)
        return summed + (e + wide) * unit + waiting + tied
    in_place = inputs.layout.replicas == 1 and e == wide
    moved = held.largest * (e if several or not in_place else 0)
    if inputs.shards == 1 or summed == wide * held.total:
        return summed + max(moved, waiting) + tied
    on_way = _buckets_on_way(inputs)
    several_sums = inputs.layout.zero == 2 and several  # which are there beside buckets of the next micro-batch
    sums = summed + on_way if several_sums else min(summed + on_way, wide * held.total)
    return sums + max(moved, waiting) + tied


def _summed_bytes(inputs: MemoryInputs, after_reduction: bool = False) -> int:
    """Gradient sums between two micro-batches: of whole parameters, or of the rows that this rank updates."""
    whole = inputs.layout.zero == 1 and inputs.layout.micro_batches > 1 and not after_reduction
    return inputs.wide * inputs.held.total // (1 if whole else inputs.shards)


def _buckets_on_way(inputs: MemoryInputs) -> int:
    """Buckets of gradient sums, of which three are there at a time: one is filled while two are reduced."""
    held, bucket = inputs.held, max(inputs.bucket_bytes, inputs.wide * inputs.held.largest_in_block)
    return min(max(bucket, inputs.wide * held.largest) + 2 * bucket, inputs.wide * held.total)


def gathered_bytes(inputs: MemoryInputs) -> int:
    """ZeRO-3: the unit at work, what was received of it, and the next one, received meanwhile (Zhao et al. 2023).

    In a pipeline all units stay, with what the last one was received in. ZeRO-1 and 2 gather after the update, two
    buckets at a time, each with this rank's part of it.
    """
    held, e = inputs.held, inputs.itemsize
    if inputs.layout.zero == 3:
        unit = max(held.block, held.end)
        return e * (held.total + unit if inputs.layout.pp > 1 else 2 * unit + held.block)
    if inputs.shards == 1:
        return 0
    bucket = max(inputs.bucket_bytes // inputs.wide, held.largest_in_block)
    together = min(held.total, max(bucket, held.largest) + bucket)
    return e * (together + together // inputs.shards)


def _update_bytes(inputs: MemoryInputs) -> int:
    """What Muon works with: of a matrix m x n, m >= n, 3 m n + 2 n^2 numbers, in bf16 on a GPU.

    The matrix, an iterate and the next one; X X^T and its polynomial.
    """
    if inputs.optimizer != "muon":
        return 0
    m, n = inputs.held.sides
    return (2 if inputs.device == "cuda" and inputs.wide == _FLOAT32 else inputs.wide) * (3 * m * n + 2 * n * n)


def _grid_sum_bytes(inputs: MemoryInputs) -> int:
    """What the layers of a 2.5D grid all-reduce at once after the backward pass: a copy of all gradients."""
    return _summed_bytes(inputs, after_reduction=True) if inputs.layout.tensor == "2.5d" else 0


# activations and logits


def activation_bytes(inputs: MemoryInputs) -> int:
    """What micro-batches in flight keep for their backward passes at the most, and a block that is computed again.

    Where backward is split (Qi et al. 2023), a micro-batch keeps all until the pass for weights, and the gradients from
    which those follow. In a pipeline torch receives each micro-batch of a step in a buffer of its own.
    """
    stages, layout = inputs.stages, inputs.layout
    kept = [_stage_bytes(inputs, stage) for stage in stages]
    split = [len(inputs.stage_layers[stage]) * _split_gradients(inputs) for stage in stages]
    most = max(sum(map(mul, numbers, (*kept, *split))) for numbers in _passes_in_flight(inputs))
    others = sum(0 <= at < layout.stages and at not in stages for stage in stages for at in (stage - 1, stage + 1))
    buffers = layout.micro_batches * others * inputs.hidden
    return most + _computed_again(inputs) + buffers + _INT64 * inputs.sequences * (inputs.seq_len + 1)


def _stage_bytes(inputs: MemoryInputs, stage: int) -> int:
    """What one micro-batch keeps in a stage: its blocks, tables of positions, and its end.

    The first block's input is in the buffer in which it was received; the end is the stage's output, or the last norm's
    input and the loss's gradient of its output.
    """
    model, layout = inputs.model, inputs.layout
    size = len(inputs.stage_layers[stage]) * _block_bytes(inputs, inputs.recompute) + inputs.hidden * (stage == 0)
    if stage == layout.stages - 1:
        size += inputs.tokens * model.width // (1 if layout.tensor == "1d" else inputs.parts) * inputs.itemsize
        size += inputs.itemsize * inputs.tokens * inputs.vocabulary if layout.tensor != "1d" else 0
    if model.positions == "rope":
        size += 2 * _FLOAT32 * (inputs.seq_len // layout.cp) * model.rotary_dim
    if model.positions == "alibi" and layout.cp == 1:  # the bias of each pair of tokens, of all blocks
        size += inputs.itemsize * inputs.seq_len**2 * model.heads // inputs.parts
    return size


def _block_bytes(inputs: MemoryInputs, recompute: Recompute) -> int:
    """Bytes that a block keeps of a micro-batch from its forward pass to its backward pass."""
    layout, window = inputs.layout, inputs.model.window or 0
    is_ring = layout.cp > 1 and layout.context == "ring"
    windows = -(-inputs.seq_len // window) if 0 < window < inputs.seq_len and not is_ring else 1
    divided = layout.sequence_parallel, layout.tensor != "1d"
    features, wide = _block_features(inputs.model, inputs.parts, divided, min(windows, 3), recompute)
    if layout.cp > 1 and layout.context == "ulysses" and recompute == "none":  # outputs, before and after the exchange
        features += inputs.model.q_width // inputs.parts
    return inputs.tokens * (features * inputs.itemsize + wide * inputs.wide)


@lru_cache(4096)
def _block_features(
    model: ModelConfig, parts: int, divided: tuple[bool, bool], windows: int, recompute: Recompute
) -> tuple[int, int]:
    """Features a token that a block keeps, in the compute dtype and in float32.

    Korthikanti et al. 2022, section 4, count 34 bytes a token and feature in 16 bits, with dropout and attention's
    weights. Here those are never kept (Dao et al. 2022), and `selective` keeps the outputs of products and attention.
    `divided`: the features between tensor-parallel regions, and those that go into them.
    """
    q, kv, ffn = model.q_width // parts, model.kv_width // parts, model.ffn_width // parts
    hidden, whole = (model.width // (parts if each else 1) for each in (any(divided), divided[1]))
    if recompute == "full":  # the input only (Chen et al. 2016)
        return hidden, 0
    statistics = model.heads // parts  # attention's log-sum-exp
    if recompute == "selective":
        return hidden + 2 * q + 2 * kv + 2 * whole + ffn * (2 if model.is_gated else 1), statistics
    # of three windows and more: queries, and once more, with keys and values of two windows; of two no copies of these
    attention = {1: q + 2 * kv, 2: 3 * q, 3: 8 * q}[windows] + (q + kv) * bool(model.qk_norm) + q
    streams = hidden * (1 if model.residual == "parallel" else 2) + 2 * whole
    statistics += 2 * (1 if model.norm == "rms" else 2)
    return streams + attention + ffn * _MLP_TENSORS.get(str(model.mlp), 2), statistics


def _computed_again(inputs: MemoryInputs) -> int:
    """A block as if nothing were computed again, less what it kept, with the gradient of its output."""
    if inputs.recompute == "none":
        return 0
    return max(0, _block_bytes(inputs, "none") - _block_bytes(inputs, inputs.recompute)) + inputs.hidden


def _split_gradients(inputs: MemoryInputs) -> int:
    """Of a block whose backward pass is split: the gradients of the outputs of its products and norms."""
    features, _ = _block_features(inputs.model, inputs.parts, (False, inputs.layout.tensor != "1d"), 1, "selective")
    return inputs.tokens * features * inputs.itemsize


def _passes_in_flight(inputs: MemoryInputs) -> tuple[tuple[int, ...], ...]:
    """Micro-batches in flight at every moment that may be the fullest.

    By stage of the rank, those whose activations it keeps; then those between the parts of a split backward pass.
    """
    layout = inputs.layout
    pp, count, v = layout.pp, layout.micro_batches, layout.virtual_stages
    if layout.schedule not in ("gpipe", "looped-bfs") and count > 4 * pp and count % pp == 0:
        count = 4 * pp  # all rounds are alike
    return _most_in_flight(pp, layout.schedule, v, count, inputs.rank) if pp > 1 else ((1, 0),)


@lru_cache(4096)
def _most_in_flight(
    pp: int, schedule: Schedule, virtual_stages: int, micro_batches: int, rank: int
) -> tuple[tuple[int, ...], ...]:
    layout = ParallelConfig(pp=pp, schedule=schedule, virtual_stages=virtual_stages, micro_batches=micro_batches)
    stages = layout.stages_of_rank(rank)
    live, between = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    moments = set()
    for kind, stage in pipeline_passes(layout, rank):
        if kind == "F":
            live[stage] += 1
        elif kind == "I":
            between[stage] += 1
        else:
            live[stage] -= 1
            between[stage] -= kind == "W"
        if kind in "FI":
            moments.add((*live.values(), *between.values()))
    return tuple(one for one in moments if not any(one != other and all(map(le, one, other)) for other in moments))


def logit_bytes(inputs: MemoryInputs) -> int:
    """What the loss works with, on the rank of the last stage: never all logits, but a chunk of tokens at a time.

    In float32 logits and log-probabilities; in 16 bits also a float32 copy, and in bf16 the float32 sum of the output
    matrix's gradient. On a grid all logits of the rank.
    """
    if not inputs.has_loss:
        return 0
    e, wide, vocabulary = inputs.itemsize, inputs.wide, inputs.vocabulary
    on_grid = inputs.layout.tensor != "1d"
    chunk = LOGIT_CHUNK_BYTES[inputs.device] // (vocabulary * wide)
    tokens = inputs.tokens if on_grid else min(inputs.tokens, max(1, chunk))
    summed = wide * vocabulary * inputs.model.width if inputs.precision == "bf16" and not on_grid else 0
    return tokens * vocabulary * ((1 if on_grid else 2) * wide if e == wide else e + 2 * wide) + summed


_UNDIVIDED = ParallelConfig(dp=1, zero_group=1, virtual_stages=1, micro_batches=1)


@lru_cache(4096)
def _held_parameters(
    model: ModelConfig, grid: tuple[int, TensorGrid, int], layers: int, ends_here: tuple[bool, bool], one_stage: bool
) -> HeldParameters:
    """Of `layers` blocks and the ends of the model; `grid`: tensor-parallel ranks, their kind and depth.

    `one_stage`: it has both ends, where a tied matrix is one.
    """
    tp, tensor, depth = grid
    divided = replace(_UNDIVIDED, tp=tp, tensor=tensor, depth=depth)
    parameters = rank_parameters(replace(model, tied=model.tied and one_stage), divided, range(1), 0)
    units = {name: [p for p in parameters if p.unit == name] for name in ("embed", "0", "head")}
    ends = [units[name] for name, here in zip(("embed", "head"), ends_here, strict=True) if here]
    block, sizes = _numel(units["0"]), [_numel(end) for end in ends]
    matrices = [p for p in units["0"] if len(p.shape) == 2 and not p.name.endswith("attention.query.weight")]
    whole = rank_parameters(model, _UNDIVIDED, range(1), 0)
    sides = max((tuple(sorted(p.shape, reverse=True)) for p in whole if p.unit == "0" and len(p.shape) == 2), key=_area)
    return HeldParameters(
        layers * block + sum(sizes),
        layers * _numel(matrices),
        block,
        max(sizes, default=0),
        max(p.numel for unit in [units["0"], *ends] for p in unit),
        max(p.numel for p in units["0"]),
        (sides[0], sides[1]),
    )


def _numel(parameters: Sequence[ParameterShape]) -> int:
    return sum(p.numel for p in parameters)


def _area(sides: tuple[int, ...]) -> int:
    return sides[0] * sides[1]
