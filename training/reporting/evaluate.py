"""Evaluation: the losses of a holdout, and the unigram model's loss to compare them with."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.data.mix import TokenMix
from training.data.sequences import TokenSequences
from training.data.target_groups import TargetGroups
from training.kernels.cross_entropy import IGNORE_INDEX
from training.parallel.mesh import World
from training.parallel.parallel_model import ParallelModel
from training.reporting.holdout_losses import HoldoutLosses, holdout_losses

_SPAN = 1 << 18  # tokens counted at once
_SPANS = 1 << 9  # of the training tokens, at most: 134 million tokens, which take a second or two


def evaluate(
    model: ParallelModel,
    groups: TargetGroups,
    count: int,
    micro_batch_size: int,
    weights: Mapping[str, float] = MappingProxyType({}),
    mask_documents: bool = False,
) -> HoldoutLosses:
    """Return the losses of the first `count` sequences of `groups.data`; every rank calls it.

    Sequence i goes to replica i mod dp_size. All replicas run the same number of micro-batches, because their
    collectives wait for each other: a replica with fewer sequences repeats the last one, with all targets ignored.
    Ids that are IGNORE_INDEX are padding. `weights` of sources count in the whole's loss, in place of their tokens.
    """
    world, data = model.world, groups.data
    share = -(-count // world.dp_size)
    mine = np.arange(share) * world.dp_size + world.dp_rank
    sums = np.zeros((2, groups.count))  # nats and targets of each group
    for start in range(0, share, micro_batch_size):
        indices = mine[start : start + micro_batch_size]
        read = np.minimum(indices, count - 1)
        tokens = data.batch(read)
        targets = tokens[:, 1:].masked_fill(torch.from_numpy(indices >= count)[:, None], IGNORE_INDEX)
        ids = tokens[:, :-1].clamp(min=0).to(world.device)  # padding is IGNORE_INDEX
        positions = [data.positions(read).to(world.device)] if mask_documents else None
        for losses in model.target_losses([ids], [targets.to(world.device)], positions):
            group = groups.of(read)
            sums += _sums_by_group(losses, (targets != IGNORE_INDEX) & (group >= 0), group, groups.count)
    nats, counted = world.all_reduce(torch.from_numpy(sums)).numpy()
    return holdout_losses(nats, counted, groups, weights)


def _sums_by_group(losses: Tensor, counted: Tensor, group: Tensor, groups: int) -> NDArray[np.float64]:
    """Sum of the losses, and number, of the targets of each group that are `counted`; (B, T) each: (2, groups)."""
    group = group[counted]
    nats = np.bincount(group.numpy(), losses.cpu()[counted].double().numpy(), groups)
    return np.stack([nats, np.bincount(group.numpy(), minlength=groups)])


def unigram_loss(train: TokenMix, holdout: TokenSequences, count: int, world: World) -> float:
    """Return the unigram model's loss in nats/token, over the targets of `evaluate` with the same `count`.

    The unigram model predicts each token by its frequency in `train`, with add-one smoothing: in all of it, or of more
    than 134 million tokens in 512 spans, evenly spread; of a mix, in each data set, by its share. Every rank calls it
    and counts its part of the tokens.
    """
    vocabulary = train.first.manifest.tokenizer.vocab_size
    each = [_train_counts(part, vocabulary, world) for part in train.parts]
    seen = each[0] if len(each) == 1 else _mixed_counts(each, train.shares)
    last = 1 + count * holdout.length
    targets = [(start, min(start + _SPAN, last)) for start in range(1, last, _SPAN)]
    target_counts = _token_counts(holdout, targets, vocabulary, world)
    nats = math.log(seen.sum() + vocabulary) - np.log(seen + 1.0)
    return float((target_counts * nats).sum() / target_counts.sum())


def _train_counts(train: TokenSequences, vocabulary: int, world: World) -> NDArray[np.int64]:
    """Count each id of a data set, or of spans of it: (vocabulary,) int64."""
    starts: Sequence[int] = range(0, train.tokens, _SPAN)
    if len(starts) > _SPANS:
        starts = [(train.tokens - _SPAN) * number // (_SPANS - 1) for number in range(_SPANS)]
    return _token_counts(train, [(start, min(start + _SPAN, train.tokens)) for start in starts], vocabulary, world)


def _mixed_counts(each: Sequence[NDArray[np.int64]], shares: Sequence[float]) -> NDArray[np.float64]:
    """Counts of as many tokens as there are in all sets, each by its share: (vocabulary,)."""
    total = sum(int(counts.sum()) for counts in each)
    return sum(share * total / counts.sum() * counts for counts, share in zip(each, shares, strict=True))


def _token_counts(
    data: TokenSequences, spans: Sequence[tuple[int, int]], vocabulary: int, world: World
) -> NDArray[np.int64]:
    """Count each id in spans (start, stop) of all shards concatenated: (vocabulary,) int64."""
    counts = np.zeros(vocabulary, np.int64)
    for start, stop in spans[world.rank :: world.size]:
        counts += np.bincount(data.read(start, stop), minlength=vocabulary)
    return world.all_reduce(torch.from_numpy(counts)).numpy()
