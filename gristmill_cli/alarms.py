"""Alarms: what looks wrong in the counts of a run's stages, by the limits of [alarms], each with where to look."""

from collections.abc import Iterator

from gristmill.counts import FAILED, Counts, warn_of_losses
from gristmill.errors import AlarmError
from gristmill.wording import count_of
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.pipeline import context_of, find_stage
from preprocessing.mixing.drops import LOW, SHORT

_LOOK_AT = {  # where a reason is decided
    SHORT: "--filter.threshold",
    LOW: "the tables [scores.NAME]",
    FAILED: "OUT/scores.removed.parquet",
}


def find_alarms(config: RunConfig, stage: str, counts: Counts) -> Iterator[str]:
    """Yield what looks wrong after a stage of a run; a line names the run's folder OUT."""
    spec = find_stage(stage)
    if spec.look_at:
        losses = warn_of_losses(counts, "", config.alarms.source_loss, config.alarms.times_median)
        for source, line in losses.items():
            look_at = _option_that_decides(line) or spec.look_at.format(source=source)
            yield f"{line}: look at {look_at}"
    yield from spec.alarms(context_of(config, spec), counts)


def _option_that_decides(line: str) -> str:
    """Return the option that decides on the reason which a line on losses names; '' if the stage itself does."""
    for reason, option in _LOOK_AT.items():
        if f" as {reason};" in f"{line};":
            return option
    return ""


def check_strict(config: RunConfig, stage: str, alarms: list[str]) -> None:
    """Raise AlarmError if there are alarms and none is allowed."""
    if config.strict and alarms:
        raise AlarmError(
            f"{stage} raises {count_of(len(alarms), 'alarm')}, and --strict allows none: {'; '.join(alarms)}. To "
            "continue, run the same command without --strict, or with another limit in [alarms]"
        )
