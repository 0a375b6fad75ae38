"""Records of a run, read for a report: options, counts of stages, tables in parts, token manifests."""

import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar
from zlib import crc32

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from markupsafe import Markup
from numpy.typing import NDArray

from gristmill.counts import HELD_OUT
from gristmill.engine.execution.staging import local_copies
from gristmill.engine.staleness.ledger import Ledger
from gristmill.errors import GristmillError, InputError, UsageError
from gristmill.io.documents import DocKey
from gristmill.io.files import STATE_DIR
from gristmill.io.parquet_files import open_parquet
from gristmill.io.token_shards import Manifest
from gristmill.storage.files import is_file, read_file
from gristmill_cli.alarms import find_alarms
from gristmill_cli.documents.duplicates import CLUSTERS, DUPLICATES, Pair
from gristmill_cli.documents.removed_texts import removed_table
from gristmill_cli.funnel import FUNNEL_FILE, TRAIN, Funnel, at_folder, show_funnel
from gristmill_cli.run_config import RunConfig, load_options, read_options
from gristmill_cli.run_records import StageRecord
from gristmill_cli.stages.mix import DecideMix
from gristmill_cli.stages.pipeline import judging_stage, stages_in_run
from gristmill_cli.stages.spec import StageSpec
from gristmill_cli.status.command import stages_of_run
from preprocessing.mixing.mix_manifest import MixManifest
from preprocessing.quality.recipe import RULES

RUN_RECORDS = f"{STATE_DIR}/run"  # the folder of a record for each stage
BINS = 50  # of similarities from 0 to 1
_LEAST_SIMILAR = 3  # the least similar pairs whose texts are shown
_SPREAD = 4  # pairs from all of the table whose texts are shown
_NOT_SIMILAR = 2.0  # in the place of a similarity that was not measured: sorts after all
SHOWN_DOCUMENTS = 2  # documents of a rule or benchmark whose texts are shown
_VERSIONS = {"pyarrow", "unicode", "numpy", "numba", "sentencepiece", "tokenizers", "ftfy", "zstandard"}
Table = TypeVar("Table")


@dataclass
class Removals:
    """The table of duplicates in sums, between which sources and how similar, and some of its pairs."""

    between: Counter[tuple[str, str]] = field(default_factory=Counter)  # (removed, kept)
    similar: list[int] = field(default_factory=lambda: [0] * BINS)  # documents by similarity
    unmeasured: int = 0
    least_alike: list[Pair] = field(default_factory=list)
    spread: list[Pair] = field(default_factory=list)


@dataclass(frozen=True, order=True)
class SampledRemoval:
    """A document that a rule removed; documents with the smallest hashes of their keys are shown."""

    hash: int
    key: DocKey
    value: float | None


class StageSection(Protocol):
    """Section of a stage in the report: read with the run's other records, shown later."""

    def show(self, run: "DataRun") -> Markup:
        """Return the section."""


@dataclass
class DataRun:
    """All that a run of data has recorded. `faults` are sentences on records that are damaged."""

    out: Path
    options: dict[str, Any]
    states: dict[str, str]
    funnel: Funnel | None = None
    stages: dict[str, StageRecord] = field(default_factory=dict)
    mix: MixManifest | None = None
    manifests: dict[str, Manifest] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    removals: Removals | None = None
    clusters: Counter[int] | None = None  # of sizes
    by_rule: dict[str, list[SampledRemoval]] = field(default_factory=dict)
    by_detail: Counter[tuple[str, str]] = field(default_factory=Counter)  # documents by rule and language or domain
    sections: list[StageSection] = field(default_factory=list)

    @property
    def text_column(self) -> str:
        """Return the field of the documents that holds the text."""
        return str(self.options.get("text_column", "text"))

    @property
    def config(self) -> RunConfig | None:
        """Return the options of the run; None if they are of another version."""
        try:
            return load_options(self.options, self.out)
        except ValueError:
            return None

    @property
    def alarms(self) -> list[str]:
        """Return what looks wrong: as the finished run said it, or in the stages that have finished."""
        if self.funnel:
            return self.funnel.warnings
        config = self.config
        if config is None:
            return []
        alarms = list[str]()
        for name, record in self.stages.items():
            alarms += find_alarms(config, name, record.counts)
        return at_folder(alarms, self.out)


