"""Plain experts: sparse layers as their papers write them; the certificate's independent reference.

Every expert computes every token, and those that were not chosen weigh nothing. It imports nothing of the trainer.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PlainRouting:
    """How experts are chosen, weighed and balanced."""

    chosen: int
    """Experts of a token."""
    sigmoid: bool
    """Scores are sigmoids (DeepSeek-V3, equation 15), and not a softmax."""
    normalize: bool
    scale: float
    groups: int
    groups_chosen: int
    balance: str
    """none, switch, sequence or bias."""
    balance_loss: float
    z_loss: float
    rate: float
    """By which a bias of the choice changes in a step."""
    clamped: bool = False
    """Experts are gpt-oss's."""
    capacity: float = 0.0
    """Of an expert, over its equal share of a sequence's choices, where gradients are computed; 0: without limit."""


class PlainExperts:
    """The sparse layers of a decoder; `loss` is that of the passes since `restart`, `counts` the tokens of each expert.

    The biases of the choice are in `biases`, by the layer's name; all choices so far, and those that were dropped, in
    `choices` and `dropped`.
    """

    def __init__(self, weights: Mapping[str, Tensor], routing: PlainRouting) -> None:
        self.weights = weights
        self.routing = routing
        self.choices: dict[str, int] = {}
        self.dropped: dict[str, int] = {}
        self.biases: dict[str, Tensor] = {}
        self.padding: Tensor | None = None
        """Which tokens (B, T) choose no expert."""
        if routing.balance == "bias":
            for name, weight in weights.items():
                if name.endswith(".router.weight"):
                    self.biases[name.removesuffix(".weight")] = torch.zeros(len(weight), dtype=torch.float64)
        self.restart()

    def restart(self) -> None:
        """Forget losses and counts."""
        self.loss = torch.zeros((), dtype=torch.float64)
        self.counts: dict[str, Tensor] = {}

    def update(self) -> None:
        """Change the biases by the counts: Wang et al. 2024, algorithm 1."""
        for name, bias in self.biases.items():
            for expert, count in enumerate(self.counts[name].tolist()):
                mean = float(self.counts[name].sum()) / len(bias)
                bias[expert] += self.routing.rate * ((count < mean) - (count > mean))

    def outputs(self, name: str, x: Tensor) -> Tensor:
        """Return the weighted sum over the chosen experts for x (B, T, D): (B, T, D)."""
        shares = self._weights(f"{name}.router", x)
        gate = self._linear(f"{name}.experts.gate", "btd,efd->btef", x)
        up = self._linear(f"{name}.experts.up", "btd,efd->btef", x)
        inner = gated(gate, up, self.routing.clamped)
        outputs = self._linear(f"{name}.experts.down", "btef,edf->bted", inner)
        return torch.einsum("bte,bted->btd", shares, outputs)

    def _linear(self, name: str, product: str, x: Tensor) -> Tensor:
        """Multiply `x` with the matrices of all experts, and add their biases if they have some."""
        y = torch.einsum(product, x, self.weights[f"{name}.weight"])
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _weights(self, name: str, x: Tensor) -> Tensor:
        """Return the weight of each expert for each token, zero for those that were not chosen: (B, T, E)."""
        how = self.routing
        logits = x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", torch.zeros(()))
        if how.sigmoid:
            scores = 1 / (1 + (-logits).exp())
        else:
            scores = logits.exp() / logits.exp().sum(-1, keepdim=True)
        preference = scores.detach() + self.biases.get(name, 0.0)
        if how.groups > 1:
            members = preference.unflatten(-1, (how.groups, -1))
            best = members.sort(-1, descending=True).values[..., :2].sum(-1)
            preference = members.masked_fill(~_largest(best, how.groups_chosen)[..., None], -1e9).flatten(-2)
        is_chosen = _largest(preference, how.chosen)
        weights = scores * is_chosen
        if how.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = how.scale * weights
        if self.padding is not None:
            is_chosen = is_chosen & ~self.padding[..., None]
            weights = weights * is_chosen
        self.counts[name] = self.counts.get(name, 0) + is_chosen.sum((0, 1))
        self._add_losses(logits, scores, is_chosen.double())
        if not how.capacity or not torch.is_grad_enabled():
            return weights
        has_place = self._has_place(is_chosen)
        self.choices[name] = self.choices.get(name, 0) + int(is_chosen.sum())
        self.dropped[name] = self.dropped.get(name, 0) + int((is_chosen & ~has_place).sum())
        return weights * has_place

    def _has_place(self, is_chosen: Tensor) -> Tensor:
        """Return which choices (B, T, E) their expert takes: the first ones of a sequence, up to its capacity.

        Others are dropped: Fedus et al. 2022, section 2.2.
        """
        experts = is_chosen.shape[-1]
        limits = []
        for choices in is_chosen.sum((1, 2)).tolist():
            limits.append(math.ceil(self.routing.capacity * choices / experts))
        return is_chosen & (is_chosen.cumsum(1) <= torch.tensor(limits)[:, None, None])

    def _add_losses(self, logits: Tensor, scores: Tensor, is_chosen: Tensor) -> None:
        """Add the losses of balance: Fedus et al. 2022, Switch, equations 4 to 6; DeepSeek-V3, equations 17 to 20.

        Each is a mean over the tokens that are no padding, times their number. The router's z-loss: Zoph et al. 2022,
        ST-MoE, equation 5.
        """
        how = self.routing
        experts = scores.shape[-1]
        if self.padding is None:
            is_real = torch.ones_like(scores[..., 0])
        else:
            is_real = (~self.padding).double()
        if how.balance_loss:
            share = scores / scores.sum(-1, keepdim=True)
            groups = [slice(None)]  # all sequences together, or each alone
            if how.balance != "switch":
                groups = [slice(number, number + 1) for number in range(len(scores))]
            for own in groups:
                tokens = is_real[own].sum()
                f = is_chosen[own].sum((0, 1)) / tokens * experts / how.chosen
                mean_share = (share[own] * is_real[own][..., None]).sum((0, 1)) / tokens
                self.loss = self.loss + how.balance_loss * (f * mean_share).sum() * tokens
        if how.z_loss:
            self.loss = self.loss + how.z_loss * (logits.exp().sum(-1).log().square() * is_real).sum()


def gated(gate: Tensor, up: Tensor, clamped: bool) -> Tensor:
    """Return SwiGLU's elementwise part (Shazeer 2020, equation 6), or gpt-oss's, as its published code has it."""
    if not clamped:
        return gate / (1 + (-gate).exp()) * up
    gate = gate.clamp(max=7)
    up = up.clamp(-7, 7)
    return (up + 1) * gate / (1 + (-1.702 * gate).exp())


def _largest(values: Tensor, count: int) -> Tensor:
    """Return whether each of the values (…, n) is among the `count` largest."""
    return values >= values.sort(-1, descending=True).values[..., count - 1 : count]
