"""Sparse MLP: a router sends each token to a few of many experts (mixture of experts, Shazeer et al. 2017)."""

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
    other tokens. Tokens are sorted by expert, so that each expert multiplies once.
    """

    last = "output"

    @staticmethod
    def dispatch(experts: "Experts", x: Tensor, counts: Tensor) -> Tensor:
        """Outputs of rows (N, D) sorted by expert; otherwise where experts are divided over ranks."""
        found: Tensor = experts(x, counts)
        return found

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        shared = config.shared_experts * config.expert_width
        self.shared = GatedMLP(config, shared) if shared else None
        self.output = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        chosen, weights, counts = self.router(x)
        order = chosen.flatten().argsort(stable=True)  # (B T K,): numbers of (token, choice), by expert
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        k = chosen.shape[-1]
        if self.router.config.capacity_factor:  # one row more, of zeros, is the output of all that are dropped
            taken = int(counts.sum())
            order, place = F.pad(order[:taken], (0, 1)), place.clamp(max=taken)
            tokens = Rows.apply(x.flatten(0, 1), order // k, place, k)
            outputs = F.pad(self.dispatch(self.experts, tokens[:-1], counts), (0, 0, 0, 1))
        else:
            outputs = self.dispatch(self.experts, Rows.apply(x.flatten(0, 1), order // k, place, k), counts)
        outputs = Rows.apply(outputs, place, order, 1).unflatten(0, (-1, k))
        mixed = torch.bmm(weights.flatten(0, 1)[:, None].to(x.dtype), outputs).view_as(x)
        return self.output(mixed if self.shared is None else mixed + self.shared(x))


class Experts(nn.Module):
    """Gated MLPs, one for each expert: rows (N, D), of one expert after the other, to (N, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        count, width, features = config.experts, config.width, config.expert_width
        bias = bool(config.mlp_bias)
        self.gate = ExpertLinear(count, width, features, bias)
        self.up = ExpertLinear(count, width, features, bias)
        self.down = ExpertLinear(count, features, width, bias)
        self.combine = gate_function(config)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """`counts` (E,) int64: rows of each expert."""
        return self.down(self.combine(self.gate(x, counts), self.up(x, counts)), counts)


class ExpertLinear(nn.Module):
    """A matrix for each expert, (E, outputs, inputs), and perhaps a bias, (E, outputs)."""

    bias_share = 1.0
    """Of the bias that is added here: several ranks may add a part of it each, with terms of one sum."""

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(experts, outputs)) if bias else None

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        x = grouped_linear(x, self.weight, counts)
        return x if self.bias is None else _AddBiases.apply(x, self.bias, counts, self.bias_share)


class _AddBiases(torch.autograd.Function):
    """Rows plus `share` of their experts' biases; the backward pass sums rows one after the other, as autograd's own
    does not on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, counts: Tensor, share: float) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.share = share
        return x.add(bias.repeat_interleave(counts, 0, output_size=len(x)), alpha=share)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (counts,) = ctx.saved_tensors
        sums = torch.segment_reduce(grad.to(accumulation_dtype(grad.dtype)), "sum", lengths=counts, axis=0)
        return grad, sums.mul_(ctx.share).to(grad.dtype), None, None


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
        found = grad.index_select(0, back)
        return (found if ctx.uses == 1 else found.unflatten(0, (-1, ctx.uses)).sum(1)), None, None, None
