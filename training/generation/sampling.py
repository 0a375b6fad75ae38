"""Sampling: the next token, drawn from a model's logits.

The probabilities of tokens are those of softmax(logits / temperature), after tokens that a text has already are made
less probable, and before the improbable rest is cut off. The steps and their order are those of transformers' generate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_COLDEST = 1e-6  # temperature below which float32 would divide to infinity


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn."""

    temperature: float = 1.0
    """Divides the logits: lower ones make probable tokens more probable; 0: always the most probable token."""
    top_k: int = 0
    """Draw from the k most probable tokens only (Fan et al. 2018); 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest tokens whose probabilities add up to p (nucleus sampling, Holtzman et al. 2020)."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens that the text has (Keskar et al. 2019)."""


def draw_token(logits: Tensor, seen: Sequence[int], options: SamplingOptions, generator: torch.Generator) -> int:
    """Draw a token from logits (V,) on the CPU; `seen` are the tokens of the text so far."""
    logits = penalize_repetition(logits, seen, options.repetition_penalty)
    if options.temperature < _COLDEST:
        return int(logits.argmax())
    logits = keep_top_k(logits / options.temperature, options.top_k)
    logits = keep_top_p(logits, options.top_p)
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


def penalize_repetition(logits: Tensor, seen: Sequence[int], penalty: float) -> Tensor:
    """Make the tokens `seen` less probable, each once."""
    if penalty == 1:
        return logits
    tokens = torch.tensor(seen)
    repeated = logits[tokens]
    lowered = torch.where(repeated > 0, repeated / penalty, repeated * penalty)
    return logits.index_copy(0, tokens, lowered)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Hide all but the `k` highest logits (V,), and those equal to the last of them; 0: none."""
    if not 0 < k < len(logits):
        return logits
    last = logits.topk(k).values[-1]
    return logits.masked_fill(logits < last, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Hide all but the fewest tokens whose probabilities add up to `p`."""
    if p >= 1:
        return logits
    ordered, tokens = logits.sort(descending=True)
    probabilities = ordered.softmax(-1)
    of_those_before = probabilities.cumsum(-1) - probabilities
    hidden = of_those_before >= p
    hidden[0] = False
    return logits.masked_fill(hidden.new_empty(hidden.shape).scatter_(0, tokens, hidden), -torch.inf)


def text_generator(seed: int, number: int) -> torch.Generator:
    """Return the random numbers of one text: they depend on the seed and its number, and not on the other texts."""
    state = np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))
