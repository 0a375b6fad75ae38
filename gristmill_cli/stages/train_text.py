"""Stages of a run with --keep train_text: SlimPajama's, which write the mix as text, shuffle it, and split it."""

import sys
from typing import Any

from dedup.dedup_train import STAGE, dedup_train
from gristmill.counts import HELD_OUT, WRITTEN, Counts
from gristmill_cli.funnel import TRAIN
from gristmill_cli.stages.mix import mix_settings
from gristmill_cli.stages.spec import RunContext, StageSpec
from preprocessing.shuffle_holdout import PASS_1, PASS_2, pass1, pass2

_CHUNK = 1  # number of the only train chunk
_ALL_PARTS = sys.maxsize


class Pass1(StageSpec):
    """Scatter the documents of the mix over random parts."""

    name = "pass1"
    engine = PASS_1
    output = "pass1"
    section = "mix"
    added_by = "keep"
    keeps = WRITTEN
    requests = 11.0
    reads_documents = True
    is_intermediate = True

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


class Pass2(StageSpec):
    """Shuffle the parts, and split them into train and holdout."""

    name = "pass2"
    engine = PASS_2
    output = "train"
    section = "mix"
    added_by = "keep"
    reads = "pass1"
    keeps = WRITTEN
    requests = 4.5
    is_after_mix = True

    def call(self, run: RunContext) -> Counts:
        """Write the train set and the holdout."""
        folders = (run.out / "pass1", run.out / TRAIN, run.out / HELD_OUT)
        return pass2(0, _ALL_PARTS, _CHUNK, *folders, run.config.mix.holdout, run.options)

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return the share that is held out."""
        return {"holdout": run.config.mix.holdout}


class DedupTrain(StageSpec):
    """Remove the documents of the train set whose text is in the holdout."""

    name = "dedup_train"
    engine = STAGE
    output = "train_deduped"
    added_by = "keep"
    reads = "pass2"
    keeps = WRITTEN
    requests = 2.5
    is_after_mix = True

    def call(self, run: RunContext) -> Counts:
        """Write the train set without copies of the holdout."""
        folders = (run.out / TRAIN, run.out / HELD_OUT, self.path(run.config))
        return dedup_train(_CHUNK, *folders, text_column=run.config.text_column, options=run.options)

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return nothing: it has no options."""
        return {}
