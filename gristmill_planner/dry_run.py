"""Dry run: one rank's modules and a step of them on the meta device, by the trainer's own code.

The other ranks do not exist: collectives are counted and send nothing.
"""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gristmill.errors import require
from gristmill.wording import count_of
from gristmill_planner.memory import LOGIT_CHUNK_BYTES
from gristmill_planner.planned_run import PlannedRun
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import MemoryConfig
from training.model.batch import TokenBatch
from training.model.decoder import meta_decoder
from training.optim.build_optimizer import build_optimizer
from training.optim.optim_config import OptimConfig
from training.optim.optimizer import Optimizer
from training.parallel.mesh import World, build_world
from training.parallel.parallel_model import ParallelModel
from training.parallel.parallelize import parallelize
from training.parallel.traffic import expected_traffic
from training.parallel.traffic_counter import TrafficCounter, traffic_inputs
from training.parallel.traffic_inputs import Traffic, Volume

_META = torch.device("meta")
_CPU = torch.device("cpu")
_aten = torch.ops.aten


@contextmanager
def fake_world(layout: ParallelConfig, rank: int) -> Iterator[World]:
    """Yield the world of `rank` in a resolved layout, on the meta device; it lasts as long as the context.

    Its process group is torch's fake one, of all ranks of the layout.
    """
    size = layout.processes
    dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        group = dist.group.WORLD
        assert group is not None
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)  # without one torch warns at the end
        # the mesh's device decides where FSDP allocates, and it knows no meta device: StepOnMeta allocates there
        yield replace(build_world(layout, _CPU), device=_META)
    finally:
        dist.destroy_process_group()


class FakeCollectives(TorchDispatchMode):
    """Context manager in which collectives are not carried out: they leave their tensors as they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            return _not_sent(func, args)
        return func(*args, **(kwargs or {}))


class StepOnMeta(TrafficCounter):
    """Context manager that counts the collectives of a step, which are not carried out.

    Every tensor made in it is on the meta device, wherever it was asked for. A number that another rank would have
    sent is 1: torch's pipeline stages vote that all of them know the shapes of what they pass on.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._operators = MetaOperators()
        self._patches = ExitStack()

    def __enter__(self) -> "StepOnMeta":
        # FSDP refuses to run on the meta device, and from torch 2.15 on asks a CPU's stream for its number. torch's
        # other way, FakeTensorMode, takes some five times as long, and all that the trainer does otherwise on the meta
        # device (kernels, initial values, documents, recomputation) would have to know of fake tensors, too.
        self._patches.enter_context(patch.object(FSDPParamGroup, "_validate_no_meta_params", lambda _: None))
        if torch.__version__ >= "2.15":
            self._patches.enter_context(patch.object(_fsdp_collectives, "record_grad_output_stream", lambda *_: None))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.count(func.overloadpacket.__name__, tree_leaves((args, kwargs)))
            return _not_sent(func, args)
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            return 1
        if func is _aten.lift_fresh.default:
            return torch.empty_like(args[0], device=_META)
        kwargs = kwargs or {}
        if kwargs.get("device") == _CPU:
            kwargs = {**kwargs, "device": _META}
        return self._operators.call(func, args, kwargs)

    def count(self, name: str, arguments: list[Any]) -> None:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        if not all(_is_vote(tensor) for tensor in tensors):
            super().count(name, arguments)


def _is_vote(tensor: Tensor) -> bool:
    """Return whether a tensor is a pipeline's vote: one integer; a grid's rows exchange many of them, which are ids."""
    return tensor.numel() <= 1 and not tensor.is_floating_point()


def _not_sent(func: Any, args: Any) -> Any:
    """Return what a collective returns: its work, and if it has outputs those too."""
    work = FakeWork().boxed()
    if len(func._schema.returns) == 1:
        return work
    return args[0], work


