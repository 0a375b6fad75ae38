"""Holdouts: the data sets on which a run is evaluated, their losses, and the unigram model's to compare with."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.errors import UsageError
from gristmill.io.token_shards import Manifest, SourceRecord
from gristmill.wording import count_of
from training.data.mix import TokenMix
from training.data.sequences import TokenSequences
from training.data.target_groups import TargetGroups, range_names
from training.data.text import TextSequences
from training.kernels.cross_entropy import IGNORE_INDEX
from training.parallel.mesh import World
from training.parallel.parallel_model import ParallelModel
from training.reporting.metrics_file import finite
from training.reporting.reporting_config import EvalConfig

_MOST_NATS = 709.0  # of which a float holds the exponential


@dataclass(frozen=True)
class PartLoss:
    """The loss of one part of a holdout.

    `loss`: mean cross-entropy of its targets, nats/token. `bits_per_byte`: of UTF-8 text, which compares models of
    different vocabularies; None where the bytes are not known, as of a range of lengths. `tokens`: its targets.
    """

    loss: float
    bits_per_byte: float | None
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < _MOST_NATS else math.inf

    def __str__(self) -> str:
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        return f"loss {self.loss:.4f}{bits}"

    def values(self) -> dict[str, Any]:
        """The numbers as JSON holds them: null for what is not finite, without bits per byte that are not known."""
        bits = {} if self.bits_per_byte is None else {"bits_per_byte": finite(self.bits_per_byte)}
        return {"loss": finite(self.loss), **bits, "tokens": self.tokens}


@dataclass(frozen=True)
class HoldoutLosses:
    """The losses of one holdout: of the `whole`, weighted as configured, and by name of `sources` and `lengths`.

    Sources are there if there are several; lengths if ranges are asked for. Parts without a target are left out.
    """

    whole: PartLoss
    sources: dict[str, PartLoss] = field(default_factory=dict)
    lengths: dict[str, PartLoss] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """Return the losses as metrics.jsonl holds them."""
        parts = {"sources": self.sources, "lengths": self.lengths}
        losses = dict[str, dict[str, Any]]()
        for kind, named in parts.items():
            if named:
                losses[kind] = {name: part.values() for name, part in named.items()}
        return {key: value for key, value in self.whole.values().items() if key != "tokens"} | losses

    def lines(self) -> list[str]:
        """Return a line for each source and each range of lengths, for the terminal."""
        parts = self.sources | {f"documents of {name} tokens": part for name, part in self.lengths.items()}
        width = max(map(len, parts), default=0)
        return [f"    {name:<{width}}  {part} ({count_of(part.tokens, 'token')})" for name, part in parts.items()]


def bits_per_byte(loss: float, counted: Manifest | SourceRecord) -> float | None:
    """Convert nats/token to bits per UTF-8 byte of text, as `counted` has tokens per byte.

    None where the text of tokens is not known, as of those that another program wrote.
    """
    if not counted.bytes:
        return None
    return loss / math.log(2) * counted.tokens / counted.bytes


def holdout_losses(
    nats: NDArray[np.float64], targets: NDArray[np.float64], groups: TargetGroups, weights: Mapping[str, float]
) -> HoldoutLosses:
    """Return the losses from the sum of the losses and the number of targets of each group, (groups,) each.

    `weights` of sources count in the whole, in place of their tokens, if there are any.
    """
    nats, targets = (sums.reshape(-1, groups.ranges) for sums in (nats, targets))
    manifest = groups.data.manifest
    by_source = list(zip(groups.sources, nats.sum(1), targets.sum(1), strict=False))
    sources = {
        name: PartLoss(total / count, bits_per_byte(total / count, manifest.sources[name]), int(count))
        for name, total, count in by_source
        if count
    }
    by_length = zip(range_names(groups.bounds.tolist()), nats.sum(0), targets.sum(0), strict=True)
    lengths = {name: PartLoss(total / count, None, int(count)) for name, total, count in by_length if count}
    loss = float(nats.sum() / targets.sum())
    count = int(targets.sum())
    whole = _weighted(sources, weights) if weights else PartLoss(loss, bits_per_byte(loss, manifest), count)
    several = len(sources) > 1
    return HoldoutLosses(whole, sources if several else {}, lengths if groups.ranges > 1 else {})


def _weighted(sources: Mapping[str, PartLoss], weights: Mapping[str, float]) -> PartLoss:
    """Return the mean of the sources' losses and of their bits per byte, by the weights of sources."""
    total = sum(weights.values())
    loss = sum(weight * sources[name].loss for name, weight in weights.items()) / total
    each = [(weight, sources[name].bits_per_byte) for name, weight in weights.items()]
    known = [weight * bits for weight, bits in each if bits is not None]
    bits = sum(known) / total if len(known) == len(each) else None
    return PartLoss(loss, bits, sum(sources[name].tokens for name in weights))


