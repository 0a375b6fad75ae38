"""Alarms: what looks wrong in the counts of a run's stages, by the limits of [alarms], each with where to look."""

from collections.abc import Iterator
from statistics import median

from dedup.candidates.cluster_samples import warn_of_clusters
from gristmill.counts import READ, REPEATED, WRITTEN, Counts, warn_of_losses
from gristmill.engine.ledger import Ledger
from gristmill.errors import AlarmError, GristmillError
from gristmill.io.files import STATE_DIR
from gristmill.io.token_manifest import Manifest
from gristmill_cli.funnel import HELD_OUT, TRAIN
from gristmill_cli.run_config import RunConfig
from preprocessing.datasets import DEFAULT_WEIGHT, WEIGHTS, kept_by_mix
from preprocessing.mixing.drops import SHORT
from preprocessing.quality.recipe import Bounds, load_recipe

_FEW, _FILES = 20, 3  # documents of a file, or of a source; files of a source: fewer are not compared
_AS_SHORT = f" as {SHORT}"
_LOOK = {  # at what a stage lost; OUT is the run's folder
    "normalize_text": "the files *.malformed in OUT/normalized",
    "apply": "what your function leaves out",
    "filter_quality": "OUT/quality.removed.parquet, or the texts in gristmill report OUT",
    "remove_lines": "OUT/lines.lines.parquet",
    "decontaminate": "OUT/decontaminated.contamination.parquet",
    "pass1": "gristmill duplicates OUT --source {source}",
    "dedup_train": "how much of the corpus --mix.holdout takes",
}


def find_alarms(config: RunConfig, stage: str, counts: Counts) -> Iterator[str]:
    """What looks wrong after a stage of a run."""
    limits, losses = config.alarms, (config.alarms.source_loss, config.alarms.times_median)
    if stage in _LOOK:
        for source, line in warn_of_losses(counts, "", *losses).items():
            at = "--filter.threshold" if line.endswith(_AS_SHORT) or f"{_AS_SHORT};" in line else _LOOK[stage]
            yield f"{line}: look at {at.format(source=source)}"
    if stage == "normalize_text":
        yield from _lengths(_by_file(Ledger(config.out / "normalized" / STATE_DIR, stage), "normalize"), limits.length)
    elif stage == "filter_quality":
        yield from _idle_rules(config, counts)
        for source, files in sorted(_by_file(Ledger(config.judged / STATE_DIR, stage), "judge").items()):
            for line in list(warn_of_losses(files, "", 0, limits.times_median, "file").values())[:1]:
                yield f"in {source} {line}: look whether it is of another kind"
    elif stage == "generate_connected_components":
        for line in warn_of_clusters(counts.clusters, limits.cluster, limits.alike, config.dedup.measure is not None):
            yield f"{line}: look at gristmill duplicates OUT --largest 5"
    elif stage == "pass1":
        yield from _mix(config, counts)
    elif stage == "tokenize_holdout" and config.mix.tokens:
        yield from _mixed_tokens(config)


def check_strict(config: RunConfig, stage: str, alarms: list[str]) -> None:
    """Raise AlarmError if there are alarms and none is allowed."""
    if config.strict and alarms:
        raise AlarmError(
            f"{stage} raises {len(alarms)} alarm{'s' * (len(alarms) > 1)}, and --strict allows none: "
            f"{'; '.join(alarms)}. The same command without --strict goes on, as does another limit in [alarms]"
        )


def _by_file(ledger: Ledger, step: str) -> dict[str, Counts]:
    """For each source, the counts of its files, as the tasks of a step have recorded them.

    Small files that one task reads count as the first of them.
    """
    found = dict[str, Counts]()
    for record in ledger.read().values():
        if record.step == step:
            for source, reason, tally in record.counts.rows():
                file = record.task.rpartition("+")[0] or record.task
                found.setdefault(source, Counts({}, [])).add(file, reason, tally.bytes, tally.documents)
    return found


def _lengths(sources: dict[str, Counts], times: float) -> Iterator[str]:
    """Files whose documents are far longer, or shorter, than in the median file of their source."""
    for source, files in sorted(sources.items()):
        read = {file: files.total(READ, file) for file in sorted(files.tallies)}
        means = {file: its.bytes / its.documents for file, its in read.items() if its.documents >= _FEW and its.bytes}
        if not times or len(means) < _FILES:
            continue
        middle = median(means.values())
        odd = {file: max(mean / middle, middle / mean) for file, mean in means.items()}
        first = max(odd, key=lambda file: odd[file])
        if odd[first] > times:
            many = sum(ratio > times for ratio in odd.values())
            also = f"; {many:,} files differ as much" if many > 1 else ""
            yield (
                f"documents of {first} have {means[first]:,.0f} bytes on average, in the median file of {source} "
                f"{middle:,.0f}{also}: look whether it is of another kind"
            )


def _idle_rules(config: RunConfig, counts: Counts) -> Iterator[str]:
    """Rules that removed no document of many."""
    documents = counts.total(READ).documents
    if not config.alarms.idle_rule or documents < config.alarms.idle_rule:
        return
    try:
        rules = [step.name for step in load_recipe(config.recipe).steps if isinstance(step, Bounds)]
    except GristmillError:  # a report of a run whose recipe is no longer there
        return
    if idle := [rule for rule in rules if not counts.total(rule).documents]:
        yield f"of {documents:,} documents these rules removed none: {', '.join(idle)}: look at their limits"


def _mix(config: RunConfig, counts: Counts) -> Iterator[str]:
    """Sources of which the mix has not what was asked for."""
    for source in sorted(counts.tallies):
        written, kept = counts.total(WRITTEN, source), kept_by_mix(counts, source)[0]
        weight = config.weights.get(source, WEIGHTS.get(source, DEFAULT_WEIGHT))
        if source in config.mix.bytes:
            yield from _differs(config, source, config.mix.bytes[source], written.bytes, "bytes")
        elif (
            source not in config.mix.tokens
            and max(kept, written.documents - counts.total(REPEATED, source).documents) >= _FEW
        ):
            yield from _differs(config, source, weight * kept, written.documents, "documents")


def _mixed_tokens(config: RunConfig) -> Iterator[str]:
    manifests = [Manifest.load(config.out / "tokens" / name) for name in (TRAIN, HELD_OUT)]
    for source, asked in sorted(config.mix.tokens.items()):
        found = [its.sources[source] for its in manifests if source in its.sources]
        yield from _differs(config, source, asked, sum(it.tokens - it.documents for it in found), "tokens")


def _differs(config: RunConfig, source: str, asked: float, got: int, unit: str) -> Iterator[str]:
    limit = config.alarms.mix
    if limit and abs(got - asked) > limit * max(asked, 1):
        yield (
            f"the mix has {got:,} {unit} of {source}, and {asked:,.0f} were asked for: look at the shares of the mix "
            "in gristmill report OUT"
        )
