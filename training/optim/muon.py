"""Muon: momentum whose matrices are orthogonalised before the update (Jordan et al. 2024)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from training.optim.optim_config import OptimConfig
from training.optim.optimizer import Optimizer
from training.optim.whole_matrices import WholeMatrices
from training.sharding.axis import JointAxis
from training.sharding.sharded_parameter import ShardedParameter

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan et al. 2024: singular values end between 0.7 and 1.2
_ITERATIONS = 5
_EPS = 1e-7
_RMS = 0.2  # of an update's elements, as AdamW's have (Liu et al. 2025, section 2.2)


class Muon(Optimizer):
    """Muon with Nesterov momentum, for matrices, with the scale of Moonlight (Liu et al. 2025, equation 4).

    M = momentum M + G;  W = W - lr (0.2 sqrt(max(rows, columns)) O(G + momentum M) + weight_decay W)

    O, the nearest matrix with orthonormal rows or columns, needs whole matrices: those of which the ranks along
    `holders` hold pieces are gathered one by one. It is computed in bf16 on a GPU, else in the parameters' dtype. The
    momentum is sharded like the parameters, and has their dtype.
    """

    def __init__(self, params: Sequence[ShardedParameter], config: OptimConfig, holders: JointAxis) -> None:
        super().__init__(params)
        self.config = config
        self._momentum = [torch.zeros_like(param.local.detach()) for param in self.params]
        self._whole = WholeMatrices(self.params, holders)

    def _update(self, lr: float) -> None:
        for param, momentum in zip(self.params, self._momentum, strict=True):
            if param.local.grad is not None:
                momentum.mul_(self.config.muon_momentum).add_(param.local.grad)
        self._whole.map(self._direction, orthogonalize, lambda i, update: self._apply(i, update, lr))

    def _direction(self, i: int) -> Tensor:
        """This rank's piece of G + momentum M, in the dtype to orthogonalise in."""
        momentum, gradient = self._momentum[i], self.params[i].local.grad
        if gradient is None:  # an empty piece
            gradient = momentum
        direction = gradient.add(momentum, alpha=self.config.muon_momentum)
        return direction.bfloat16() if direction.is_cuda and direction.dtype is torch.float32 else direction

    def _apply(self, i: int, update: Tensor, lr: float) -> None:
        param = self.params[i]
        shape = param.spec.global_shape
        if self.config.decays(param.name, shape):
            param.local.mul_(1 - lr * self.config.weight_decay)
        param.local.add_(update, alpha=-lr * _RMS * math.sqrt(max(shape)))

    @property
    def memory_bytes(self) -> int:
        return sum(momentum.nbytes for momentum in self._momentum)

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """`momentum_buffer` of every matrix, zeros before the first step."""
        pairs = zip(self.params, self._momentum, strict=True)
        return {param.name: {"momentum_buffer": momentum} for param, momentum in pairs}


def orthogonalize(matrix: Tensor) -> Tensor:
    """The matrix (m, n) with all singular values near 1, by five Newton-Schulz iterations in its dtype.

    Each maps X to a X + (b X X^T + c (X X^T)^2) X, an odd polynomial of the singular values.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if is_tall else matrix
    x = x / (x.norm() + _EPS)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
