"""Forward and backward over one step's micro-batches."""

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from training.data_parallel import without_sync
from training.mesh import World
from training.model import summed_loss


def forward_backward(
    model: nn.Module, batch: Sequence[tuple[Tensor, Tensor]], counted: int, world: World, precision: str
) -> Tensor:
    """Add to the gradients those of the batch's mean loss; return this rank's summed loss in nats, 0-d.

    `batch` holds this rank's micro-batches, inputs and targets (B, T) each; `counted` is the number of
    targets over all ranks and micro-batches, by which the sum is divided: so neither the loss nor its
    gradients depend on how the batch was split.
    """
    scale = world.mesh["dp"].size() / counted  # gradients are averaged over the ranks, and are to be summed
    total = torch.zeros((), device=world.device)
    for number, (inputs, targets) in enumerate(batch, start=1):
        with contextlib.nullcontext() if number == len(batch) else without_sync(model):
            with autocast(world.device, precision):
                loss = summed_loss(model(inputs.to(world.device)), targets.to(world.device))
            (loss * scale).backward()
        total = total + loss.detach()
    return total


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Matrix products in bfloat16 where `precision` is "bf16"; what it is "fp32" for is left alone."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