def read_data_run(out: Path) -> DataRun:
    """Read the records of a run that are there and whole. Raises InputError where its run.json is damaged."""
    run = DataRun(out, options=read_options(out), states=stages_of_run(out, ""))
    _read_stages(run)
    _read_funnel(run)
    _read_mix(run)
    _read_manifests(run)
    run.versions = _read_versions(out)
    if "generate_connected_components" in run.stages:
        run.clusters = read_table(run, CLUSTERS, _cluster_sizes)
    if "generate_duplicates_dict" in run.stages:
        run.removals = read_table(run, DUPLICATES, _sum_removals)
    config = run.config
    if config and judging_stage(config).name in run.stages:
        table = removed_table(config).relative_to(out)
        if config.recipe or config.steps or is_file(out / table):
            run.by_rule = read_table(run, table, _sample_removals) or {}
            run.by_detail = read_table(run, table, _count_details) or Counter()
    for stage in stages_in_run(run.options):
        if stage.report_section and stage.name in run.stages:
            section = pkgutil.resolve_name(stage.report_section)(run, stage)
            if section is not None:
                run.sections.append(section)
    return run


def _read_stages(run: DataRun) -> None:
    for name, state in run.states.items():
        if state != "finished":
            continue
        path = run.out / RUN_RECORDS / f"{name}.json"
        try:
            run.stages[name] = msgspec.json.decode(read_file(path), type=StageRecord)
        except ValueError as error:
            run.faults.append(f"the record of {name} ({path}) is damaged: {error}")


def _read_funnel(run: DataRun) -> None:
    try:
        if is_file(run.out / FUNNEL_FILE):
            run.funnel = show_funnel(run.out)
    except GristmillError as error:
        run.faults.append(str(error))


def _read_mix(run: DataRun) -> None:
    if DecideMix.name not in run.stages:
        return
    try:
        run.mix = MixManifest.load(run.out / DecideMix.output)
    except (InputError, UsageError) as error:
        run.faults.append(str(error))


def _read_manifests(run: DataRun) -> None:
    if not run.funnel and "encode" not in run.stages:
        return
    for name in (TRAIN, HELD_OUT):
        try:
            run.manifests[name] = Manifest.load(run.out / "tokens" / name)
        except (InputError, UsageError) as error:
            run.faults.append(str(error))


def read_table(run: DataRun, name: Path, read: Callable[[pq.ParquetFile], Table]) -> Table | None:
    """Return what `read` makes of a table; None, with a fault, if it is missing or damaged."""
    if not is_file(run.out / name):
        run.faults.append(f"{run.out / name} is missing: what it records is not shown")
        return None
    try:
        with local_copies([run.out / name]) as (copy,), open_parquet(copy) as file:
            return read(file)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        run.faults.append(f"{run.out / name} is damaged ({error}): what it records is not shown")
        return None


def read_losses(run: DataRun, stage: StageSpec, read: Callable[[pq.ParquetFile], Table]) -> Table | None:
    """Return what `read` makes of the table of what documents lost in a stage; None if it is missing or damaged."""
    assert stage.losses is not None, stage.name
    return read_table(run, stage.losses, read)


def _cluster_sizes(file: pq.ParquetFile) -> Counter[int]:
    """Return how many clusters have each size; the documents of a cluster follow one another."""
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
        distinct, counts = np.unique(lengths[:-1], return_counts=True)
        sizes.update(dict(zip(distinct.tolist(), counts.tolist(), strict=True)))
        last = int(numbers[-1])
        size = int(lengths[-1])
    sizes[size] += 1
    del sizes[0]
    return sizes


