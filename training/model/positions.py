"""Positions: a learned embedding per position, or the angles that rotate queries and keys."""

import math

import torch
from torch import Tensor, nn

from training.kernels.dispatch import embedding
from training.kernels.precision import accumulation_dtype
from training.kernels.rotary import rotary_frequencies, rotary_table
from training.model.model_config import ModelConfig


class PositionEmbedding(nn.Embedding):
    """Learned embedding of the positions of features (B, T, D): (T, D)."""

    def forward(self, x: Tensor) -> Tensor:
        return embedding(self.positions(x), self.weight)

    def positions(self, x: Tensor) -> Tensor:
        """Positions of the tokens in their sequence, (T,) int64."""
        return torch.arange(x.shape[1], device=x.device)


class Rotary(nn.Module):
    """The pair cos, sin of the positions of features (B, T, D), each (T, E); None for a model without rotary ones."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        config = self.config
        if config.positions != "rope":
            return None
        frequencies = rotary_frequencies(config.head_dim, config.rope_base, x.device, accumulation_dtype(x.dtype))
        if config.rope_scaling == "none":
            return rotary_table(self.positions(x), frequencies)
        cos, sin = rotary_table(self.positions(x), scaled_frequencies(config, frequencies))
        return cos * config.rope_attention_factor, sin * config.rope_attention_factor

    def positions(self, x: Tensor) -> Tensor:
        """Positions of the tokens in their sequence, (T,) int64."""
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
        start, end = max(math.floor(first), 0), min(math.ceil(last), config.head_dim - 1)
        pairs = torch.arange(len(frequencies), device=frequencies.device, dtype=frequencies.dtype)
        kept = 1 - ((pairs - start) / (end - start or 0.001)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / config.rope_factor)


def _pair_that_turns(config: ModelConfig, times: float) -> float:
    """Number of the pair of features that turns so many times in the original context (Peng et al. 2023, section 3.2).

    Between two pairs it is not whole.
    """
    wavelength = config.rope_original_context / times
    return config.head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(config.rope_base))
