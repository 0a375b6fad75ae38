"""Stage of a run: note facts of a corpus that a stage wrote which looks at all documents together."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gristmill.counts import Counts
from gristmill_cli.stages.spec import RunContext, StageSpec, is_given
from preprocessing.document_pass import NOTED
from preprocessing.prepare import STAGE, prepare


class NoteFacts(StageSpec):
    """Read the corpus once for the facts that documents are filtered and compared by."""

    name = "note_facts"
    output = "facts"
    section = "dedup"
    keeps = NOTED
    requests = 5.0

    def call(self, run: RunContext) -> Counts:
        """Note the facts; no text is written."""
        counts, _ = prepare(
            run.corpus,
            None,
            run.facts,
            run.fact_steps,
            run.options,
            text_column=run.config.text_column,
            stage=replace(STAGE, name=self.name),
        )
        return counts

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return the parameters of the signatures."""
        return signature_settings(run)

    def is_in_run(self, options: Mapping[str, Any]) -> bool:
        """Return whether the stage that writes the corpus last notes no facts itself."""
        if is_given(options, "lines.unit") or is_given(options, "decontaminate.against"):
            return True
        return is_given(options, "apply.function") and not is_given(options, "recipe")


def signature_settings(run: RunContext) -> dict[str, Any]:
    """Return the parameters of the signatures, by name."""
    return {name: getattr(run.config.dedup, name) for name in ("hash", "unit", "width", "permutations", "seed")}
