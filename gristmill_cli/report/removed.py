"""Section of a report on the documents that rules took out."""

from markupsafe import Markup

from gristmill.io.documents import DocKey
from gristmill.wording import count_of
from gristmill_cli.documents.duplicates import label_among, text_among
from gristmill_cli.documents.removed_texts import removed_documents
from gristmill_cli.report.page import (
    NOTHING,
    Number,
    Row,
    fold,
    join,
    paragraph,
    pointer,
    quotation,
    section,
    table,
)
from gristmill_cli.report.records import RUN_RECORDS, DataRun
from gristmill_cli.stages.pipeline import judging_stage

_EXCERPT = 400  # characters
_MAX_DETAILS = 25  # languages or domains that are shown


def show_personal(run: DataRun) -> Markup:
    """Return the section on personal data that was replaced, by kind."""
    rows = list[Row]()
    for stage, record in run.stages.items():
        for kind, count in record.counts.replaced.items():
            record_field = pointer(f"{RUN_RECORDS}/{stage}.json", "counts", "replaced", kind)
            rows.append([kind, Number(count, record=record_field)])
    if not rows:
        return NOTHING
    note = paragraph(
        "In the documents that were written, before duplicates are removed and sources are weighted.", "soft"
    )
    return section("Personal data that was replaced", note, table(["", "replaced"], rows, "personal"))


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
    judged = run.stages[judging_stage(config).name].counts
    by_count = sorted(run.by_rule.items(), key=lambda item: (-judged.total(item[0]).documents, item[0]))
    for rule, samples in by_count:
        texts = list[Markup]()
        for sample in samples:
            text = excerpt(text_among(sample.key, documents))
            value = ""
            if sample.value is not None:
                value = f", {sample.value:.4g}"
            texts.append(quotation(label_among(sample.key, documents), text, value))
        parts.append(fold(f"{rule}: {count_of(judged.total(rule).documents, 'document')}", join(texts)))
    note = paragraph("For each rule a few documents and the measured value, sampled by a hash of their keys.", "soft")
    return section("Documents that rules removed", _show_details(run), note, *parts)


def _show_details(run: DataRun) -> Markup:
    """Return a table of the languages and domains of which rules removed most documents."""
    if not run.by_detail:
        return NOTHING
    largest = sorted(run.by_detail.items(), key=lambda item: (-item[1], item[0]))[:_MAX_DETAILS]
    rows = list[Row]()
    for (rule, detail), documents in largest:
        rows.append([f"{detail}: {rule}", Number(documents)])
    return table(["language or domain, and rule", "documents"], rows, "details")


def excerpt(text: str) -> str:
    """Return the beginning of a text, on one line."""
    line = " ".join(text[: 4 * _EXCERPT].split())
    if len(line) <= _EXCERPT:
        return line
    return f"{line[:_EXCERPT]} …"
