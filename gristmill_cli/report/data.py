"""The sections of a report on a run of data: what was lost and why, what is alike, what is in the tokens."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

import numpy as np
from markupsafe import Markup

from dedup.clustering.lsh import detection
from gristmill.counts import INCOMING, READ, WRITTEN, Counts, Tally, list_faults
from gristmill.wording import count_of
from gristmill_cli.duplicates import corpus_of, label_of, mark_differences, some_documents
from gristmill_cli.funnel import FUNNEL_FILE, HELD_OUT, TRAIN
from gristmill_cli.report.page import (
    NOTHING,
    Number,
    comparison,
    counted,
    figure,
    fold,
    grid,
    heading,
    marked,
    paragraph,
    pointer,
    quotation,
    section,
    table,
    tiles,
    warnings,
)
from gristmill_cli.report.pictures import draw_bars, draw_columns, draw_curves, draw_matrix, draw_sankey, top
from gristmill_cli.report.records import BINS, DataRun
from gristmill_cli.report.removed import excerpt, show_benchmarks, show_lines, show_rules
from preprocessing.datasets import DEFAULT_WEIGHT, WEIGHTS, kept_by_mix

_SOURCES = 12  # in a picture; the others are together
_OUTCOMES = 9  # in a picture; the others are together
_STATE = ".gristmill/run"
_STAGES_NOTE = (
    "Seconds are those of the last gristmill run, which passes over what is done. Core hours are the time of "
    "processors for all tasks, whenever they ran; retries, how often storage made them begin anew."
)


def sections(run: DataRun) -> Iterator[Markup]:
    """The parts of the page, those that have something to tell, in order."""
    counts = Counts(run.funnel.tallies if run.funnel else _normalized(run), [])
    yield from _head(run, counts)
    if run.funnel:
        yield _funnel(counts)
        yield _sizes(counts)
        yield _lengths(run)
    else:
        yield _so_far(run)
    yield _shares(run)
    yield _alike(run)
    yield _pairs(run)
    yield show_rules(run)
    yield show_lines(run)
    yield show_benchmarks(run)
    yield _tokens(run)
    yield _stages(run)
    yield _options(run)


def _normalized(run: DataRun) -> dict[str, dict[str, Tally]]:
    record = run.stages.get("normalize_text")
    return record.counts.tallies if record else {}


def _head(run: DataRun, counts: Counts) -> Iterator[Markup]:
    yield heading(run.out.name or str(run.out))
    yield paragraph(f"The corpus {run.options.get('corpus')}, as tokenized by gristmill run.", "soft")
    lines = [f"This record cannot be used: {fault}." for fault in run.faults]
    if waiting := [name for name, state in run.states.items() if state != "finished"]:
        lines.append(
            f"The run has not finished: {', '.join(waiting)} {'is' if len(waiting) == 1 else 'are'} missing. What "
            "follows covers the stages before; the same gristmill run resumes."
        )
    elif not run.funnel and not run.faults:
        lines.append(f"The run has not finished: there is no {FUNNEL_FILE}. The same gristmill run writes it.")
    lines += [f"{line[:1].upper()}{line[1:]}" for line in run.alarms]
    if run.funnel and run.funnel.damaged:
        lines.append(f"Files that were left out: {list_faults(run.funnel.damaged)}.")
    yield warnings(lines)
    if not lines:
        yield paragraph("Nothing looks wrong: no source loses far more than the others, no cluster is large or loose.")
    read = counts.total(READ)
    kept = counts.total(TRAIN)
    numbers = {"documents read": Number(read.documents), "MB of text read": Number(read.bytes / 1e6)}
    if run.funnel:
        numbers |= {"documents for training": Number(kept.documents), "MB for training": Number(kept.bytes / 1e6)}
    if TRAIN in run.manifests:
        numbers["tokens for training"] = Number(run.manifests[TRAIN].tokens)
    yield tiles(numbers)


def _so_far(run: DataRun) -> Markup:
    """What the stages that have finished made of the documents of each source."""
    sources = sorted({source for record in run.stages.values() for source in record.counts.tallies})
    rows = list[list[str | Number]]()
    for name, record in run.stages.items():
        for reason in record.counts.reasons:
            where = f"{_STATE}/{name}.json", "counts", "tallies"
            cells = [counted(record.counts, source, reason, *where) for source in sources]
            rows.append([f"{name}: {reason}", Number(record.counts.total(reason).documents), *cells])
    numbers = table(["documents", "all", *sources], rows, "so_far") if rows else NOTHING
    return section("Where the documents went, so far", numbers)


def _funnel(counts: Counts) -> Markup:
    sources = sorted(counts.tallies)
    reasons = [reason for reason in counts.reasons if reason not in INCOMING]
    reasons = sorted(reasons, key=lambda it: (it == TRAIN, it == HELD_OUT, -counts.total(it).documents, it))
    ends = _top_with_others(
        {reason: counts.total(reason).documents for reason in reasons}, _OUTCOMES, (HELD_OUT, TRAIN)
    )
    starts = _top_with_others({source: counts.total(READ, source).documents for source in sources}, _SOURCES)
    flows = Counter[tuple[str, str]]()
    for source in sources:
        for reason in reasons:
            flows[starts[source], ends[reason]] += counts.total(reason, source).documents
    sizes = {end: sum(flows[start, end] for start in set(starts.values())) for end in ends.values()}
    right = sorted(sizes, key=lambda end: (end == TRAIN, end == HELD_OUT, -sizes[end], end))
    picture = draw_sankey(flows, list(dict.fromkeys(starts.values())), right)
    rows = list[list[str | Number]]()
    for reason in [*(name for name in INCOMING if counts.total(name).documents), *reasons]:
        cells = [counted(counts, source, reason, FUNNEL_FILE, "went") for source in sources]
        rows.append([reason, Number(counts.total(reason).documents), *cells])
    numbers = table(["", "all", *sources], rows, "funnel")
    unread = counts.unread_files()
    return section(
        "Where the documents went", figure("documents by source, and what became of them", picture, wide=True),
        numbers, paragraph(f"files not read: {unread}") if unread else NOTHING,
    )  # fmt: skip


def _top_with_others(sizes: Mapping[str, float], most: int, always: Sequence[str] = ()) -> dict[str, str]:
    """Each name to itself, if it is one of the largest, or else to that of all others."""
    chosen = {*always, *top((name for name in sizes if name not in always), sizes, most - len(always))}
    others = count_of(len(sizes) - len(chosen), "other")
    if len(sizes) - len(chosen) == 1:
        chosen = set(sizes)
    return {name: name if name in chosen else others for name in sizes}


def _sizes(counts: Counts) -> Markup:
    sources = sorted(counts.tallies)
    shown = top(sources, {source: counts.total(READ, source).bytes for source in sources}, _SOURCES)
    ends = {"read": READ, "for training": TRAIN}
    megabytes = {name: [counts.total(it, source).bytes / 1e6 for source in shown] for name, it in ends.items()}
    lengths = {name: [_mean(counts.total(it, source)) for source in shown] for name, it in ends.items()}
    rows: list[list[str | Number]] = [
        [source, *(counted(counts, source, it, FUNNEL_FILE, "went", of="bytes") for it in ends.values()),
         *(Number(round(_mean(counts.total(it, source)))) for it in ends.values())]
        for source in sources
    ]  # fmt: skip
    numbers = table(["", "bytes read", "bytes for training", "a document, read", "for training"], rows, "sizes")
    return section(
        "Sizes and lengths, before and after",
        grid(figure("MB of text", draw_bars(shown, megabytes, "MB")),
             figure("mean length of a document", draw_bars(shown, lengths, "bytes"))),
        numbers,
    )  # fmt: skip


def _lengths(run: DataRun) -> Markup:
    """How long documents are, in classes that double: as they were read, and those for training."""
    stages = {"read": "normalize_text", "for training": "tokenize_corpus"}
    found = {name: run.stages[stage].counts.lengths for name, stage in stages.items() if stage in run.stages}
    sums = {name: [sum(its) for its in zip_longest(*lengths.values(), fillvalue=0)] for name, lengths in found.items()}
    if not any(sums.values()):
        return NOTHING
    most = max(map(len, sums.values()))
    least = min(next((bits for bits, count in enumerate(its) if count), most) for its in sums.values())
    labels = [f"{_brief(1 << bits >> 1)}–{_brief(1 << bits)}" if bits else "0" for bits in range(least, most)]
    bars = {name: [100 * count / max(sum(counts), 1) for count in [*counts, *[0] * (most - len(counts))][least:]]
            for name, counts in sums.items()}  # fmt: skip
    columns = [(name, source) for name, lengths in found.items() for source in sorted(lengths)]
    rows: list[list[str | Number]] = []
    for bits, label in zip(range(least, most), labels, strict=True):
        cells = [
            Number(found[name][source][bits],
                   record=pointer(f"{_STATE}/{stages[name]}.json", "counts", "lengths", source, str(bits)))
            if bits < len(found[name][source]) else Number(0)
            for name, source in columns
        ]  # fmt: skip
        rows.append([label, *cells])
    numbers = table(["bytes", *(f"{source}, {name}" for name, source in columns)], rows, "lengths")
    return section(
        "Lengths of documents", figure("bytes of a document", draw_bars(labels, bars, "% of documents"), numbers)
    )


def _brief(size: int) -> str:
    """A power of two.

    >>> [_brief(size) for size in (1, 512, 2048, 1 << 20)]
    ['1', '512', '2k', '1M']
    """
    for unit, bits in (("G", 30), ("M", 20), ("k", 10)):
        if size >> bits:
            return f"{size >> bits}{unit}"
    return str(size)


def _mean(tally: Tally) -> float:
    return tally.bytes / tally.documents if tally.documents else 0.0


def _shares(run: DataRun) -> Markup:
    record = run.stages.get("pass1")
    if not record:
        return NOTHING
    counts = record.counts
    given = record.settings.get("weights", {})
    amounts = {unit: record.settings[unit] for unit in ("bytes", "tokens") if record.settings.get(unit)}
    sources = sorted(counts.tallies)
    total = counts.total(WRITTEN).documents or 1
    weights = {source: float(given.get(source, WEIGHTS.get(source, DEFAULT_WEIGHT))) for source in sources}
    kept = {source: kept_by_mix(counts, source)[0] for source in sources}
    whole = sum(weights[source] * kept[source] for source in sources) or 1
    shares = {
        "requested": {source: 100 * weights[source] * kept[source] / whole for source in sources},
        "realised": {source: 100 * counts.total(WRITTEN, source).documents / total for source in sources},
    }
    head = ["", "epochs", "documents", *shares]
    if amounts:  # epochs follow from what is kept
        head = ["", "documents", "realised"]
        shares = {"realised": shares["realised"]}
    rows = list[list[str | Number]]()
    for source in sources:
        cells: dict[str, str | Number] = {
            "": source,
            "epochs": Number(weights[source], f"{weights[source]:g}"),
            "documents": counted(counts, source, WRITTEN, f"{_STATE}/pass1.json", "counts", "tallies"),
            **{name: Number(its[source], f"{its[source]:.2f} %") for name, its in shares.items()},
        }
        rows.append([cells[name] for name in head])
    shown = top(sources, shares["realised"], _SOURCES)
    bars = {name: [its[source] for source in shown] for name, its in shares.items()}
    asked = [paragraph(f"asked for, in {unit}: " + ", ".join(f"{name} {size:,.0f}" for name, size in sizes.items()))
             for unit, sizes in amounts.items()]  # fmt: skip
    picture = figure("shares of the mix, by documents", draw_bars(shown, bars, "%"))
    return section("Shares of the mix", *asked, picture, table(head, rows, "shares"))


def _alike(run: DataRun) -> Markup:
    parts = list[Markup]()
    if run.clusters:
        labels, values, rows = _histogram(run.clusters)
        largest = max(run.clusters)
        parts.append(
            figure(f"{count_of(sum(run.clusters.values()), 'cluster')} by size; the largest has "
                   f"{count_of(largest, 'document')}",
                   draw_columns(labels, values, "documents of a cluster", "clusters"),
                   table(["documents", "clusters"], rows, "clusters"))
        )  # fmt: skip
    settings = run.stages["generate_connected_components"].settings if parts or run.removals else {}
    rows_of_band = settings.get("range")
    bands = settings.get("bands")
    if isinstance(rows_of_band, int) and isinstance(bands, int):
        at = np.linspace(0, 1, 101)
        found = detection(at, rows_of_band, bands)
        similar = run.removals.similar if run.removals else [0]
        most = max(similar) or 1
        histogram = [(number / BINS, count / most) for number, count in enumerate(similar)] if any(similar) else []
        threshold = float(run.options.get("dedup", {}).get("threshold", 0.8))
        probed = sorted({0.5, 0.6, 0.7, 0.8, 0.9, 1.0, threshold})
        shares = detection(probed, rows_of_band, bands).tolist()
        numbers: list[list[str | Number]] = [
            [f"{it:g}", Number(share, f"{share:.1%}")] for it, share in zip(probed, shares, strict=True)
        ]
        parts.append(
            figure(
                f"pairs that {bands} bands of {rows_of_band} rows find"
                + (", and how similar removed documents are to the kept one" if histogram else ""),
                draw_curves({"found": list(zip(at.tolist(), found.tolist(), strict=True)),
                             "threshold": [(threshold, 0.0), (threshold, 1.0)]},
                            "Jaccard similarity", "share", histogram),
                table(["similarity", "found"], numbers),
            )
        )  # fmt: skip
    if run.removals and run.removals.between:
        between = run.removals.between
        sizes = Counter[str]()
        for (removed, kept), documents in between.items():
            sizes[removed] += documents
            sizes[kept] += documents
        names = _top_with_others(dict(sorted(sizes.items())), _SOURCES)
        shown = list(dict.fromkeys(names.values()))
        cells = Counter[tuple[str, str]]()
        for (removed, kept), documents in between.items():
            cells[names[removed], names[kept]] += documents
        square = [[cells[removed, kept] for kept in shown] for removed in shown]
        cross: list[list[str | Number]] = [[name, *map(Number, row)] for name, row in zip(shown, square, strict=True)]
        parts.append(
            figure("documents removed (a row), and the source of what was kept (a column)",
                   draw_matrix(shown, square, "removed", "kept"), table(["", *shown], cross, "matrix"))
        )  # fmt: skip
    record = run.stages.get("generate_duplicates_dict")
    verified = NOTHING
    if record:
        totals = {name: record.counts.total(name).documents for name in record.counts.reasons}
        verified = paragraph(
            "Documents of clusters: " + ", ".join(f"{count:,} {name}" for name, count in totals.items()) + "."
        )
    return section("What is alike", verified, grid(*parts))


def _histogram(sizes: Mapping[int, int]) -> tuple[list[str], list[int], list[list[str | Number]]]:
    """Clusters by size, in classes that double: 2, 3 to 4, 5 to 8."""
    classes = Counter[int]()
    for size, clusters in sizes.items():
        classes[(size - 1).bit_length()] += clusters
    labels = list[str]()
    values = list[int]()
    for number in range(1, max(classes) + 1):
        first = (1 << (number - 1)) + 1
        last = 1 << number
        labels.append(f"{last:,}" if first == last else f"{first:,}–{last:,}")
        values.append(classes[number])
    return labels, values, [[label, Number(value)] for label, value in zip(labels, values, strict=True)]


def _pairs(run: DataRun) -> Markup:
    if not run.removals or not (pairs := [*run.removals.least, *run.removals.spread]):
        return NOTHING
    keys = [key for pair in pairs for key in (pair.removed, pair.kept)]
    found = some_documents(corpus_of(run.out), keys, run.text_column)
    parts = list[Markup]()
    for pair in pairs:
        if pair.removed not in found or pair.kept not in found:
            continue
        names = " next to ".join(label_of(found[key]) for key in (pair.removed, pair.kept))
        removed = found[pair.removed].text
        kept = found[pair.kept].text
        alike = "not measured" if pair.similarity is None else f"similarity {pair.similarity:.3f}"
        title = f"{names}, {alike}"
        if removed == kept:
            parts += [quotation(title, excerpt(removed)), paragraph("the texts are equal", "soft")]
            continue
        left, right = mark_differences(removed, kept)
        parts.append(comparison(title, marked(left), marked(right)))
    note = paragraph("The least similar first, then some spread over all. Left the document that was "
                "removed, right the one that was kept, from shortly before their first difference; words that the "
                "other has not are marked.", "soft")  # fmt: skip
    note = note if parts else paragraph("The texts are no longer available.")
    return section("Pairs of documents, removed and kept", note, *parts)


def _tokens(run: DataRun) -> Markup:
    if TRAIN not in run.manifests:
        return NOTHING
    manifest = run.manifests[TRAIN]
    held = run.manifests.get(HELD_OUT)
    sources = sorted(manifest.sources)
    rows = list[list[str | Number]]()
    for source in sources:
        record = manifest.sources[source]
        where = f"tokens/{TRAIN}/manifest.json"
        rows.append([
            source,
            *(Number(getattr(record, name), record=pointer(where, "sources", source, name))
              for name in ("documents", "tokens", "bytes")),
            Number(record.bytes / max(record.tokens, 1), f"{record.bytes / max(record.tokens, 1):.3f}"),
            Number(held.sources[source].tokens if held and source in held.sources else 0),
        ])  # fmt: skip
    shown = top(sources, {source: manifest.sources[source].tokens for source in sources}, _SOURCES)
    tokens = {"tokens": [manifest.sources[source].tokens for source in shown]}
    sizes = {"bytes a token": [manifest.sources[s].bytes / max(manifest.sources[s].tokens, 1) for s in shown]}
    head = ["", "documents", "tokens", "bytes", "bytes a token", "tokens held out"]
    return section(
        "Tokens",
        grid(figure("tokens by source", draw_bars(shown, tokens, "tokens")),
             figure("bytes a token", draw_bars(shown, sizes, "bytes"))),
        table(head, rows, "tokens"),
    )  # fmt: skip


def _stages(run: DataRun) -> Markup:
    if not run.stages:
        return NOTHING
    rows = list[list[str | Number]]()
    for name, record in run.stages.items():
        where = f"{_STATE}/{name}.json"
        read = record.counts.total(READ)
        rate = read.bytes / 1e6 / record.seconds if record.seconds else 0.0
        speed = Number(rate, f"{rate:,.1f}") if rate else "–"
        spent = [
            Number(record.core_seconds, f"{record.core_seconds / 3600:,.4f}", record=pointer(where, "core_seconds")),
            *(Number(getattr(record, it), record=pointer(where, it)) for it in ("tasks", "retries")),
        ]
        out = ", ".join(
            f"{record.counts.total(reason).documents:,} {reason}" for reason in record.counts.reasons if reason != READ
        )
        rows.append([
            name, Number(record.seconds, f"{record.seconds:,.1f}", record=pointer(where, "seconds")),
            *spent,
            Number(read.documents), Number(read.bytes / 1e6), speed, out,
        ])  # fmt: skip
    seconds = {"seconds": [record.seconds for record in run.stages.values()]}
    names = list(run.stages)
    return section(
        "Stages",
        paragraph(_STAGES_NOTE, "soft"),
        figure("seconds", draw_bars(names, seconds, "seconds")) if any(seconds["seconds"]) else NOTHING,
        table(["", "seconds", "core hours", "tasks", "retries", "documents read", "MB read", "MB/s", "of them"], rows,
              "stages"),
    )  # fmt: skip


def _options(run: DataRun) -> Markup:
    options = [[name, value] for name, value in _flat(run.options)]
    hashes = [[f"{name}/{shard.name}.bin", shard.sha256] for name, manifest in run.manifests.items()
              for shard in manifest.shards[:8]]  # fmt: skip
    if TRAIN in run.manifests:
        hashes.insert(0, ["tokenizer", run.manifests[TRAIN].tokenizer.sha256])
    versions = [[name, value] for name, value in run.versions.items()]
    return section(
        "Options, versions, hashes", fold("options", table(["", ""], options)),
        fold("versions of libraries", table(["", ""], versions)) if versions else NOTHING,
        fold("SHA-256 of the tokenizer and of the first shards", table(["", ""], hashes)) if hashes else NOTHING,
    )  # fmt: skip


def _flat(options: Mapping[str, object], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in options.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", str(value)
