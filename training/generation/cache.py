"""Key-value cache: a decoder that keeps the keys and values of the tokens before computes only the new ones.

The decoder does not know of it. As parallelism is, the cache is applied to it from outside, by replacing what looks
beyond a token: the positions, and attention. Everything else in a decoder sees one token at a time.

Texts of a batch may have different lengths. They end together: a shorter text begins with padding, so that the next
token of every text has the same slot.

    slot        0    1    2    3   | 4
    text 0      The  mill grin ds  | the
    text 1      -    -    A    mill| is       padding 2: the position of a token is its slot - 2

Shapes: B texts, Q new tokens, K tokens whose keys are kept, H heads of E features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.kernels.precision import accumulation_dtype
from training.model.attention import Attention
from training.model.attention_mask import Mask
from training.model.block import Block
from training.model.decoder import Decoder
from training.model.documents import Documents
from training.model.embedding import Head
from training.model.latent_attention import LatentAttention
from training.model.positions import Alibi, AlibiSlopes, Rotary, SequenceTable


class KeyValueCache:
    """The keys and values that the layers of one decoder keep of a batch of texts."""

    def __init__(self, decoder: Decoder) -> None:
        """Let a decoder, or a pipeline stage of one, compute new tokens through this cache; in place."""
        self.decoder = decoder.eval()
        self.slots = Slots(decoder.config.context)
        self.layers: list[LayerCache] = []
        for block in decoder.blocks.values():
            assert isinstance(block, Block)
            self.layers.append(_layer_cache(block.attention, self.slots))
        self.rotary = _RotaryTable(decoder.config)
        table = decoder.position_table
        decoder.position_table = AlibiSlopes(table) if isinstance(table, Alibi) else self.rotary
        self.scored = 1  # tokens, the last ones, of which logits are computed
        if isinstance(decoder.head, Head):
            decoder.head.register_forward_pre_hook(self._of_scored)

    @property
    def device(self) -> torch.device:
        """Return where ids are expected."""
        return next(self.decoder.parameters()).device

    def begin(self, padding: Tensor, capacity: int) -> None:
        """Start a batch of texts, of which text i has `padding[i]` (B,) empty slots, and at most `capacity` slots."""
        self.slots.begin(padding)
        self.rotary.begin(capacity)
        for layer in self.layers:
            layer.begin(capacity)

    def keep(self, texts: Tensor) -> None:
        """Go on with some of the texts, by their numbers (int64): the others have ended."""
        self.slots.padding = self.slots.padding[texts]
        for layer in self.layers:
            layer.keep(texts)

    @torch.inference_mode()
    def logits(self, ids: Tensor, count: int = 1) -> Tensor:
        """Add `ids` (B, Q) to the texts; return the logits (B, count, V) of what follows each of the last `count`.

        A pipeline stage gets the features (B, Q, D) of the stage before, and returns those for the one after.
        """
        self.scored = count
        positions = self.slots.take(ids.shape[1])
        logits: Tensor = self.decoder(ids, positions=positions)
        return logits

    def _of_scored(self, _head: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Forward pre-hook of the output matrix: features (B, Q, D) of the tokens whose logits are asked for."""
        features, *others = arguments
        return features[:, -self.scored :], *others


class Slots:
    """The slots of a batch of texts: how many are filled, and which of them a token sees."""

    def __init__(self, context: int) -> None:
        self.last_position = context - 1

    def begin(self, padding: Tensor) -> None:
        self.padding = padding
        self.is_padded = bool(padding.any())
        self.filled = 0

    def take(self, count: int) -> Tensor:
        """Fill the next `count` slots; return the positions of their tokens in the texts, (B, count) int64."""
        slots = torch.arange(self.filled, self.filled + count, device=self.padding.device)
        self.filled += count
        # padding, and tokens after the end of a text, have any position
        return (slots - self.padding[:, None]).clamp(0, self.last_position)

    def bias(self, mask: Mask, q: Tensor, keys: int) -> Tensor | None:
        """What is added to the scores of queries `q` (B, H, Q, E) of the last slots, and of the last `keys` slots.

        None where they see all that came before; bool (B, 1, Q, K), False for hidden slots; or numbers (B, H, Q, K),
        with attention sinks (B, H, Q, K + 1).
        """
        heads, queries = q.shape[1:3]
        plain = mask.bias is None and mask.sinks is None
        sees_all = queries == 1 or (queries == keys and not 0 < mask.window < keys)
        if plain and sees_all and not self.is_padded:
            return None
        key = torch.arange(self.filled - keys, self.filled, device=q.device)
        query = torch.arange(self.filled - queries, self.filled, device=q.device)[:, None]
        seen = key <= query
        if mask.window:
            seen &= key > query - mask.window
        # padding sees itself: a row of nothing but hidden slots would be NaN
        seen = seen & ((key >= self.padding[:, None, None, None]) | (key == query))
        if plain:
            return seen
        wide = accumulation_dtype(q.dtype)
        slopes = q.new_zeros(heads, dtype=wide) if mask.bias is None else mask.bias
        bias = (slopes[:, None, None] * (key - query)).to(q.dtype).where(seen, -torch.inf)
        if mask.sinks is None:
            return bias
        return torch.cat((bias, mask.sinks.to(q.dtype)[:, None, None].expand(*bias.shape[:3], 1)), -1)


