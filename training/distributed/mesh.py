"""World: the ranks of a run, their device mesh, and this rank's place in it; joins the process group.

Mesh dimensions, outermost first: "pp", "replicate", "shard", "tp". Neighbouring ranks differ in "tp", which
communicates most (Narayanan et al. 2021, section 3). Data parallelism is "replicate" x "shard", as in FSDP's hybrid
sharding: ZeRO shards over the ranks along "shard" (`parallel.zero_group` of them), and the ranks along "replicate"
hold copies of the same shard.

Where tensor parallelism is 2D, 2.5D or 3D, "tp" is also a grid of its own axes "depth", "row" and "column". With
context parallelism neighbours on "replicate" x "shard" have parts of the same sequences: they are an axis "cp" of their
own, and for parameters replicas like others, over which gradients are summed and ZeRO shards.

With local steps (DiLoCo) "replicate" of the mesh is the axis "outer": its ranks hold different weights, which are
averaged at times; the axis "replicate" has one rank. The ranks of such a replica are neighbours.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gristmill.errors import GristmillError, UsageError
from training.distributed.layout import ParallelConfig
from training.kernels.dispatch import kernels_for
from training.sharding.axis import Axes, Axis, JointAxis

Result = TypeVar("Result")

_START_TIMEOUT = timedelta(minutes=5)  # for all ranks to join
_REPORT_SECONDS = 30.0  # for the report on a hang under NCCL
AXES = ("pp", "replicate", "shard", "tp")
GRID = ("depth", "row", "column")
OUTER = "outer"  # of replicas that take local steps


@dataclass(frozen=True)
class World:
    """This rank's view of the mesh: per-axis size, rank and group; its device; the collectives' timeout."""

    mesh: DeviceMesh
    axes: Axes
    device: torch.device
    timeout: timedelta

    @property
    def rank(self) -> int:
        """Global rank."""
        return dist.get_rank()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size()

    @property
    def is_main(self) -> bool:
        """True on rank 0, which prints and writes the files of the run."""
        return self.rank == 0

    def axis(self, name: str) -> Axis:
        """The axis "pp", "replicate", "shard" or "tp", one of a grid, or "cp" with context parallelism."""
        return self.axes[name]

    @property
    def finest_axes(self) -> tuple[str, ...]:
        """The axes of the mesh in order, with those of a grid of tensor-parallel ranks in place of "tp"."""
        return (*AXES[:-1], *GRID) if "row" in self.axes else AXES

    def joint_axis(self, *names: str) -> JointAxis:
        """Several of the `finest_axes`, in their order, as one; collective if more than one has several ranks."""
        axes = tuple(self.axes[name] for name in names)
        longer = [axis for axis in axes if axis.size > 1]
        if len(longer) < 2:
            return JointAxis(axes, longer[0].group if longer else None)
        every = self.finest_axes
        dims = [every.index(name) for name in names]
        of_mesh = dict(zip(AXES, self.mesh.mesh.shape, strict=True))
        ranks = self.mesh.mesh.reshape([of_mesh.get(name) or self.axes[name].size for name in every])
        lines = ranks.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims)).flatten(0, -2).tolist()
        group = dist.new_subgroups_by_enumeration(lines, timeout=self.timeout, group_desc=" x ".join(names))[0]
        return JointAxis(axes, group)

    @property
    def dp_size(self) -> int:
        """Number of data-parallel replicas: of groups of ranks that read different sequences."""
        outer = self.axes[OUTER].size if OUTER in self.axes else 1
        return outer * self.axes["replicate"].size * self.axes["shard"].size // self._cp_size

    @property
    def dp_rank(self) -> int:
        """Index of this rank's data-parallel replica; of n that take local steps, replica r has r, r + n, r + 2n, …"""
        shard, replicate = self.axes["shard"], self.axes["replicate"]
        rank = (replicate.rank * shard.size + shard.rank) // self._cp_size
        return rank * self.axes[OUTER].size + self.axes[OUTER].rank if OUTER in self.axes else rank

    @property
    def _cp_size(self) -> int:
        return self.axes["cp"].size if "cp" in self.axes else 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over all ranks, in place; on `self.device` or the CPU."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def all_reduce_max(self, value: int) -> int:
        """The maximum of `value` over all ranks; reduced on the CPU, so it does not wait for a GPU."""
        x = torch.tensor(value)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return int(x)


