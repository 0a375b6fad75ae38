"""Search: every layout of a model on a cluster that the trainer accepts, from the fastest that fits its memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isqrt

from gristmill.errors import UsageError
from training.distributed.layout import SPLIT_BACKWARD, STAGES_PER_RANK, ParallelConfig, Schedule
from training.formulas.block_memory import BlockSizes, kept_bytes, loss_bytes
from training.formulas.memory import LOGIT_CHUNK_BYTES
from training.kernels.precision import Precision
from training.memory.memory_config import Recompute
from training.model.model_config import ModelConfig
from training.parallel.pipeline_stages import stage_layers
from training.planner.cost.fitted_constants import Constants
from training.planner.cost.hardware import Cluster
from training.planner.cost.planned_run import ADAMW, GRISTMILL, OptimizerStates, PlannedRun, Software
from training.planner.cost.step_time import StepTime, layer_parameters, step_time
from training.planner.run_memory import RunMemory, reserve, run_memory

_MOST_SEQUENCES = 32  # of a micro-batch
_MOST_VIRTUAL = 4
_SMALLEST = 4
_EXACT = 60  # memory estimates, which take longest, before the search gives up


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned: a resolved model, `batch` sequences of `seq_len` tokens a step, and a cluster."""

    model: ModelConfig
    batch: int
    seq_len: int
    cluster: Cluster
    precision: Precision = "bf16"
    software: Software = GRISTMILL
    states: OptimizerStates = ADAMW
    compiled: bool = False
    """Blocks are compiled, so that no schedule may compute gradients of inputs and weights apart."""


@dataclass(frozen=True)
class Choice:
    """A layout, its step time and its memory."""

    run: PlannedRun
    time: StepTime
    memory: RunMemory


@dataclass(frozen=True)
class SearchResult:
    """The fastest layouts that fit; and the one that comes closest to fitting, if none does."""

    choices: list[Choice]
    considered: int
    closest: Choice | None


def search(request: PlanRequest, constants: Constants, wanted: int = 5) -> SearchResult:
    """Find the `wanted` fastest layouts, each of other degrees or of another schedule.

    Raises UsageError if no layout divides GPUs, model and batch.
    """
    runs = list(candidates(request))
    if not runs:
        raise UsageError(_no_layout(request))
    timed = sorted(((step_time(run, constants), at) for at, run in enumerate(runs)), key=lambda pair: pair[0].total)
    available = request.cluster.device.memory
    found: list[Choice] = []
    tried: list[Choice] = []
    shapes: set[tuple[int, int, int, str]] = set()
    for time, at in timed:
        run, layout = runs[at], runs[at].layout
        shape = (layout.dp, layout.tp, layout.pp, layout.schedule)
        if shape in shapes or least_total(run, request.precision) > available:
            continue
        memory = run_memory(run, request.precision, available)
        choice = Choice(run, time, memory)
        tried.append(choice)
        if memory.total <= available:
            found.append(choice)
            shapes.add(shape)
        if len(found) == wanted or len(tried) == _EXACT + wanted:
            break
    if found:
        return SearchResult(found, len(runs), None)
    small = _smallest(request, runs, constants)
    fitting = sorted((each for each in small if each.memory.total <= available), key=lambda each: each.time.total)
    closest = min([*tried, *small], key=lambda choice: choice.memory.total)
    return SearchResult(fitting[:wanted], len(runs), None if fitting else closest)


def _smallest(request: PlanRequest, runs: list[PlannedRun], constants: Constants) -> list[Choice]:
    """The layouts with the lowest bounds of memory: if the fastest do not fit, one of these may."""
    low = sorted(runs, key=lambda run: least_total(run, request.precision))[:_SMALLEST]
    return [Choice(run, step_time(run, constants), run_memory(run, request.precision)) for run in low]


