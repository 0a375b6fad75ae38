"""Stage of a run: normalise the texts of the corpus, and write it as JSON lines."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from gristmill.counts import WRITTEN, Counts
from gristmill.engine.ledger import Ledger
from gristmill.io.files import STATE_DIR
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.odd_files import counts_by_file, odd_lengths
from gristmill_cli.stages.spec import RunContext, StageSpec
from preprocessing.normalize_text import normalize_text
from preprocessing.steps.normalise import check_ftfy


class NormalizeText(StageSpec):
    """Normalise every text to Unicode NFC."""

    name = "normalize_text"
    output = "normalized"
    section = "normalize"
    rewrites = True
    is_in_funnel = True
    keeps = WRITTEN
    look_at = "the files *.malformed in OUT/normalized"
    requests = 3.0

    def call(self, run: RunContext) -> Counts:
        """Normalise the corpus."""
        return normalize_text(
            run.corpus,
            self.path(run.config),
            text_column=run.config.text_column,
            sources=run.config.sources,
            options=run.options,
            **vars(run.config.normalize),
        )

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return how texts are read and normalised, and the sources that have tables of their own."""
        settings = {**vars(run.config.normalize), "text_column": run.config.text_column}
        if run.config.sources:
            unweighted = {name: replace(source, weight=None) for name, source in run.config.sources.items()}
            settings["sources"] = msgspec.to_builtins(unweighted)
        return settings

    def check(self, config: RunConfig, sources: set[str]) -> None:
        """Raise UsageError if ftfy is asked for and missing."""
        if config.normalize.ftfy:
            check_ftfy()

    def alarms(self, run: RunContext, counts: Counts) -> Iterator[str]:
        """Yield files whose documents are far longer, or shorter, than in others of their source."""
        ledger = Ledger(self.path(run.config) / STATE_DIR, self.name)
        yield from odd_lengths(counts_by_file(ledger, "normalize"), run.config.alarms.length)

    def hint(self, config: RunConfig) -> str:
        """Return what to try if no document is left."""
        return "give a corpus with documents"
