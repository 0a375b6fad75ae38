"""Positions: a learned embedding per position, or the angles that rotate queries and keys."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from training.kernels.dispatch import embedding
from training.kernels.precision import accumulation_dtype
from training.kernels.rotary import rotary_frequencies, rotary_table
from training.model.documents import Documents
from training.model.layers import EmbeddingTable
from training.model.model_config import ModelConfig

# the pair cos, sin of rotary positions, ALiBi's bias, or nothing where positions are embedded
SequenceTable = tuple[Tensor, Tensor] | Tensor | None


class DocumentTable(NamedTuple):
    """Positions for blocks where documents do not see each other."""

    table: SequenceTable
    """Of rotary positions, each of the pair is (B T, E), sequence after sequence; else as without documents."""
    documents: Documents


# What blocks know of positions
PositionTable = SequenceTable | DocumentTable


class PositionEmbedding(EmbeddingTable):
    """Learned embedding of the positions of features (B, T, D): (T, D), or in their documents (B, T, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.position_rows, config.width)
        self.offset = config.position_offset or 0

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        rows = self.positions(x)
        if documents is not None:
            rows = documents.positions[:, rows - self.offset] + self.offset
        return embedding(rows, self.weight)

    def positions(self, x: Tensor) -> Tensor:
        """Return the rows of the tokens' positions in their sequence, (T,) int64."""
        return torch.arange(self.offset, self.offset + x.shape[1], device=x.device)


class Alibi(nn.Module):
    """ALiBi: the bias of attention's scores by distance, causal, (1, H, T, T) (Press et al. 2022, section 3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.slopes = alibi_slopes(config.heads)

    def forward(self, x: Tensor) -> Tensor:
        """Return the bias of features (B, T, D), in their dtype: near tokens have a small, precise bias."""
        positions = torch.arange(self.tokens(x), device=x.device)
        distance = (positions - positions[:, None]).to(accumulation_dtype(x.dtype))
        bias = torch.tensor(self.slopes, device=x.device, dtype=distance.dtype)[:, None, None] * distance
        return bias.masked_fill_(distance > 0, -torch.inf).to(x.dtype)[None]

    def in_documents(self, table: Tensor, documents: Documents) -> DocumentTable:
        """Return the bias depends on distances alone."""
        return DocumentTable(table, documents)

    def tokens(self, x: Tensor) -> int:
        """Return the number of tokens in a sequence."""
        return x.shape[1]


class AlibiSlopes(Alibi):
    """The slopes (H,) of ALiBi's bias alone, for attention that computes the bias of the pairs of tokens it needs."""

    def __init__(self, full: Alibi) -> None:
        nn.Module.__init__(self)
        self.slopes = full.slopes

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensor(self.slopes, device=x.device, dtype=accumulation_dtype(x.dtype))


def alibi_slopes(heads: int) -> list[float]:
    """Return slope of each head's bias: 2^(-8 i / heads), i = 1 …, for a power of two (Press et al. 2022, section 3).

    Other numbers of heads take those of the power of two below, then every other one of twice as many (the paper's
    published code).

    >>> alibi_slopes(3)
    [0.0625, 0.00390625, 0.25]
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes + [2.0 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]


def build_positions(config: ModelConfig) -> "Alibi | Rotary":
    """Return the module that makes a model's PositionTable from features (B, T, D)."""
    return Alibi(config) if config.positions == "alibi" else Rotary(config)


class Rotary(nn.Module):
    """The pair cos, sin of the positions of features (B, T, D), each (T, E); None for a model without rotary ones."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.config.positions != "rope":
            return None
        return self.angles(self.positions(x), accumulation_dtype(x.dtype))

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the pair cos, sin of positions (T,) int64, each (T, E) in `dtype`."""
        config = self.config
        frequencies = rotary_frequencies(config.rotary_dim, config.rope_base, positions.device, dtype)
        if config.rope_scaling == "none":
            return rotary_table(positions, frequencies)
        cos, sin = rotary_table(positions, scaled_frequencies(config, frequencies))
        return cos * config.rope_attention_factor, sin * config.rope_attention_factor

    def in_documents(self, table: SequenceTable, documents: Documents) -> DocumentTable:
        """Let positions restart with each document."""
        if isinstance(table, tuple):
            positions = documents.positions.flatten()
            table = table[0][positions], table[1][positions]
        return DocumentTable(table, documents)

    def positions(self, x: Tensor) -> Tensor:
        """Return the positions of the tokens in their sequence, (T,) int64."""
        return torch.arange(x.shape[1], device=x.device)


def scaled_frequencies(config: ModelConfig, frequencies: Tensor) -> Tensor:
    """Rotary frequencies (E/2,) for sequences longer than those of pre-training: some are divided by `rope_factor`.

    linear: all of them (Chen et al. 2023, "Extending context window", equation 4). llama3 (Llama team 2024, and its
    published code) and yarn (Peng et al. 2023, definition 2): those that turn fewer than `rope_low` times in
    `rope_original_context` positions; those that turn more than `rope_high` times stay, and in between is a ramp: over
    the number of turns for llama3, over the number of the pair for yarn.
    """
    if config.rope_scaling == "linear":
        return frequencies / config.rope_factor
    if config.rope_scaling == "llama3":
        turns = frequencies * config.rope_original_context / (2 * math.pi)
        kept = ((turns - config.rope_low) / (config.rope_high - config.rope_low)).clamp(0, 1)
    else:
        first, last = (_pair_that_turns(config, times) for times in (config.rope_high, config.rope_low))
        if config.rope_truncate:
            first = math.floor(first)
            last = math.ceil(last)
        start = max(first, 0)
        end = min(last, config.rotary_dim - 1)
        pairs = torch.arange(len(frequencies), device=frequencies.device, dtype=frequencies.dtype)
        kept = 1 - ((pairs - start) / (end - start or 0.001)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / config.rope_factor)


def _pair_that_turns(config: ModelConfig, times: float) -> float:
    """Number of the pair of features that turns so many times in the original context (Peng et al. 2023, section 3.2).

    Between two pairs it is not whole.
    """
    wavelength = config.rope_original_context / times
    return config.rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(config.rope_base))
