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
        size, group = self.holders.size, self.holders.group
        sizes = [tensor.numel() for tensor in sent] + [0] * (size - len(sent))
        counts = [*received] + [0] * (size - len(received))
        found = sent[0].new_empty(sum(counts))
        dist.all_to_all_single(found, torch.cat([*sent]), counts, sizes, group=group)
        return list(found.split(counts))


def _assemble(specs: Sequence[ShardSpec], pieces: list[Tensor]) -> Tensor:
    """The whole matrix from its flat pieces, of which it empties the list: they are not needed beside it."""
    whole = pieces[0].new_empty(specs[0].global_shape)
    for spec, values in zip(specs, pieces, strict=True):
        whole[spec.slices] = values.view(spec.size)
    pieces.clear()
    return whole


def _piece(matrix: ShardedParameter, holders: JointAxis, rank: int) -> ShardSpec:
    axes = holders.at(rank)
    unknown = matrix.placement.shard.keys() - axes.keys()
    assert holders.size == 1 or not unknown, f"{matrix.name} is sharded along {unknown}, and not gathered along them"
    return matrix.placement.piece(matrix.spec.global_shape, axes) if holders.size > 1 else matrix.spec
