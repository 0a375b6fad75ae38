"""Stage of a run: read the raw corpus, take each document through all steps, and write what is kept.

Steps are normalisation, the user's steps, the rules of a recipe, and the facts that later stages decide by.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from gristmill.counts import WRITTEN, Counts
from gristmill.engine.staleness.ledger import Ledger
from gristmill.io.files import STATE_DIR
from gristmill.steps import DocumentStep
from gristmill.wording import count_of
from gristmill_cli.run_config import RunConfig, Source
from gristmill_cli.stages.note_facts import signature_settings
from gristmill_cli.stages.odd_files import counts_by_file, odd_lengths
from gristmill_cli.stages.rules import rule_alarms, rules_card, rules_version
from gristmill_cli.stages.spec import RunContext, StageSpec, spell_limits
from preprocessing.document_pass import removed_path
from preprocessing.normalize_text import STAGE
from preprocessing.prepare import note_replaced, prepare
from preprocessing.quality.recipe import read_recipe
from preprocessing.steps.normalise import Normalise, check_ftfy
from preprocessing.steps.recipe_rules import RecipeRules
from preprocessing.steps.text_digest import TextDigest
from preprocessing.steps.user_function import StepOptions, UserFunction


class NormalizeText(StageSpec):
    """Normalise every text to Unicode NFC, and keep the documents that your steps and a recipe allow."""

    name = "normalize_text"
    engine = STAGE
    output = "normalized"
    section = "normalize"
    rewrites = True
    notes_facts = True
    is_in_funnel = True
    keeps = WRITTEN
    look_at = "OUT/normalized.removed.parquet, *.malformed in OUT/normalized, or the texts in gristmill report OUT"
    requests = 5.0

    def call(self, run: RunContext) -> Counts:
        """Take the corpus through the steps; note facts, if no later stage writes it anew."""
        config = run.config
        target = self.path(config)
        facts = run.facts if run.is_last_writer else own_facts(config)
        removed: Path | None = None
        if any(step.removes for step in document_steps(config)) or config.max_failed > 0:
            removed = removed_path(target)
        counts, _ = prepare(
            run.corpus,
            target,
            facts,
            self.steps(run),
            run.options,
            text_column=config.text_column,
            read_also=config.normalize.read_also,
            skip_odd_names=config.normalize.skip_odd_names,
            extract=config.normalize.extract,
            sources=config.sources,
            removed=removed,
            max_failed=config.max_failed,
            stage=self.engine,
        )
        note_replaced(counts, run.options)
        return counts

    def steps(self, run: RunContext) -> list[DocumentStep]:
        """Return the steps that documents go through, and those that note what later stages decide by."""
        steps = document_steps(run.config)
        if run.is_last_writer:
            return steps + run.fact_steps
        if run.first_texts:
            steps.append(TextDigest())  # take-downs hold for a text as it is now, whatever later stages cut
        return steps

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return how texts are read and normalised, and the sources that have tables of their own."""
        settings = {**vars(run.config.normalize), "text_column": run.config.text_column}
        if run.config.sources:
            unweighted = dict[str, Source]()
            for name, source in run.config.sources.items():
                unweighted[name] = replace(source, weight=None)
            settings["sources"] = msgspec.to_builtins(unweighted)
        if run.config.steps:
            settings["steps"] = list(map(_describe, run.config.steps))
        if _has_rules(run.config):
            settings["rules"] = rules_version(read_recipe(run.config.recipe))
        if run.is_last_writer:
            settings |= signature_settings(run)
        return settings

    def check(self, config: RunConfig, sources: set[str]) -> None:
        """Raise UsageError if ftfy is asked for and missing."""
        if config.normalize.ftfy:
            check_ftfy()

    def alarms(self, run: RunContext, counts: Counts) -> Iterator[str]:
        """Yield files left out as damaged, and files whose documents are far longer, or shorter, than others."""
        if counts.damaged:
            number = count_of(len(counts.damaged), "damaged file")
            yield f"{number} left out: {counts.damaged_files()}: fetch them again, or take them out of the corpus"
        ledger = Ledger(self.path(run.config) / STATE_DIR, self.name)
        yield from odd_lengths(counts_by_file(ledger, "prepare"), run.config.alarms.length)
        if _has_rules(run.config):
            yield from rule_alarms(run.config, counts, ledger, "prepare")

    def card(self, out: Path, options: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
        """Yield the rules of a recipe, if this stage applied them."""
        if "rules" in settings:
            yield from rules_card(options["recipe"], settings)

    def hint(self, config: RunConfig) -> str:
        """Return what to try if no document is left."""
        if _has_rules(config):
            return (
                f"give a corpus with documents, or see what each rule removes: gristmill preview {config.recipe} CORPUS"
            )
        return "give a corpus with documents"


def document_steps(config: RunConfig) -> list[DocumentStep]:
    """Return the steps that rewrite or remove documents, in order. Another one of ours is a line of this list."""
    return [
        Normalise(config.normalize.ftfy),
        *map(UserFunction.of, config.steps),
        *([RecipeRules.of(config.recipe)] if _has_rules(config) else []),
    ]


def own_facts(config: RunConfig) -> Path:
    """Return the facts of the first pass, where a later stage writes the corpus anew and notes others."""
    return config.out / f"{NormalizeText.output}.facts"


def _has_rules(config: RunConfig) -> bool:
    """Return whether the rules of a recipe are among the steps: no function of the user comes before them."""
    return bool(config.recipe) and not config.apply.function


def _describe(options: StepOptions) -> str:
    """Return a step of the user in a few words, with the version of its code."""
    step = UserFunction.of(options)
    limits = spell_limits(step.min, step.max)
    return " ".join([step.kind, step.function, *limits, f"({step.code[:12]})"])
