"""Output projection fused with cross-entropy: computed in chunks of tokens, so the full logits are never stored."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._triton import has_triton

from training.kernels.dispatch import kernels_for
from training.kernels.precision import accumulation_dtype

IGNORE_INDEX = -100  # a target with this id adds nothing to the loss
_BLOCK_BYTES = 64 << 20  # of the gradient of the weight, where it is added to in blocks of rows

ChunkLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits (N, V), targets (N,)) to the losses, (N,), and the gradient of their sum by the logits, (N, V), as these."""


class ZLoss:
    """z-loss: `coefficient` (log Z)^2 of each target, Z the sum of exponentials (Chowdhery et al. 2022, section 5).

    It keeps logits from drifting. Its gradient joins that of the cross-entropy, its value is summed apart.
    """

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient
        self._total: Tensor | None = None

    def add(self, log_z: Tensor, valid: Tensor) -> Tensor:
        """Add that of N targets, `log_z` (N,), where `valid`; returns 1 + its derivative by log Z, (N,)."""
        value = torch.where(valid, self.coefficient * log_z.square(), 0.0).sum()
        self._total = value if self._total is None else self._total + value
        return 1 + 2 * self.coefficient * log_z

    def take(self) -> Tensor | None:
        """Return the sum since the last call, 0-d; None if nothing was added."""
        total = self._total
        self._total = None
        return total


class SequenceLosses:
    """The loss of each sequence of a step, kept where it is computed, in the order of the micro-batches."""

    def __init__(self) -> None:
        self._parts = list[Tensor]()

    def add(self, losses: Tensor, targets: Tensor) -> None:
        """Add those of a micro-batch, (B, T) in nats, zero where `targets` (B, T) are ignored."""
        counts = (targets != IGNORE_INDEX).sum(1)
        self._parts.append(torch.stack([losses.sum(1), counts.to(losses.dtype)]))

    def take(self) -> Tensor | None:
        """Return each sequence's summed loss and targets since the last call, (2, B); None if there are none."""
        parts = self._parts
        self._parts = []
        return torch.cat(parts, 1) if parts else None


def chunk_tokens(vocabulary: int, dtype: torch.dtype, device: torch.device) -> int:
    """Tokens per chunk: as many as the device's memory for logits holds, in the dtype of the loss; one at least."""
    return max(1, kernels_for(device).LOGITS_BYTES // (vocabulary * accumulation_dtype(dtype).itemsize))


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    z_loss: ZLoss | None = None,
    sequence_losses: SequenceLosses | None = None,
) -> Tensor:
    """Return the cross-entropy of softmax(x @ weight.T) in nats, summed over all targets but IGNORE_INDEX; shape (1,).

    `x` (B, T, D), `weight` (V, D), `targets` (B, T) int64. Softmax and loss are float32, or float64 for float64
    inputs: in bfloat16 the log-sum-exp is wrong in the second digit. A second backward pass through the result raises
    AssertionError, as the first scales the gradients in place; only torch.autograd.grad may be called several times.

    Vocab-parallel with `group`: `weight` (V / n, D) is this rank's shard of the vocabulary, starting at id
    `vocab_start`; all ranks pass the same x and targets, and the gradient of x is a partial sum, still to be
    all-reduced. Two all-reduces per chunk: of the largest log-sum-exp, then of the sum of exponentials and the
    target's logit (after Shoeybi et al. 2019, section 3).

    With `z_loss` the gradients are of the sum of both losses, and the result remains the cross-entropy. The losses of
    sequences are added to `sequence_losses`.
    On a GPU torch.compile fuses all that follows the logits, unless there is a group or a z-loss: of GPT-2's step on an
    H200 torch's operators took a fifth for it.
    """
    chunk_loss: ChunkLoss = partial(_chunk_loss, vocab_start=vocab_start, group=group, z_loss=z_loss)
    if x.is_cuda and group is None and z_loss is None and has_triton():
        chunk_loss = _compiled_chunk_loss()
    step = chunk_tokens(_largest_shard(len(weight), vocab_start, group), x.dtype, x.device)
    if x.is_cuda:
        step = _equal_step(targets.numel(), step)
    kept = None
    if sequence_losses is not None:
        kept = torch.empty(targets.numel(), dtype=accumulation_dtype(x.dtype), device=x.device)
    loss = _LinearCrossEntropy.apply(x.flatten(0, 1), weight, targets.flatten(), step, chunk_loss, kept)
    if sequence_losses is not None and kept is not None:
        sequence_losses.add(kept.view_as(targets), targets)
    return loss


