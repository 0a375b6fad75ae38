"""Data parallelism: replicas of the model, whose gradients are averaged while they are computed."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from training.mesh import World


def apply_data_parallel(model: nn.Module, world: World) -> nn.Module:
    """Wrap `model`, whose weights are equal on all ranks already, in DDP; alone, it stays as it is.

    DDP averages over the ranks: a loss to be summed over them must be multiplied by their number.
    """
    if world.mesh["dp"].size() == 1:
        return model
    replica = DistributedDataParallel(
        model,
        process_group=world.mesh.get_group("dp"),
        init_sync=False,
        gradient_as_bucket_view=True,
    )
    _settle_buckets(replica, world.device)
    return replica


def without_sync(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which gradients are added up on this rank only, for all micro-batches but the last."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def _settle_buckets(replica: DistributedDataParallel, device: torch.device) -> None:
    """Run one backward pass of zeros.

    After the first one DDP sorts its buckets anew, and with three ranks or more the place of a number
    in its bucket decides in which order the ranks' shares are added: a run that resumes would round its
    first step differently from the run that went on.
    """
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    for _ in range(2):  # the second forward pass is where it sorts
        (replica(ids).sum() * 0.0).backward()
    replica.zero_grad(set_to_none=True)
