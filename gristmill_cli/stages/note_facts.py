"""Stage of a run: note facts of a corpus that a stage wrote which looks at all documents together."""

from dataclasses import replace
from typing import Any

from gristmill.counts import Counts
from gristmill.steps import DocumentStep
from gristmill_cli.stages.spec import RunContext, StageSpec
from preprocessing.document_pass import NOTED, removed_path
from preprocessing.prepare import STAGE, prepare
from preprocessing.steps.model_score import score_steps


class NoteFacts(StageSpec):
    """Read the corpus once for the facts that documents are filtered and compared by."""

    name = "note_facts"
    engine = replace(STAGE, name="note_facts")
    output = "facts"
    section = "dedup"
    is_in_funnel = True
    keeps = NOTED
    requests = 4.0
    reads_documents = True

    def call(self, run: RunContext) -> Counts:
        """Note the facts; no text is written."""
        counts, _ = prepare(
            run.corpus,
            None,
            run.facts,
            self.steps(run),
            run.options,
            text_column=run.config.text_column,
            removed=removed_path(run.facts) if run.config.max_failed > 0 else None,
            max_failed=run.config.max_failed,
            stage=self.engine,
        )
        return counts

    def steps(self, run: RunContext) -> list[DocumentStep]:
        """Return what later stages decide by."""
        return run.fact_steps

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return the parameters of the signatures."""
        return signature_settings(run)


def signature_settings(run: RunContext) -> dict[str, Any]:
    """Return the parameters of the signatures, by name, and the models that score documents."""
    settings: dict[str, Any] = {
        name: getattr(run.config.dedup, name) for name in ("hash", "unit", "width", "permutations", "seed")
    }
    if run.config.scores:
        settings["scores"] = [step.describe() for step in score_steps(run.config.scores)]
    return settings
