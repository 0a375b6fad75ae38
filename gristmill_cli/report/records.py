"""Records of a run, read for a report: options, counts of stages, tables in parts, token manifests."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.engine.executors.staging import local_copies
from gristmill.engine.ledger import Ledger
from gristmill.errors import GristmillError, InputError, UsageError
from gristmill.io.documents import DocKey
from gristmill.io.files import RUN_FILE, STATE_DIR
from gristmill.io.parquet_files import open_parquet
from gristmill.io.token_shards import Manifest
from gristmill.storage.files import is_file, read_file
from gristmill_cli.alarms import find_alarms
from gristmill_cli.duplicates import CLUSTERS, DUPLICATES, Pair
from gristmill_cli.funnel import FUNNEL_FILE, HELD_OUT, TRAIN, Funnel, at_folder, show_funnel
from gristmill_cli.run_config import RunConfig, read_options, recorded_options
from gristmill_cli.run_records import StageRecord
from gristmill_cli.status import stages_of_run
from preprocessing.decontaminate import Report, read_report

REMOVED = Path("quality.removed.parquet")
LINES = Path("lines.lines.parquet")
SPANS = Path("decontaminated.contamination.parquet")
BENCHMARKS = Path("decontaminated.benchmarks.json")
BINS = 50  # of similarities from 0 to 1
_LEAST = 3  # the least similar pairs whose texts are shown
_SPREAD = 4  # pairs from all of the table whose texts are shown
_OF_A_RULE = 2  # documents of a rule or benchmark whose texts are shown
_VERSIONS = {"pyarrow", "unicode", "numpy", "numba", "sentencepiece", "tokenizers", "ftfy", "zstandard"}

_Table = TypeVar("_Table", "Removals", "Counter[int]", "dict[str, list[RemovedByRule]]")


@dataclass
class Removals:
    """The table of duplicates, in sums: between which sources, how similar; and some pairs."""

    between: Counter[tuple[str, str]] = field(default_factory=Counter)  # (removed, kept)
    similar: list[int] = field(default_factory=lambda: [0] * BINS)
    unmeasured: int = 0
    least: list[Pair] = field(default_factory=list)
    spread: list[Pair] = field(default_factory=list)


@dataclass(frozen=True, order=True)
class RemovedByRule:
    """A document that a rule removed; `draw` is a number of its key, by which some are drawn."""

    draw: int
    key: DocKey
    value: float


@dataclass(frozen=True, order=True)
class Span:
    """A place of a document with an item of a benchmark."""

    draw: int
    key: DocKey
    item: str
    match: str  # exact or near, and the share of the item's words
    text: str
    item_text: str


@dataclass
class LostLines:
    """What documents lost by repeated lines: by source documents, lines and bytes; and those that lost most bytes."""

    sums: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    most: list[tuple[int, DocKey]] = field(default_factory=list)  # -bytes, key


@dataclass
class DataRun:
    """All that a run of data has recorded. `faults` are sentences on records that are damaged."""

    out: Path
    options: dict[str, Any]
    funnel: Funnel | None
    states: dict[str, str]
    stages: dict[str, StageRecord]
    manifests: dict[str, Manifest]
    versions: dict[str, str]
    faults: list[str]
    removals: Removals | None = None
    clusters: Counter[int] | None = None  # of sizes
    by_rule: dict[str, list[RemovedByRule]] = field(default_factory=dict)
    benchmarks: Report | None = None
    spans: dict[str, list[Span]] = field(default_factory=dict)
    lines: LostLines | None = None

    @property
    def text_column(self) -> str:
        """The field of the documents that holds the text."""
        return str(self.options.get("text_column", "text"))

    @property
    def alarms(self) -> list[str]:
        """Return what looks wrong: as the finished run said it, or in the stages that have finished."""
        if self.funnel:
            return self.funnel.warnings
        try:
            config = load_options(self.options, self.out)
        except ValueError:
            return []
        found = (line for name, record in self.stages.items() for line in find_alarms(config, name, record.counts))
        return at_folder(found, self.out)


def is_data_run(out: Path) -> bool:
    """Whether a folder is a run's of data; a training run has a file of the same name."""
    return is_file(out / RUN_FILE) and "dedup" in (recorded_options(out) or ("dedup",))


