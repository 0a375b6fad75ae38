"""Traffic counter: the collectives and bytes of a real training step, counted where torch calls a process group."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.kernels.element_bytes import ACCUMULATION_BYTES, COMPUTE_BYTES
from training.memory.memory_config import Recompute
from training.parallel.mesh import AXES, World
from training.parallel.parallel_model import ParallelModel
from training.parallel.pipeline.stage_layers import stage_layers
from training.parallel.traffic import rank_parameters
from training.parallel.traffic_inputs import Traffic, TrafficInputs, Volume

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


class TrafficCounter(TorchDispatchMode):
    """Context manager that counts this thread's communication, including backward passes and torch's own calls."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._axes = {world.mesh.get_group(axis).group_name: axis for axis in AXES}
        self._axes |= {axis.group.group_name: axis.name for axis in world.axes.values() if axis.group is not None}
        self.traffic: Traffic = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.count(func.overloadpacket.__name__, tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))

    def count(self, name: str, arguments: list[Any]) -> None:
        """Count a call of torch's operator `name` on a process group."""
        group = next(dist.ProcessGroup.unbox(a) for a in arguments if _is_group(a))
        key = self._axes.get(group.group_name, group.group_desc), OPERATIONS.get(name, name)
        nbytes = max((a.nbytes for a in arguments if isinstance(a, Tensor)), default=0)
        self.traffic[key] = self.traffic.get(key, Volume(0, 0)) + Volume(1, nbytes)


def _is_group(argument: Any) -> bool:
    return isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type())


def traffic_inputs(
    model: ParallelModel, sequences: int, seq_len: int, precision: str, recompute: Recompute
) -> TrafficInputs:
    """Return the inputs of the formulas of traffic for this rank of `model`; `sequences` per step and replica."""
    config = model.config
    layout = model.layout
    wide = ACCUMULATION_BYTES[precision]
    rank = {name: model.world.axis(name).rank for name in ("pp", "shard", "tp")}
    layers = stage_layers(config, layout.stages, seq_len)
    stages = layout.stages_of_rank(rank["pp"])
    return TrafficInputs(
        config=config,
        layout=layout,
        rank=rank,
        sequences=sequences,
        seq_len=seq_len,
        itemsize=COMPUTE_BYTES[precision],
        wide=wide,
        reduced=2 if layout.reduce_bf16 else wide,
        recompute=recompute,
        stage_layers=layers,
        parameters={n: rank_parameters(config, layout, layers[n], n, rank["tp"]) for n in stages},
    )
