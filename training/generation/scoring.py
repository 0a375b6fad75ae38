"""Scoring: how probable a continuation is after a context, for many pairs at once."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from training.generation.loop import Cache, padded_rows
from training.kernels.precision import accumulation_dtype

_LOGITS = 1 << 28  # numbers, at most, that the logits of a batch are

Pair = tuple[Sequence[int], Sequence[int]]


class Score(NamedTuple):
    """Of a continuation: the log of its probability, and whether each of its tokens is the most probable one."""

    log_likelihood: float
    """In nats, summed over its tokens."""
    is_greedy: bool


def score_continuations(
    cache: Cache,
    pairs: Sequence[Pair],
    vocab_size: int,
    batch_size: int,
    advance: Callable[[int], object] = lambda _: None,
) -> list[Score]:
    """Score pairs of a context and a continuation, tokens of one or more each; every rank calls it.

    A context and its continuation together have no more tokens than the model's context and one. `advance` is called
    with the number of pairs that a batch has scored.
    """
    scores: list[Score] = [Score(0.0, True)] * len(pairs)
    lengths = [len(context) + len(continuation) for context, continuation in pairs]
    order = sorted(range(len(pairs)), key=lambda number: -lengths[number])  # the longest first
    while order:
        longest = max(len(pairs[number][1]) for number in order[:batch_size])
        size = max(1, min(batch_size, _LOGITS // (longest * vocab_size)))
        batch = order[:size]
        order = order[size:]
        scores_of_batch = _score_batch(cache, [pairs[number] for number in batch])
        for number, score in zip(batch, scores_of_batch, strict=True):
            scores[number] = score
        advance(len(batch))
    return scores


def _score_batch(cache: Cache, pairs: Sequence[Pair]) -> list[Score]:
    """Score the pairs of a batch. Texts end together, so the logits of the last tokens score all continuations."""
    inputs = [[*context, *continuation][:-1] for context, continuation in pairs]
    continuations = [continuation for _, continuation in pairs]
    ids, padding = padded_rows(inputs, cache.device)
    cache.begin(padding, ids.shape[1])
    count = max(map(len, continuations))
    logits = cache.logits(ids, count)
    targets, empty = padded_rows(continuations, cache.device)
    counted = torch.arange(count, device=cache.device) >= empty[:, None]
    likelihoods = _target_likelihoods(logits, targets).masked_fill(~counted, 0).sum(1)
    is_greedy = ((logits.argmax(-1) == targets) | ~counted).all(1)
    return [Score(*values) for values in zip(likelihoods.tolist(), is_greedy.tolist(), strict=True)]


def _target_likelihoods(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log of the probability of each target: (B, T, V) and (B, T) to (B, T)."""
    wide = logits.to(accumulation_dtype(logits.dtype))
    return wide.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
