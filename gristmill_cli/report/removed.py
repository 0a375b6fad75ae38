"""Sections of a report on what stages took out: documents by rule, items of benchmarks, lines and spans that repeat."""

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from gristmill.counts import CHANGED, READ
from gristmill.io.documents import DocKey
from gristmill.storage.files import is_folder
from gristmill.wording import count_of
from gristmill_cli.documents.duplicates import CORPORA, label_among, mark_differences, some_documents, text_among
from gristmill_cli.documents.removed_texts import removed_documents
from gristmill_cli.report.page import (
    NOTHING,
    Number,
    Row,
    comparison,
    counted,
    fold,
    join,
    marked,
    paragraph,
    pointer,
    quotation,
    section,
    table,
)
from gristmill_cli.report.records import BENCHMARKS, RUN_RECORDS, DataRun, LostLines
from preprocessing.decontaminate import CONTAMINATED, BenchmarkReport

_EXCERPT = 400  # characters


def show_rules(run: DataRun) -> Markup:
    """Return the section with some documents of each rule."""
    config = run.config
    if not run.by_rule or config is None:
        return NOTHING
    keys = list[DocKey]()
    for samples in run.by_rule.values():
        keys += [sample.key for sample in samples]
    documents = removed_documents(config, keys)
    parts = list[Markup]()
    for rule, samples in run.by_rule.items():
        texts = list[Markup]()
        for sample in samples:
            text = excerpt(text_among(sample.key, documents))
            texts.append(quotation(label_among(sample.key, documents), text, f", {sample.value:.4g}"))
        parts.append(fold(rule, join(texts)))
    note = paragraph("For each rule a few documents and the measured value, sampled by a hash of their keys.", "soft")
    return section("Documents that rules removed", note, *parts)


def show_benchmarks(run: DataRun) -> Markup:
    """Return the section on how much of each benchmark is in which sources, and some places next to their items."""
    if not run.benchmarks:
        return NOTHING
    benchmarks = run.benchmarks.benchmarks
    names = set[str]()
    for benchmark in benchmarks.values():
        names.update(benchmark.documents)
    sources = sorted(names)
    head = ["", "items", "found", "", "near alone", "too short", *sources]
    rows = [_row_of_benchmark(name, benchmark, sources) for name, benchmark in benchmarks.items()]
    outcome = _outcome_of_benchmarks(run, run.benchmarks.documents)
    return section(
        "Benchmarks",
        paragraph(f"{outcome}. On the right, documents of each source in which items were found."),
        table(head, rows, "benchmarks"),
        *_spans(run),
    )


def _row_of_benchmark(name: str, benchmark: BenchmarkReport, sources: Sequence[str]) -> Row:
    place = (str(BENCHMARKS), "benchmarks", name)
    share = benchmark.found / max(benchmark.items, 1)
    row: Row = [
        name,
        Number(benchmark.items, record=pointer(*place, "items")),
        Number(benchmark.found, record=pointer(*place, "found")),
        Number(share, f"{share:.1%}"),
        Number(benchmark.near, record=pointer(*place, "near")),
        Number(benchmark.too_short),
    ]
    for source in sources:
        documents = benchmark.documents.get(source, 0)
        row.append(Number(documents, record=pointer(*place, "documents", source) if documents else ""))
    return row


def _outcome_of_benchmarks(run: DataRun, documents: int) -> str:
    """Return what became of the `documents` that have an item, in words."""
    policy = str(run.options.get("decontaminate", {}).get("policy"))
    removed = run.stages["decontaminate"].counts.total(CONTAMINATED).documents
    outcome = f"Policy {policy}: {count_of(documents, 'document')} with an item; {removed:,} removed"
    if policy == "cut":
        outcome += f", {documents - removed:,} rewritten"
    return outcome


def _spans(run: DataRun) -> list[Markup]:
    """Return for each benchmark some places of documents next to their items, folded."""
    keys = list[DocKey]()
    for spans in run.spans.values():
        keys += [span.key for span in spans]
    documents = some_documents(_input_of(run, "decontaminated"), keys, run.text_column)
    parts = list[Markup]()
    for name, spans in run.spans.items():
        texts = list[Markup]()
        for span in spans:
            title = f"{label_among(span.key, documents)} has {span.item}, {span.match}"
            texts.append(comparison(title, excerpt(span.text), excerpt(span.item_text)))
        parts.append(fold(f"{name}: places in documents, and the items", join(texts)))
    return parts


def show_lines(run: DataRun) -> Markup:
    """Return the section on repeated lines: what each source lost, and the documents that lost most."""
    unit = f"{run.options.get('lines', {}).get('unit', 'line')}s"
    return _show_losses(run, run.lines, "remove_lines", "lines", unit)


def show_spans(run: DataRun) -> Markup:
    """Return the section on repeated spans: what each source lost, and the documents that lost most."""
    return _show_losses(run, run.cuts, "remove_spans", "spans", "spans")


def _show_losses(run: DataRun, losses: LostLines | None, stage: str, folder: str, unit: str) -> Markup:
    """Return the section on what documents lost in a stage that wrote `folder`."""
    if not losses:
        return NOTHING
    counts = run.stages[stage].counts
    rows = list[Row]()
    for source in sorted(counts.tallies):
        documents, units, size = losses.sums.get(source, (0, 0, 0))
        share = size / max(counts.total(READ, source).bytes, 1)
        rows.append(
            [
                source,
                counted(counts, source, READ, f"{RUN_RECORDS}/{stage}.json", "counts", "tallies"),
                Number(documents),
                Number(units),
                Number(size),
                Number(share, f"{share:.2%}"),
            ]
        )
    head = ["", "documents read", "of them changed", f"{unit} left out", "bytes", "of all"]
    total = paragraph(f"{count_of(counts.total(CHANGED).bytes, 'byte')} of repeated {unit} left out.")
    return section(f"Repeated {unit}", total, table(head, rows, folder), _changed_documents(run, losses, folder))


def _changed_documents(run: DataRun, losses: LostLines, folder: str) -> Markup:
    """Return the documents that lost most, before and after, folded."""
    keys = [key for _, key in losses.most]
    before = some_documents(_input_of(run, folder), keys, run.text_column)
    after = some_documents(run.out / folder, keys, run.text_column)
    parts = list[Markup]()
    for key in keys:
        if key in before and key in after:
            left, right = mark_differences(before[key].text, after[key].text)
            parts.append(comparison(label_among(key, before), marked(left), marked(right)))
    return fold("documents that lost most, before and after", join(parts)) if parts else NOTHING


def excerpt(text: str) -> str:
    """Return the beginning of a text, on one line."""
    line = " ".join(text[: 4 * _EXCERPT].split())
    return line if len(line) <= _EXCERPT else f"{line[:_EXCERPT]} …"


def _input_of(run: DataRun, folder: str) -> Path | None:
    """Return the folder that was read by the stage which wrote `folder`; None if it is no longer there."""
    for earlier in CORPORA[CORPORA.index(folder) + 1 :]:
        if is_folder(run.out / earlier):
            return run.out / earlier
    return None
