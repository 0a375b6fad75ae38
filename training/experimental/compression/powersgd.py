"""PowerSGD: replicas sum a rank-r approximation of each gradient matrix (Vogels et al. 2019, arXiv 1905.13727).

One step of a power iteration, continued over training steps. With M_w (n, m), replica w's gradient and what it has
left out so far, and Q (m, r) of the step before:
    P = sum of M_w Q      all-reduce of n r numbers, then orthonormal columns
    Q = sum of M_w^T P    all-reduce of m r numbers
    the sum of all M_w is taken to be P Q^T, and replica w remembers M_w - P (M_w^T P)^T (algorithms 1 and 2).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from training.distributed.collectives import wait
from training.kernels.keyed_random import keyed_normal
from training.parallel.gradients import all_reduce_as_one
from training.sharding.axis import Axis


def initial_q(shape: tuple[int, int], rank: int, seed: int, name: str, like: Tensor) -> Tensor:
    """Return the first Q (m, rank) of a matrix of `shape` (n, m): normal numbers, the same on all replicas."""
    index = torch.arange(shape[1] * rank, device=like.device).view(shape[1], rank)
    return keyed_normal(seed, f"powersgd/{name}", index).to(like.dtype)


def is_smaller(shape: Sequence[int], rank: int) -> bool:
    """Return whether P and Q of a matrix of `shape` have fewer elements than the matrix."""
    return rank * sum(shape) < shape[0] * shape[1]


class PowerSGD:
    """One reduction of several matrices over the replicas, in two halves: begun here, then `finish`.

    `exact` (k,) is summed as it is, in the message of the first half.
    """

    def __init__(self, matrices: Sequence[Tensor], qs: Sequence[Tensor], exact: Tensor, replicate: Axis) -> None:
        self.matrices = list(matrices)
        self.replicate = replicate
        products = [m @ q for m, q in zip(matrices, qs, strict=True)]
        self._shapes = [p.shape for p in products]
        self._lengths = [*(p.numel() for p in products), len(exact)]
        self._message = torch.cat([*(p.flatten() for p in products), exact])
        self._work = dist.all_reduce(self._message, group=replicate.group, async_op=True)

    def finish(self) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Return the approximate sums of the matrices, the new Q of each, and the exact sum.

        Leaves in each of the matrices what this replica has left out.
        """
        wait(self._work, self.replicate.group)
        *products, exact = self._message.split(self._lengths)
        ps = [torch.linalg.qr(p.view(s)).Q for p, s in zip(products, self._shapes, strict=True)]
        qs = [m.mT @ p for m, p in zip(self.matrices, ps, strict=True)]
        for m, p, q in zip(self.matrices, ps, qs, strict=True):
            m.addmm_(p, q.mT, alpha=-1)
        all_reduce_as_one(qs, self.replicate.group)
        return [p @ q.mT for p, q in zip(ps, qs, strict=True)], qs, exact
