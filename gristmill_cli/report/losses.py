"""Sections of a report on the lines, paragraphs and spans that were left out as the corpus repeats them."""

from dataclasses import dataclass, field
from itertools import groupby

import pyarrow.parquet as pq
from markupsafe import Markup

from gristmill.counts import CHANGED, READ
from gristmill.io.documents import DocKey
from gristmill.wording import count_of
from gristmill_cli.documents.duplicates import corpus_before, label_among, mark_differences, some_documents
from gristmill_cli.report.page import (
    Number,
    Row,
    comparison,
    counted,
    fold,
    join,
    marked,
    paragraph,
    section,
    table,
)
from gristmill_cli.report.records import RUN_RECORDS, DataRun, read_losses, rows_of
from gristmill_cli.stages.spec import StageSpec

_SHOWN_DOCUMENTS = 3  # that lost most


@dataclass
class Losses:
    """Losses of documents: how many documents, units and bytes by source; the documents that lost most bytes."""

    sums: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    largest: list[tuple[int, DocKey]] = field(default_factory=list)  # -bytes, key

    def add(self, key: DocKey, units: int, size: int) -> None:
        """Count what a document lost."""
        documents, units_before, bytes_before = self.sums.get(key.source, (0, 0, 0))
        self.sums[key.source] = (documents + 1, units_before + units, bytes_before + size)
        loss = (-size, key)
        if len(self.largest) < _SHOWN_DOCUMENTS or loss < self.largest[-1]:
            self.largest = sorted([*self.largest, loss])[:_SHOWN_DOCUMENTS]


@dataclass
class LossesSection:
    """Losses of each source in a stage, in units such as lines, and the documents that lost most."""

    stage: StageSpec
    unit: str
    losses: Losses

    def show(self, run: DataRun) -> Markup:
        """Return the section."""
        counts = run.stages[self.stage.name].counts
        record = f"{RUN_RECORDS}/{self.stage.name}.json"
        rows = list[Row]()
        for source in sorted(counts.tallies):
            documents, units, size = self.losses.sums.get(source, (0, 0, 0))
            share = size / max(counts.total(READ, source).bytes, 1)
            read = counted(counts, source, READ, record, "counts", "tallies")
            row: Row = [source, read, Number(documents), Number(units), Number(size), Number(share, f"{share:.2%}")]
            rows.append(row)
        head = ["", "documents read", "of them changed", f"{self.unit} left out", "bytes", "of all"]
        total = paragraph(f"{count_of(counts.total(CHANGED).bytes, 'byte')} of repeated {self.unit} left out.")
        numbers = table(head, rows, self.stage.output)
        return section(f"Repeated {self.unit}", total, numbers, self._changed_documents(run))

    def _changed_documents(self, run: DataRun) -> Markup:
        """Return the documents that lost most, before and after, folded."""
        keys = [key for _, key in self.losses.largest]
        before = some_documents(corpus_before(run.out, self.stage.output), keys, run.text_column)
        after = some_documents(run.out / self.stage.output, keys, run.text_column)
        parts = list[Markup]()
        for key in keys:
            if key in before and key in after:
                left, right = mark_differences(before[key].text, after[key].text)
                parts.append(comparison(label_among(key, before), marked(left), marked(right)))
        return fold("documents that lost most, before and after", join(parts))


def read_lines(run: DataRun, stage: StageSpec) -> LossesSection | None:
    """Return the section on repeated lines; None, with a fault, if the table of the stage is damaged or missing."""
    losses = read_losses(run, stage, _sum_lines)
    if losses is None:
        return None
    unit = run.options.get(stage.section, {}).get("unit", "line")
    return LossesSection(stage, f"{unit}s", losses)


def read_spans(run: DataRun, stage: StageSpec) -> LossesSection | None:
    """Return the section on repeated spans; None, with a fault, if the table of the stage is damaged or missing."""
    losses = read_losses(run, stage, _sum_spans)
    if losses is None:
        return None
    return LossesSection(stage, "spans", losses)


def _sum_lines(file: pq.ParquetFile) -> Losses:
    losses = Losses()
    for row in rows_of(file, ["file", "row", "units", "bytes"]):
        losses.add(DocKey(row["file"], row["row"]), row["units"], row["bytes"])
    return losses


def _sum_spans(file: pq.ParquetFile) -> Losses:
    losses = Losses()
    rows = rows_of(file, ["file", "row", "bytes"])
    for key, of_document in groupby(rows, key=lambda row: DocKey(row["file"], row["row"])):
        sizes = [row["bytes"] for row in of_document]
        losses.add(key, len(sizes), sum(sizes))
    return losses