class _MetaTensor(NamedTuple):
    """Description of a tensor on the meta device, all that there is of it."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class MetaOperators:
    """Calls operators, and remembers what those returned that make new tensors.

    torch takes 0.1 to 5 ms for the shapes of one, and the thousands of micro-batches of a step have the same.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call `func` and return its result."""
        if not _makes_tensors(func):
            return func(*args, **kwargs)
        named = [(name, _describe(value)) for name, value in kwargs.items()]
        key = (func, *map(_describe, args), *named)
        if key not in self._known:
            self._known[key] = _describe(func(*args, **kwargs))
        return _make(self._known[key])


@cache
def _makes_tensors(func: Any) -> bool:
    """Return whether no output is a view of an input, and no input is written to."""
    schema = func._schema
    if func.namespace != "aten" or schema.is_mutable:
        return False
    return not any(output.alias_info for output in schema.returns)


def _describe(value: Any) -> Any:
    """Return an argument or a result without its tensors; numbers with their type, as 1 and 1.0 are equal."""
    if isinstance(value, Tensor):
        assert value.is_meta, "a step on the meta device has a tensor with values"
        return _MetaTensor(value.shape, value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(map(_describe, value))
    return type(value), value


def _make(described: Any) -> Any:
    if isinstance(described, _MetaTensor):
        return torch.empty_strided(described.shape, described.stride, dtype=described.dtype, device="meta")
    if described and isinstance(described[0], type):
        return described[1]
    return tuple(map(_make, described))


_ANY_DECAY = 0.999  # an average takes as much memory with any


@dataclass(frozen=True)
class DryRun:
    """A rank's bytes, as it was built, and its traffic in a step, as it was run and by the formulas."""

    rank: int
    place: dict[str, tuple[int, int]]
    """Index of the rank, and number of ranks, by axis of the mesh."""
    layers: dict[int, range]
    """Layers of each of its pipeline stages."""
    parameters: int
    """Number that its modules compute with, before ZeRO-3 shards them; of two tied copies on one rank one."""
    built: dict[str, int]
    """Bytes of weights, of float32 masters, and of the optimizer's moments with an average of the weights."""
    sent: Traffic
    expected_sent: Traffic

    @property
    def agrees(self) -> bool:
        """Return whether the formulas of traffic are right to the byte."""
        return self.sent == self.expected_sent


def try_rank(run: PlannedRun, rank: int) -> DryRun:
    """Build rank `rank` of `run`, and run one step of it, without memory and without the other ranks.

    The step is that of the trainer but for the update, with what Muon gathers for it, and the sum of loss and gradient
    norm over all ranks. Raises UsageError for a rank that there is not, a layout that the trainer refuses, or moments
    that are not on the device.
    """
    _check(run, rank)
    layout = run.layout
    memory = MemoryConfig(run.recompute)
    optim = OptimConfig(name=run.states.name, ema_decay=_ANY_DECAY if run.states.ema else 0.0)
    sequences = run.batch // layout.dp
    with fake_world(layout, rank) as world:
        with FakeCollectives():
            model = parallelize(meta_decoder(run.model), layout, world, 1, run.precision, memory, seq_len=run.seq_len)
            optimizer = build_optimizer(model.params, optim, memory)
        if model.pipeline is not None:
            # torch keeps the state of the random numbers of a stage's device, and the meta device has none
            model.pipeline.device = torch.device("cpu")
            if torch.__version__ < "2.13":  # whose first step also connects a stage with its neighbours
                with StepOnMeta(world):
                    _step(model, sequences, run.seq_len)
        with StepOnMeta(world) as traffic:
            _step(model, sequences, run.seq_len)
        inputs = traffic_inputs(model, sequences, run.seq_len, run.precision, run.recompute)
        inputs = replace(inputs, chunk_bytes=LOGIT_CHUNK_BYTES["cuda"])
        return DryRun(
            rank=rank,
            place={axis.name: (axis.rank, axis.size) for axis in world.axes.values()},
            layers={stage: inputs.stage_layers[stage] for stage in inputs.stages},
            parameters=_parameter_count(model),
            built={**_weights(model), "moments": _moments(optimizer)},
            sent=traffic.traffic,
            expected_sent=expected_traffic(inputs),
        )


def _check(run: PlannedRun, rank: int) -> None:
    """Raise UsageError for a rank that there is not, or a run of which a dry run says nothing."""
    devices = run.cluster.devices
    require(0 <= rank < devices, f"--rank is {rank}; expected 0 to {devices - 1}, as {devices} GPUs have")
    run.layout.check(devices, run.model, run.seq_len)
    moments = run.states.moments
    require(
        moments == "device",
        f"--dry_run with memory.optimizer {moments}: a dry run builds the optimizer's states on the device alone; try "
        "memory.optimizer device, or no --dry_run",
    )
    require(
        not run.model.capacity_factor,
        f"--dry_run with model.capacity_factor {run.model.capacity_factor}: how many tokens are dropped is known in a "
        "run alone; try it without",
    )


def _step(model: ParallelModel, sequences: int, seq_len: int) -> None:
    """Run a step without the update of parameters."""
    tokens = torch.empty((sequences, seq_len), dtype=torch.int64)
    samples = torch.empty((sequences,), dtype=torch.int64)
    model.forward_backward(TokenBatch(tokens, tokens, samples), 1.0)
    if model.routing is not None:
        model.routing.update_bias()
    model.all_gather_params()