def candidates(request: PlanRequest) -> Iterator[PlannedRun]:
    """Every layout that divides GPUs, model and batch evenly.

    Tensor parallelism stays within a node, with sequence parallelism where the sequence divides.
    """
    devices, model = request.cluster.devices, request.model
    for tp in tensor_degrees(request):
        for pp in divisors(devices // tp):
            dp = devices // (tp * pp)
            if pp > model.layers or request.batch % dp:
                continue
            for micro in divisors(request.batch // dp):
                if micro <= _MOST_SEQUENCES:
                    yield from _of_sizes(request, (dp, tp, pp), request.batch // dp // micro)


def _of_sizes(request: PlanRequest, sizes: tuple[int, int, int], count: int) -> Iterator[PlannedRun]:
    """Layouts of these degrees (data, tensor, pipeline) with `count` micro-batches."""
    dp, tp, pp = sizes
    software = request.software
    for schedule, virtual in _schedules(request, pp, count):
        layers = _stage_layers(request.model, pp * virtual, request.seq_len)
        for zero in software.zero if dp > 1 else (0,):
            if zero == 3 and pp > 1:  # gathers all weights of a stage at once: as much memory as ZeRO-1, and more time
                continue
            layout = ParallelConfig(
                dp=dp, zero=zero, zero_group=dp if zero else 1, tp=tp, pp=pp, schedule=schedule,
                sequence_parallel=tp > 1 and request.seq_len % tp == 0 and software == GRISTMILL,
                virtual_stages=virtual, micro_batches=count,
            )  # fmt: skip
            for recompute in software.recompute:
                yield PlannedRun(
                    request.model, layout, request.batch, request.seq_len, request.cluster, recompute,
                    software, layers, request.states,
                )  # fmt: skip


def _schedules(request: PlanRequest, pp: int, count: int) -> Iterator[tuple[Schedule, int]]:
    """Schedules of a pipeline of `pp` ranks that take `count` micro-batches, with their stages per rank."""
    layers = request.model.layers
    if pp == 1:
        yield "1f1b", 1
        return
    for schedule in request.software.schedules:
        if request.compiled and schedule in SPLIT_BACKWARD:
            continue
        fixed = STAGES_PER_RANK[schedule]
        for virtual in [fixed] if fixed else range(2, _MOST_VIRTUAL + 1 if schedule not in SPLIT_BACKWARD else 3):
            enough = count >= (pp if schedule == "1f1b" else 1) and pp * virtual <= layers
            if enough and (virtual == 1 or count % max(1, count // pp) == 0):  # in rounds of one per rank
                yield schedule, virtual


def tensor_degrees(request: PlanRequest) -> list[int]:
    """Degrees of tensor parallelism that divide the heads, the MLP and the GPUs of a node."""
    model, cluster = request.model, request.cluster
    sizes = (model.heads, model.kv_heads, model.ffn_width, cluster.devices)
    within = min(cluster.per_node, cluster.devices)
    return [
        tp
        for tp in range(1, within + 1)
        if all(size % tp == 0 for size in sizes) and cluster.per_node % tp == 0 and model.vocab_size >= tp * tp
    ]


def least_total(run: PlannedRun, precision: Precision) -> float:
    """Bytes that `run` takes at the least, on its first or on its last rank: a bound that is quick to compute."""
    layout = run.layout
    if run.software != GRISTMILL:
        return run_memory(run, precision).total
    kept, logits = _block_bytes(
        run.model, run.micro_batch, run.seq_len, precision, layout.tp, layout.sequence_parallel, run.recompute
    )
    in_flight = micro_batches_in_flight(layout)
    received = 2.0 * run.micro_batch * run.seq_len * run.model.width / layout.sequence_shards * layout.micro_batches
    buffers = (2 * layout.virtual_stages - 1) * received if layout.pp > 1 else 0.0  # torch keeps one per micro-batch
    first = _state_bytes(run, 0, layout.micro_batches > in_flight) + in_flight * run.rank_layers[0] * kept + buffers
    last = _state_bytes(run, -1, False) + kept + logits
    return reserve(run) + (max(first, last) if run.held[-1][-1] == layout.stages - 1 else first)


def _state_bytes(run: PlannedRun, rank: int, sums: bool) -> float:
    """Bytes of weights, float32 masters and moments, and with `sums` the float32 sums of gradients, of a rank's layers.

    The first rank has an end of the model, too; ZeRO-1, 2 and 3 shard moments, gradients and weights. Muon has half of
    AdamW's moments for most parameters.
    """
    layout, vocabulary = run.layout, run.model.vocab_size * run.model.width if rank == 0 else 0
    parameters = (run.rank_layers[rank] * layer_parameters(run.model) + vocabulary) / layout.tp
    weights = 2 if layout.zero < 3 else 0
    gradients = 4 / (layout.zero_group if layout.zero >= 2 else 1) if sums else 0
    moments = {"adamw": 8, "muon": 4, "sgd": 0}[run.states.name] if run.states.moments == "device" else 0
    return parameters * (weights + gradients + (4 + moments + 4 * run.states.ema) / layout.zero_group)


def micro_batches_in_flight(layout: ParallelConfig) -> float:
    """Micro-batches of which the first rank keeps all activations (Narayanan et al. 2021, section 2.2)."""
    pp, v = layout.pp, layout.virtual_stages
    if layout.schedule == "interleaved-1f1b" and pp > 1:
        return min(layout.micro_batches, ((v - 1) * pp + 2 * (pp - 1) + 1) / v)
    return min(layout.micro_batches, pp)


@lru_cache(4096)
def _block_bytes(
    model: ModelConfig, sequences: int, seq_len: int, precision: Precision, tp: int, sharded: bool, recompute: Recompute
) -> tuple[int, int]:
    """Bytes that a block keeps of a micro-batch, and that the loss works with."""
    sizes = BlockSizes(model, sequences, seq_len, precision, tp, sharded)
    return kept_bytes(sizes, recompute), loss_bytes(sizes, LOGIT_CHUNK_BYTES["cuda"])


@lru_cache
def _stage_layers(model: ModelConfig, stages: int, seq_len: int) -> tuple[int, ...]:
    """As the trainer divides them; other programs are taken to do it alike."""
    return tuple(len(layers) for layers in stage_layers(model, stages, seq_len))


def divisors(number: int) -> list[int]:
    """All divisors, in ascending order."""
    low = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def _no_layout(request: PlanRequest) -> str:
    """Why no layout divides, and what would."""
    devices, batch = request.cluster.devices, request.batch
    fewer = (replace(request, cluster=replace(request.cluster, devices=n)) for n in range(devices - 1, 0, -1))
    near = next(each.cluster.devices for each in fewer if each.cluster.fills_nodes and any(candidates(each)))
    return (
        f"no layout divides {devices} GPUs: data-parallel replicas must divide data.batch_size {batch}, "
        f"tensor-parallel ranks the heads ({request.model.heads}, {request.model.kv_heads} of keys and values) and the "
        f"GPUs of a node, and pipeline ranks be at most {request.model.layers}; try --gpus {near}, or a batch_size "
        f"of {-(-batch // devices) * devices}"
    )
