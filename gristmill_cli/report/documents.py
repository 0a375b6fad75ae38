"""Sections of a report on documents in numbers: what became of them, their sizes and lengths, the shares of the mix."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from markupsafe import Markup

from gristmill.counts import HELD_OUT, INCOMING, READ, WRITTEN, Counts, Tally
from gristmill.wording import count_of, verb_for
from gristmill_cli.funnel import FUNNEL_FILE, TRAIN
from gristmill_cli.report.page import (
    NOTHING,
    Number,
    Row,
    counted,
    figure,
    grid,
    join,
    paragraph,
    pointer,
    section,
    table,
)
from gristmill_cli.report.pictures import draw_bars, draw_sankey, group_small, largest, values_of
from gristmill_cli.report.records import RUN_RECORDS, DataRun
from gristmill_cli.stages.pipeline import FIRST_STAGE
from preprocessing.datasets import kept_by_mix, mixed_tally
from preprocessing.mixing.mix_manifest import BandShare

MAX_SOURCES = 12  # in a picture; the others are together
_IN_TRAIN = "in the train set"
_MAX_OUTCOMES = 9  # in a picture; the others are together
_SIZE_REASONS = {"read": READ, "for training": TRAIN}
_LENGTH_STAGES = {"read": FIRST_STAGE, "in the mix": "encode"}

Histogram = Sequence[int]  # documents by the number of bits of their sizes: class 3 has 4 to 7 bytes


def show_flow(counts: Counts) -> Markup:
    """Return the section on what became of the documents of each source."""
    sources = sorted(counts.tallies)
    outcomes = _outcomes(counts)
    incoming = [reason for reason in INCOMING if counts.total(reason).documents]
    numbers = _table_of_reasons(counts, [*incoming, *outcomes], sources)
    unread = counts.unread_files()
    note = NOTHING
    if unread:
        note = paragraph(f"files not read: {unread}")
    return section(
        "Where the documents went",
        figure("documents by source, and what became of them", _draw_flow(counts, sources, outcomes), wide=True),
        numbers,
        note,
    )


def _table_of_reasons(counts: Counts, reasons: Iterable[str], sources: Sequence[str]) -> Markup:
    """Return the table of a finished run's documents: a row for each reason, a column for each source."""
    rows = list[Row]()
    for reason in reasons:
        cells = [counted(counts, source, reason, FUNNEL_FILE, "went") for source in sources]
        rows.append([reason, Number(counts.total(reason).documents), *cells])
    return table(["", "all", *sources], rows, "funnel")


def _outcomes(counts: Counts) -> list[str]:
    """Return the reasons that remove documents, in the order of the page."""
    sizes = dict[str, float]()
    for reason in counts.reasons:
        if reason not in INCOMING:
            sizes[reason] = counts.total(reason).documents
    return _in_order(sizes)


def _in_order(sizes: Mapping[str, float]) -> list[str]:
    """Return outcomes from the largest to the smallest, and after them what is held out and what is for training."""
    return sorted(sizes, key=lambda outcome: (outcome == TRAIN, outcome == HELD_OUT, -sizes[outcome], outcome))


def _draw_flow(counts: Counts, sources: Sequence[str], outcomes: Sequence[str]) -> Markup:
    """Draw ribbons from sources to outcomes; small sources and small outcomes are together."""
    read = dict[str, int]()
    for source in sources:
        read[source] = counts.total(READ, source).documents
    sizes = dict[str, int]()
    for outcome in outcomes:
        sizes[outcome] = counts.total(outcome).documents
    source_labels = group_small(read, MAX_SOURCES)
    outcome_labels = group_small(sizes, _MAX_OUTCOMES, always=(HELD_OUT, TRAIN))
    flows = Counter[tuple[str, str]]()
    label_sizes = Counter[str]()
    for source in sources:
        for outcome in outcomes:
            documents = counts.total(outcome, source).documents
            flows[source_labels[source], outcome_labels[outcome]] += documents
            label_sizes[outcome_labels[outcome]] += documents
    left = list(dict.fromkeys(source_labels.values()))
    return draw_sankey(flows, left, _in_order(label_sizes))


