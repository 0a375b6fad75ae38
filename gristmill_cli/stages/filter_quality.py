"""Stage of a run: keep the documents that a recipe of quality rules allows."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gristmill.counts import WRITTEN, Counts
from gristmill.engine.staleness.ledger import Ledger
from gristmill.io.files import STATE_DIR
from gristmill.steps import DocumentStep
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.note_facts import signature_settings
from gristmill_cli.stages.rules import rule_alarms, rules_card, rules_version
from gristmill_cli.stages.spec import RunContext, StageSpec, is_given
from preprocessing.document_pass import removed_path
from preprocessing.filter_quality import STAGE, filter_quality
from preprocessing.prepare import note_replaced, prepare
from preprocessing.quality.recipe import load_recipe, read_recipe
from preprocessing.steps.recipe_rules import RecipeRules


class FilterQuality(StageSpec):
    """Keep the documents that a recipe allows."""

    name = "filter_quality"
    engine = STAGE
    output = "quality"
    added_by = "recipe"  # and a function between normalisation and the rules
    rewrites = True
    notes_facts = True
    is_in_funnel = True
    keeps = WRITTEN
    look_at = "OUT/quality.removed.parquet, or the texts in gristmill report OUT"
    requests = 6.0
    reads_documents = True

    def is_in_run(self, options: Mapping[str, Any]) -> bool:
        """Return whether rules judge what a user's function wrote; else they are steps of the first stage."""
        return super().is_in_run(options) and is_given(options, "apply.function")

    def call(self, run: RunContext) -> Counts:
        """Judge every document by the rules."""
        recipe = run.config.recipe
        text_column = run.config.text_column
        output = self.path(run.config)
        if not run.is_last_writer:
            return filter_quality(run.corpus, output, recipe, run.options, text_column=text_column)
        counts, _ = prepare(
            run.corpus, output, run.facts, self.steps(run), run.options, text_column=text_column,
            removed=removed_path(output), stage=self.engine,
        )  # fmt: skip
        note_replaced(counts, run.options)
        return counts

    def steps(self, run: RunContext) -> list[DocumentStep]:
        """Return the rules, and what later stages decide by, if it is the last that writes documents."""
        if not run.is_last_writer:
            return []
        return [RecipeRules.of(run.config.recipe), *run.fact_steps]

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return the version of the rules."""
        settings = {"rules": rules_version(read_recipe(run.config.recipe))}
        if run.is_last_writer:
            settings |= signature_settings(run)
        return settings

    def check(self, config: RunConfig, sources: set[str]) -> None:
        """Raise UsageError if the recipe cannot be read."""
        if config.recipe:
            load_recipe(config.recipe)

    def alarms(self, run: RunContext, counts: Counts) -> Iterator[str]:
        """Yield rules that remove nothing, and files that lose far more than others of their source."""
        ledger = Ledger(self.path(run.config) / STATE_DIR, self.name)
        step = "prepare" if run.is_last_writer else "judge"
        yield from rule_alarms(run.config, counts, ledger, step)

    def card(self, out: Path, options: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
        """Yield the rules of the recipe."""
        yield from rules_card(options["recipe"], settings)

    def hint(self, config: RunConfig) -> str:
        """Return what to try if no document is left."""
        return f"see what each rule removes: gristmill preview {config.recipe} {config.out}"
