"""Sections of a report on documents that resemble one another: clusters, bands, sources, and pairs with their texts."""

from collections import Counter
from collections.abc import Mapping

import numpy as np
from markupsafe import Markup

from dedup.clustering.lsh import detection
from gristmill.io.documents import DocKey, Document
from gristmill.wording import count_of
from gristmill_cli.documents.duplicates import Pair, corpus_of, label_of, mark_differences, some_documents
from gristmill_cli.report.documents import MAX_SOURCES
from gristmill_cli.report.page import (
    NOTHING,
    Number,
    Row,
    comparison,
    figure,
    grid,
    marked,
    paragraph,
    quotation,
    section,
    table,
)
from gristmill_cli.report.pictures import draw_columns, draw_curves, draw_matrix, group_small
from gristmill_cli.report.records import BINS, DataRun
from gristmill_cli.report.removed import excerpt

_PROBED_SIMILARITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_PAIRS_NOTE = (
    "The least similar first, then some spread over all. Left the document that was removed, right the one that was "
    "kept, from shortly before their first difference; words that the other has not are marked."
)


def show_alike(run: DataRun) -> Markup:
    """Return the section on clusters, on pairs that bands find, and on the sources of what was removed."""
    figures = grid(_clusters(run), _detection(run), _between_sources(run))
    return section("What is alike", _members(run), figures)


def _members(run: DataRun) -> Markup:
    """Return what became of the documents of clusters, in a sentence."""
    record = run.stages.get("generate_duplicates_dict")
    if not record:
        return NOTHING
    totals = list[str]()
    for reason in record.counts.reasons:
        totals.append(f"{record.counts.total(reason).documents:,} {reason}")
    return paragraph(f"Documents of clusters: {', '.join(totals)}.")


def _clusters(run: DataRun) -> Markup:
    """Draw the number of clusters by size, in classes that double: 2, 3 to 4, 5 to 8."""
    if not run.clusters:
        return NOTHING
    classes = Counter[int]()
    for size, clusters in run.clusters.items():
        classes[(size - 1).bit_length()] += clusters
    labels = list[str]()
    values = list[int]()
    rows = list[Row]()
    for bits in range(1, max(classes) + 1):
        first = (1 << (bits - 1)) + 1
        last = 1 << bits
        label = f"{first:,}–{last:,}"
        if first == last:
            label = f"{last:,}"
        labels.append(label)
        values.append(classes[bits])
        rows.append([label, Number(classes[bits])])
    clusters_in_words = count_of(sum(run.clusters.values()), "cluster")
    largest_in_words = count_of(max(run.clusters), "document")
    return figure(
        f"{clusters_in_words} by size; the largest has {largest_in_words}",
        draw_columns(labels, values, "documents of a cluster", "clusters"),
        table(["documents", "clusters"], rows, "clusters"),
    )


def _detection(run: DataRun) -> Markup:
    """Draw the share of pairs that the bands find by similarity, over the similarities of what was removed."""
    if not run.clusters and not run.removals:
        return NOTHING
    settings = run.stages["generate_connected_components"].settings
    rows_of_band = settings.get("range")
    bands = settings.get("bands")
    if not isinstance(rows_of_band, int) or not isinstance(bands, int):
        return NOTHING
    threshold = float(run.options.get("dedup", {}).get("threshold", 0.8))
    similarities = np.linspace(0, 1, 101)
    shares = detection(similarities, rows_of_band, bands)
    curves = {
        "found": list(zip(similarities.tolist(), shares.tolist(), strict=True)),
        "threshold": [(threshold, 0.0), (threshold, 1.0)],
    }
    histogram = _similarity_histogram(run)
    probed = sorted({*_PROBED_SIMILARITIES, threshold})
    rows = list[Row]()
    for similarity, share in zip(probed, detection(probed, rows_of_band, bands).tolist(), strict=True):
        rows.append([f"{similarity:g}", Number(share, f"{share:.1%}")])
    title = f"pairs that {bands} bands of {rows_of_band} rows find"
    if histogram:
        title += ", and how similar removed documents are to the kept one"
    picture = draw_curves(curves, "Jaccard similarity", "share", histogram)
    return figure(title, picture, table(["similarity", "found"], rows))


def _similarity_histogram(run: DataRun) -> list[tuple[float, float]]:
    """Return (similarity, share of the largest bin) of removed documents; nothing if none was measured."""
    if not run.removals or not any(run.removals.similar):
        return []
    highest = max(run.removals.similar)
    return [(number / BINS, count / highest) for number, count in enumerate(run.removals.similar)]


def _between_sources(run: DataRun) -> Markup:
    """Draw how many documents of each source were removed for one of each source."""
    if not run.removals or not run.removals.between:
        return NOTHING
    between = run.removals.between
    sizes = Counter[str]()
    for (removed, kept), documents in between.items():
        sizes[removed] += documents
        sizes[kept] += documents
    labels = group_small(dict(sorted(sizes.items())), MAX_SOURCES)
    cells = Counter[tuple[str, str]]()
    for (removed, kept), documents in between.items():
        cells[labels[removed], labels[kept]] += documents
    shown = list(dict.fromkeys(labels.values()))
    matrix = list[list[int]]()
    rows = list[Row]()
    for removed in shown:
        values = [cells[removed, kept] for kept in shown]
        matrix.append(values)
        rows.append([removed, *map(Number, values)])
    return figure(
        "documents removed (a row), and the source of what was kept (a column)",
        draw_matrix(shown, matrix, "removed", "kept"),
        table(["", *shown], rows, "matrix"),
    )


def show_pairs(run: DataRun) -> Markup:
    """Return the section with the texts of some pairs, each of a removed document and the one that was kept."""
    if not run.removals:
        return NOTHING
    pairs = [*run.removals.least_alike, *run.removals.spread]
    if not pairs:
        return NOTHING
    keys = list[DocKey]()
    for pair in pairs:
        keys += [pair.removed, pair.kept]
    documents = some_documents(corpus_of(run.out), keys, run.text_column)
    parts = list[Markup]()
    for pair in pairs:
        if pair.removed in documents and pair.kept in documents:
            parts += _pair(pair, documents)
    note = paragraph(_PAIRS_NOTE, "soft")
    if not parts:
        note = paragraph("The texts are no longer available.")
    return section("Pairs of documents, removed and kept", note, *parts)


def _pair(pair: Pair, documents: Mapping[DocKey, Document]) -> list[Markup]:
    """Return the texts of a pair next to each other, or the text of both if they are equal."""
    removed = documents[pair.removed]
    kept = documents[pair.kept]
    alike = "not measured"
    if pair.similarity is not None:
        alike = f"similarity {pair.similarity:.3f}"
    title = f"{label_of(removed)} next to {label_of(kept)}, {alike}"
    if removed.text == kept.text:
        return [quotation(title, excerpt(removed.text)), paragraph("the texts are equal", "soft")]
    left, right = mark_differences(removed.text, kept.text)
    return [comparison(title, marked(left), marked(right))]
