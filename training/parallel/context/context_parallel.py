"""The decoder's modules where the tokens of a sequence are divided: what apply_context puts in place of those for all.

Between attention layers every token is computed alone, so a rank has (B, T / n, D) of everything; positions are those
of its tokens, and attention reaches the tokens of the other ranks.
"""

import torch
from torch import Tensor, nn

from training.kernels.dispatch import embedding
from training.model.attention import Attention
from training.model.block import Block
from training.model.decoder import Decoder
from training.model.documents import Documents
from training.model.dropout import Dropout
from training.model.embedding import Embedding
from training.model.positions import Alibi, AlibiSlopes, DocumentTable, PositionEmbedding, Rotary, SequenceTable
from training.parallel.context.ring import RingAttention
from training.parallel.context.tokens import TokenOrder
from training.parallel.context.ulysses import Ulysses
from training.parallel.layout import Layout
from training.parallel.tensor.tensor_parallel import ShardedAlibi, ShardedDropout


def apply_context(part: Decoder, layout: Layout, order: TokenOrder, compiled: bool = False) -> None:
    """Replace the modules of a decoder, or a pipeline stage of one, after tensor parallelism; in place.

    `compiled`: its blocks will be.
    """
    if order.axis.size == 1:
        return
    for block in part.blocks.children():
        assert isinstance(block, Block)
        _reach_other_ranks(block.attention, layout, order, compiled)
        block.attention_dropout = _OwnDropout(block.attention_dropout, order, layout.sequence_shards)
        block.mlp_dropout = _OwnDropout(block.mlp_dropout, order, layout.sequence_shards)
    if isinstance(part.position_table, Rotary):
        part.position_table = _OwnRotary(part.position_table, order)
    elif layout.context == "ring":
        part.position_table = AlibiSlopes(part.position_table)
    else:
        part.position_table = _OwnAlibi(part.position_table, order, layout.sequence_shards)
    if isinstance(part.embed, Embedding):
        part.embed.dropout = _OwnDropout(part.embed.dropout, order, layout.sequence_shards)
        if part.embed.positions is not None:
            part.embed.positions = _OwnPositions(part.embed.positions, order, layout.sequence_shards)


def _reach_other_ranks(attention: Attention, layout: Layout, order: TokenOrder, compiled: bool) -> None:
    """Let tokens see those of other ranks; in place."""
    is_ring = layout.context == "ring"
    across = RingAttention(order) if is_ring else Ulysses(order)
    attention.attend = across.attend
    attention.attend_with_dropout = across.attend_with_dropout
    if is_ring and compiled:  # a block is compiled around the ring: each of its pairs of chunks would be compiled anew
        attention.attend = torch.compiler.disable(across.attend)
        attention.attend_with_dropout = torch.compiler.disable(across.attend_with_dropout)
    if not is_ring:
        attention.dropout = ShardedDropout(attention.dropout, order.axis)  # of its heads


class _OwnDropout(Dropout):
    """Dropout of this rank's tokens, or of some of them where tp ranks share these in `parts`: by their positions."""

    def __init__(self, full: Dropout, order: TokenOrder, parts: int) -> None:
        nn.Module.__init__(self)
        self.p = full.p
        self.key = full.key
        self.local = full.index
        self.order = order
        self.parts = parts

    def index(self, x: Tensor) -> Tensor:
        local = self.local(x)
        features = x[0, 0].numel()
        tokens = self.order.positions(local // features, self.parts * x.shape[1])
        return tokens * features + local % features


class _OwnRotary(Rotary):
    """Rotary positions of this rank's tokens."""

    def __init__(self, full: Rotary, order: TokenOrder) -> None:
        nn.Module.__init__(self)
        self.config = full.config
        self.local = full.positions
        self.order = order

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
    """The documents of the sequences that attention sees: with Ulysses all of them, in a ring this rank's tokens."""
    return documents if order.per_rank > 1 else Documents.of(order.gather(documents.positions))


class _OwnPositions(PositionEmbedding):
    """Embedding of the positions of this rank's tokens, or of some of them where tp ranks share these in `parts`."""

    def __init__(self, full: PositionEmbedding, order: TokenOrder, parts: int) -> None:
        nn.Module.__init__(self)
        self.weight = full.weight
        self.offset = full.offset
        self.local = full.positions
        self.order = order
        self.parts = parts

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        if documents is None:
            return super().forward(x)
        return embedding(documents.positions[:, self.local(x) - self.offset] + self.offset, self.weight)

    def positions(self, x: Tensor) -> Tensor:
        local = self.local(x) - self.offset
        return self.order.positions(local, self.parts * x.shape[1]) + self.offset
