"""Stage of a run: keep the documents that a recipe of quality rules allows."""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

from gristmill.counts import READ, WRITTEN, Counts, warn_of_losses
from gristmill.engine.staleness.ledger import Ledger
from gristmill.errors import GristmillError
from gristmill.io.files import STATE_DIR
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.note_facts import signature_settings
from gristmill_cli.stages.odd_files import counts_by_file, odd_languages
from gristmill_cli.stages.spec import RunContext, StageSpec, is_given
from preprocessing.filter_quality import STAGE, filter_quality, note_replaced, removed_path
from preprocessing.prepare import prepare
from preprocessing.quality.recipe import Bounds, load_recipe, read_recipe
from preprocessing.steps.recipe_rules import REPLACED, RecipeRules

_SHOWN_DIGITS = 12  # of the SHA-256 of a recipe's rules


class FilterQuality(StageSpec):
    """Keep the documents that a recipe allows."""

    name = "filter_quality"
    output = "quality"
    added_by = "recipe"  # and a function that stands between normalisation and the rules
    rewrites = True
    notes_facts = True
    is_in_funnel = True
    keeps = WRITTEN
    look_at = "OUT/quality.removed.parquet, or the texts in gristmill report OUT"
    requests = 6.0

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
        steps = [RecipeRules.of(recipe), *run.fact_steps]
        counts, sums = prepare(
            run.corpus, output, run.facts, steps, run.options, text_column=text_column, sums=(REPLACED,),
            removed=removed_path(output), stage=STAGE,
        )  # fmt: skip
        note_replaced(sums[REPLACED], run.options)
        return counts

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return the version of the rules."""
        settings = {"rules": rules_version(read_recipe(run.config.recipe))}
        return settings | signature_settings(run) if run.is_last_writer else settings

    def check(self, config: RunConfig, sources: set[str]) -> None:
        """Raise UsageError if the recipe cannot be read."""
        if config.recipe:
            load_recipe(config.recipe)

    def alarms(self, run: RunContext, counts: Counts) -> Iterator[str]:
        """Yield rules that remove nothing, and files that lose far more than others of their source."""
        ledger = Ledger(self.path(run.config) / STATE_DIR, self.name)
        yield from rule_alarms(run.config, counts, ledger, "prepare" if run.is_last_writer else "judge")

    def hint(self, config: RunConfig) -> str:
        """Return what to try if no document is left."""
        return f"see what each rule removes: gristmill preview {config.recipe} {config.out}"


def rule_alarms(config: RunConfig, counts: Counts, ledger: Ledger, step: str) -> Iterator[str]:
    """Yield what looks wrong in what the rules of a recipe removed, given the ledger and the step that judged."""
    limits = config.alarms
    yield from _idle_rules(config, counts)
    files_of_source = counts_by_file(ledger, step)
    yield from odd_languages(files_of_source, limits.language)
    for source, files in sorted(files_of_source.items()):
        losses = warn_of_losses(files, "", 0, limits.times_median, "file")
        for line in list(losses.values())[:1]:
            yield f"in {source} {line}: check whether this file holds a different kind of text"


def rules_version(recipe: str) -> str:
    """Return the beginning of the SHA-256 of a recipe's TOML."""
    return sha256(recipe.encode()).hexdigest()[:_SHOWN_DIGITS]


def _idle_rules(config: RunConfig, counts: Counts) -> Iterator[str]:
    """Yield a sentence if rules removed none of many documents."""
    documents = counts.total(READ).documents
    limit = config.alarms.idle_rule
    if not limit or documents < limit:
        return
    try:
        steps = load_recipe(config.recipe).steps
    except GristmillError:  # a report of a run whose recipe is no longer there
        return
    rules = [step.name for step in steps if isinstance(step, Bounds)]
    idle = [rule for rule in rules if not counts.total(rule).documents]
    if idle:
        yield f"of {documents:,} documents these rules removed none: {', '.join(idle)}: look at their limits"
