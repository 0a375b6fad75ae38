"""The decoder's modules where the tokens of a sequence are divided: what apply_context puts in place of those for all.

Between attention layers every token is computed alone, so a rank has (B, T / n, D) of everything; positions are those
of its tokens, and attention reaches the tokens of the other ranks.
"""

from torch import Tensor, nn

from training.distributed.layout import ParallelConfig
from training.kernels.dispatch import embedding
from training.model.attention import Attention
from training.model.decoder import Decoder
from training.model.documents import Documents
from training.model.embedding import Embedding
from training.model.positions import Alibi, DocumentTable, PositionEmbedding, Rotary, SequenceTable
from training.parallel.context.ring import RingAttention
from training.parallel.context.tokens import TokenOrder
from training.parallel.context.ulysses import Ulysses
from training.parallel.tensor_parallel import ShardedAlibi


def apply_context(part: Decoder, layout: ParallelConfig, order: TokenOrder) -> None:
    """Replace the modules of a decoder, or a pipeline stage of one, after tensor parallelism; in place."""
    if order.axis.size == 1:
        return
    for block in part.blocks.children():
        assert isinstance(block.attention, Attention)
        block.attention.attend = Ulysses(order) if layout.context == "ulysses" else RingAttention(order)
    if isinstance(part.position_table, Rotary):
        part.position_table = _OwnRotary(part.position_table, order)
    else:
        part.position_table = _OwnAlibi(part.position_table, order, layout.sequence_shards)
    if isinstance(part.embed, Embedding) and part.embed.positions is not None:
        part.embed.positions = _OwnPositions(part.embed.positions, order, layout.sequence_shards)


class _OwnRotary(Rotary):
    """Rotary positions of this rank's tokens."""

    def __init__(self, full: Rotary, order: TokenOrder) -> None:
        nn.Module.__init__(self)
        self.config, self.local, self.order = full.config, full.positions, order

    def positions(self, x: Tensor) -> Tensor:
        local = self.local(x)
        return self.order.positions(local, len(local))

    def in_documents(self, table: SequenceTable, documents: Documents) -> DocumentTable:
        """A document may start on another rank: the angles are of the positions themselves, not rows of `table`."""
        if isinstance(table, tuple):
            table = self.angles(documents.positions.flatten(), table[0].dtype)
        return DocumentTable(table, _of_attention(documents, self.order))


class _OwnAlibi(ShardedAlibi):
    """ALiBi's bias of the heads that are this rank's in attention, and of all tokens."""

    def __init__(self, full: Alibi, order: TokenOrder, parts: int) -> None:
        super().__init__(full, order.axis, parts * order.axis.size)
        self.order = order

    def in_documents(self, table: Tensor, documents: Documents) -> DocumentTable:
        return DocumentTable(table, _of_attention(documents, self.order))


def _of_attention(documents: Documents, order: TokenOrder) -> Documents:
    """The documents of the sequences that attention sees: with Ulysses whole ones, in a ring this rank's tokens."""
    return documents if order.per_rank > 1 else Documents.of(order.gather(documents.positions))


class _OwnPositions(PositionEmbedding):
    """Embedding of the positions of this rank's tokens, or of some of them where tp ranks share these in `parts`."""

    def __init__(self, full: PositionEmbedding, order: TokenOrder, parts: int) -> None:
        nn.Module.__init__(self)
        self.weight, self.offset, self.local = full.weight, full.offset, full.positions
        self.order, self.parts = order, parts

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        if documents is None:
            return super().forward(x)
        return embedding(documents.positions[:, self.local(x) - self.offset] + self.offset, self.weight)

    def positions(self, x: Tensor) -> Tensor:
        local = self.local(x) - self.offset
        return self.order.positions(local, self.parts * x.shape[1]) + self.offset
