"""Traffic: counts the collectives and bytes of a training step, where torch calls a process group."""

from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.distributed.mesh import AXES, World

# c10d operation: name in the report
OPERATIONS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "receive",
}


class Volume(NamedTuple):
    """Number of calls, and their bytes in total.

    The bytes of a collective are those of its largest tensor: the input of an all-reduce or reduce-scatter, the output
    of an all-gather. In a ring of p ranks each rank sends (p - 1) / p of that, and twice as much for an all-reduce
    (Patarasuk & Yuan 2009); of p broadcasts or reductions, of which each rank is the root of one, (p - 1) / p too.
    """

    calls: int
    bytes: int

    def __add__(self, other: object) -> "Volume":
        assert isinstance(other, Volume)
        return Volume(self.calls + other.calls, self.bytes + other.bytes)


Traffic = dict[tuple[str, str], Volume]
"""Volume by mesh axis ("tied": between the first and last pipeline stage) and operation; without zero entries."""


class TrafficCounter(TorchDispatchMode):
    """Context manager that counts this thread's communication, including backward passes and torch's own calls."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._axes = {world.mesh.get_group(axis).group_name: axis for axis in AXES}
        self._axes |= {axis.group.group_name: axis.name for axis in world.axes.values() if axis.group is not None}
        self._calls: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.count(func, args, kwargs)
        return func(*args, **(kwargs or {}))

    def count(self, func: Any, args: Any, kwargs: Any) -> None:
        """Count a call of one of torch's operators on process groups."""
        self._count(func.overloadpacket.__name__, tree_leaves((args, kwargs)))

    @property
    def traffic(self) -> Traffic:
        return {key: Volume(calls, self._bytes[key]) for key, calls in self._calls.items()}

    def _count(self, name: str, arguments: list[Any]) -> None:
        group = next(dist.ProcessGroup.unbox(a).group_name for a in arguments if _is_group(a))
        key = self._axes.get(group, "tied"), OPERATIONS.get(name, name)
        self._calls[key] += 1
        self._bytes[key] += max((a.nbytes for a in arguments if isinstance(a, Tensor)), default=0)


def _is_group(argument: Any) -> bool:
    return isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type())
