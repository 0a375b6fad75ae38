"""Router: chooses the experts of each token, and keeps their loads equal, by a loss or by a bias of the choice."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.kernels.precision import accumulation_dtype
from training.model.model_config import ModelConfig


class Tokens:
    """What routers know of the tokens of a step, and of the other ranks' tokens; here one process has all of them."""

    scale = 0.0
    """Factor of the gradients: that of a step's loss sum."""
    counts_losses = True
    """Of ranks that have the same tokens one adds the gradients of the losses."""

    def sum_counts(self, counts: Tensor, balance: str) -> Tensor:  # noqa: ARG002
        """Tokens of each expert, (sequences, E) or (1, E), over all ranks that have tokens of what is balanced."""
        return counts

    def gather(self, x: Tensor) -> Tensor:
        """Return what all tokens of the sequences have, of those of this rank's tokens: (B, …), token after token."""
        return x

    def own(self, x: Tensor) -> Tensor:
        """Return the opposite: what this rank's tokens have."""
        return x


class Router(nn.Module):
    """Scores of all experts, softmax or sigmoid of x W^T, of which the highest are chosen; in float32.

    Losses are added where they arise, so that neither blocks nor pipeline stages pass them on: their gradient joins
    that of the weights in the backward pass, which comes once, also where the forward pass is recomputed.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, config.width))
        self.bias = nn.Parameter(torch.empty(config.experts)) if config.router_bias else None
        self.choice_bias: Tensor | None
        self.register_buffer("choice_bias", torch.zeros(config.experts) if config.balance == "bias" else None)
        self.tokens = Tokens()
        self.forget()
        self._has_losses = config.balance_loss > 0 or config.router_z_loss > 0

    def forget(self) -> None:
        """Count tokens and losses of backward passes anew."""
        self.counts: Tensor | int = 0
        self.losses: Tensor | float = 0.0
        self.dropped: Tensor | int = 0

    def forward(self, x: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Of features (B, T, D) the chosen experts and their weights, (B, T, K); the tokens of each expert, (E,).

        Number E is no expert: the token does not pass the one that it chose, or is one of `padding`, (B, T) bool, which
        chooses none and is left out of counts and losses.
        """
        config = self.config
        wide = accumulation_dtype(x.dtype)
        logits = F.linear(x.to(wide), self.weight.to(wide), None if self.bias is None else self.bias.to(wide))
        scores = logits.softmax(-1) if config.router == "softmax" else logits.sigmoid()
        chosen = self._choose(scores.detach())
        weights = scores.gather(-1, chosen)
        if config.router_normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * config.router_scale
        if padding is not None:
            chosen = chosen.masked_fill(padding[..., None], config.experts)
        counts = _count(chosen, config.experts)
        if self.training and torch.is_grad_enabled():
            loss = self._loss(logits, scores, counts, padding) if self._has_losses else weights.new_zeros(())
            taken = self._within_capacity(chosen) if config.capacity_factor else (chosen, counts)
            weights = _WithLoss.apply(weights, loss, counts.sum(0), counts.sum() - taken[1].sum(), self)
            chosen, counts = taken
        return chosen, weights, counts.sum(0)

    def _within_capacity(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The choices (B, T, K), with number E for those of experts that earlier tokens of the sequence have filled.

        Also how many each expert takes of each sequence, (B, E). A token depends on none after it, nor on other
        sequences, and the result not on the layout. Padding, which has number E already, fills no expert.
        """
        config = self.config
        flat = self.tokens.gather(chosen.flatten(1))
        order = flat.argsort(dim=1, stable=True)
        by_expert = flat.gather(1, order)
        number = torch.arange(flat.shape[1], device=flat.device) - torch.searchsorted(by_expert, by_expert)
        choices = (flat < config.experts).sum(1, keepdim=True)
        limit = torch.ceil(config.capacity_factor * choices.double() / config.experts)
        is_full = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, order, number >= limit)
        own = chosen.flatten(1).masked_fill(self.tokens.own(is_full), config.experts)
        taken = own.view_as(chosen)
        return taken, _count(taken, config.experts)

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the numbers of the experts with the highest scores (B, T, E), of the best groups: (B, T, K).

        The bias steers the choice only: weights are the scores (Wang et al. 2024, equation 3).
        """
        config = self.config
        if self.choice_bias is not None:
            scores = scores + self.choice_bias
        if config.groups_per_token < config.expert_groups:  # DeepSeek-AI 2024, DeepSeek-V3, section 2.1.2
            groups = scores.unflatten(-1, (config.expert_groups, -1))
            best = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1).topk(config.groups_per_token, -1).indices
            left_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            scores = groups.masked_fill(left_out[..., None], -torch.inf).flatten(-2)
        return scores.topk(config.experts_per_token, -1).indices

    def _loss(self, logits: Tensor, scores: Tensor, counts: Tensor, padding: Tensor | None) -> Tensor:
        """Return the auxiliary losses, each its mean times the number of tokens that are no padding, 0-d.

        With f_e the share of the choices that fell on expert e, and P_e the mean share of its score, the balance loss
        is E Σ f_e P_e (Fedus et al. 2022, Switch, equation 4), of each sequence (DeepSeek-V3, equation 17) or of all
        tokens of a micro-batch.
        """
        config = self.config
        loss = logits.new_zeros(())
        if config.balance_loss:
            shares = scores if config.router == "softmax" else scores / scores.sum(-1, keepdim=True)
            if padding is not None:
                shares = shares.masked_fill(padding[..., None], 0.0)
            sums = shares.sum(1)
            if config.balance == "switch":
                sums = sums.sum(0, keepdim=True)
                counts = counts.sum(0, keepdim=True)
            counts = self.tokens.sum_counts(counts, str(config.balance)).to(sums.dtype)
            choices = counts / counts.sum(-1, keepdim=True).clamp(min=1)  # a sequence may be all padding
            loss = loss + config.balance_loss * config.experts * (choices * sums).sum()
        if config.router_z_loss:
            squares = logits.logsumexp(-1).square()
            if padding is not None:
                squares = squares.masked_fill(padding, 0.0)
            loss = loss + config.router_z_loss * squares.sum()
        return loss


def _count(chosen: Tensor, experts: int) -> Tensor:
    """Return how many of the choices (B, T, K) of each sequence fell on each expert: (B, E) int64."""
    flat = chosen.flatten(1)
    counts = flat.new_zeros(len(flat), experts + 1).scatter_add_(1, flat, torch.ones_like(flat))
    return counts[:, :experts]  # without those of number E


class _WithLoss(torch.autograd.Function):
    """The weights; the backward pass adds the loss's gradient, and lets the router count loss and tokens."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, counts: Tensor, dropped: Tensor, router: Router) -> Tensor:
        ctx.router = router
        ctx.loss = loss.detach()
        # not saved: they would be recomputed
        ctx.counts = counts
        ctx.dropped = dropped
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        router = ctx.router
        router.counts = router.counts + ctx.counts
        router.losses = router.losses + ctx.loss
        router.dropped = router.dropped + ctx.dropped
        scale = router.tokens.scale if router.tokens.counts_losses else 0.0
        return grad, torch.full_like(ctx.loss, scale), None, None, None