def read_data_run(out: Path) -> DataRun:
    """Read a run's records, those that are there and whole. Raises InputError where its run.json is damaged."""
    faults = list[str]()
    options = read_options(out)
    states = stages_of_run(out, "")
    stages = dict[str, StageRecord]()
    for name, state in states.items():
        path = out / STATE_DIR / "run" / f"{name}.json"
        try:
            if state == "finished":
                stages[name] = msgspec.json.decode(read_file(path), type=StageRecord)
        except ValueError as error:
            faults.append(f"the record of {name} ({path}) is damaged: {error}")
    funnel = None
    manifests = dict[str, Manifest]()
    try:
        funnel = show_funnel(out) if is_file(out / FUNNEL_FILE) else None
    except GristmillError as error:
        faults.append(str(error))
    for name in (TRAIN, HELD_OUT):
        try:
            if funnel or "tokenize_holdout" in stages:
                manifests[name] = Manifest.load(out / "tokens" / name)
        except (InputError, UsageError) as error:
            faults.append(str(error))
    run = DataRun(out, options, funnel, states, stages, manifests, _read_versions(out), faults)
    if "generate_connected_components" in stages:
        run.clusters = _read_table(run, CLUSTERS, _cluster_sizes)
    if "generate_duplicates_dict" in stages:
        run.removals = _read_table(run, DUPLICATES, _sum_removals)
    if "filter_quality" in stages:
        run.by_rule = _read_table(run, REMOVED, _draw_by_rule) or {}
    if "remove_lines" in stages:
        run.lines = _read_table(run, LINES, _sum_lines)
    if "decontaminate" in stages:
        run.spans = _read_table(run, SPANS, draw_spans) or {}
        try:
            run.benchmarks = read_report(out / BENCHMARKS)
        except (ValueError, OSError, GristmillError) as error:
            faults.append(f"{out / BENCHMARKS} is damaged or missing ({error}): what it records is not shown")
    return run


def load_options(options: dict[str, Any], out: Path) -> RunConfig:
    """The options of a run, as run.json has them. Raises ValueError for those of another version."""
    return msgspec.convert(
        {**options, "out": str(out)}, RunConfig, strict=False, dec_hook=lambda kind, text: kind(text)
    )


def _read_table(run: DataRun, name: Path, read: Any) -> Any:
    """Return what `read` finds in a table; None, with a fault, if it is missing or damaged."""
    if not is_file(run.out / name):
        run.faults.append(f"{run.out / name} is missing: what it records is not shown")
        return None
    try:
        with local_copies([run.out / name]) as (copy,), open_parquet(copy) as file:
            return read(file)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        run.faults.append(f"{run.out / name} is damaged ({error}): what it records is not shown")
        return None


def _cluster_sizes(file: pq.ParquetFile) -> "Counter[int]":
    """How many clusters have each size; the documents of a cluster follow one another."""
    sizes = Counter[int]()
    last = -1  # number of the last cluster, which may continue in the next batch
    size = 0  # of the last cluster so far
    for batch in file.iter_batches(columns=["cluster"]):
        numbers = batch.column(0).to_numpy()
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        lengths = np.diff(starts, append=len(numbers))
        if numbers[0] == last:
            lengths[0] += size
        else:
            sizes[size] += 1
        found, counts = np.unique(lengths[:-1], return_counts=True)
        sizes.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
        last = int(numbers[-1])
        size = int(lengths[-1])
    sizes[size] += 1
    del sizes[0]
    return sizes


