"""Muon: momentum whose matrices are orthogonalised before the update (Jordan et al. 2024)."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from training.optim.adamw import build_adamw
from training.optim.optim_config import OptimConfig
from training.optim.optimizer import Optimizer, OptimizerByPart, OptimizerContext, split_matrices
from training.sharding.axis import JointAxis
from training.sharding.shard_spec import ShardSpec
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
    momentum is sharded like the parameters, and has their dtype. A parameter of experts, (E, m, n), is a matrix for
    each, and a rank orthogonalises those that it updates.
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
        """Return this rank's piece of G + momentum M, in the dtype to orthogonalise in."""
        momentum = self._momentum[i]
        gradient = self.params[i].local.grad
        if gradient is None:  # an empty piece
            gradient = momentum
        direction = gradient.add(momentum, alpha=self.config.muon_momentum)
        return direction.bfloat16() if direction.is_cuda and direction.dtype is torch.float32 else direction

    def _apply(self, i: int, update: Tensor, lr: float) -> None:
        param = self.params[i]
        shape = param.spec.global_shape
        if self.config.decays(param.name, shape):
            param.local.mul_(1 - lr * self.config.weight_decay)
        param.local.add_(update, alpha=-lr * _RMS * math.sqrt(max(shape[-2:])))

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """`momentum_buffer` of every matrix, zeros before the first step."""
        pairs = zip(self.params, self._momentum, strict=True)
        return {param.name: {"momentum_buffer": momentum} for param, momentum in pairs}


def build_muon(params: Sequence[ShardedParameter], context: OptimizerContext) -> Optimizer:
    """Build Muon for the matrices of blocks, and AdamW for all other parameters."""
    parts, others = split_matrices(params)
    matrices = [Muon(part, context.config, context.holders(part)) for part in parts]
    return OptimizerByPart([*matrices, build_adamw(others, context)])


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return the matrix (m, n) with all singular values near 1, by five Newton-Schulz iterations in its dtype.

    Each maps X to a X + (b X X^T + c (X X^T)^2) X, an odd polynomial of the singular values. Of experts' matrices, (E,
    m, n), each is orthogonalised by itself.
    """
    a, b, c = _COEFFICIENTS
    add_product = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + _EPS)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


class WholeMatrices:
    """Matrices of which the n ranks along `holders` hold pieces, as their placements say; or each those of its experts.

    They are dealt to the ranks in rounds of n, largest first. In a round each rank sends its pieces to the matrices'
    owners, gets all pieces of its own one, and sends back what it computes: two all-to-alls, and never more than one
    whole matrix on a rank. Over all rounds a rank sends (n - 1) / n of its pieces' bytes and receives as many, twice.
    """

    def __init__(self, matrices: Sequence[ShardedParameter], holders: JointAxis) -> None:
        self.matrices = matrices
        self.holders = holders
        ranks = range(holders.size)
        self._specs = [[_piece(matrix, holders, rank) for rank in ranks] for matrix in matrices]
        order = sorted(range(len(matrices)), key=lambda i: (-math.prod(_whole_shape(matrices[i])), matrices[i].name))
        self.rounds = [order[start : start + holders.size] for start in range(0, len(order), holders.size)]

    def map(
        self, piece: Callable[[int], Tensor], function: Callable[[Tensor], Tensor], use: Callable[[int, Tensor], None]
    ) -> None:
        """Call `use(i, p)` with this rank's piece of `function` of each whole matrix i; every holder calls it.

        `piece(i)` is this rank's piece of matrix i; all are of one dtype, which `function` keeps, like the shape.
        """
        for owned in self.rounds:
            if self.holders.size == 1:
                use(owned[0], function(piece(owned[0])))
            else:
                self._run_round(owned, piece, function, use)

    def _run_round(
        self,
        owned: Sequence[int],
        piece: Callable[[int], Tensor],
        function: Callable[[Tensor], Tensor],
        use: Callable[[int, Tensor], None],
    ) -> None:
        """One round; rank r owns matrix `owned[r]`, and the last ranks of the last round none."""
        rank = self.holders.rank
        specs = self._specs[owned[rank]] if rank < len(owned) else []
        mine = [self._specs[i][rank] for i in owned]
        gathered = self._all_to_all([piece(i).flatten() for i in owned], [spec.numel for spec in specs])
        sent = gathered  # of an owner of none: nothing
        if specs:
            whole = function(_assemble(specs, gathered))
            sent = [whole[spec.slices].flatten() for spec in specs]
        for i, spec, values in zip(owned, mine, self._all_to_all(sent, [spec.numel for spec in mine]), strict=False):
            if spec.numel:
                use(i, values.view(spec.size))

    def _all_to_all(self, sent: Sequence[Tensor], received: Sequence[int]) -> list[Tensor]:
        """Send a tensor to each of the first ranks; returns one of so many elements from each of the first ranks."""
        size = self.holders.size
        group = self.holders.group
        sizes = [tensor.numel() for tensor in sent] + [0] * (size - len(sent))
        counts = [*received] + [0] * (size - len(received))
        flat = sent[0].new_empty(sum(counts))
        dist.all_to_all_single(flat, torch.cat([*sent]), counts, sizes, group=group)
        return list(flat.split(counts))


def _assemble(specs: Sequence[ShardSpec], pieces: list[Tensor]) -> Tensor:
    """Return the whole matrix from its flat pieces, of which it empties the list: they are not needed with it."""
    whole = pieces[0].new_empty(specs[0].global_shape)
    for spec, values in zip(specs, pieces, strict=True):
        whole[spec.slices] = values.view(spec.size)
    pieces.clear()
    return whole


def _piece(matrix: ShardedParameter, holders: JointAxis, rank: int) -> ShardSpec:
    if holders.size == 1:
        return matrix.spec
    axes = holders.at(rank)
    placement = matrix.matrix_placement
    unknown = placement.shard.keys() - axes.keys()
    assert not unknown, f"{matrix.name} is sharded along {unknown}, and not gathered along them"
    return placement.piece(_whole_shape(matrix), axes)


def _whole_shape(matrix: ShardedParameter) -> tuple[int, ...]:
    """Return the global shape of a matrix; of experts' those that this rank updates."""
    return matrix.spec.size[:-2] + matrix.spec.global_shape[-2:]
