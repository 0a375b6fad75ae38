"""Stage of a run: remove copies of held-out documents from the train set."""

from typing import Any

from dedup.dedup_train import dedup_train
from gristmill.counts import HELD_OUT, WRITTEN, Counts
from gristmill_cli.funnel import TRAIN
from gristmill_cli.stages.pass2 import CHUNK
from gristmill_cli.stages.spec import RunContext, StageSpec


class DedupTrain(StageSpec):
    """Remove the documents of the train set whose text is in the holdout."""

    name = "dedup_train"
    output = "train_deduped"
    added_by = "keep"
    reads = "pass2"
    keeps = WRITTEN
    requests = 5.0
    is_after_mix = True

    def call(self, run: RunContext) -> Counts:
        """Write the train set without copies of the holdout."""
        folders = (run.out / TRAIN, run.out / HELD_OUT, self.path(run.config))
        return dedup_train(CHUNK, *folders, text_column=run.config.text_column, options=run.options)

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return nothing: it has no options."""
        return {}
