"""Tokens: which ones of a sequence each context-parallel rank has, and how they are gathered.

A sequence is cut into chunks of equal length. With Ulysses rank r of n has chunk r. With ring attention it has two
of 2 n: r and 2 n - 1 - r. A causal mask lets late tokens see more than early ones, so consecutive tokens would give the
last rank almost twice the average work; an early chunk with a late one gives each the same (the zigzag order of
Llama team 2024, "The Llama 3 herd of models"; Brandon et al. 2023, "Striped attention", balance with single tokens).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from training.distributed.collectives import gather_rows
from training.model.batch import TokenBatch
from training.parallel.layout import Layout
from training.parallel.mesh import World
from training.sharding.axis import Axis


@dataclass(frozen=True)
class TokenOrder:
    """The chunks of a sequence that each rank along `axis` has, `per_rank` each: one, or two in zigzag order."""

    axis: Axis
    per_rank: int

    @classmethod
    def of(cls, layout: Layout, world: World) -> "TokenOrder":
        """Return the order of a layout; without context parallelism all tokens are this rank's."""
        return cls(world.axis("cp"), layout.context_chunks)

    def chunks(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of the chunks of a rank, in the order in which it has them."""
        return (rank,) if self.per_rank == 1 else (rank, 2 * self.axis.size - 1 - rank)

    def positions(self, local: Tensor, length: int) -> Tensor:
        """Return positions in the global sequence of this rank's tokens of numbers `local`, of `length` that it has."""
        size = length // self.per_rank
        shifts = [size * (chunk - i) for i, chunk in enumerate(self.chunks(self.axis.rank))]
        return torch.where(local < size, local + shifts[0], local + shifts[-1])

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's tokens: (B, T) to (B, T / n)."""
        if self.axis.size == 1:
            return x
        chunks = x.unflatten(1, (self.per_rank * self.axis.size, -1))
        return chunks[:, list(self.chunks(self.axis.rank))].flatten(1)

    def own_batch(self, batch: TokenBatch) -> TokenBatch:
        """Return this rank's tokens of all sequences of a batch."""
        if self.axis.size == 1:
            return batch
        positions = None if batch.positions is None else self.own(batch.positions)
        padding = None if batch.padding is None else self.own(batch.padding)
        return TokenBatch(
            self.own(batch.ids), self.own(batch.targets), batch.sample_ids, positions, batch.sources, padding
        )

    def gather(self, x: Tensor) -> Tensor:
        """Return all tokens in their order, on every rank: (B, T / n) to (B, T); without autograd."""
        if self.axis.size == 1:
            return x
        held = gather_rows(x, self.axis).unflatten(0, (self.axis.size, -1)).unflatten(2, (self.per_rank, -1))
        held = held.transpose(0, 1).flatten(1, 2)  # (B, chunks, length of one)
        chunks = [chunk for rank in range(self.axis.size) for chunk in self.chunks(rank)]
        return held[:, sorted(range(len(chunks)), key=chunks.__getitem__)].flatten(1)

    def holder(self, position: int, length: int) -> tuple[int, int]:
        """Return the rank that has a token of a sequence of `length`, and the token's number there."""
        size = length // (self.per_rank * self.axis.size)
        chunk, within = divmod(position, size)
        rank = next(rank for rank in range(self.axis.size) if chunk in self.chunks(rank))
        return rank, self.chunks(rank).index(chunk) * size + within