@torch.no_grad()
def token_losses(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_start: int = 0, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the cross-entropy of each target in nats, zero for IGNORE_INDEX: (B, T); without gradients.

    Arguments and memory are those of `linear_cross_entropy`.
    """
    losses = torch.empty(targets.shape, dtype=accumulation_dtype(x.dtype), device=x.device)
    step = chunk_tokens(_largest_shard(len(weight), vocab_start, group), x.dtype, x.device)
    chunks = zip(x.flatten(0, 1).split(step), targets.flatten().split(step), losses.flatten().split(step), strict=True)
    for features, ids, out in chunks:
        out.copy_(_chunk_losses(features @ weight.T, ids, vocab_start, group)[0])
    return losses


def logits_cross_entropy(
    logits: Tensor, targets: Tensor, vocab_start: int, group: dist.ProcessGroup | None, z_loss: ZLoss | None = None
) -> Tensor:
    """`linear_cross_entropy` from this rank's logits (B, T, V / n), all of which are in memory; shape (1,)."""
    return _LogitsCrossEntropy.apply(logits.flatten(0, 1), targets.flatten(), vocab_start, group, z_loss)


@torch.no_grad()
def logits_losses(logits: Tensor, targets: Tensor, vocab_start: int, group: dist.ProcessGroup | None) -> Tensor:
    """`token_losses` from this rank's logits (B, T, V / n): (B, T), without gradients."""
    return _chunk_losses(logits.flatten(0, 1), targets.flatten(), vocab_start, group)[0].view_as(targets)


class _LogitsCrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits that keeps their gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        vocab_start: int,
        group: dist.ProcessGroup | None,
        z_loss: ZLoss | None,
    ) -> Tensor:
        losses, gradient = _chunk_loss(logits, targets, vocab_start, group, z_loss)
        ctx.save_for_backward(gradient)
        return losses.sum()[None].clone()  # FSDP warns of a view

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None, None, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy that computes its gradients in the forward pass, while each chunk's logits exist."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        step: int,
        chunk_loss: ChunkLoss,
        kept: Tensor | None,
    ) -> Tensor:
        dtype = accumulation_dtype(x.dtype)
        total = torch.zeros(1, dtype=dtype, device=x.device)
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        for start in range(0, len(x), step):
            chunk = slice(start, start + step)
            losses, dlogits = chunk_loss(x[chunk] @ weight.T, targets[chunk])
            total += losses.sum()
            if kept is not None:
                kept[chunk] = losses
            if dx is not None and dw is not None:
                torch.mm(dlogits, weight, out=dx[chunk])
                _add_product(dw, dlogits.T, x[chunk])
        # float16 ends at 65,504, and the gradients are not scaled by the loss's scale yet
        half = dw is not None and weight.dtype is torch.bfloat16
        ctx.gradients = [dx, dw.to(weight.dtype) if half and dw is not None else dw]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.gradients is not None, "a second backward pass through linear_cross_entropy"
        gradients = ctx.gradients
        if _is_only_backward_pass(ctx):
            ctx.gradients = None  # in place, and no reference is left: autograd takes a gradient over without a copy
            dx, dw = (g if g is None else g.mul_(grad.to(g.dtype)) for g in gradients)
        else:
            dx, dw = (g if g is None else g * grad.to(g.dtype) for g in gradients)
        return dx, dw, None, None, None, None