def main_only(action: Callable[[], Result]) -> Result:
    """Run `action` on rank 0 and broadcast its result; a GristmillError it raises is raised on every rank."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except GristmillError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


@contextmanager
def init_distributed(device: Literal["auto", "cpu", "cuda"] = "auto", timeout: float = 60.0) -> Iterator[torch.device]:
    """Join the process group of torchrun (or torch.distributed.launch), or make one of a single rank.

    Yields this rank's device and destroys the group at the end; a group that the caller initialized is used and left
    open. `timeout`: seconds that a collective waits for other ranks. Raises UsageError for a missing GPU.
    """
    kind = _device_kind(device)
    rank_device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(rank_device)
    else:
        _share_cores()
    kernels_for(rank_device).prepare_process()
    ours = not dist.is_initialized()
    if ours:
        _init_process_group(kind, timeout)
    try:
        yield rank_device
    finally:
        if ours:
            dist.destroy_process_group()


def build_world(layout: ParallelConfig, device: torch.device, timeout: float = 60.0) -> World:
    """Build the mesh of a resolved layout; collective: every rank calls it. `timeout` in seconds."""
    shape = (layout.pp, layout.replicas // layout.shards, layout.shards, layout.tp)
    ranks = torch.arange(dist.get_world_size()).view(shape)
    if layout.local_steps:
        ranks = torch.arange(dist.get_world_size()).view(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    limit = _group_timeout(device.type, timeout)
    groups = []
    for dim, name in enumerate(AXES):  # not init_device_mesh, whose groups always time out after 30 minutes
        lines = ranks.movedim(dim, -1).flatten(0, -2).tolist()
        groups.append(dist.new_subgroups_by_enumeration(lines, timeout=limit, group_desc=name)[0])
    mesh = DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=AXES)
    axes = {name: _axis(mesh[name], name) for name in AXES}
    if layout.local_steps:
        axes |= {OUTER: replace(axes["replicate"], name=OUTER), "replicate": Axis("replicate", 1, 0, None)}
    if layout.tensor != "1d":
        axes |= _further_axes(GRID, ranks.reshape(-1, *layout.grid), limit)
    if layout.cp > 1:
        neighbours = ranks.reshape(layout.pp, -1, layout.cp, layout.tp).transpose(2, 3).reshape(-1, layout.cp)
        axes |= _further_axes(("cp",), neighbours, limit)
    return World(mesh, axes, device, limit)


def _further_axes(names: Sequence[str], ranks: Tensor, timeout: timedelta) -> dict[str, Axis]:
    """Axes of groups of ranks, (groups, ranks along each of the axes `names`); collective."""
    own, axes = (ranks == dist.get_rank()).nonzero()[0].tolist(), {}
    for dim, name in enumerate(names, 1):
        group, size = None, ranks.shape[dim]
        if size > 1:
            lines = ranks.movedim(dim, -1).flatten(0, -2).tolist()
            group = dist.new_subgroups_by_enumeration(lines, timeout=timeout, group_desc=name)[0]
        axes[name] = Axis(name, size, own[dim], group)
    return axes


def _axis(line: DeviceMesh, name: str) -> Axis:
    return Axis(name, line.size(), line.get_local_rank(), line.get_group() if line.size() > 1 else None)


def restart_prefix() -> str:
    """Prefix of this restart's keys in torchrun's store, such as "attempt0": restarts may share one store."""
    return f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"


def _device_kind(asked: str) -> str:
    available = torch.cuda.is_available()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if asked == "cuda" and not available:
        raise UsageError("--device is cuda, and torch finds no GPU on this machine; try --device cpu")
    if asked != "cpu" and available and local_ranks > torch.cuda.device_count():
        raise UsageError(
            f"{local_ranks} processes and {torch.cuda.device_count()} GPUs on this machine; "
            "try a lower --nproc_per_node, or --device cpu"
        )
    return "cuda" if available and asked != "cpu" else "cpu"


def _share_cores() -> None:
    """Divide this machine's cores among its ranks, unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def _init_process_group(kind: str, timeout: float) -> None:
    limit = _group_timeout(kind, timeout)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
        return
    store, rank, size = next(dist.rendezvous("env://", timeout=_START_TIMEOUT))
    # torchrun may keep one store over restarts, which still holds the addresses of dead processes
    store = dist.PrefixStore(restart_prefix(), store)
    _wait_for_start(store, size)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except RuntimeError as error:
        raise UsageError(
            f"rank {rank} and the other {size - 1} could not connect within --timeout, {timeout:g} s: one has died, or "
            f"the machine is busy; try a higher --timeout ({str(error).strip().splitlines()[0]:.150})"
        ) from error


def _group_timeout(kind: str, timeout: float) -> timedelta:
    """How long a collective waits. NCCL aborts the process then: StallWatch must have reported before."""
    return timedelta(seconds=timeout + (_REPORT_SECONDS if kind == "cuda" else 0.0))


def _wait_for_start(store: dist.Store, size: int) -> None:
    """Wait until all ranks have started: the start may take longer than the collectives' timeout."""
    if store.add("started", 1) == size:
        store.set("all started", "")
    try:
        store.wait(["all started"], _START_TIMEOUT)
    except dist.DistStoreError as error:
        raise UsageError(
            f"only {store.add('started', 0)} of {size} ranks have started within {_START_TIMEOUT}; "
            "look for the others' errors in the launcher's output"
        ) from error
