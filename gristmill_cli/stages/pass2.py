"""Stage of a run: shuffle the parts, and hold documents out."""

import sys
from typing import Any

from gristmill.counts import HELD_OUT, WRITTEN, Counts
from gristmill_cli.funnel import TRAIN
from gristmill_cli.stages.spec import RunContext, StageSpec
from preprocessing.shuffle_holdout import pass2

CHUNK = 1  # number of the only train chunk
_ALL_PARTS = sys.maxsize


class Pass2(StageSpec):
    """Shuffle the parts, and split them into train and holdout."""

    name = "pass2"
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
        return pass2(0, _ALL_PARTS, CHUNK, *folders, run.config.mix.holdout, run.options)

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return the share that is held out."""
        return {"holdout": run.config.mix.holdout}
