"""The output matrix and the cross-entropy in one: chunk by chunk of the tokens, so that no full logits exist."""

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
    the gradient of x is this process's part of a sum. The maximum and the pair (sum of exponentials, the
    target's logit) are what is communicated (Shoeybi et al. 2019, section 3). Float32 or better whatever x
    is: a bfloat16 log-sum-exp loses the second digit.
    """
    return _SummedCrossEntropy.apply(x.flatten(0, 1), weight, targets.flatten(), first, group)


class _SummedCrossEntropy(torch.autograd.Function):
    """Computes the gradients together with the loss, while a chunk's logits are there."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        low = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        with torch.autocast(x.device.type, enabled=False):
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
                    dx[here] = dlogits @ matrix
                    if low == dw.dtype:
                        dw.addmm_(dlogits.T, inputs[here])
                    else:
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
    largest = logits.amax(-1, keepdim=True)
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    logits -= largest
    local = (targets - first)[:, None]
    mine = (local >= 0) & (local < len(weight))
    local = local.clamp(0, len(weight) - 1)
    chosen = torch.where(mine, logits.gather(1, local), 0.0)
    powers = logits.exp_()
    sums = torch.cat([powers.sum(-1, keepdim=True), chosen], 1)
    if group is not None:
        dist.all_reduce(sums, group=group)
    valid = targets != IGNORED
    loss = (sums[:, 0].log() - sums[:, 1])[valid].sum()
    gradient = powers.mul_((valid / sums[:, 0])[:, None])
    gradient.scatter_add_(1, local, -(mine & valid[:, None]).to(gradient.dtype))
    return loss, gradient


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
