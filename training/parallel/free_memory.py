"""Memory is asked for before it is taken: what the states of a run need at least, and what is free."""

import os

import torch

from gristmill.budget import free_memory
from gristmill.errors import UsageError
from training.kernels.element_bytes import ACCUMULATION_BYTES, COMPUTE_BYTES
from training.memory.memory_config import MemoryConfig
from training.parallel.layout import Layout
from training.parallel.mesh import World

_TO_TRAIN = "--memory.optimizer disk, a smaller model, or --memory.force true to start all the same"
_TO_EVALUATE = "or a machine with more"


def require_memory(
    world: World,
    layout: Layout,
    precision: str,
    memory: MemoryConfig,
    moments: int | None,
    parameters: int,
    own: int,
    sharding: str = "--parallel.zero 3 or --parallel.tp",
) -> None:
    """Raise UsageError on every rank where the states need more memory than is free on one of them; collective.

    `parameters`: of this rank, before ZeRO shards them, and `own` of them that it updates; `moments`: values that the
    optimizer keeps of each, None without training. `sharding`: options that divide the model over more ranks.
    """
    if memory.force:
        return
    needed = state_bytes(parameters, own, layout, precision, memory, moments, world.device.type)
    fault = _lack(needed, world.device, moments is not None)
    if world.all_reduce_max(bool(fault)):
        fault = fault or "another machine of this run has too little memory free"
        others = _TO_EVALUATE if moments is None else _TO_TRAIN
        raise UsageError(f"{fault}: try more ranks with {sharding}, --precision bf16, {others}")


def state_bytes(
    parameters: int, own: int, layout: Layout, precision: str, memory: MemoryConfig, moments: int | None, device: str
) -> int:
    """Return least bytes of weights, gradients, and what the optimizer updates and keeps, on a rank's `device`.

    Without activations, buckets, and what operations work with.
    """
    e = COMPUTE_BYTES[precision]
    wide = ACCUMULATION_BYTES[precision]
    held = {"device": True, "cpu": device == "cpu", "disk": False}
    if layout.zero == 3:
        total = wide * own if held[memory.parameters] else 0
    else:
        total = e * parameters + (wide * own if e < wide and moments is not None else 0)
    if moments is not None:
        total += wide * (parameters if layout.zero == 0 else own)  # gradients
        total += wide * moments * own if held[memory.optimizer] else 0
    return total


def _lack(needed: int, device: torch.device, is_training: bool) -> str:
    """Return what is wrong if a rank needs more bytes than are free, or the ranks of this machine together; else ''."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        owner = "the GPU has"
    else:
        needed *= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        free = free_memory()
        owner = "this machine has"
    if needed <= free:
        return ""
    what = "parameters, gradients and the optimizer's state need" if is_training else "the parameters need"
    return f"{what} {needed / 2**30:,.1f} GiB, and {owner} {free / 2**30:,.1f} GiB free"