class LayerCache:
    """What one layer keeps of the tokens before: keys and values of its heads."""

    def __init__(self, attention: Attention, slots: Slots) -> None:
        self.slots = slots
        self.buffers = [TokenBuffer(attention.window), TokenBuffer(attention.window)]
        self.scale: float | None = None  # of the scores; None: by the features of keys
        attention.attend = self.attend

    def begin(self, capacity: int) -> None:
        for buffer in self.buffers:
            buffer.begin(capacity)

    def keep(self, texts: Tensor) -> None:
        for buffer in self.buffers:
            buffer.keep(texts)

    def attend(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of new tokens to all that they see, in the place of `Mask.attend`: (1, H, B Q, E) to the same.

        `mask.bias` has ALiBi's slopes (H,), and not the bias of all pairs of tokens.
        """
        documents = mask.documents
        assert documents is not None
        q, k, v = (documents.split_sequences(x) for x in (q, k, v))
        k, v = self.append(k, v)
        bias = self.slots.bias(mask, q, k.shape[2])
        if mask.sinks is not None:  # a sink is a key with a score of its own, whose value is 0
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        grouped = q.shape[1] != k.shape[1]
        causal = bias is None and q.shape[2] > 1
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=causal, scale=self.scale, enable_gqa=grouped
        )
        return documents.join_sequences(mixed)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep keys and values of new tokens; return those of all tokens that these see, the last K."""
        keys, values = self.buffers
        return keys.append(k), values.append(v)


class LatentLayerCache(LayerCache):
    """What a layer of latent attention keeps: each token's compressed vector and rotated key, once for all heads.

    Keys are never made from the vectors c: a score q · (W_k c) is (W_k^T q) · c, and likewise the weighted mean of
    values is W_v times the weighted mean of vectors (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.2). So it is
    attention of all heads to one head of keys, whose first features are its values.
    """

    def __init__(self, attention: LatentAttention, slots: Slots) -> None:
        super().__init__(attention, slots)
        self.attention = attention
        self.buffers = [TokenBuffer(attention.window)]
        self.scale = attention.config.head_dim**-0.5
        attention.heads = self.heads  # type: ignore[method-assign]
        attention.mix = self.mix  # type: ignore[method-assign]

    def heads(self, x: Tensor, table: SequenceTable, documents: Documents | None) -> tuple[Tensor, Tensor, Tensor]:
        """In the place of `Attention.heads`: (1, H, B Q, R) queries of vectors, and one head of keys and values."""
        plain, rotated, vectors, rotated_key = self.attention.compressed(x, table, documents)
        of_keys, _ = self._matrices()
        queries = torch.einsum("bthp,hpr->bthr", plain, of_keys)
        q = torch.cat((queries, rotated), -1) * self.attention.score_factor
        v = vectors[:, :, None]
        k = torch.cat((v, rotated_key), -1)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        (buffer,) = self.buffers
        keys = buffer.append(k)
        return keys, keys[..., : v.shape[-1]]

    def mix(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor, sample_ids: Tensor | None) -> Tensor:  # noqa: ARG002
        """In the place of `Attention.mix`."""
        _, of_values = self._matrices()
        return torch.einsum("bhtr,hvr->bhtv", self.attend(mask, q, k, v), of_values)

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """Return what makes keys, and values, of a vector of R features: (H, E, R) each."""
        config = self.attention.config
        sizes = (config.qk_nope_head_dim, config.v_head_dim)
        of_keys, of_values = self.attention.kv_b.weight.unflatten(0, (-1, sum(sizes))).split(sizes, 1)
        return of_keys, of_values


class TokenBuffer:
    """Features of a batch's tokens, (B, H, K, E): of all of them, or with a `window` of those that a token sees."""

    def __init__(self, window: int) -> None:
        self.window = window

    def begin(self, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self.kept: Tensor | None = None

    def keep(self, texts: Tensor) -> None:
        assert self.kept is not None
        self.kept = self.kept[texts]

    def append(self, new: Tensor) -> Tensor:
        """Add the features of new tokens; return those of all tokens that the new ones see."""
        count = new.shape[2]
        if self.window:
            seen = new if self.kept is None else torch.cat((self.kept, new), 2)
            self.kept = seen[:, :, -self.window :]
            return seen[:, :, -(self.window + count - 1) :]
        if self.kept is None:
            self.kept = new.new_empty(*new.shape[:2], self.capacity, new.shape[3])
        self.kept[:, :, self.count : self.count + count] = new
        self.count += count
        return self.kept[:, :, : self.count]


class _RotaryTable(Rotary):
    """Rotary angles of all positions that the texts of a batch can reach, computed once for the batch."""

    def begin(self, capacity: int) -> None:
        self.capacity = capacity
        self.table: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.table is None:
            self.table = super().forward(x)
        return self.table

    def positions(self, x: Tensor) -> Tensor:
        return torch.arange(self.capacity, device=x.device)


def _layer_cache(attention: Attention, slots: Slots) -> LayerCache:
    if isinstance(attention, LatentAttention):
        return LatentLayerCache(attention, slots)
    return LayerCache(attention, slots)
