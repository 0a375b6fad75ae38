"""Stages of a run that read the corpus for facts: after a stage that compared documents, and after copies are known."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gristmill.counts import Counts
from gristmill.steps import DocumentStep
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.spec import RunContext, StageSpec, settings_of
from preprocessing.document_pass import NOTED, removed_path
from preprocessing.prepare import STAGE, prepare
from preprocessing.score_after_copies import STAGE as SCORE_AFTER_COPIES
from preprocessing.score_after_copies import score_after_copies
from preprocessing.steps.model_score import After, ScoreOptions, score_steps, tables_after
from preprocessing.steps.text_digest import TextDigest


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
    settings = settings_of(run.config.dedup, "hash", "unit", "width", "permutations", "seed")
    scores = tables_after("rules", run.config.scores)
    if scores:
        settings["scores"] = _describe_scores(scores)
    return settings


def _describe_scores(scores: Mapping[str, ScoreOptions]) -> list[str]:
    """Return the models that score documents, with their versions."""
    return [step.describe() for step in score_steps(scores)]


class ScoreAfterCopies(StageSpec):
    """Read the documents of which no copy is kept once more, and score them."""

    name = "score_after_copies"
    engine = SCORE_AFTER_COPIES
    output = "scores"
    added_by = "scores"
    keeps = NOTED
    requests = 4.0
    reads_documents = True
    is_after_mix = True

    def call(self, run: RunContext) -> Counts:
        """Note the scores; no text is written."""
        config = run.config
        scores = self.path(config)
        return score_after_copies(
            run.corpus,
            run.facts,
            scores,
            self.steps(run),
            run.duplicates,
            run.short_documents,
            run.options,
            text_column=config.text_column,
            absent=[source for source, weight in config.weights.items() if not weight],
            keep_list=config.keep_list,
            low_scores=run.low_scores,
            removed=removed_path(scores) if config.max_failed > 0 else None,
            max_failed=config.max_failed,
            first=run.first_texts,
        )

    def steps(self, run: RunContext) -> list[DocumentStep]:
        """Return the scores, and the digest by which a curve chooses."""
        return [TextDigest(), *score_steps(tables_after("copies", run.config.scores))]

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return the models that score documents."""
        return {"scores": _describe_scores(tables_after("copies", run.config.scores))}

    def is_in_run(self, options: Mapping[str, Any]) -> bool:
        """Return whether a score is after copies."""
        return has_scores_after("copies", options)

    def hint(self, config: RunConfig) -> str:
        """Return what to try if no document is left."""
        return "give more documents, or look at --dedup.index and --filter.threshold"


def has_scores_after(after: After, options: Mapping[str, Any]) -> bool:
    """Return whether a run with these options, as run.json has them, has scores after rules, or after copies."""
    for table in options.get("scores", {}).values():
        if not table.get("mean_of") and table.get("after", "rules") == after:
            return True
    return False
