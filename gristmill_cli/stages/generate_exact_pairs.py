"""Stage of a run: find exact copies."""

from typing import Any

from dedup.from_facts.exact_copies import pair_exact_copies
from dedup.generate_exact_pairs import STAGE
from gristmill.counts import Counts
from gristmill_cli.stages.spec import RunContext, StageSpec


class GenerateExactPairs(StageSpec):
    """Find exact copies of any length, so that they need no signature."""

    name = "generate_exact_pairs"
    engine = STAGE
    output = "dup/duplicate_pairs_exact.txt"
    section = "dedup"
    added_by = "dedup.exact"
    requests = 1.2

    def call(self, run: RunContext) -> Counts:
        """Write the pairs of copies."""
        return pair_exact_copies(run.facts, run.exact_pairs, run.config.dedup.scope, run.options)

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return which documents are compared."""
        return {"scope": run.config.dedup.scope}