def _parameter_count(model: ParallelModel) -> int:
    """Return the number of parameters of the rank's modules; FSDP's are DTensors, which have the whole's shapes."""
    sizes = dict[int, int]()
    for parameter in model.params:
        sizes[id(parameter.module_param)] = parameter.module_param.numel()
    return sum(sizes.values())


def _weights(model: ParallelModel) -> dict[str, int]:
    """Return the bytes of modules' parameters, and of those that the optimizer updates, where they are others."""
    modules = list[torch.nn.Parameter]()
    for part in model.parts:
        modules += [parameter for parameter in part.parameters() if not isinstance(parameter, DTensor)]
    own = {parameter.untyped_storage()._cdata for parameter in modules}
    masters = dict[int, int]()  # bytes, by the id of the tensor
    for parameter in model.params:
        local = parameter.local
        if local.untyped_storage()._cdata not in own:
            masters[id(local)] = local.nbytes
    return {"weights": _storage_bytes(modules), "master": sum(masters.values())}


def _moments(optimizer: Optimizer) -> int:
    """Return the bytes of the optimizer's states, with an average of the weights."""
    moments = list[Tensor]()
    for moments_of_parameter in optimizer.moments().values():
        moments += moments_of_parameter.values()
    return _storage_bytes(moments)


def _storage_bytes(tensors: list[torch.Tensor] | list[torch.nn.Parameter]) -> int:
    """Return the bytes of the memory that tensors are in, each counted once; the meta device has no addresses."""
    sizes = dict[int, int]()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


_NONE = Volume(0, 0)


def dry_run_report(run: PlannedRun, dry_run: DryRun) -> list[object]:
    """Return the report on a dry run, in words and tables."""
    layout = run.layout
    axes = [f"{name} {index} of {size}" for name, (index, size) in dry_run.place.items() if size > 1]
    ranks_of_axes = ", ".join(axes) or "alone"
    agrees = "agree to the byte" if dry_run.agrees else "differ where both numbers are shown"
    return [
        f"rank {dry_run.rank} of {run.cluster.devices} ({ranks_of_axes}) in {layout.describe()}, recompute "
        f"{run.recompute}, with {count_of(layout.micro_batches, 'micro-batch', 'micro-batches')} of "
        f"{run.micro_batch} x {run.seq_len} tokens",
        f"{_held(run, dry_run)}: {dry_run.parameters:,} parameters",
        "",
        _bytes_table(dry_run.built),
        "",
        _traffic_table(dry_run.sent, dry_run.expected_sent),
        "",
        f"The traffic formulas {agrees}.",
    ]


def _held(run: PlannedRun, dry_run: DryRun) -> str:
    """Return the layers and ends of the model on the rank, in words."""
    words = list[str]()
    for layers in dry_run.layers.values():
        words.append(f"layers {layers.start} to {layers.stop - 1}" if len(layers) > 1 else f"layer {layers.start}")
    if 0 in dry_run.layers:
        words.append("the embedding")
    if run.layout.stages - 1 in dry_run.layers:
        words.append("the output")
    return " and ".join(words)


def _bytes_table(built: Mapping[str, int]) -> Table:
    table = Table("memory", "bytes", "GiB", box=None, pad_edge=False)
    for kind, size in built.items():
        table.add_row(kind, f"{size:,}", f"{size / 2**30:.2f}")
    return table


def _traffic_table(sent: Traffic, expected: Traffic) -> Table:
    table = Table("collectives of a step", "calls", "bytes", "GiB", box=None, pad_edge=False)
    for axis, operation in sorted({**sent, **expected}):
        calls, size = sent.get((axis, operation), _NONE)
        more = expected.get((axis, operation), _NONE)
        counted = (_with_formula(calls, more.calls), _with_formula(size, more.bytes))
        table.add_row(f"{axis}: {operation}", *counted, f"{size / 2**30:.2f}")
    return table


def _with_formula(counted: int, expected: int) -> str:
    return f"{counted:,}" if counted == expected else f"{counted:,} (formula {expected:,})"


def dry_run_record(dry_run: DryRun) -> dict[str, Any]:
    """Return a dry run for programs, in bytes."""
    return {
        "rank": dry_run.rank,
        "place": {name: index for name, (index, _) in dry_run.place.items()},
        "layers": {str(stage): [layers.start, layers.stop] for stage, layers in dry_run.layers.items()},
        "parameters": dry_run.parameters,
        "bytes": dry_run.built,
        "collectives": {"counted": _record(dry_run.sent), "formulas": _record(dry_run.expected_sent)},
        "agrees": dry_run.agrees,
    }


def _record(traffic: Traffic) -> list[dict[str, Any]]:
    records = list[dict[str, Any]]()
    for (axis, operation), volume in sorted(traffic.items()):
        records.append({"axis": axis, "operation": operation, **volume._asdict()})
    return records
