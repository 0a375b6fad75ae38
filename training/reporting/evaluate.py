"""Evaluation: the holdout loss, in nats/token and bits per byte, and the unigram model's loss to compare it with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from gristmill.config import INT64, Range
from gristmill.errors import require
from gristmill.io.token_manifest import Manifest
from training.data.sequences import TokenSequences
from training.distributed.mesh import World
from training.kernels.cross_entropy import IGNORE_INDEX
from training.parallel.parallel_model import ParallelModel

_SPAN = 1 << 18  # tokens counted at once
_SPANS = 1 << 9  # of the training tokens, at most: 134 million tokens, which take a second or two


@dataclass(frozen=True)
class EvalConfig:
    """Options of evaluation: the interval, the number of sequences, and the text to sample."""

    RANGES: ClassVar[dict[str, Range]] = {
        **dict.fromkeys(("every", "sequences"), Range(0, INT64)),
        "sample_tokens": Range(0, 1_000_000),
        "temperature": Range(0),
    }

    every: int = 100
    """Steps between evaluations; 0: only after the last step."""
    sequences: int = 0
    """Holdout sequences to evaluate, from the first; 0: all."""
    sample_tokens: int = 64
    """Tokens of text to sample at each evaluation; 0: none."""
    prompt: str = ""
    """Prompt of the sampled text; empty: the start of a document."""
    ema: bool = False
    """Evaluate and sample the average of the weights (optim.ema_decay) instead of the weights."""
    temperature: float = 0.8
    """Sampling temperature; 0: always the most probable token."""

    def check(self) -> None:
        """Raise UsageError for a prompt that is no text."""
        require(
            not any("\ud800" <= character <= "\udfff" for character in self.prompt),  # Python's form of other bytes
            f"eval.prompt is {self.prompt!r}, which is not UTF-8; wanted text; try another --eval.prompt",
        )

    def sequence_count(self, available: int) -> int:
        """Number of sequences to evaluate, if the holdout has `available` ones."""
        return min(self.sequences or available, available)


def evaluate(model: ParallelModel, data: TokenSequences, count: int, micro_batch_size: int) -> float:
    """Return the mean cross-entropy in nats/token over the first `count` sequences; every rank calls it.

    Sequence i goes to replica i mod dp_size. All replicas run the same number of micro-batches, because their
    collectives wait for each other: a replica with fewer sequences repeats the last one, with all targets ignored.
    """
    world = model.world
    share = -(-count // world.dp_size)
    mine = np.arange(share) * world.dp_size + world.dp_rank
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for start in range(0, share, micro_batch_size):
        indices = mine[start : start + micro_batch_size]
        tokens = data.batch(np.minimum(indices, count - 1)).to(world.device)
        beyond = torch.from_numpy(indices >= count).to(world.device)
        targets = tokens[:, 1:].masked_fill(beyond[:, None], IGNORE_INDEX)
        total += model.loss([tokens[:, :-1]], [targets])
    return world.all_reduce(total).item() / (count * data.length)


def bits_per_byte(loss: float, manifest: Manifest) -> float:
    """Convert nats/token to bits per UTF-8 byte of text, which compares models with different vocabularies."""
    return loss / math.log(2) * manifest.tokens / max(1, manifest.bytes)


def unigram_loss(train: TokenSequences, holdout: TokenSequences, count: int, world: World) -> float:
    """Return the unigram model's loss in nats/token, over the targets of `evaluate` with the same `count`.

    The unigram model predicts each token by its frequency in `train`, with add-one smoothing: in all of it, or of more
    than 134 million tokens in 512 spans, evenly spread. Every rank calls it and counts its part of the tokens.
    """
    vocabulary = train.manifest.tokenizer.vocab_size
    starts: Sequence[int] = range(0, train.tokens, _SPAN)
    if len(starts) > _SPANS:
        starts = [(train.tokens - _SPAN) * number // (_SPANS - 1) for number in range(_SPANS)]
    seen = _token_counts(train, [(start, min(start + _SPAN, train.tokens)) for start in starts], vocabulary, world)
    last = 1 + count * holdout.length
    targets = [(start, min(start + _SPAN, last)) for start in range(1, last, _SPAN)]
    target_counts = _token_counts(holdout, targets, vocabulary, world)
    nats = math.log(seen.sum() + vocabulary) - np.log(seen + 1.0)
    return float((target_counts * nats).sum() / target_counts.sum())


def _token_counts(
    data: TokenSequences, spans: Sequence[tuple[int, int]], vocabulary: int, world: World
) -> NDArray[np.int64]:
    """Count each id in spans (start, stop) of all shards concatenated: (vocabulary,) int64."""
    counts = np.zeros(vocabulary, np.int64)
    for start, stop in spans[world.rank :: world.size]:
        counts += np.bincount(data.read(start, stop), minlength=vocabulary)
    return world.all_reduce(torch.from_numpy(counts)).numpy()