def _sum_removals(file: pq.ParquetFile) -> Removals:
    found = Removals()
    total = file.metadata.num_rows
    row = 0
    spread_over = {place * total // _SPREAD for place in range(_SPREAD)} if total else set[int]()
    least = list[tuple[float, int, Pair]]()
    for batch in file.iter_batches(columns=["file", "row", "kept_file", "kept_row", "similarity"]):
        count = batch.num_rows
        sources = [_sources(batch.column(name)) for name in ("file", "kept_file")]
        names = sorted({*sources[0], *sources[1]})
        places = [np.searchsorted(names, its) for its in sources]
        cells, counts = np.unique(places[0] * len(names) + places[1], return_counts=True)
        for cell, documents in zip(cells.tolist(), counts.tolist(), strict=True):
            found.between[names[cell // len(names)], names[cell % len(names)]] += documents
        similar = batch.column("similarity").cast(pa.float64()).to_numpy(zero_copy_only=False)
        measured = similar[~np.isnan(similar)]
        found.unmeasured += count - len(measured)
        bins = np.bincount(np.clip((measured * BINS).astype(int), 0, BINS - 1), minlength=BINS)
        found.similar = [old + new for old, new in zip(found.similar, bins.tolist(), strict=True)]
        order = np.lexsort((np.arange(count), np.nan_to_num(similar, nan=2.0)))[:_LEAST].tolist()
        spread = [place - row for place in spread_over if row <= place < row + count]
        for place in {*order, *spread}:
            (it,) = batch.slice(place, 1).to_pylist()
            keys = DocKey(it["file"], it["row"]), DocKey(it["kept_file"], it["kept_row"])
            pair = Pair(*keys, it["similarity"])
            if place in order:
                least.append((2.0 if pair.similarity is None else pair.similarity, row + place, pair))
            if place in spread:
                found.spread.append(pair)
        row += count
        least = sorted(least)[:_LEAST]
    found.least = [pair for _, _, pair in least]
    found.spread = [pair for pair in sorted(found.spread) if pair not in found.least]
    return found


def _sources(files: pa.Array) -> "np.ndarray[Any, Any]":
    """The source of each file: its first folder."""
    coded = files.dictionary_encode()
    names = np.array([name.partition("/")[0] for name in coded.dictionary.to_pylist()], dtype=object)
    return names[coded.indices.to_numpy()]


def _draw_by_rule(file: pq.ParquetFile) -> "dict[str, list[RemovedByRule]]":
    """Some documents of each rule, drawn by a hash of their keys."""
    found = dict[str, list[RemovedByRule]]()
    for row in _rows(file, ["file", "row", "rule", "value"]):
        key = DocKey(row["file"], row["row"])
        some = found.setdefault(row["rule"], [])
        drawn = RemovedByRule(crc32(str(key).encode("utf-8", "replace")), key, row["value"])
        if len(some) < _OF_A_RULE or drawn < some[-1]:
            found[row["rule"]] = sorted([*some, drawn])[:_OF_A_RULE]
    return dict(sorted(found.items()))


def draw_spans(file: pq.ParquetFile) -> "dict[str, list[Span]]":
    """Some places of each benchmark, drawn by a hash of the documents' keys; of an item in a document the first."""
    found = dict[str, list[Span]]()
    for row in _rows(file, ["file", "row", "benchmark", "item", "match", "share", "text", "item_text"]):
        key = DocKey(row["file"], row["row"])
        match = f"{row['match']} {row['share']:.0%}"
        span = Span(crc32(str(key).encode("utf-8", "replace")), key, row["item"], match, row["text"], row["item_text"])
        some = found.get(row["benchmark"], [])
        if (span.key, span.item) not in [(one.key, one.item) for one in some]:
            found[row["benchmark"]] = sorted([*some, span])[:_OF_A_RULE]
    return dict(sorted(found.items()))


def _sum_lines(file: pq.ParquetFile) -> LostLines:
    found = LostLines()
    for row in _rows(file, ["file", "row", "units", "bytes"]):
        key = DocKey(row["file"], row["row"])
        documents, units, size = found.sums.get(key.source, (0, 0, 0))
        found.sums[key.source] = documents + 1, units + row["units"], size + row["bytes"]
        if len(found.most) < _LEAST or (-row["bytes"], key) < found.most[-1]:
            found.most = sorted([*found.most, (-row["bytes"], key)])[:_LEAST]
    return found


def _rows(file: pq.ParquetFile, columns: list[str]) -> Iterator[dict[str, Any]]:
    for batch in file.iter_batches(columns=columns):
        yield from batch.to_pylist()


def _read_versions(out: Path) -> dict[str, str]:
    """Versions of libraries that decide bytes, as the last stages noted them."""
    found = dict[str, str]()
    for folder in ("dup", "tokens/train", "tokenizer"):
        for ledger in Ledger.all_in(out / folder / STATE_DIR):
            for record in ledger.read().values():
                found |= {name: value for name, value in record.identity.items() if name in _VERSIONS}
    return dict(sorted(found.items()))
