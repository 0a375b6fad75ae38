"""Holdouts: the data sets, by name, on which a run is evaluated."""

from collections.abc import Mapping

from gristmill.errors import UsageError
from training.data.sequences import TokenSequences
from training.data.target_groups import TargetGroups
from training.data.text import TextSequences
from training.parallel.parallel_model import ParallelModel
from training.reporting.evaluate import evaluate
from training.reporting.holdout_losses import HoldoutLosses
from training.reporting.reporting_config import EvalConfig


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
        self.config, self.micro_batch_size, self.mask_documents = config, micro_batch_size, mask_documents
        self.groups = {name: TargetGroups(data, config.lengths) for name, data in named.items()}
        self.counts = {name: config.sequence_count(len(data)) for name, data in named.items()}
        if config.weights:
            for name, groups in self.groups.items():
                _require_sources(groups, self.counts[name], config.weights)

    def evaluate(self, model: ParallelModel) -> dict[str, HoldoutLosses]:
        """The losses of each holdout; every rank calls it."""
        options = self.micro_batch_size, self.config.weights, self.mask_documents
        return {name: evaluate(model, groups, self.counts[name], *options) for name, groups in self.groups.items()}


def _require_sources(groups: TargetGroups, count: int, weights: Mapping[str, float]) -> None:
    folder, known = groups.data.folder, ", ".join(groups.sources)
    if not known:
        raise UsageError(
            f"eval.weights are given, and {folder} does not say which document is of which source; run tokenize_corpus "
            "again, or leave them out"
        )
    if unknown := [name for name in weights if name not in groups.sources]:
        raise UsageError(f"eval.weights has {unknown[0]!r}, and {folder} has no such source; it has {known}")
    found = {groups.sources[number] for number in groups.sources_of(count)}
    if missing := [name for name in weights if name not in found]:
        raise UsageError(
            f"eval.weights has {missing[0]!r}, and no token of it is among the first {count:,} sequences of {folder}; "
            "try more --eval.sequences, or 0 for all"
        )