def _sum_removals(file: pq.ParquetFile) -> Removals:
    """Return the table of duplicates in sums, the least similar pairs, and some from all of the table."""
    removals = Removals()
    total = file.metadata.num_rows
    spread_rows = {number * total // _SPREAD for number in range(_SPREAD)}
    least_alike = list[tuple[float, int, Pair]]()  # similarity, row
    first_row = 0
    for batch in file.iter_batches(columns=["file", "row", "kept_file", "kept_row", "similarity"]):
        similarities = batch.column("similarity").cast(pa.float64()).to_numpy(zero_copy_only=False)
        _count_between_sources(removals, batch)
        _count_similarities(removals, similarities)
        end_row = first_row + batch.num_rows
        least_similar = _least_similar(similarities)
        spread = {row - first_row for row in spread_rows if first_row <= row < end_row}
        for row in {*least_similar, *spread}:
            pair = _pair_of_row(batch, row)
            if row in least_similar:
                similarity = pair.similarity
                if similarity is None:
                    similarity = _NOT_SIMILAR
                least_alike.append((similarity, first_row + row, pair))
            if row in spread:
                removals.spread.append(pair)
        least_alike = sorted(least_alike)[:_LEAST_SIMILAR]
        first_row = end_row
    removals.least_alike = [pair for _, _, pair in least_alike]
    others = [pair for pair in removals.spread if pair not in removals.least_alike]
    removals.spread = sorted(others)
    return removals


def _count_between_sources(removals: Removals, batch: pa.RecordBatch) -> None:
    """Count removed documents by their source and the source of the kept one."""
    removed = _sources(batch.column("file"))
    kept = _sources(batch.column("kept_file"))
    names = sorted({*removed, *kept})
    cells = np.searchsorted(names, removed) * len(names) + np.searchsorted(names, kept)
    for cell, documents in zip(*np.unique(cells, return_counts=True), strict=True):
        row, column = divmod(int(cell), len(names))
        removals.between[names[row], names[column]] += int(documents)


def _count_similarities(removals: Removals, similarities: NDArray[np.float64]) -> None:
    """Count removed documents by similarity, or as not measured (NaN)."""
    measured = similarities[~np.isnan(similarities)]
    removals.unmeasured += len(similarities) - len(measured)
    numbers = np.clip((measured * BINS).astype(int), 0, BINS - 1)
    for number, documents in enumerate(np.bincount(numbers, minlength=BINS).tolist()):
        removals.similar[number] += documents


def _least_similar(similarities: NDArray[np.float64]) -> list[int]:
    """Return the rows of the smallest similarities; rows that were not measured come last."""
    known = np.nan_to_num(similarities, nan=_NOT_SIMILAR)
    return np.argsort(known, kind="stable")[:_LEAST_SIMILAR].tolist()


def _pair_of_row(batch: pa.RecordBatch, row: int) -> Pair:
    (values,) = batch.slice(row, 1).to_pylist()
    removed = DocKey(values["file"], values["row"])
    kept = DocKey(values["kept_file"], values["kept_row"])
    return Pair(removed, kept, values["similarity"])


def _sources(files: pa.Array) -> "np.ndarray[Any, Any]":
    """Return the source of each file: its first folder."""
    coded = files.dictionary_encode()
    names = np.array([name.partition("/")[0] for name in coded.dictionary.to_pylist()], dtype=object)
    return names[coded.indices.to_numpy()]


def _sample_removals(file: pq.ParquetFile) -> dict[str, list[SampledRemoval]]:
    """Return some documents of each rule, sampled by a hash of their keys."""
    samples = dict[str, list[SampledRemoval]]()
    for row in rows_of(file, ["file", "row", "rule", "value"]):
        key = DocKey(row["file"], row["row"])
        removal = SampledRemoval(hash_of(key), key, row["value"])
        of_rule = samples.setdefault(row["rule"], [])
        if len(of_rule) < SHOWN_DOCUMENTS or removal < of_rule[-1]:
            samples[row["rule"]] = sorted([*of_rule, removal])[:SHOWN_DOCUMENTS]
    return dict(sorted(samples.items()))


def _count_details(file: pq.ParquetFile) -> Counter[tuple[str, str]]:
    """Return how many documents each rule of a recipe removed, by language or domain, where it names one."""
    counts = Counter[tuple[str, str]]()
    for row in rows_of(file, ["rule", "detail"]):
        if row["detail"] and row["rule"] in RULES:
            counts[row["rule"], row["detail"]] += 1
    return counts


def hash_of(key: DocKey) -> int:
    return crc32(str(key).encode("utf-8", "replace"))


def rows_of(file: pq.ParquetFile, columns: list[str]) -> Iterator[dict[str, Any]]:
    for batch in file.iter_batches(columns=columns):
        yield from batch.to_pylist()


def _read_versions(out: Path) -> dict[str, str]:
    """Return versions of libraries that decide bytes, as the last stages noted them."""
    versions = dict[str, str]()
    for folder in ("dup", "tokens/train", "tokenizer"):
        for ledger in Ledger.all_in(out / folder / STATE_DIR):
            for record in ledger.read().values():
                for name in _VERSIONS & record.identity.keys():
                    versions[name] = record.identity[name]
    return dict(sorted(versions.items()))
