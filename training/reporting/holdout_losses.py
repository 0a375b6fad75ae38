"""Losses of a holdout: over all of it, and of each source and each range of document lengths."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill.io.token_manifest import Manifest, SourceRecord
from training.data.target_groups import TargetGroups, range_names
from training.reporting.metrics_file import finite


@dataclass(frozen=True)
class PartLoss:
    """The loss of one part of a holdout.

    `loss`: mean cross-entropy of its targets, nats/token. `bits_per_byte`: of UTF-8 text, which compares models of
    different vocabularies; None of a range of lengths, of which the bytes are not known. `tokens`: its targets.
    """

    loss: float
    bits_per_byte: float | None
    tokens: int

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
        """The losses as metrics.jsonl holds them."""
        parts = {"sources": self.sources, "lengths": self.lengths}
        found = {kind: {name: part.values() for name, part in named.items()} for kind, named in parts.items() if named}
        return {key: value for key, value in self.whole.values().items() if key != "tokens"} | found

    def lines(self) -> list[str]:
        """A line for each source and each range of lengths, for the terminal."""
        parts = self.sources | {f"documents of {name} tokens": part for name, part in self.lengths.items()}
        width = max(map(len, parts), default=0)
        return [f"    {name:<{width}}  {part} ({part.tokens:,} tokens)" for name, part in parts.items()]


def bits_per_byte(loss: float, counted: Manifest | SourceRecord) -> float:
    """Convert nats/token to bits per UTF-8 byte of text, as `counted` has tokens per byte."""
    return loss / math.log(2) * counted.tokens / max(1, counted.bytes)


def holdout_losses(
    nats: NDArray[np.float64], targets: NDArray[np.float64], groups: TargetGroups, weights: Mapping[str, float]
) -> HoldoutLosses:
    """The losses from the sum of the losses and the number of targets of each group, (groups,) each.

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
    loss, count = float(nats.sum() / targets.sum()), int(targets.sum())
    whole = _weighted(sources, weights) if weights else PartLoss(loss, bits_per_byte(loss, manifest), count)
    several = len(sources) > 1
    return HoldoutLosses(whole, sources if several else {}, lengths if groups.ranges > 1 else {})


def _weighted(sources: Mapping[str, PartLoss], weights: Mapping[str, float]) -> PartLoss:
    """The mean of the sources' losses and of their bits per byte, by the weights of sources."""
    total = sum(weights.values())
    loss = sum(weight * sources[name].loss for name, weight in weights.items()) / total
    bits = sum(weight * (sources[name].bits_per_byte or 0.0) for name, weight in weights.items()) / total
    return PartLoss(loss, bits, sum(sources[name].tokens for name in weights))
