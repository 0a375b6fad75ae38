"""Sections of a report on what stages took out: documents by rule, items of benchmarks, lines that repeat."""

from pathlib import Path

from markupsafe import Markup

from gristmill.counts import CHANGED, READ
from gristmill.storage.files import is_folder
from gristmill.wording import count_of
from gristmill_cli.duplicates import CORPORA, label_among, mark_differences, some_documents, text_among
from gristmill_cli.report.page import (
    NOTHING,
    Number,
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
from gristmill_cli.report.records import BENCHMARKS, DataRun
from preprocessing.decontaminate import CONTAMINATED

_EXCERPT = 400  # characters
_STATE = ".gristmill/run"


def show_rules(run: DataRun) -> Markup:
    """Some documents of each rule."""
    if not run.by_rule:
        return NOTHING
    found = some_documents(
        _before(run, "quality"), [it.key for some in run.by_rule.values() for it in some], run.text_column
    )
    parts = list[Markup]()
    for rule, some in run.by_rule.items():
        shown = join(
            quotation(label_among(it.key, found), excerpt(text_among(it.key, found)), f", {it.value:.4g}")
            for it in some
        )
        parts.append(fold(rule, shown))
    note = paragraph("For each rule a few documents and the measured value, sampled by a hash of their keys.", "soft")
    return section("Documents that rules removed", note, *parts)


def show_benchmarks(run: DataRun) -> Markup:
    """How much of each benchmark was found, in which sources, and some places next to their items."""
    if not run.benchmarks:
        return NOTHING
    found = run.benchmarks.benchmarks
    keys = [span.key for spans in run.spans.values() for span in spans]
    documents = some_documents(_before(run, "decontaminated"), keys, run.text_column)
    sources = sorted({source for its in found.values() for source in its.documents})
    where = str(BENCHMARKS)
    rows = list[list[str | Number]]()
    for name, its in found.items():
        share = its.found / max(its.items, 1)
        cells = [
            Number(count, record=pointer(where, "benchmarks", name, "documents", source) if count else "")
            for source in sources
            for count in [its.documents.get(source, 0)]
        ]
        items, some, near = (
            Number(getattr(its, kind), record=pointer(where, "benchmarks", name, kind))
            for kind in ("items", "found", "near")
        )
        rows.append([name, items, some, Number(share, f"{share:.1%}"), near, Number(its.too_short), *cells])
    policy = str(run.options.get("decontaminate", {}).get("policy"))
    record = run.stages["decontaminate"].counts
    gone = record.total(CONTAMINATED).documents
    took = f"Policy {policy}: {count_of(run.benchmarks.documents, 'document')} with an item; {gone:,} removed"
    took += f", {run.benchmarks.documents - gone:,} rewritten" if policy == "cut" else ""
    parts = list[Markup]()
    for name, spans in run.spans.items():
        sides = join(
            comparison(
                f"{label_among(span.key, documents)} has {span.item}, {span.match}",
                excerpt(span.text),
                excerpt(span.item_text),
            )
            for span in spans
        )
        parts.append(fold(f"{name}: places in documents, and the items", sides))
    head = ["", "items", "found", "", "near alone", "too short", *sources]
    return section(
        "Benchmarks",
        paragraph(f"{took}. On the right, documents of each source in which items were found."),
        table(head, rows, "benchmarks"),
        *parts,
    )


def show_lines(run: DataRun) -> Markup:
    """What documents lost by lines that repeat, by source; and those that lost most, before and after."""
    if not run.lines:
        return NOTHING
    record = run.stages["remove_lines"].counts
    unit = f"{run.options.get('lines', {}).get('unit', 'line')}s"
    rows = list[list[str | Number]]()
    for source in sorted(record.tallies):
        documents, units, size = run.lines.sums.get(source, (0, 0, 0))
        share = size / max(record.total(READ, source).bytes, 1)
        rows.append([
            source, counted(record, source, READ, f"{_STATE}/remove_lines.json", "counts", "tallies"),
            Number(documents), Number(units), Number(size), Number(share, f"{share:.2%}"),
        ])  # fmt: skip
    keys = [key for _, key in run.lines.most]
    folders = _before(run, "lines"), run.out / "lines"
    before, after = (some_documents(folder, keys, run.text_column) for folder in folders)
    parts = list[Markup]()
    for key in keys:
        if key in before and key in after:
            left, right = mark_differences(before[key].text, after[key].text)
            parts.append(comparison(label_among(key, before), marked(left), marked(right)))
    head = ["", "documents read", "of them changed", f"{unit} left out", "bytes", "of all"]
    total = paragraph(f"{count_of(record.total(CHANGED).bytes, 'byte')} of repeated {unit} left out.")
    shown = fold("documents that lost most, before and after", join(parts)) if parts else NOTHING
    return section(f"Repeated {unit}", total, table(head, rows, "lines"), shown)


def excerpt(text: str) -> str:
    """The beginning of a text, on one line."""
    some = " ".join(text[: 4 * _EXCERPT].split())
    return some if len(some) <= _EXCERPT else f"{some[:_EXCERPT]} …"


def _before(run: DataRun, folder: str) -> Path | None:
    """The folder that the stage which wrote `folder` read."""
    earlier = CORPORA[CORPORA.index(folder) + 1 :]
    return next((run.out / name for name in earlier if is_folder(run.out / name)), None)
