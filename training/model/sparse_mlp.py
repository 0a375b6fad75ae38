"""Sparse MLP: a router sends each token to a few of many experts (mixture of experts, Shazeer et al. 2017)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.kernels.dispatch import grouped_linear
from training.kernels.precision import accumulation_dtype
from training.model.mlp import GatedMLP, gate_function
from training.model.model_config import ModelConfig
from training.model.router import Router


class SparseMLP(nn.Module):
    """(B, T, D) to (B, T, D): the weighted sum of the chosen experts' outputs, plus the shared experts' output.

    Without a capacity every token reaches all experts that are chosen for it, and its result does not depend on the
    other tokens. Tokens are sorted by expert, so that each expert multiplies once. The weights multiply the features
    inside the experts, which are fewer than outputs and need no copy of these for the backward pass.
    """

    last = "output"

    @staticmethod
    def dispatch(experts: "Experts", x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Return weighted outputs of rows (N, D) sorted by expert; otherwise where experts are divided over ranks."""
        output: Tensor = experts(x, weights, counts)
        return output

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        shared = config.shared_experts * config.expert_width
        self.shared = GatedMLP(config, shared) if shared else None
        self.output = nn.Identity()

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Of tokens of `padding`, (B, T) bool, only the shared experts' output."""
        chosen, weights, counts = self.router(x, padding)
        order = chosen.flatten().argsort(stable=True)  # (B T K,): numbers of (token, choice), by expert
        slot_of_row = torch.empty_like(order)
        slot_of_row[order] = torch.arange(len(order), device=order.device)
        k = chosen.shape[-1]
        leaves_out = self.router.config.capacity_factor > 0 or padding is not None
        if leaves_out:  # one row more, of zeros, is the output of all that no expert takes
            taken = int(counts.sum())
            order = F.pad(order[:taken], (0, 1))
            slot_of_row = slot_of_row.clamp(max=taken)
        tokens = Rows.apply(x.flatten(0, 1), order // k, slot_of_row, k)
        weights = Rows.apply(weights.flatten()[:, None].to(x.dtype), order, slot_of_row, 1)
        if leaves_out:
            tokens = tokens[:-1]
            weights = weights[:-1]
        outputs = self.dispatch(self.experts, tokens, weights, counts)
        if leaves_out:
            outputs = F.pad(outputs, (0, 0, 0, 1))
        mixed = RowSums.apply(outputs, slot_of_row, order // k, k).view_as(x)
        return self.output(mixed if self.shared is None else mixed + self.shared(x))


class Experts(nn.Module):
    """Gated MLPs, one for each expert: rows (N, D), of one expert after the other, to (N, D), times their weights."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        count = config.experts
        width = config.width
        features = config.expert_width
        bias = bool(config.mlp_bias)
        self.gate = ExpertLinear(count, width, features, bias)
        self.up = ExpertLinear(count, width, features, bias)
        self.down = ExpertLinear(count, features, width, bias)
        self.combine = gate_function(config)

    def forward(self, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """`weights` (N, 1); `counts` (E,) int64: rows of each expert."""
        hidden = _Weighted.apply(self.gate(x, counts), self.up(x, counts), weights, self.combine)
        return self.down(hidden, counts, weights)


class ExpertLinear(nn.Module):
    """A matrix for each expert, (E, outputs, inputs), and perhaps a bias, (E, outputs)."""

    bias_share = 1.0
    """Of the bias that is added here: several ranks may add a part of it each, with terms of one sum."""

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(experts, outputs)) if bias else None

    def forward(self, x: Tensor, counts: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return rows (N, inputs) to (N, outputs); `weights` (N, 1) are in them already, and multiply their biases."""
        x = grouped_linear(x, self.weight, counts)
        if self.bias is None:
            return x
        weights = x.new_ones(len(x), 1) if weights is None else weights
        return _AddBiases.apply(x, self.bias, weights, counts, self.bias_share)


class _Weighted(torch.autograd.Function):
    """`combine(gate, up)` (N, F) times weights (N, 1); what it combines to is computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weights: Tensor, combine: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(gate, up, weights)
        ctx.combine = combine
        return combine(gate, up).mul_(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        gate, up, weights = ctx.saved_tensors
        with torch.enable_grad():
            inputs = gate.detach().requires_grad_(), up.detach().requires_grad_()
            hidden = ctx.combine(*inputs)
        of_weights = (grad * hidden.detach()).sum(-1, keepdim=True)
        return *torch.autograd.grad(hidden, inputs, grad * weights), of_weights, None


class _AddBiases(torch.autograd.Function):
    """Rows plus `share` of their experts' biases times weights; the backward pass sums rows one after the other, as
    autograd's own does not on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, weights: Tensor, counts: Tensor, share: float) -> Tensor:
        ctx.save_for_backward(bias, weights, counts)
        ctx.share = share
        return x.addcmul(bias.repeat_interleave(counts, 0, output_size=len(x)), weights, value=share)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        bias, weights, counts = ctx.saved_tensors
        rows = (grad * weights).to(accumulation_dtype(grad.dtype))
        sums = torch.segment_reduce(rows, "sum", lengths=counts, axis=0).mul_(ctx.share).to(grad.dtype)
        of_rows = (grad * bias.repeat_interleave(counts, 0, output_size=len(grad))).sum(-1, keepdim=True)
        return grad, sums, of_rows.mul_(ctx.share), None, None


class Rows(torch.autograd.Function):
    """Rows of a matrix in another order, each as often as it is used: the backward pass reads rows, too.

    Autograd's own would add to rows of zeros, on a GPU in an order that changes from run to run.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, back: Tensor, uses: int) -> Tensor:
        """`x[rows]`; the uses of row i are at `back[i uses …]`, `uses` of them."""
        ctx.save_for_backward(back)
        ctx.uses = uses
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        return _row_sums(grad, back, ctx.uses), None, None, None


class RowSums(torch.autograd.Function):
    """The opposite of Rows: the sum of all uses of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, back: Tensor, rows: Tensor, uses: int) -> Tensor:
        ctx.save_for_backward(rows)
        return _row_sums(x, back, uses)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (rows,) = ctx.saved_tensors
        return grad.index_select(0, rows), None, None, None


def _row_sums(x: Tensor, back: Tensor, uses: int) -> Tensor:
    """Return sums (T, D) of the rows `x[back]`, `uses` neighbours each; on a GPU in one kernel, which copies none."""
    if uses == 1:
        return x.index_select(0, back)
    if x.is_cuda:
        return F.embedding_bag(back.unflatten(0, (-1, uses)), x, mode="sum")
    return x.index_select(0, back).unflatten(0, (-1, uses)).sum(1)
