"""Stage of a run: write the documents of the mix to random parts, as text."""

from typing import Any

from gristmill.counts import WRITTEN, Counts
from gristmill_cli.stages.mix import mix_settings
from gristmill_cli.stages.spec import RunContext, StageSpec
from preprocessing.shuffle_holdout import pass1


class Pass1(StageSpec):
    """Scatter the documents of the mix over random parts."""

    name = "pass1"
    output = "pass1"
    section = "mix"
    added_by = "keep"
    keeps = WRITTEN
    requests = 11.0

    def call(self, run: RunContext) -> Counts:
        """Write the bucket files of the mix."""
        config = run.config
        return pass1(
            run.corpus,
            self.path(config),
            run.duplicates,
            run.short_documents,
            config.weights,
            config.mix_seed,
            run.options,
            config.text_column,
            bytes=config.mix.bytes,
            tokens=config.mix.tokens,
            tokenizer=config.counting_tokenizer,
            keep_list=config.keep_list,
            low_scores=run.low_scores,
        )

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return how much of each source the mix asks for, and the documents that are kept or dropped by name."""
        return mix_settings(run)
