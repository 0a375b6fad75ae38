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
        """Return the numbers as JSON holds them: null for what is not finite, no bits per byte where not known."""
        values: dict[str, Any] = {"loss": finite(self.loss)}
        if self.bits_per_byte is not None:
            values["bits_per_byte"] = finite(self.bits_per_byte)
        values["tokens"] = self.tokens
        return values


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
        values = self.whole.values()
        del values["tokens"]
        if self.sources:
            values["sources"] = {name: part.values() for name, part in self.sources.items()}
        if self.lengths:
            values["lengths"] = {name: part.values() for name, part in self.lengths.items()}
        return values

    def lines(self) -> list[str]:
        """Return a line for each source and each range of lengths, for the terminal."""
        parts = dict(self.sources)
        for name, part in self.lengths.items():
            parts[f"documents of {name} tokens"] = part
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
    nats = nats.reshape(-1, groups.ranges)  # by source and range of lengths
    targets = targets.reshape(-1, groups.ranges)
    manifest = groups.data.manifest
    sources = dict[str, PartLoss]()
    for name, total, count in zip(groups.sources, nats.sum(1), targets.sum(1), strict=False):
        if count:
            bits = bits_per_byte(total / count, manifest.sources[name])
            sources[name] = PartLoss(total / count, bits, int(count))
    lengths = dict[str, PartLoss]()
    if groups.ranges > 1:
        names = range_names(groups.bounds.tolist())
        for name, total, count in zip(names, nats.sum(0), targets.sum(0), strict=True):
            if count:
                lengths[name] = PartLoss(total / count, None, int(count))
    if weights:
        whole = _weighted(sources, weights)
    else:
        loss = float(nats.sum() / targets.sum())
        whole = PartLoss(loss, bits_per_byte(loss, manifest), int(targets.sum()))
    return HoldoutLosses(whole, sources if len(sources) > 1 else {}, lengths)


def _weighted(sources: Mapping[str, PartLoss], weights: Mapping[str, float]) -> PartLoss:
    """Return the mean of the sources' losses and of their bits per byte, by the weights of sources."""
    total = sum(weights.values())
    loss = 0.0
    bits: float | None = 0.0
    for name, weight in weights.items():
        source = sources[name]
        loss += weight * source.loss
        if bits is None or source.bits_per_byte is None:
            bits = None
        else:
            bits += weight * source.bits_per_byte
    tokens = sum(sources[name].tokens for name in weights)
    return PartLoss(loss / total, None if bits is None else bits / total, tokens)


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
            is_repeated = torch.from_numpy(indices >= count)[:, None]
            tokens = data.batch(read)
            targets = data.targets(read, tokens).masked_fill(is_repeated, IGNORE_INDEX)
            ids = tokens[:, :-1].clamp(min=0).to(world.device)  # padding is IGNORE_INDEX
            positions = None
            if self.mask_documents:
                positions = [data.positions(read).to(world.device)]
            for losses in model.target_losses([ids], [targets.to(world.device)], positions):
                group = groups.of(read)
                sums += _sums_by_group(losses, (targets != IGNORE_INDEX) & (group >= 0), group, groups.count)
        nats, counted = world.all_reduce(torch.from_numpy(sums)).numpy()
        return holdout_losses(nats, counted, groups, self.config.weights)


def _require_sources(groups: TargetGroups, count: int, weights: Mapping[str, float]) -> None:
    """Raise UsageError for a weight of a source that is not among the first `count` sequences."""
    folder = groups.data.folder
    known = ", ".join(groups.sources)
    if not known:
        raise UsageError(
            f"eval.weights are given, but {folder} does not say which source each document is from; run "
            "tokenize_corpus again, or leave them out"
        )
    for name in weights:
        if name not in groups.sources:
            raise UsageError(f"eval.weights has {name!r}, and {folder} has no such source; it has {known}")
    evaluated = {groups.sources[number] for number in groups.sources_of(count)}
    for name in weights:
        if name not in evaluated:
            raise UsageError(
                f"eval.weights has {name!r}, and no token of it is among the first {count:,} sequences of {folder}; "
                "try more --eval.sequences, or 0 for all"
            )


def _sums_by_group(losses: Tensor, counted: Tensor, group: Tensor, groups: int) -> NDArray[np.float64]:
    """Return summed loss and number of the targets of each group that are `counted`; (B, T) each: (2, groups)."""
    group_of_target = group[counted].numpy()
    nats = np.bincount(group_of_target, losses.cpu()[counted].double().numpy(), groups)
    return np.stack([nats, np.bincount(group_of_target, minlength=groups)])


_SPAN = 1 << 18  # tokens counted at once
_SPANS = 1 << 9  # of the training tokens, at most: 134 million tokens, which take a second or two


def unigram_loss(train: TokenMix, holdout: TokenSequences, count: int, world: World) -> float:
    """Return the unigram model's loss in nats/token, over the targets of the first `count` sequences.

    The unigram model predicts each token by its frequency in `train`, with add-one smoothing: in all of it, or of more
    than 134 million tokens in 512 spans, evenly spread; of a mix, in each data set, by its share. Every rank calls it
    and counts its part of the tokens.
    """
    vocabulary = train.first.manifest.tokenizer.vocab_size
    counts_of_sets = [_train_counts(part, vocabulary, world) for part in train.parts]
    seen: NDArray[Any] = counts_of_sets[0]
    if len(counts_of_sets) > 1:
        seen = _mixed_counts(counts_of_sets, train.shares)
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
    spans = [(start, min(start + _SPAN, train.tokens)) for start in starts]
    return _token_counts(train, spans, vocabulary, world)


def _mixed_counts(counts_of_sets: Sequence[NDArray[np.int64]], shares: Sequence[float]) -> NDArray[np.float64]:
    """Return the counts of as many tokens as there are in all sets, each by its share: (vocabulary,)."""
    total = sum(int(counts.sum()) for counts in counts_of_sets)
    mixed = np.zeros(len(counts_of_sets[0]))
    for counts, share in zip(counts_of_sets, shares, strict=True):
        mixed += share * total / counts.sum() * counts
    return mixed


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
