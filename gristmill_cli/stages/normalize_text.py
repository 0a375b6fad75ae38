"""Stage of a run: normalise the texts of the corpus, and write it as JSON lines."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from gristmill.counts import WRITTEN, Counts
from gristmill.engine.ledger import Ledger
from gristmill.io.files import STATE_DIR
from gristmill.steps import DocumentStep
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.note_facts import signature_settings
from gristmill_cli.stages.odd_files import counts_by_file, odd_lengths
from gristmill_cli.stages.spec import RunContext, StageSpec
from preprocessing.filter_quality import removed_path
from preprocessing.normalize_text import STAGE, normalize_text
from preprocessing.prepare import prepare
from preprocessing.steps.normalise import Normalise, check_ftfy
from preprocessing.steps.user_function import StepOptions, UserFunction


class NormalizeText(StageSpec):
    """Normalise every text to Unicode NFC."""

    name = "normalize_text"
    output = "normalized"
    section = "normalize"
    rewrites = True
    notes_facts = True
    is_in_funnel = True
    keeps = WRITTEN
    look_at = "the files *.malformed in OUT/normalized"
    requests = 3.0

    def call(self, run: RunContext) -> Counts:
        """Normalise the corpus, and run the steps of the user; note facts, if no later stage writes it anew."""
        config = run.config
        spec = vars(config.normalize)
        target = self.path(config)
        if not _is_pass(run):
            return normalize_text(
                run.corpus,
                target,
                text_column=config.text_column,
                sources=config.sources,
                options=run.options,
                **spec,
            )
        own_steps = [UserFunction.of(options) for options in config.steps]
        steps: list[DocumentStep] = [Normalise(config.normalize.ftfy), *own_steps]
        if run.is_last_writer:
            steps += run.fact_steps
        counts, _ = prepare(
            run.corpus,
            target,
            run.facts if run.is_last_writer else target.with_name(f"{self.output}.facts"),
            steps,
            run.options,
            text_column=config.text_column,
            read_also=config.normalize.read_also,
            skip_odd_names=config.normalize.skip_odd_names,
            extract=config.normalize.extract,
            sources=config.sources,
            removed=removed_path(target) if own_steps else None,
            stage=STAGE,
        )
        return counts

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return how texts are read and normalised, and the sources that have tables of their own."""
        settings = {**vars(run.config.normalize), "text_column": run.config.text_column}
        if run.config.sources:
            unweighted = {name: replace(source, weight=None) for name, source in run.config.sources.items()}
            settings["sources"] = msgspec.to_builtins(unweighted)
        if run.config.steps:
            settings["steps"] = [_describe(options) for options in run.config.steps]
        if run.is_last_writer:
            settings |= signature_settings(run)
        return settings

    def check(self, config: RunConfig, sources: set[str]) -> None:
        """Raise UsageError if ftfy is asked for and missing."""
        if config.normalize.ftfy:
            check_ftfy()

    def alarms(self, run: RunContext, counts: Counts) -> Iterator[str]:
        """Yield files whose documents are far longer, or shorter, than in others of their source."""
        ledger = Ledger(self.path(run.config) / STATE_DIR, self.name)
        step = "prepare" if _is_pass(run) else "normalize"
        yield from odd_lengths(counts_by_file(ledger, step), run.config.alarms.length)

    def hint(self, config: RunConfig) -> str:
        """Return what to try if no document is left."""
        return "give a corpus with documents"


def _is_pass(run: RunContext) -> bool:
    """Return whether documents go through further steps as they are normalised."""
    return run.is_last_writer or bool(run.config.steps)


def _describe(options: StepOptions) -> str:
    """Return a step of the user in a few words, with the version of its code."""
    step = UserFunction.of(options)
    limits = [f"{name} {value:g}" for name, value in (("min", step.min), ("max", step.max)) if value is not None]
    return " ".join([step.kind, step.function, *limits, f"({step.code[:12]})"])