def _equal_step(tokens: int, max_tokens: int) -> int:
    """Return the tokens of a chunk, at most `max_tokens`: of one size, for one compiled shape, if a few more do."""
    count = max(1, -(-tokens // max_tokens))
    count = next((n for n in range(count, 2 * count + 1) if tokens % n == 0), count)
    return max(1, -(-tokens // count))


def _largest_shard(rows: int, vocab_start: int, group: dist.ProcessGroup | None) -> int:
    """Ids of the first rank's shard, which is the largest: the ranks' collectives match only with the same chunks."""
    rank = 0 if group is None else dist.get_rank(group)
    return max(rows, vocab_start // rank) if rank else rows


def _is_only_backward_pass(ctx: Any) -> bool:
    """False in torch.autograd.grad: zero-bubble schedules call it twice, for the gradients of inputs and weights."""
    leaf = ctx.next_functions[1][0]
    try:
        return leaf is not None and bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # autograd.grad cannot answer for a leaf
        return False


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total` in place; a CPU's product in another dtype is added in blocks of rows, to be small."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
        return
    if a.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
        return
    step = max(1, _BLOCK_BYTES // max(1, total[0].nbytes))
    for start in range(0, len(total), step):
        rows = slice(start, start + step)
        total[rows] += a[rows] @ b


def _chunk_loss(
    logits: Tensor, targets: Tensor, vocab_start: int, group: dist.ProcessGroup | None, z_loss: ZLoss | None = None
) -> tuple[Tensor, Tensor]:
    """Return losses of the logits (N, V / n) of a chunk, (N,), and the logits' gradient, of their shape and dtype."""
    losses, log_probs, log_z, shard_prob = _chunk_losses(logits, targets, vocab_start, group)
    valid, (in_shard, column) = targets != IGNORE_INDEX, _columns(targets, logits, vocab_start, group)
    scale = valid.to(log_probs.dtype)
    if shard_prob is not None:
        scale *= shard_prob
    if z_loss is not None:
        scale *= z_loss.add(log_z, valid)
    gradient = log_probs.exp_().mul_(scale[:, None])
    gradient.scatter_add_(1, column, -(in_shard & valid)[:, None].to(gradient.dtype))
    return losses, gradient.to(logits.dtype)


@cache
def _compiled_chunk_loss() -> ChunkLoss:
    return torch.compile(_whole_chunk_loss)


def _whole_chunk_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """`_chunk_loss` of the whole vocabulary, without scatter and gather, which torch.compile would not fuse."""
    wide = logits.to(accumulation_dtype(logits.dtype))
    valid = targets != IGNORE_INDEX
    log_z = wide.logsumexp(-1, keepdim=True)
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    losses = torch.where(valid, log_z[:, 0] - torch.where(is_target, wide, 0.0).sum(-1), 0.0)
    gradient = torch.where(valid[:, None], (wide - log_z).exp() - is_target.to(wide.dtype), 0.0)
    return losses, gradient.to(logits.dtype)


def _columns(
    targets: Tensor, logits: Tensor, vocab_start: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Whether this shard has each of N targets, (N,), and its column there, (N, 1), or any other where it has not."""
    local = targets - vocab_start
    in_shard = (local >= 0) & (local < logits.shape[1]) if group is not None else targets != IGNORE_INDEX
    return in_shard, local.clamp(0, logits.shape[1] - 1)[:, None]


def _chunk_losses(
    logits: Tensor, targets: Tensor, vocab_start: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the loss of each of N tokens, (N,), and what its gradient is made of.

    That is log-probabilities, (N, V / n), normalised within this shard of the vocabulary; log Z over all of it, (N,);
    with `group` this shard's total probability, (N,).
    """
    in_shard, column = _columns(targets, logits, vocab_start, group)
    log_probs = logits.log_softmax(-1, dtype=accumulation_dtype(logits.dtype))
    shard_prob = None
    target_log_prob = log_probs.gather(1, column)[:, 0]
    log_z = logits[:, 0].to(log_probs.dtype) - log_probs[:, 0]  # of this shard
    if group is not None:
        target_log_prob, shard_prob, log_z = _combine_vocab_shards(target_log_prob, log_z, in_shard, group)
    return torch.where(targets != IGNORE_INDEX, -target_log_prob, 0.0), log_probs, log_z, shard_prob


def _combine_vocab_shards(
    target_log_prob: Tensor, log_sum_exp: Tensor, in_shard: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Over the whole vocabulary each target's log-probability, this shard's total probability, and log Z; each (N,).

    `target_log_prob` (N,) is normalised within this shard and valid where the target is `in_shard`;
    `log_sum_exp` (N,) is of this shard's logits.
    """
    largest = log_sum_exp.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    log_sum_exp = log_sum_exp - largest
    sums = torch.stack([log_sum_exp.exp(), torch.where(in_shard, target_log_prob + log_sum_exp, 0.0)], 1)
    dist.all_reduce(sums, group=group)
    log_total = sums[:, 0].log()
    return sums[:, 1] - log_total, log_sum_exp.exp() / sums[:, 0], largest + log_total
