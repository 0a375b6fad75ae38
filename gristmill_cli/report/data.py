"""The page on a run of data: its sections in order, and the sections on tokens, stages and options."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from markupsafe import Markup

from gristmill.counts import HELD_OUT, READ, Counts, Tally
from gristmill.io.token_shards import SourceRecord
from gristmill.wording import verb_for
from gristmill_cli.funnel import FUNNEL_FILE, TRAIN
from gristmill_cli.report.documents import MAX_SOURCES, show_flow, show_lengths, show_shares, show_sizes
from gristmill_cli.report.page import (
    NOTHING,
    Number,
    Row,
    Section,
    counted,
    figure,
    filled_table,
    fold,
    grid,
    heading,
    paragraph,
    pointer,
    section,
    table,
    tiles,
    warnings,
)
from gristmill_cli.report.pictures import draw_bars, largest, values_of
from gristmill_cli.report.records import RUN_RECORDS, DataRun
from gristmill_cli.report.removed import show_personal, show_rules
from gristmill_cli.report.similar import show_alike, show_pairs
from gristmill_cli.run_records import StageRecord, kept_versions
from gristmill_cli.stages.pipeline import FIRST_STAGE

# by words of alarms; the first that an alarm has counts
_SECTIONS = {
    "a token of": "Tokens",
    "bytes on average": "Lengths of documents",
    "gristmill duplicates": "What is alike",
    "contamination": "Benchmarks",
    "rule": "Documents that rules removed",
    "of the score": "Scores",
    "the score": "Scores",
    "were asked for": "Shares of the mix",
    "loses": "Where the documents went",
}
_MAX_HASHES = 8  # of shards of a data set
_STAGES_NOTE = (
    "Seconds are those of the last gristmill run in which a stage had work to do. Core hours are the processor time of "
    "all tasks, whenever they ran; retries count how often storage errors made tasks start again."
)


def sections(run: DataRun) -> Iterator[Markup]:
    """Yield the parts of the page in order; a part about which the run says nothing is empty."""
    counts = Counts(_tallies(run), [])
    parts = list[Markup]()
    if run.funnel:
        parts += [show_flow(counts), show_sizes(counts), show_lengths(run)]
    else:
        parts.append(_flow_so_far(run))
    parts += [
        show_shares(run),
        show_alike(run),
        show_pairs(run),
        show_rules(run),
        show_personal(run),
    ]
    for stage_section in run.sections:
        parts.append(stage_section.show(run))
    parts += [_tokens(run), _stages(run), _options(run)]
    titles = [part.heading for part in parts if isinstance(part, Section)]
    yield heading(run.out.name or str(run.out))
    yield paragraph(f"The corpus {run.options.get('corpus')}, as tokenized by gristmill run.", "soft")
    yield _warnings(run, titles)
    yield _summary(run, counts)
    yield from parts


def _tallies(run: DataRun) -> dict[str, dict[str, Tally]]:
    """Return what the funnel counts, or where there is none what normalisation counted, if it has finished."""
    if run.funnel:
        return run.funnel.tallies
    if FIRST_STAGE in run.stages:
        return run.stages[FIRST_STAGE].counts.tallies
    return {}


def _warnings(run: DataRun, titles: Sequence[str]) -> Markup:
    """Return what looks wrong, a paragraph each that links to a section of these `titles`, or that nothing does."""
    lines = [f"This record cannot be used: {fault}." for fault in run.faults]
    lines += _unfinished(run)
    for alarm in run.alarms:
        lines.append(f"{alarm[:1].upper()}{alarm[1:]}")
    if not lines:
        return paragraph("Nothing looks wrong: no source loses far more than the others, no cluster is large or loose.")
    return warnings((line, _section_of(line, titles)) for line in lines)


def _section_of(alarm: str, titles: Sequence[str]) -> str:
    """Return the title of the section that shows what an alarm is about; '' for what none of the page shows."""
    for word, title in _SECTIONS.items():
        if word in alarm and title in titles:
            return title
    return ""


def _unfinished(run: DataRun) -> list[str]:
    """Return a sentence on what the run has still to do, if it has not finished."""
    waiting = [name for name, state in run.states.items() if state != "finished"]
    if waiting:
        verb = verb_for(len(waiting), "is", "are")
        return [
            f"The run has not finished: {', '.join(waiting)} {verb} missing. What follows covers the stages before; "
            "the same gristmill run resumes."
        ]
    if not run.funnel and not run.faults:
        return [f"The run has not finished: there is no {FUNNEL_FILE}. The same gristmill run writes it."]
    return []


def _summary(run: DataRun, counts: Counts) -> Markup:
    """Return the numbers at the head of the page."""
    read = counts.total(READ)
    numbers = {"documents read": Number(read.documents), "MB of text read": Number(read.bytes / 1e6)}
    if run.funnel:
        kept = counts.total(TRAIN)
        numbers["documents for training"] = Number(kept.documents)
        numbers["MB for training"] = Number(kept.bytes / 1e6)
    if TRAIN in run.manifests:
        numbers["tokens for training"] = Number(run.manifests[TRAIN].tokens)
    return tiles(numbers)


def _flow_so_far(run: DataRun) -> Markup:
    """Return the section on what the stages that have finished made of the documents of each source."""
    names = set[str]()
    for record in run.stages.values():
        names.update(record.counts.tallies)
    sources = sorted(names)
    rows = list[Row]()
    for name, record in run.stages.items():
        for reason in record.counts.reasons:
            fields = (_record_of(name), "counts", "tallies")
            cells = [counted(record.counts, source, reason, *fields) for source in sources]
            rows.append([f"{name}: {reason}", Number(record.counts.total(reason).documents), *cells])
    numbers = filled_table(["documents", "all", *sources], rows, "so_far")
    return section("Where the documents went, so far", numbers)


def _record_of(stage: str) -> str:
    return f"{RUN_RECORDS}/{stage}.json"


def _tokens(run: DataRun) -> Markup:
    """Return the section on the tokens of each source."""
    if TRAIN not in run.manifests:
        return NOTHING
    trained = run.manifests[TRAIN].sources
    tokens_trained = _tokens_of(trained)
    tokens_held_out = dict[str, int]()
    if HELD_OUT in run.manifests:
        tokens_held_out = _tokens_of(run.manifests[HELD_OUT].sources)
    sources = sorted(trained)
    bytes_per_token = dict[str, float]()
    for source, record in trained.items():
        bytes_per_token[source] = record.bytes / max(record.tokens, 1)
    rows = list[Row]()
    for source in sources:
        row: Row = [source]
        for field in ("documents", "tokens", "bytes"):
            record_field = pointer(f"tokens/{TRAIN}/manifest.json", "sources", source, field)
            row.append(Number(getattr(trained[source], field), record=record_field))
        row.append(Number(bytes_per_token[source], f"{bytes_per_token[source]:.3f}"))
        row.append(Number(tokens_held_out.get(source, 0)))
        rows.append(row)
    shown = largest(sources, tokens_trained, MAX_SOURCES)
    tokens = {"tokens": values_of(tokens_trained, shown)}
    sizes = {"bytes a token": values_of(bytes_per_token, shown)}
    head = ["", "documents", "tokens", "bytes", "bytes a token", "tokens held out"]
    return section(
        "Tokens",
        grid(
            figure("tokens by source", draw_bars(shown, tokens, "tokens")),
            figure("bytes a token", draw_bars(shown, sizes, "bytes")),
        ),
        table(head, rows, "tokens"),
    )


def _tokens_of(sources: Mapping[str, SourceRecord]) -> dict[str, int]:
    return {source: record.tokens for source, record in sources.items()}


def _stages(run: DataRun) -> Markup:
    """Return the section on what each stage took, and what it did."""
    if not run.stages:
        return NOTHING
    head = ["", "seconds", "core hours", "tasks", "retries", "documents read", "MB read", "MB/s", "of them"]
    rows = list[Row]()
    seconds = list[float]()
    for name, record in run.stages.items():
        rows.append(_row_of_stage(name, record))
        seconds.append(record.seconds)
    picture = NOTHING
    if any(seconds):
        picture = figure("seconds", draw_bars(list(run.stages), {"seconds": seconds}, "seconds"))
    return section("Stages", paragraph(_STAGES_NOTE, "soft"), picture, table(head, rows, "stages"))


def _row_of_stage(name: str, record: StageRecord) -> Row:
    record_path = _record_of(name)
    read = record.counts.total(READ)
    speed: str | Number = "–"
    if read.bytes and record.seconds:
        rate = read.bytes / 1e6 / record.seconds
        speed = Number(rate, f"{rate:,.1f}")
    outcomes = list[str]()
    for reason in record.counts.reasons:
        if reason != READ:
            outcomes.append(f"{record.counts.total(reason).documents:,} {reason}")
    return [
        name,
        Number(record.seconds, f"{record.seconds:,.1f}", record=pointer(record_path, "seconds")),
        Number(record.core_seconds, f"{record.core_seconds / 3600:,.4f}", record=pointer(record_path, "core_seconds")),
        Number(record.tasks, record=pointer(record_path, "tasks")),
        Number(record.retries, record=pointer(record_path, "retries")),
        Number(read.documents),
        Number(read.bytes / 1e6),
        speed,
        ", ".join(outcomes),
    ]


def _options(run: DataRun) -> Markup:
    """Return the section on options, versions of libraries and hashes of what was written."""
    hashes = list[list[str]]()
    if TRAIN in run.manifests:
        hashes.append(["tokenizer", run.manifests[TRAIN].tokenizer.sha256])
    for name, manifest in run.manifests.items():
        for shard in manifest.shards[:_MAX_HASHES]:
            hashes.append([f"{name}/{shard.name}.bin", shard.sha256])
    return section(
        "Options, versions, hashes",
        *map(paragraph, kept_versions(run.stages)),
        fold("options", table(["", ""], _flatten(run.options))),
        _folded_pairs("versions of libraries", list(run.versions.items())),
        _folded_pairs("SHA-256 of the tokenizer and of the first shards", hashes),
    )


def _folded_pairs(title: str, rows: Sequence[Iterable[str]]) -> Markup:
    return fold(title, filled_table(["", ""], rows))


def _flatten(options: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each option with the names of its sections before its own, and its value as text."""
    for name, value in options.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)
