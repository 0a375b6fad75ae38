"""Whole matrices: a function of matrices of which ranks hold pieces, computed once by one of these ranks each."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from training.sharding.axis import JointAxis
from training.sharding.shard_spec import ShardSpec
from training.sharding.sharded_parameter import ShardedParameter


class WholeMatrices:
    """Matrices of which the n ranks along `holders` hold pieces, as their placements say.

    They are dealt to the ranks in rounds of n, largest first. In a round each rank sends its pieces to the matrices'
    owners, gets all pieces of its own one, and sends back what it computes: two all-to-alls, and never more than one
    whole matrix on a rank. Over all rounds a rank sends (n - 1) / n of its pieces' bytes and receives as many, twice.
    """

    def __init__(self, matrices: Sequence[ShardedParameter], holders: JointAxis) -> None:
        self.matrices, self.holders = matrices, holders
        ranks = range(holders.size)
        self._specs = [[_piece(matrix, holders, rank) for rank in ranks] for matrix in matrices]
        self._shapes = [matrix.spec.global_shape for matrix in matrices]
        order = sorted(range(len(matrices)), key=lambda i: (-math.prod(self._shapes[i]), matrices[i].name))
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
        own = owned[rank] if rank < len(owned) else None
        mine = [piece(i).flatten() for i in owned]
        theirs = self._specs[own] if own is not None else []
        gathered = self._all_to_all(mine, [spec.numel for spec in theirs])
        if own is not None:
            whole = mine[0].new_empty(self._shapes[own])
            for spec, values in zip(theirs, gathered, strict=False):
                whole[spec.slices] = values.view(spec.size)
            whole = function(whole)
            gathered = [whole[spec.slices].flatten() for spec in theirs]
        back = self._all_to_all(gathered[: len(theirs)], [values.numel() for values in mine], mine[0])
        for i, values in zip(owned, back, strict=False):
            if values.numel():
                use(i, values.view(self._specs[i][rank].size))

    def _all_to_all(self, sent: Sequence[Tensor], received: Sequence[int], like: Tensor | None = None) -> list[Tensor]:
        """Send a tensor to each of the first ranks and receive one of so many elements from each of the first ones."""
        group, sample = self.holders.group, sent[0] if like is None else like
        rest = self.holders.size
        sizes = [tensor.numel() for tensor in sent] + [0] * (rest - len(sent))
        counts = [*received] + [0] * (rest - len(received))
        found = sample.new_empty(sum(counts))
        dist.all_to_all_single(found, torch.cat([sample[:0], *sent]), counts, sizes, group=group)
        return list(found.split(counts))


def _piece(matrix: ShardedParameter, holders: JointAxis, rank: int) -> ShardSpec:
    axes = holders.at(rank)
    unknown = matrix.placement.shard.keys() - axes.keys()
    assert holders.size == 1 or not unknown, f"{matrix.name} is sharded along {unknown}, and not gathered along them"
    return matrix.placement.piece(matrix.spec.global_shape, axes) if holders.size > 1 else matrix.spec