def show_sizes(counts: Counts) -> Markup:
    """Return the section on bytes and mean lengths of each source, as they were read and for training."""
    sources = sorted(counts.tallies)
    bytes_read = dict[str, int]()
    for source in sources:
        bytes_read[source] = counts.total(READ, source).bytes
    shown = largest(sources, bytes_read, MAX_SOURCES)
    megabytes = dict[str, list[float]]()
    lengths = dict[str, list[float]]()
    for name, reason in _SIZE_REASONS.items():
        megabytes[name] = []
        lengths[name] = []
        for source in shown:
            tally = counts.total(reason, source)
            megabytes[name].append(tally.bytes / 1e6)
            lengths[name].append(_mean_length(tally))
    rows = list[Row]()
    for source in sources:
        row: Row = [source]
        for reason in _SIZE_REASONS.values():
            row.append(counted(counts, source, reason, FUNNEL_FILE, "went", of="bytes"))
        for reason in _SIZE_REASONS.values():
            row.append(Number(round(_mean_length(counts.total(reason, source)))))
        rows.append(row)
    return section(
        "Sizes and lengths, before and after",
        grid(
            figure("MB of text", draw_bars(shown, megabytes, "MB")),
            figure("mean length of a document", draw_bars(shown, lengths, "bytes")),
        ),
        table(["", "bytes read", "bytes for training", "a document, read", "for training"], rows, "sizes"),
    )


def _mean_length(tally: Tally) -> float:
    return tally.bytes / max(tally.documents, 1)


def show_lengths(run: DataRun) -> Markup:
    """Return the section on lengths of documents, in classes that double: as they were read, and for training."""
    by_source = dict[str, dict[str, Histogram]]()
    sums = dict[str, list[int]]()
    for name, stage in _LENGTH_STAGES.items():
        if stage in run.stages:
            lengths = run.stages[stage].counts.lengths
            by_source[name] = dict(sorted(lengths.items()))
            sums[name] = _add_histograms(lengths.values())
    if not any(sums.values()):
        return NOTHING
    end = max(map(len, sums.values()))
    first = min(_first_filled(histogram, end) for histogram in sums.values())
    labels = list(map(_length_label, range(first, end)))
    bars = dict[str, list[float]]()
    for name, histogram in sums.items():
        bars[name] = _percentages(histogram, first, end)
    numbers = _table_of_lengths(by_source, range(first, end), labels)
    picture = draw_bars(labels, bars, "% of documents")
    return section("Lengths of documents", figure("bytes of a document", picture, numbers))


def _add_histograms(histograms: Iterable[Histogram]) -> list[int]:
    """Return the sum of histograms, which may differ in length.

    >>> _add_histograms([[1, 2], [0, 1, 5]])
    [1, 3, 5]
    """
    sums = list[int]()
    for histogram in histograms:
        sums += [0] * (len(histogram) - len(sums))
        for bits, count in enumerate(histogram):
            sums[bits] += count
    return sums


def _first_filled(histogram: Histogram, default: int) -> int:
    """Return the first class that has documents, or `default`."""
    for bits, count in enumerate(histogram):
        if count:
            return bits
    return default


def _percentages(histogram: Histogram, first: int, end: int) -> list[float]:
    """Return for each class from `first` to `end` its share of all documents, in percent."""
    total = max(sum(histogram), 1)
    shares = [100 * count / total for count in histogram[first:]]
    return shares + [0.0] * (end - first - len(shares))


def _table_of_lengths(
    by_source: Mapping[str, Mapping[str, Histogram]], classes: Iterable[int], labels: Sequence[str]
) -> Markup:
    """Return the table of lengths: a row for each class, a column for each source as it was read, and for training."""
    head = ["bytes"]
    for name, histograms in by_source.items():
        head += [f"{source}, {name}" for source in histograms]
    rows = list[Row]()
    for bits, label in zip(classes, labels, strict=True):
        row: Row = [label]
        for name, histograms in by_source.items():
            record = f"{RUN_RECORDS}/{_LENGTH_STAGES[name]}.json"
            for source, histogram in histograms.items():
                number = Number(0)
                if bits < len(histogram):
                    number = Number(histogram[bits], record=pointer(record, "counts", "lengths", source, str(bits)))
                row.append(number)
        rows.append(row)
    return table(head, rows, "lengths")


def _length_label(bits: int) -> str:
    """Return the sizes of a class in words.

    >>> [_length_label(bits) for bits in (0, 1, 11)]
    ['0', '1–2', '1k–2k']
    """
    if bits == 0:
        return "0"
    return f"{_brief(1 << bits >> 1)}–{_brief(1 << bits)}"


