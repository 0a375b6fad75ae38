"""Output projection fused with cross-entropy: computed in chunks of tokens, so the full logits are never stored."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100  # a target with this id adds nothing to the loss
_CHUNK = 1 << 23  # logits per chunk


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_start: int = 0, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Cross-entropy of softmax(x @ weight.T) in nats, summed over all targets but IGNORE_INDEX; shape (1,).

    `x` (B, T, D), `weight` (V, D), `targets` (B, T) int64. The result is float32, or float64 for float64 inputs:
    in bfloat16 the log-sum-exp is wrong in the second digit.

    Vocab-parallel with `group`: `weight` (V / n, D) is this rank's shard of the vocabulary, starting at id
    `vocab_start`; all ranks pass the same x and targets, and the gradient of x is a partial sum, still to be
    all-reduced. Two all-reduces per chunk: of the largest log-sum-exp, then of the sum of exponentials and the
    target's logit (after Shoeybi et al. 2019, section 3).
    """
    return _LinearCrossEntropy.apply(x.flatten(0, 1), weight, targets.flatten(), vocab_start, group)


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy that computes its gradients in the forward pass, while each chunk's logits exist."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, vocab_start: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        device = x.device.type
        casts = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if casts else x.dtype
        with torch.autocast(device, enabled=False) if casts else nullcontext():
            inputs, matrix = x.to(dtype), weight.to(dtype)
            total = torch.zeros(1, dtype=_accumulation_dtype(dtype), device=x.device)
            dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
            dw = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
            step = max(1, _CHUNK // len(weight))
            for start in range(0, len(x), step):
                chunk = slice(start, start + step)
                loss, dlogits = _chunk_loss(inputs[chunk], matrix, targets[chunk], vocab_start, group)
                total += loss
                if dx is not None and dw is not None:
                    dlogits = dlogits.to(dtype)
                    if dtype == dw.dtype:
                        torch.mm(dlogits, matrix, out=dx[chunk])
                        dw.addmm_(dlogits.T, inputs[chunk])
                    else:
                        dx[chunk] = dlogits @ matrix
                        dw += dlogits.T @ inputs[chunk]
        ctx.save_for_backward(dx, dw)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # not in place: zero-bubble schedules call this twice, for the gradients of inputs and of weights
        dx, dw = (g if g is None else g * grad.to(g.dtype) for g in ctx.saved_tensors)
        return dx, dw, None, None, None


def _chunk_loss(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_start: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Summed loss of a chunk of N tokens, (), and the gradient of its logits, (N, V / n)."""
    logits = (x @ weight.T).to(_accumulation_dtype(x.dtype))
    valid, local = targets != IGNORE_INDEX, targets - vocab_start
    in_shard = (local >= 0) & (local < len(weight)) if group is not None else valid
    column = local.clamp(0, len(weight) - 1)[:, None]
    log_probs = logits.log_softmax(-1)  # normalised within this shard of the vocabulary
    target_log_prob, scale = log_probs.gather(1, column)[:, 0], valid.to(log_probs.dtype)
    if group is not None:
        log_sum_exp = logits[:, 0] - log_probs[:, 0]
        target_log_prob, shard_prob = _combine_vocab_shards(target_log_prob, log_sum_exp, in_shard, group)
        scale *= shard_prob
    loss = torch.where(valid, -target_log_prob, 0.0).sum()
    gradient = log_probs.exp_().mul_(scale[:, None])
    gradient.scatter_add_(1, column, -(in_shard & valid)[:, None].to(gradient.dtype))
    return loss, gradient


def _combine_vocab_shards(
    target_log_prob: Tensor, log_sum_exp: Tensor, in_shard: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Each target's log-probability over the whole vocabulary, (N,), and this shard's total probability, (N,).

    `target_log_prob` (N,) is normalised within this shard and valid where the target is `in_shard`;
    `log_sum_exp` (N,) is of this shard's logits.
    """
    largest = log_sum_exp.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    log_sum_exp = log_sum_exp - largest
    sums = torch.stack([log_sum_exp.exp(), torch.where(in_shard, target_log_prob + log_sum_exp, 0.0)], 1)
    dist.all_reduce(sums, group=group)
    return sums[:, 1] - sums[:, 0].log(), log_sum_exp.exp() / sums[:, 0]


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to sum in: float32 for 16-bit dtypes, else `dtype` itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
