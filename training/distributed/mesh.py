"""The processes of a run: the process group, this process's device, the mesh of all of them."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gristmill.errors import GristmillError, UsageError
from training.distributed.layout import ParallelConfig
from training.memory.allocator import keep_freed_memory

Result = TypeVar("Result")


_STARTING = timedelta(minutes=5)
AXES = ("pp", "replicate", "shard", "tp")  # the last varies fastest: neighbours talk most


@dataclass(frozen=True)
class Axis:
    """The processes along one axis of the mesh, and which of them this one is; no group where it is alone."""

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class World:
    """All processes, and which one this is.

    `mesh` has the dimensions of AXES; `axes` is what this process sees of each. The replicas of the model,
    which read different samples, lie along "replicate" and "shard"; those along "shard" divide among them
    what ZeRO divides. `timeout` is how long one waits for another.
    """

    mesh: DeviceMesh
    axes: Mapping[str, Axis]
    device: torch.device
    timeout: timedelta

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    @property
    def is_main(self) -> bool:
        """Whether this process speaks for all: prints, and writes what is written once."""
        return self.rank == 0

    def axis(self, name: str) -> Axis:
        return self.axes[name]

    @property
    def dp_size(self) -> int:
        """How many replicas there are: dp."""
        return self.axes["replicate"].size * self.axes["shard"].size

    @property
    def dp_rank(self) -> int:
        """Which of the replicas this process belongs to."""
        return self.axes["replicate"].rank * self.axes["shard"].size + self.axes["shard"].rank

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every process's `x`, in `x`; of `self.device` or the CPU."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def max(self, value: int) -> int:
        """The largest of the processes' values. On the CPU, so that an accelerator need not be waited for."""
        x = torch.tensor(value)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return int(x)

    def main_only(self, action: Callable[[], Result]) -> Result:
        """Let the main process act while the others wait: all get its result, or raise the error it met."""
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = action()
            except GristmillError as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]


@contextmanager
def open_processes(device: Literal["auto", "cpu", "cuda"] = "auto", timeout: float = 60.0) -> Iterator[torch.device]:
    """Join the processes that torchrun (or torch.distributed.launch) started, or be the only one.

    A process group that the caller has made already is used and left open. `timeout` in seconds.
    Yields this process's device. Raises UsageError for a GPU that is not there.
    """
    kind = _device_kind(device)
    place = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(place)
    else:
        _share_cores()
        keep_freed_memory()
    ours = not dist.is_initialized()
    if ours:
        _init_process_group(kind, timeout)
    try:
        yield place
    finally:
        if ours:
            dist.destroy_process_group()


def build_world(layout: ParallelConfig, device: torch.device, timeout: float = 60.0) -> World:
    """The mesh of a resolved layout over all processes; every process calls it. `timeout` in seconds."""
    ranks = torch.arange(dist.get_world_size()).view(layout.pp, layout.dp // layout.shard, layout.shard, layout.tp)
    patience = timedelta(seconds=timeout)
    groups = []
    for dim, name in enumerate(AXES):  # init_device_mesh would have them wait for half an hour
        lines = ranks.movedim(dim, -1).flatten(0, -2).tolist()
        groups.append(dist.new_subgroups_by_enumeration(lines, timeout=patience, group_desc=name)[0])
    mesh = DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=AXES)
    return World(mesh, {name: _axis(mesh[name], name) for name in AXES}, device, patience)


def _axis(line: DeviceMesh, name: str) -> Axis:
    return Axis(name, line.size(), line.get_local_rank(), line.get_group() if line.size() > 1 else None)


def attempt() -> str:
    """Which of torchrun's attempts to run these processes this is."""
    return f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"


def _device_kind(asked: str) -> str:
    available = torch.cuda.is_available()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if asked == "cuda" and not available:
        raise UsageError("--device cuda was asked for, and torch finds no GPU here; try --device cpu")
    if asked != "cpu" and available and here > torch.cuda.device_count():
        raise UsageError(
            f"{here} processes and {torch.cuda.device_count()} GPUs on this machine; "
            "try a lower --nproc_per_node, or --device cpu"
        )
    return "cuda" if available and asked != "cpu" else "cpu"


def _share_cores() -> None:
    """Divide the cores between the processes of this machine, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def _init_process_group(kind: str, timeout: float) -> None:
    patience = timedelta(seconds=timeout)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=patience)
        return
    store, rank, size = next(dist.rendezvous("env://", timeout=_STARTING))
    # torchrun may serve every attempt from one store, in which the dead processes' addresses are still written
    store = dist.PrefixStore(attempt(), store)
    _await_all(store, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)


def _await_all(store: dist.Store, size: int) -> None:
    """Until all processes have started, which may take longer than they wait for each other later."""
    if store.add("started", 1) == size:
        store.set("all started", "")
    try:
        store.wait(["all started"], _STARTING)
    except dist.DistStoreError as error:
        raise UsageError(
            f"{store.add('started', 0)} of {size} processes have started within {_STARTING}; "
            "look at what the launcher says of the others"
        ) from error
