"""The loop: texts of a batch are extended by one token at a time, until each has ended."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from gristmill.errors import InputError
from training.generation.sampling import SamplingOptions, draw_token
from training.generation.text import Text
from training.kernels.precision import accumulation_dtype


class Cache(Protocol):
    """A decoder with what it keeps of a batch of texts: a KeyValueCache, or on several ranks a RankedCache."""

    @property
    def device(self) -> torch.device: ...
    def begin(self, padding: Tensor, capacity: int) -> None: ...
    def keep(self, texts: Tensor) -> None: ...
    def logits(self, ids: Tensor, count: int = 1) -> Tensor: ...


class TextGenerator:
    """Extends texts by a decoder's most probable tokens, or by ones that are drawn."""

    def __init__(
        self,
        cache: Cache,
        options: SamplingOptions,
        ends: frozenset[int],
        hidden: Tensor,
        agree: Callable[[Tensor], Tensor] = lambda tokens: tokens,
    ) -> None:
        """`ends`: tokens that end a text; `hidden` (V,) bool: tokens that are never drawn.

        `agree`: what makes the tokens drawn (B,) those of the first rank, where several compute the same.
        """
        self.cache = cache
        self.options = options
        self.ends = ends
        self.hidden = hidden.nonzero()[:, 0]
        self.agree = agree

    def extend(self, texts: Sequence[Text], generators: Sequence[torch.Generator]) -> Iterator[int]:
        """Extend `texts`, each with its random numbers; yields after each token how many texts have got one."""
        going = list(zip(texts, generators, strict=True))
        ids = self._begin(texts)
        while going:
            logits = self.cache.logits(ids)[:, 0]
            tokens = self._draw(logits.to(accumulation_dtype(logits.dtype)).cpu(), going)
            for (text, _), token in zip(going, tokens.tolist(), strict=True):
                text.add(token, self.ends)
            yield len(going)
            left = [row for row, (text, _) in enumerate(going) if not text.end]
            if len(left) < len(going):
                rows = torch.tensor(left, dtype=torch.int64, device=ids.device)
                self.cache.keep(rows)
                tokens = tokens[left]
                going = [going[row] for row in left]
            ids = tokens[:, None].to(ids.device)

    def _begin(self, texts: Sequence[Text]) -> Tensor:
        """Start the cache; return the prompts (B, T), which end together."""
        ids, padding = padded_rows([text.prompt for text in texts], self.cache.device)
        self.cache.begin(padding, ids.shape[1] + max(text.limit for text in texts))
        return ids

    def _draw(self, logits: Tensor, going: Sequence[tuple[Text, torch.Generator]]) -> Tensor:
        """Draw a token of each text from logits (B, V): (B,) int64."""
        if not logits.sum().isfinite():  # in a tenth of the time of a look at each
            raise InputError(
                "the model's logits are not finite numbers: its training has diverged, or --precision is too narrow; "
                "try an earlier checkpoint, or --precision fp32"
            )
        logits = logits.index_fill(1, self.hidden, -torch.inf)
        tokens = list[int]()
        for row, (text, generator) in zip(logits, going, strict=True):
            tokens.append(draw_token(row, [*text.prompt, *text.tokens], self.options, generator))
        return self.agree(torch.tensor(tokens))


def padded_rows(texts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tokens of texts (B, T), which end together, with zeros before them, and the number of these (B,)."""
    longest = max(map(len, texts))
    padding = [longest - len(text) for text in texts]
    rows = [[0] * empty + list(text) for empty, text in zip(padding, texts, strict=True)]
    return torch.tensor(rows, device=device), torch.tensor(padding, device=device)