class Holdouts:
    """The holdouts of a run, by name: that of data.holdout by "", the others by theirs."""

    def __init__(
        self,
        named: Mapping[str, TokenSequences | TextSequences],
        config: EvalConfig,
        micro_batch_size: int,
        mask_documents: bool = False,
    ) -> None:
        """Raises UsageError for weights of sources that a holdout, or what is evaluated of it, does not have."""
        self.config = config
        self.micro_batch_size = micro_batch_size
        self.mask_documents = mask_documents
        self.groups = {name: TargetGroups(data, config.lengths) for name, data in named.items()}
        self.counts = {name: min(config.sequences or len(data), len(data)) for name, data in named.items()}
        if config.weights:
            for name, groups in self.groups.items():
                _require_sources(groups, self.counts[name], config.weights)

    def evaluate(self, model: ParallelModel) -> dict[str, HoldoutLosses]:
        """Return the losses of each holdout; every rank calls it."""
        return {name: self._evaluate(model, groups, self.counts[name]) for name, groups in self.groups.items()}

    def _evaluate(self, model: ParallelModel, groups: TargetGroups, count: int) -> HoldoutLosses:
        """Return the losses of the first `count` sequences of `groups.data`.

        Sequence i goes to replica i mod dp_size. All replicas run the same number of micro-batches, because their
        collectives wait for each other: a replica with fewer sequences repeats the last one, with all targets ignored.
        Ids that are IGNORE_INDEX are padding.
        """
        world = model.world
        data = groups.data
        share = -(-count // world.dp_size)
        mine = np.arange(share) * world.dp_size + world.dp_rank
        sums = np.zeros((2, groups.count))  # nats and targets of each group
        for start in range(0, share, self.micro_batch_size):
            indices = mine[start : start + self.micro_batch_size]
            read = np.minimum(indices, count - 1)
            tokens = data.batch(read)
            targets = data.targets(read, tokens).masked_fill(torch.from_numpy(indices >= count)[:, None], IGNORE_INDEX)
            ids = tokens[:, :-1].clamp(min=0).to(world.device)  # padding is IGNORE_INDEX
            positions = [data.positions(read).to(world.device)] if self.mask_documents else None
            for losses in model.target_losses([ids], [targets.to(world.device)], positions):
                group = groups.of(read)
                sums += _sums_by_group(losses, (targets != IGNORE_INDEX) & (group >= 0), group, groups.count)
        nats, counted = world.all_reduce(torch.from_numpy(sums)).numpy()
        return holdout_losses(nats, counted, groups, self.config.weights)


def _require_sources(groups: TargetGroups, count: int, weights: Mapping[str, float]) -> None:
    folder = groups.data.folder
    known = ", ".join(groups.sources)
    if not known:
        raise UsageError(
            f"eval.weights are given, but {folder} does not say which source each document is from; run "
            "tokenize_corpus again, or leave them out"
        )
    if unknown := [name for name in weights if name not in groups.sources]:
        raise UsageError(f"eval.weights has {unknown[0]!r}, and {folder} has no such source; it has {known}")
    found = {groups.sources[number] for number in groups.sources_of(count)}
    if missing := [name for name in weights if name not in found]:
        raise UsageError(
            f"eval.weights has {missing[0]!r}, and no token of it is among the first {count:,} sequences of {folder}; "
            "try more --eval.sequences, or 0 for all"
        )


def _sums_by_group(losses: Tensor, counted: Tensor, group: Tensor, groups: int) -> NDArray[np.float64]:
    """Sum of the losses, and number, of the targets of each group that are `counted`; (B, T) each: (2, groups)."""
    group = group[counted]
    nats = np.bincount(group.numpy(), losses.cpu()[counted].double().numpy(), groups)
    return np.stack([nats, np.bincount(group.numpy(), minlength=groups)])


_SPAN = 1 << 18  # tokens counted at once
_SPANS = 1 << 9  # of the training tokens, at most: 134 million tokens, which take a second or two


def unigram_loss(train: TokenMix, holdout: TokenSequences, count: int, world: World) -> float:
    """Return the unigram model's loss in nats/token, over the targets of the first `count` sequences.

    The unigram model predicts each token by its frequency in `train`, with add-one smoothing: in all of it, or of more
    than 134 million tokens in 512 spans, evenly spread; of a mix, in each data set, by its share. Every rank calls it
    and counts its part of the tokens.
    """
    vocabulary = train.first.manifest.tokenizer.vocab_size
    each = [_train_counts(part, vocabulary, world) for part in train.parts]
    seen = each[0] if len(each) == 1 else _mixed_counts(each, train.shares)
    last = 1 + count * holdout.length
    targets = [(start, min(start + _SPAN, last)) for start in range(1, last, _SPAN)]
    target_counts = _token_counts(holdout, targets, vocabulary, world, holdout.has_ignored)
    nats = math.log(seen.sum() + vocabulary) - np.log(seen + 1.0)
    return float((target_counts * nats).sum() / max(1, target_counts.sum()))


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
    data: TokenSequences,
    spans: Sequence[tuple[int, int]],
    vocabulary: int,
    world: World,
    only_targets: bool = False,
) -> NDArray[np.int64]:
    """Count each id in spans (start, stop) of all shards concatenated: (vocabulary,) int64.

    `only_targets`: of targets, if some tokens are none.
    """
    counts = np.zeros(vocabulary, np.int64)
    for start, stop in spans[world.rank :: world.size]:
        ids = data.read(start, stop)
        if only_targets:
            ids = ids[data.is_target(start, stop)]
        counts += np.bincount(ids, minlength=vocabulary)
    return world.all_reduce(torch.from_numpy(counts)).numpy()
