"""Measuring a model on the holdout, and what a model must beat: unigram frequencies."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gristmill.io.token_shards import Manifest
from training.data.sequences import TokenSequences
from training.distributed.mesh import World
from training.kernels.cross_entropy import IGNORED
from training.parallel.parallel_model import ParallelModel

_CHUNK = 1 << 24  # tokens counted at once


@dataclass(frozen=True)
class EvalConfig:
    """How often the holdout is measured, and what text is drawn then."""

    every: int = 100
    """Steps between evaluations; 0: only after the last step."""
    sequences: int = 0
    """Holdout sequences to measure, from the first; 0: all."""
    sample_tokens: int = 64
    """Tokens of text to draw; 0: none."""
    prompt: str = ""
    """What the text begins with; empty: the start of a document."""
    temperature: float = 0.8
    """0: always the most probable token."""


def evaluate(model: ParallelModel, data: TokenSequences, count: int, micro: int) -> float:
    """Mean cross-entropy in nats a token over the first `count` sequences, `micro` at a time; every rank calls it."""
    world = model.world
    share = -(-count // world.dp_size)  # as many for each replica: they may have to wait for each other
    mine = np.arange(share) * world.dp_size + world.dp_rank
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for start in range(0, share, micro):
        here = mine[start : start + micro]
        tokens = data.batch(np.minimum(here, count - 1)).to(world.device)
        targets = tokens[:, 1:].masked_fill(torch.from_numpy(here >= count).to(world.device)[:, None], IGNORED)
        total += model.loss([tokens[:, :-1]], [targets])
    return world.all_reduce(total).item() / (count * data.length)


def bits_per_byte(loss: float, manifest: Manifest) -> float:
    """A loss in nats a token as bits for each UTF-8 byte of text, which compares models of any vocabulary."""
    return loss / math.log(2) * manifest.tokens / max(1, manifest.bytes)


def unigram_loss(train: TokenSequences, holdout: TokenSequences, count: int, world: World) -> float:
    """Nats a token of a model that knows only how frequent each token is in `train`, one added to each count.

    Over the same targets as `evaluate` with this `count`; every rank calls it and counts a part.
    """
    vocabulary = train.manifest.tokenizer.vocab_size
    seen = _counts(train, 0, train.tokens, vocabulary, world)
    asked = _counts(holdout, 1, 1 + count * holdout.length, vocabulary, world)
    surprise = math.log(seen.sum() + vocabulary) - np.log(seen + 1.0)
    return float((asked * surprise).sum() / asked.sum())


def _counts(data: TokenSequences, start: int, stop: int, vocabulary: int, world: World) -> NDArray[np.int64]:
    """How often each id occurs among tokens start … stop of all shards end to end."""
    counts = np.zeros(vocabulary, np.int64)
    chunks = [
        (int(begin) + offset, tokens[offset : offset + _CHUNK])
        for begin, tokens in zip(data.starts[:-1], data.shards, strict=True)
        for offset in range(0, len(tokens), _CHUNK)
    ]
    for first, chunk in chunks[world.rank :: world.size]:
        counts += np.bincount(chunk[max(0, start - first) : max(0, stop - first)], minlength=vocabulary)
    return world.all_reduce(torch.from_numpy(counts)).numpy()