def _brief(size: int) -> str:
    """Return a power of two in few characters.

    >>> [_brief(size) for size in (1, 512, 2048, 1 << 20)]
    ['1', '512', '2k', '1M']
    """
    for unit, bits in (("G", 30), ("M", 20), ("k", 10)):
        if size >> bits:
            return f"{size >> bits}{unit}"
    return str(size)


def show_shares(run: DataRun) -> Markup:
    """Return the section on the shares of the mix: what was asked for, and what it has."""
    record = run.stages.get("mix")
    if not record or not run.mix:
        return NOTHING
    counts = record.counts
    sources = sorted(counts.tallies)
    weights = dict.fromkeys(sources, 0.0) | run.mix.weights
    shares = {"requested": _requested_shares(counts, weights), "realised": _realised_shares(counts, sources)}
    head = ["", "epochs", _IN_TRAIN, "requested", "realised"]
    notes = list[Markup]()
    for unit in ("bytes", "tokens"):
        if amounts := record.settings.get(unit):
            listed = ", ".join(f"{source} {amount:,.0f}" for source, amount in amounts.items())
            notes.append(paragraph(f"asked for, in {unit}: {listed}"))
    if notes:  # amounts were given: epochs follow from what is kept
        head = ["", "epochs", _IN_TRAIN, "realised"]
        del shares["requested"]
    if encoded := run.stages.get("encode"):
        notes += _note_failed(encoded.counts)
    rows = list[Row]()
    for source in sources:
        cells: dict[str, str | Number] = {
            "": source,
            "epochs": Number(weights[source], f"{weights[source]:g}"),
            _IN_TRAIN: counted(counts, source, WRITTEN, f"{RUN_RECORDS}/mix.json", "counts", "tallies"),
        }
        for name, share_of in shares.items():
            cells[name] = Number(share_of[source], f"{share_of[source]:.2f} %")
        rows.append([cells[name] for name in head])
    shown = largest(sources, shares["realised"], MAX_SOURCES)
    bars = dict[str, list[float]]()
    for name, share_of in shares.items():
        bars[name] = values_of(share_of, shown)
    picture = figure("shares of the mix, by documents", draw_bars(shown, bars, "%"))
    return section("Shares of the mix", *notes, picture, table(head, rows, "shares"), _show_bands(run.mix.bands))


def _note_failed(counts: Counts) -> list[Markup]:
    """Return a paragraph on the documents of the mix that have no tokens, if there are any."""
    if not counts.failed:
        return []
    documents = count_of(counts.failed, "document")
    have = verb_for(counts.failed, "has", "have")
    said = f"{documents} of the mix, copies included, {have} no tokens, as the tokenizer failed"
    return [paragraph(f"{said}: tokens.removed.parquet lists each.")]


def _show_bands(bands: Sequence[BandShare]) -> Markup:
    """Return the table of the bands of a score in each source: its documents, their epochs, and what they make."""
    if not bands:
        return NOTHING
    rows = list[Row]()
    for share in bands:
        epochs = Number(share.weight, f"{share.weight:g}")
        rows.append([f"{share.source}: {share.band}", Number(share.documents), epochs, Number(share.mixed)])
    note = paragraph("Bands of the score: epochs of a source are those of its bands together.", "soft")
    return join([note, table(["source and band", "documents kept", "epochs", "in the mix"], rows, "bands")])


def _requested_shares(counts: Counts, weights: Mapping[str, float]) -> dict[str, float]:
    """Return the percentage of the mix that each source would have by its weight and its documents."""
    requested = dict[str, float]()  # documents
    for source, weight in weights.items():
        documents, _ = kept_by_mix(counts, source)
        requested[source] = weight * documents
    total = sum(requested.values()) or 1
    shares = dict[str, float]()
    for source, documents_requested in requested.items():
        shares[source] = 100 * documents_requested / total
    return shares


def _realised_shares(counts: Counts, sources: Iterable[str]) -> dict[str, float]:
    """Return the percentage of the mix that each source has."""
    total = mixed_tally(counts).documents or 1
    shares = dict[str, float]()
    for source in sources:
        shares[source] = 100 * mixed_tally(counts, source).documents / total
    return shares
