"""Stage of a run: list the documents that are too short."""

from typing import Any

from gristmill.counts import Counts
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.spec import RunContext, StageSpec
from preprocessing.filter import KEPT, list_short
from preprocessing.minimum_length import check_threshold


class FilterShort(StageSpec):
    """List the documents that are too short; the mix drops them."""

    name = "filter"
    output = "filtered.pickle"
    section = "filter"
    keeps = KEPT
    requests = 4.0

    def call(self, run: RunContext) -> Counts:
        """Write the key set of the short documents."""
        spec = run.config.filter
        return list_short(run.facts, run.short_documents, spec.threshold, run.options, spec.unit)

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return the minimum size, and its unit."""
        return {"threshold": run.config.filter.threshold, "unit": run.config.filter.unit}

    def check(self, config: RunConfig, sources: set[str]) -> None:
        """Raise UsageError for a threshold out of range."""
        check_threshold(config.filter.threshold)

    def hint(self, config: RunConfig) -> str:
        """Return what to try if no document is left."""
        return f"give longer documents, or a smaller --filter.threshold than {config.filter.threshold}"
