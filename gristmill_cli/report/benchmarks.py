"""Section of a report on the items of benchmarks that were found in the corpus."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from markupsafe import Markup

from gristmill.errors import GristmillError
from gristmill.io.documents import DocKey
from gristmill.wording import count_of
from gristmill_cli.documents.duplicates import corpus_before, label_among, some_documents
from gristmill_cli.report.page import Number, Row, comparison, fold, join, paragraph, pointer, section, table
from gristmill_cli.report.records import SHOWN_DOCUMENTS, DataRun, hash_of, read_losses, rows_of
from gristmill_cli.report.removed import excerpt
from gristmill_cli.stages.spec import StageSpec
from preprocessing.contamination.report import CONTAMINATED, BenchmarkReport, Report, read_report, report_paths


@dataclass(frozen=True, order=True)
class Span:
    """A place of a document with an item of a benchmark; shown for the documents with the smallest hashes of keys."""

    hash: int
    key: DocKey
    item: str
    match: str  # exact or near, and the share of the item's words
    text: str
    item_text: str


@dataclass
class BenchmarksSection:
    """How much of each benchmark is in which sources, and some places next to their items."""

    stage: StageSpec
    report: Report
    spans: dict[str, list[Span]]

    def show(self, run: DataRun) -> Markup:
        """Return the section."""
        return _show(run, self)


def read_section(run: DataRun, stage: StageSpec) -> BenchmarksSection | None:
    """Return what the section shows; None, with a fault, if the report of the stage is damaged or missing."""
    spans = read_losses(run, stage, sample_spans) or {}
    _, path = report_paths(run.out / stage.output)
    try:
        return BenchmarksSection(stage, read_report(path), spans)
    except (ValueError, OSError, GristmillError) as error:
        run.faults.append(f"{path} is damaged or missing ({error}): what it records is not shown")
        return None


def _show(run: DataRun, shown: BenchmarksSection) -> Markup:
    benchmarks = shown.report.benchmarks
    names = set[str]()
    for benchmark in benchmarks.values():
        names.update(benchmark.documents)
    sources = sorted(names)
    head = ["", "items", "found", "", "near alone", "too short", *sources]
    record = report_paths(Path(shown.stage.output))[1].name
    rows = [_row_of_benchmark(record, name, benchmark, sources) for name, benchmark in benchmarks.items()]
    outcome = _outcome_of_benchmarks(run, shown)
    return section(
        "Benchmarks",
        paragraph(f"{outcome}. On the right, documents of each source in which items were found."),
        table(head, rows, "benchmarks"),
        *_spans(run, shown),
    )


def _row_of_benchmark(record: str, name: str, benchmark: BenchmarkReport, sources: Sequence[str]) -> Row:
    fields = (record, "benchmarks", name)
    share = benchmark.found / max(benchmark.items, 1)
    row: Row = [
        name,
        Number(benchmark.items, record=pointer(*fields, "items")),
        Number(benchmark.found, record=pointer(*fields, "found")),
        Number(share, f"{share:.1%}"),
        Number(benchmark.near, record=pointer(*fields, "near")),
        Number(benchmark.too_short),
    ]
    for source in sources:
        documents = benchmark.documents.get(source, 0)
        record_field = ""
        if documents:
            record_field = pointer(*fields, "documents", source)
        row.append(Number(documents, record=record_field))
    return row


def _outcome_of_benchmarks(run: DataRun, shown: BenchmarksSection) -> str:
    """Return what became of the documents that have an item, in words."""
    documents = shown.report.documents
    policy = str(run.options.get(shown.stage.section, {}).get("policy"))
    removed = run.stages[shown.stage.name].counts.total(CONTAMINATED).documents
    outcome = f"Policy {policy}: {count_of(documents, 'document')} with an item; {removed:,} removed"
    if policy == "cut":
        outcome += f", {documents - removed:,} rewritten"
    return outcome


def _spans(run: DataRun, shown: BenchmarksSection) -> list[Markup]:
    """Return for each benchmark some places of documents next to their items, folded."""
    keys = list[DocKey]()
    for spans in shown.spans.values():
        keys += [span.key for span in spans]
    documents = some_documents(corpus_before(run.out, shown.stage.output), keys, run.text_column)
    parts = list[Markup]()
    for name, spans in shown.spans.items():
        texts = list[Markup]()
        for span in spans:
            title = f"{label_among(span.key, documents)} has {span.item}, {span.match}"
            texts.append(comparison(title, excerpt(span.text), excerpt(span.item_text)))
        parts.append(fold(f"{name}: places in documents, and the items", join(texts)))
    return parts


def sample_spans(file: pq.ParquetFile) -> dict[str, list[Span]]:
    """Return some places of each benchmark, sampled by a hash of the documents' keys; an item of a document once."""
    samples = dict[str, list[Span]]()
    for row in rows_of(file, ["file", "row", "benchmark", "item", "match", "share", "text", "item_text"]):
        key = DocKey(row["file"], row["row"])
        match = f"{row['match']} {row['share']:.0%}"
        span = Span(hash_of(key), key, row["item"], match, row["text"], row["item_text"])
        of_benchmark = samples.get(row["benchmark"], [])
        if (span.key, span.item) not in [(other.key, other.item) for other in of_benchmark]:
            samples[row["benchmark"]] = sorted([*of_benchmark, span])[:SHOWN_DOCUMENTS]
    return dict(sorted(samples.items()))
