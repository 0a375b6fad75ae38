"""Measuring a model on the holdout, and what a model must beat: unigram frequencies."""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.tokens import Manifest
from training.cross_entropy import IGNORED
from training.data import TokenSequences
from training.mesh import World
from training.parallel_model import ParallelModel

_CHUNK = 1 << 24  # tokens counted at once


def evaluate(model: ParallelModel, data: TokenSequences, count: int, micro: int) -> float:
    """Mean cross-entropy in nats a token over the first `count` sequences, `micro` at a time; every rank calls it."""
    world = model.world
    share = -(-count // world.replicas)  # as many for each replica: they may have to wait for each other
    mine = np.arange(share) * world.replicas + world.replica
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for start in range(0, share, micro):
        here = mine[start : start + micro]
        tokens = data.batch(np.minimum(here, count - 1)).to(world.device)
        targets = tokens[:, 1:].masked_fill(torch.from_numpy(here >= count).to(world.device)[:, None], IGNORED)
        total += model.loss([tokens[:, :-1]], [targets])
    return world.sum(total).item() / (count * data.length)


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
    return world.sum(torch.from_numpy(counts)).numpy()
