"""Expert parallelism: tokens are sent to the ranks that have their experts, and outputs back (Lepikhin et al. 2020).

Rank r of n along "ep" has the E / n experts from r E / n. Rows are sorted by expert, so that those for a rank are
neighbours: two all-to-alls of uneven parts in the forward pass, and two in the backward pass. What is sent depends on
the choices of the router alone; a rank may get no rows.
"""

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from training.distributed.collectives import Collective
from training.model.block import Block
from training.model.decoder import Decoder
from training.model.sparse_mlp import Experts, Rows, SparseMLP
from training.parallel.tensor.tensor_parallel import cut_parameters
from training.sharding.axis import Axis
from training.sharding.shard_spec import ShardSpec


def apply_expert_parallel(part: Decoder, pieces: Mapping[str, ShardSpec], axis: Axis) -> None:
    """Let the sparse layers of a part, on the meta device, have the experts of `pieces`, and send tokens along `axis`.

    In place; no-op for one rank.
    """
    if axis.size == 1:
        return
    cut_parameters(part, pieces)
    for block in part.blocks.values():
        assert isinstance(block, Block)
        if isinstance(block.mlp, SparseMLP):
            block.mlp.dispatch = ExpertDispatch(axis)  # type: ignore[method-assign]


class ExpertDispatch:
    """Outputs of the experts of all ranks along `axis`, as `SparseMLP.dispatch`."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def __call__(self, experts: Experts, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Rows (N, D) sorted by expert, of which `counts` (E,) are each one's, to outputs (N, D) times `weights`."""
        size = self.axis.size
        received = torch.empty_like(counts)  # from each rank, for each expert of this one
        dist.all_to_all_single(received, counts, group=self.axis.group)
        by_source = received.view(size, -1)
        arriving = _rows_by_rank(x, by_source)
        leaving = _rows_by_rank(x, counts.view(size, -1))
        rows, shares = (self._to_ranks(each, arriving, leaving) for each in (x, weights))
        # rank after rank, and of each by expert: now by expert
        expert = torch.arange(by_source.shape[1], device=x.device).repeat(size)
        expert = expert.repeat_interleave(received, output_size=len(rows))
        order = expert.argsort(stable=True)
        slot_of_row = torch.empty_like(order)
        slot_of_row[order] = torch.arange(len(order), device=order.device)
        of_experts = (Rows.apply(each, order, slot_of_row, 1) for each in (rows, shares))
        outputs = experts(*of_experts, by_source.sum(0))
        return self._to_ranks(Rows.apply(outputs, slot_of_row, order, 1), leaving, arriving)

    def _to_ranks(self, x: Tensor, arriving: list[int], leaving: list[int]) -> Tensor:
        """Rows of all ranks for this one, in the order of the ranks: `arriving` from each, of `leaving` to each."""
        there = partial(_exchange, arriving=arriving, leaving=leaving)
        return Collective.apply(x, self.axis, there, partial(_exchange, arriving=leaving, leaving=arriving))


def _rows_by_rank(x: Tensor, counts: Tensor) -> list[int]:
    """Return how many rows are exchanged with each rank, of `counts` (ranks, experts).

    On the meta device, where the router's choices are not known, as many with each, and `len(x)` with all.
    """
    if counts.is_meta:
        ranks = len(counts)
        return [len(x) // ranks + (rank < len(x) % ranks) for rank in range(ranks)]
    rows: list[int] = counts.sum(1).tolist()
    return rows


def _exchange(x: Tensor, axis: Axis, arriving: list[int], leaving: list[int]) -> Tensor:
    received = x.new_empty(sum(arriving), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), arriving, leaving, group=axis.group)
    return received
