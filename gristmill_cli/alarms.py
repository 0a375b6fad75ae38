"""Alarms: what looks wrong in the counts of a run's stages, by the limits of [alarms], each with where to look."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from dedup.candidates.cluster_samples import warn_of_clusters
from gristmill.counts import READ, REPEATED, WRITTEN, Counts, warn_of_losses
from gristmill.engine.executors.staging import local_copies
from gristmill.engine.ledger import Ledger
from gristmill.errors import AlarmError, DamagedFile, GristmillError
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import CorpusFile
from gristmill.io.files import STATE_DIR
from gristmill.io.readers import read_corpus
from gristmill.io.token_shards import Manifest
from gristmill.io.tokenizer_file import find_tokenizer_file
from gristmill.paths import is_remote
from gristmill.storage.files import exists, is_folder
from gristmill.storage.objects import download
from gristmill.text import utf8_size
from gristmill_cli.funnel import HELD_OUT, TRAIN
from gristmill_cli.run_config import RunConfig
from preprocessing.datasets import DEFAULT_WEIGHT, WEIGHTS, kept_by_mix
from preprocessing.decontaminate import read_report, report_paths
from preprocessing.mixing.drops import SHORT
from preprocessing.quality.recipe import Bounds, load_recipe
from preprocessing.tokenizer.loading import count_tokens
from preprocessing.train_tokenizer import model_name

_FEW, _FILES = 20, 3  # documents of a file, or of a source; files of a source: fewer are not compared
_SAMPLED_FILES, _SAMPLED_BYTES = 32, 1 << 15  # of a source, and of a file, whose tokens are counted
_FETCHED_BYTES = 1 << 20  # of a file in a bucket
_AS_SHORT, _LANGUAGE = f" as {SHORT}", "language"
Distance = Callable[[float, float], float]  # of a value from the median
_LOOK = {  # at what a stage lost; OUT is the run's folder, of which funnel.at_folder shows the path
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
        by_file = _by_file(Ledger(config.judged / STATE_DIR, stage), "judge")
        yield from _languages(by_file, limits.language)
        for source, files in sorted(by_file.items()):
            for line in list(warn_of_losses(files, "", 0, limits.times_median, "file").values())[:1]:
                yield f"in {source} {line}: look whether it is of another kind"
    elif stage == "decontaminate":
        if common := read_report(report_paths(config.out / "decontaminated")[1]).common_items:
            yield (
                f"near-duplicates of {common:,} items of benchmarks are in so many documents that they count as "
                "boilerplate and are not looked for: try --decontaminate.common 0"
            )
    elif stage == "generate_connected_components":
        for line in warn_of_clusters(counts.clusters, limits.cluster, limits.alike, config.dedup.measure is not None):
            yield f"{line}: look at gristmill duplicates OUT --largest 5"
    elif stage == "pass1":
        yield from _mix(config, counts)
    elif stage == "tokenize_corpus":
        yield from _token_sizes(config)
    elif stage == "tokenize_holdout" and config.mix.tokens:
        yield from _mixed_tokens(config)


def check_strict(config: RunConfig, stage: str, alarms: list[str]) -> None:
    """Raise AlarmError if there are alarms and none is allowed."""
    if config.strict and alarms:
        raise AlarmError(
            f"{stage} raises {len(alarms)} alarm{'s' * (len(alarms) > 1)}, and --strict allows none: "
            f"{'; '.join(alarms)}. The same command without --strict continues, as with another limit in [alarms]"
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
        for first, middle, also in _odd_file(means, times, _times):
            yield (
                f"documents of {first} have {means[first]:,.0f} bytes on average, in the median file of {source} "
                f"{middle:,.0f}{also}: look whether it is of another kind"
            )


def _odd_file(values: dict[str, float], limit: float, distance: Distance) -> Iterator[tuple[str, float, str]]:
    """The file whose value is furthest from the median of all, if its distance is more than `limit`.

    With the median, and how many others differ as much, in words. Of few files it is none, nor with a `limit` of 0.
    """
    if not limit or len(values) < _FILES:
        return
    middle = median(values.values())
    distances = {file: distance(value, middle) for file, value in values.items()}
    first = max(distances, key=lambda file: distances[file])
    if distances[first] > limit:
        many = sum(one > limit for one in distances.values())
        yield first, middle, f"; {many:,} files differ as much" if many > 1 else ""


def _times(value: float, middle: float) -> float:
    return max(value / middle, middle / value)


def _languages(sources: dict[str, Counts], limit: float) -> Iterator[str]:
    """Files of which the rule `language`, where a recipe has it, removes another share than of the median file."""
    for source, files in sorted(sources.items()):
        read = {file: files.total(READ, file).documents for file in sorted(files.tallies)}
        shares = {file: files.total(_LANGUAGE, file).documents / many for file, many in read.items() if many >= _FEW}
        for first, middle, also in _odd_file(shares, limit, lambda share, middle: abs(share - middle)):
            yield (
                f"the rule {_LANGUAGE} removes {shares[first]:.0%} of the documents of {first}, of the median file of "
                f"{source} {middle:.0%}{also}: look whether it is in another language"
            )


def _token_sizes(config: RunConfig) -> Iterator[str]:
    """Files whose texts have far more bytes a token than the median file of their source, or fewer: of a sample.

    That is the first 32 KiB of some 32 files of each source, as they are before duplicates are removed.
    """
    given, trained = config.tokenizer.file, config.out / "tokenizer" / model_name(config.tokenizer.model_type)
    if not config.alarms.bytes_a_token or not (given or exists(trained)):
        return
    if not is_folder(config.clean):  # removed to save space, once its tokens were written
        return
    by_source = dict[str, list[CorpusFile]]()
    for file in list_corpus(config.clean, text_column=config.text_column):
        by_source.setdefault(file.source, []).append(file)
    with local_copies([find_tokenizer_file(given or trained)]) as (tokenizer,):
        for source, files in sorted(by_source.items()):
            ratios = dict[str, float]()
            for file in files[:: -(-len(files) // _SAMPLED_FILES)] if len(files) >= _FILES else ():
                texts = _first_texts(file)
                if len(texts) >= _FEW or sum(map(len, texts)) >= _SAMPLED_BYTES:
                    ratios[file.name] = utf8_size("".join(texts)) / max(1, count_tokens(tokenizer, texts))
            for first, middle, also in _odd_file(ratios, config.alarms.bytes_a_token, _times):
                yield (
                    f"a token of {first} has {ratios[first]:.2f} bytes, in the median file of {source} {middle:.2f}"
                    f"{also}: look whether it is in another language or script"
                )


def _first_texts(file: CorpusFile) -> list[str]:
    """The first texts of a file, 32 KiB together; of an object no more is fetched than its first MiB."""
    texts, size, path = list[str](), 0, file.path
    with TemporaryDirectory() as folder, suppress(DamagedFile):  # a copy of the first bytes has no end
        if is_remote(path):
            path = Path(folder, path.name)
            download(file.path, path, 0, min(file.size, _FETCHED_BYTES))
        for document in read_corpus(path, file.text_column, on_malformed="skip"):
            texts.append(document.text[: _SAMPLED_BYTES - size])
            if (size := size + len(texts[-1])) >= _SAMPLED_BYTES:
                break
    return texts


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
