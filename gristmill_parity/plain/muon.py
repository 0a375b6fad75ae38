"""Plain Muon: the optimizer as its papers write it, in one file; the certificate's independent reference.

It imports nothing of the trainer. Jordan et al. 2024, "Muon"; the scale of Liu et al. 2025, equation 4.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class PlainMuon:
    """Muon for `matrices`, next to `other`, an optimizer of all other parameters."""

    def __init__(
        self,
        matrices: Sequence[Tensor],
        other: torch.optim.Optimizer,
        lr: float,
        weight_decay: float,
        momentum: float,
    ) -> None:
        self.matrices = matrices
        self.other = other
        self.lr = lr
        self.weight_decay = weight_decay
        self.momentum = momentum
        self.sums = [torch.zeros_like(w) for w in matrices]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.other.zero_grad()
        for w in self.matrices:
            w.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters."""
        for i, w in enumerate(self.matrices):
            assert w.grad is not None
            self.sums[i] = self.momentum * self.sums[i] + w.grad
            update = newton_schulz(w.grad + self.momentum * self.sums[i])
            rows, columns = w.shape[-2:]
            scale = 0.2 * max(rows, columns) ** 0.5
            w.copy_(w - self.lr * (scale * update + self.weight_decay * w))
        self.other.step()


def newton_schulz(g: Tensor) -> Tensor:
    """Return g with other singular values: s of g / |g| become p(p(p(p(p(s))))).

    p(s) = 3.4445 s - 4.775 s^3 + 2.0315 s^5.
    """
    if g.ndim == 3:  # a matrix for each expert
        return torch.stack([newton_schulz(matrix) for matrix in g])
    u, s, v = torch.linalg.svd(g / (g.square().sum().sqrt() + 1e-7), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v
