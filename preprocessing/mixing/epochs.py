"""Epochs of the sources of a mix: from weights, or from amounts of bytes or tokens and what a source has of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gristmill.engine.run import StageRun
from gristmill.errors import UsageError
from preprocessing.mixing.sampling import SourceEpochs, select_kth

MAX_WEIGHT = 1_000  # epochs: far above any use, and low enough that a slip of the keyboard does not fill a disk


@dataclass(frozen=True)
class Amounts:
    """How much of each source the mix asks for: bytes of text or, with a tokenizer, tokens. Others have a weight."""

    of: Mapping[str, float] = field(default_factory=dict)
    tokenizer: Path | None = None

    @property
    def unit(self) -> str:
        """Return what is counted."""
        return "tokens" if self.tokenizer else "bytes"

    def weight(self, source: str, kept: int) -> float:
        """Return the epochs of a source that has `kept` of the unit. Raises UsageError for more than MAX_WEIGHT."""
        asked = self.of[source]
        limit = kept * MAX_WEIGHT
        if asked <= limit:
            return asked / kept
        advice = "to leave out this source"
        if kept:
            advice = "less"
        raise UsageError(
            f"--{self.unit} {source}={asked:g}: expected at most {limit:,}, {MAX_WEIGHT:,} times the {kept:,} that are "
            f"left without short documents and duplicates; try {advice}"
        )


class MeasuredSources:
    """The sources whose documents are counted before the mix: sources with an amount, or a fractional weight.

    Of each, files with a random number for each document that is kept, how many documents they are, and how much they
    have of the unit of the amounts.
    """

    def __init__(self, weights: Mapping[str, float], amounts: Amounts) -> None:
        self._weights = weights
        self._amounts = amounts
        self._numbers = dict[str, list[Path]]()
        for source, weight in weights.items():
            if weight % 1 or source in amounts.of:
                self._numbers[source] = []
        self._documents = dict.fromkeys(self._numbers, 0)
        self._kept = dict.fromkeys(self._numbers, 0)

    def __contains__(self, source: str) -> bool:
        return source in self._numbers

    def add(self, source: str, numbers: Path, documents: int, amount: int) -> None:
        """Note documents of a source: the file with their random numbers, how many they are, and their amount."""
        self._numbers[source].append(numbers)
        self._documents[source] += documents
        self._kept[source] += amount

    def choose_epochs(self, run: StageRun, fan_in: int) -> tuple[dict[str, float], dict[str, SourceEpochs]]:
        """Return the weights and the epochs of all sources; of a fractional weight, the fraction is exact."""
        weights = dict(self._weights)
        for source in self._amounts.of:
            weights[source] = self._amounts.weight(source, self._kept[source])
        ranks = dict[str, int]()
        for source, documents in self._documents.items():
            ranks[source] = round(weights[source] % 1 * documents)
        limits = select_kth(run, "epochs", self._numbers, ranks, fan_in)
        epochs = dict[str, SourceEpochs]()
        for source, weight in weights.items():
            epochs[source] = SourceEpochs(int(weight), limits.get(source))
        return weights, epochs
