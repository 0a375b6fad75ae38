"""The output matrix and the cross-entropy in one: chunk by chunk of the tokens, so that no full logits exist."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100  # a target that is not counted
_CHUNK = 1 << 23  # logits at a time


def summed_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, first: int = 0, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Cross-entropy in nats of softmax(x @ weight.T), summed over the targets that are not IGNORED; shape (1,).

    `x` (B, T, D), `targets` (B, T) int64. Where `group` is given, `weight` (V / n, D) is this process's
    part of the vocabulary, which begins with id `first`; all of the group pass the same x and targets, and
    the gradient of x is this process's part of a sum. The largest log-sum-exp of the parts and the pair (sum of
    exponentials, the target's logit) are what is communicated (after Shoeybi et al. 2019, section 3). Float32 or
    better whatever x is: a bfloat16 log-sum-exp loses the second digit.
    """
    return _SummedCrossEntropy.apply(x.flatten(0, 1), weight, targets.flatten(), first, group)


class _SummedCrossEntropy(torch.autograd.Function):
    """Computes the gradients together with the loss, while a chunk's logits are there."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        device = x.device.type
        casts = torch.is_autocast_enabled(device)
        low = torch.get_autocast_dtype(device) if casts else x.dtype
        with torch.autocast(device, enabled=False) if casts else nullcontext():
            inputs, matrix = x.to(low), weight.to(low)
            total = torch.zeros(1, dtype=_sum_dtype(low), device=x.device)
            dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
            dw = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
            step = max(1, _CHUNK // len(weight))
            for start in range(0, len(x), step):
                here = slice(start, start + step)
                loss, dlogits = _chunk(inputs[here], matrix, targets[here], first, group)
                total += loss
                if dx is not None and dw is not None:
                    dlogits = dlogits.to(low)
                    if low == dw.dtype:
                        torch.mm(dlogits, matrix, out=dx[here])
                        dw.addmm_(dlogits.T, inputs[here])
                    else:
                        dx[here] = dlogits @ matrix
                        dw += dlogits.T @ inputs[here]
        ctx.save_for_backward(dx, dw)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # not in place: a schedule that computes the gradients of inputs and of weights apart comes here twice
        dx, dw = (g if g is None else g * grad.to(g.dtype) for g in ctx.saved_tensors)
        return dx, dw, None, None, None


def _chunk(
    x: Tensor, weight: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """The chunk's summed loss, (), and the gradient of its logits, (N, V / n)."""
    logits = (x @ weight.T).to(_sum_dtype(x.dtype))
    valid, local = targets != IGNORED, targets - first
    mine = (local >= 0) & (local < len(weight)) if group is not None else valid
    place = local.clamp(0, len(weight) - 1)[:, None]
    logs = logits.log_softmax(-1)  # of the probabilities within this part of the vocabulary
    chosen, share = logs.gather(1, place)[:, 0], valid.to(logs.dtype)
    if group is not None:
        chosen, part = _whole(chosen, logits[:, 0] - logs[:, 0], mine, group)
        share *= part
    loss = torch.where(valid, -chosen, 0.0).sum()
    gradient = logs.exp_().mul_(share[:, None])
    gradient.scatter_add_(1, place, -(mine & valid)[:, None].to(gradient.dtype))
    return loss, gradient


def _whole(chosen: Tensor, here: Tensor, mine: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The log-probability of each target, (N,), and how much of all probability is in this part, (N,).

    `chosen` is the former within this part, where the target is `mine`; `here` the log of the part's sum of
    exponentials.
    """
    largest = here.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    here = here - largest
    sums = torch.stack([here.exp(), torch.where(mine, chosen + here, 0.0)], 1)
    dist.all_reduce(sums, group=group)
    return sums[:, 1] - sums[:, 0].log(), here.exp() / sums[:, 0]


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
