"""Decisions of a mix: how often each document is in the train set, or that it is held out.

They are made from facts (facts.py), without the texts, by the same random numbers as pass 1 and pass 2 draw: epochs are
exact for each source, and so is the holdout, of which only a document's first copy may be. Then no document whose text
is held out is left in the train set.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gristmill.counts import HELD_OUT, IN_HOLDOUT, LEFT_OUT, READ, REPEATED, WRITTEN, Counts
from gristmill.engine.run import StageRun
from gristmill.engine.task import FileSet, Result, Task
from gristmill.errors import InputError
from gristmill.io.artefacts import encode_names, stream_table, write_table
from gristmill.io.external_sort import ExternalSorter, write_records
from preprocessing.mixing.band_epochs import BandEpochs
from preprocessing.mixing.drops import load_drops
from preprocessing.mixing.facts import GroupFacts, MixFacts, is_kept
from preprocessing.mixing.sampling import random_numbers, select_kth, write_numbers
from preprocessing.mixing.shuffle_buckets import NOT_ELIGIBLE
from preprocessing.mixing.split import Limits, held_out_documents
from preprocessing.steps.text_digest import DIGEST

HELD_OUT_COPY = -1  # in place of a number of copies: the document is held out
_SORTED = np.dtype([("digest", DIGEST)])
_FACTS_SHARE = 6  # documents that a task decides on, for each of which it reads the digest from the holdout
_NUMBERS = ("row", "copies", "bytes")
_COLUMNS = ("file", *_NUMBERS, "band")

Value = TypeVar("Value")


@dataclass(frozen=True)
class DecidedFile:
    """Decisions on one corpus file: ascending rows (n), copies of each (or HELD_OUT_COPY), and UTF-8 bytes of each.

    Of a row that is neither in the train set nor in the holdout copies are 0, or it is not there. `bands` are the
    names of the bands of its score (n), each '' in a mix without bands.
    """

    name: str
    rows: NDArray[np.int64]
    copies: NDArray[np.int64]
    sizes: NDArray[np.int64]
    bands: NDArray[np.str_]

    @property
    def train_copies(self) -> NDArray[np.int64]:
        """Return the copies (n) in the train set."""
        return np.maximum(self.copies, 0)

    def between(self, first: int, end: int) -> "DecidedFile":
        """Return the decisions on the rows from `first` to below `end`."""
        chosen = slice(*np.searchsorted(self.rows, (first, end)))
        return DecidedFile(self.name, self.rows[chosen], self.copies[chosen], self.sizes[chosen], self.bands[chosen])


@dataclass(frozen=True)
class _Drawn:
    """Documents (n) of one corpus file, why each is dropped ('' if it is not), and copies of each, 0 if dropped."""

    facts: MixFacts
    reasons: NDArray[np.str_]
    copies: NDArray[np.int64]


def _draw_copies(group: GroupFacts, epochs: BandEpochs, seed: int) -> Iterator[_Drawn]:
    """Yield the documents of each file of a group, with the copies that its weight asks for."""
    drops = load_drops(group.drops, group.names)
    for facts in group.load():
        reasons = drops[facts.name].reasons(facts.rows)
        numbers = random_numbers(seed, "weight", facts.name, facts.rows)
        copies = np.zeros(len(numbers), np.int64)
        for band, of_band in enumerate(epochs):
            chosen = facts.bands == band
            copies[chosen] = of_band.copies(numbers[chosen])
        copies[~is_kept(facts, reasons)] = 0
        yield _Drawn(facts, np.array(reasons, np.str_).reshape(len(copies)), copies)


def choose_holdout(
    run: StageRun,
    groups: Sequence[GroupFacts],
    epochs: Mapping[str, BandEpochs],
    fraction: float,
    seed: int,
    fan_in: int,
) -> tuple[Limits, Path, int]:
    """Return the largest holdout number that is held out of each source, the digests of the holdout, and their bytes.

    Exactly `fraction` of the source's documents are held out, and at least one of a source with two or more (unless
    `fraction` is 0), as of pass2.
    """
    numbers: dict[str, list[Path]] = {source: [] for source in epochs}
    documents = dict.fromkeys(epochs, 0)
    tasks = []
    for group in groups:
        output = run.work / "holdout numbers" / f"{group.label}.zst"
        arguments = {"group": group, "epochs": epochs[group.source], "seed": seed, "output": output}
        tasks.append(Task(group.label, write_holdout_numbers, arguments, (output,)))
        numbers[group.source].append(output)
    written = run.step("holdout numbers", tasks).values(int)
    for group, number in zip(groups, written, strict=True):
        documents[group.source] += number
    ranks = {source: held_out_documents(total, fraction) for source, total in documents.items()}
    limits = select_kth(run, "holdout limits", numbers, ranks, fan_in)
    outputs = []
    tasks = []
    for group in groups:
        output = run.work / "holdout digests" / f"{group.label}.digests"
        limit = limits[group.source]
        arguments = {"group": group, "epochs": epochs[group.source], "limit": limit, "seed": seed, "output": output}
        if limit is not None:
            tasks.append(Task(group.label, write_holdout_digests, arguments, (output,)))
            outputs.append(output)
    run.step("holdout digests", tasks)
    digests = run.work / "holdout.digests"
    arguments = {"files": FileSet(tuple(outputs)), "output": digests}
    task = Task("digests", sort_digests, arguments, (digests,), memory=run.options.memory_bytes)
    (record,) = run.step("digests", [task]).records
    return limits, digests, record.outputs[0].size


def write_holdout_numbers(group: GroupFacts, epochs: BandEpochs, seed: int, output: Path) -> Result:
    """Task: write a random number for each document that is in the mix, to choose the holdout by; count them."""
    chunks = [np.empty(0, np.uint64)]
    for drawn in _draw_copies(group, epochs, seed):
        in_mix = drawn.facts.rows[drawn.copies > 0]
        chunks.append(random_numbers(seed, "holdout", drawn.facts.name, in_mix))
    write_numbers(output, np.concatenate(chunks))
    return Result(Counts({}, []), sum(map(len, chunks)))


def _is_held_out(drawn: _Drawn, limit: int | None, seed: int) -> NDArray[np.bool_]:
    """Return whether each document (n) is held out, given the limit of its source."""
    if limit is None:
        return np.zeros(len(drawn.copies), np.bool_)
    numbers = random_numbers(seed, "holdout", drawn.facts.name, drawn.facts.rows)
    is_chosen = (numbers <= np.uint64(limit)) & (numbers != np.uint64(NOT_ELIGIBLE))
    return is_chosen & (drawn.copies > 0)


def write_holdout_digests(group: GroupFacts, epochs: BandEpochs, limit: int, seed: int, output: Path) -> None:
    """Task: write the digests of the documents of a group that are held out."""
    digests = []
    for drawn in _draw_copies(group, epochs, seed):
        digests.append(drawn.facts.digests[_is_held_out(drawn, limit, seed)])
    write_records(output, digests)


def sort_digests(files: FileSet, output: Path, memory: int) -> None:
    """Task: write the digests in all files as one file, sorted."""
    runs = output.with_name(f"{output.name}.runs")
    with ExternalSorter(runs, _SORTED, ("digest",), memory // 2) as sorter:
        for path in files.paths:
            sorter.add(np.fromfile(path, _SORTED))
        write_records(output, sorter)


def decide_tasks(
    groups: Sequence[GroupFacts],
    outputs: Sequence[Path],
    epochs: Mapping[str, BandEpochs],
    limits: Limits,
    digests: Path,
    seed: int,
    digest_bytes: int,
    documents: Sequence[int],
) -> Iterator[Task]:
    """Yield the tasks that decide, each on _FACTS_SHARE times as many documents as the holdout has.

    `documents` are the numbers of documents of each group.

    Else what tasks fetch would grow with the square of the corpus, as every task reads all digests.
    """
    start = 0
    size = 0
    for number, count in enumerate(documents):
        size += count
        if size < _FACTS_SHARE * digest_bytes // DIGEST.itemsize and number < len(groups) - 1:
            continue
        chosen = groups[start : number + 1]
        written = outputs[start : number + 1]
        sources = sorted({group.source for group in chosen})
        arguments = {
            "groups": list(chosen), "epochs": _of_sources(epochs, sources), "limits": _of_sources(limits, sources),
            "digests": digests, "seed": seed, "outputs": list(written),
        }  # fmt: skip
        yield Task(chosen[0].label, decide_groups, arguments, tuple(written))
        start = number + 1
        size = 0


def _of_sources(values: Mapping[str, Value], sources: Sequence[str]) -> dict[str, Value]:
    """Return the values of some sources, by source."""
    return {source: values[source] for source in sources}


def decide_groups(
    groups: list[GroupFacts],
    epochs: dict[str, BandEpochs],
    limits: Limits,
    digests: Path,
    seed: int,
    outputs: list[Path],
) -> Result:
    """Task: write the decisions on the documents of some groups, and count them by reason.

    The value is, of each group, the bytes of text in the train set and in the holdout, copies included.
    """
    counts = Counts({}, [])
    held_out = np.fromfile(digests, DIGEST)
    text_bytes = list[tuple[int, int]]()
    for group, output in zip(groups, outputs, strict=True):
        decided_files = []
        reasons_of_files = []
        train_bytes = 0
        holdout_bytes = 0
        band_names = [""]
        if group.bands:
            band_names = list(group.bands.names)
        names = np.array(band_names, np.str_)
        for drawn in _draw_copies(group, epochs[group.source], seed):
            decided, reasons = _decide(drawn, group.source, names, limits[group.source], held_out, seed, counts)
            decided_files.append(decided)
            reasons_of_files.append(reasons)
            train_bytes += int((decided.train_copies * decided.sizes).sum())
            holdout_bytes += int(decided.sizes[decided.copies == HELD_OUT_COPY].sum())
        write_decisions(output, decided_files, reasons_of_files)
        text_bytes.append((train_bytes, holdout_bytes))
    return Result(counts, text_bytes)


def _decide(
    drawn: _Drawn,
    source: str,
    bands: NDArray[np.str_],
    limit: int | None,
    held_out: NDArray[np.bytes_],
    seed: int,
    counts: Counts,
) -> tuple[DecidedFile, NDArray[np.str_]]:
    """Return the decisions on the documents (n) of one file, and why some are not in the mix; count them.

    `bands` are the names of the bands, by number.
    """
    facts = drawn.facts
    copies = drawn.copies
    is_chosen = _is_held_out(drawn, limit, seed)
    in_holdout = (copies > 0) & _contains(held_out, facts.digests)
    train = np.where(in_holdout, 0, copies)
    sizes = facts.sizes

    def count(reason: str, documents: NDArray[np.int64]) -> None:
        total = int(documents.sum())
        if total:
            counts.add(source, reason, int((documents * sizes).sum()), total)

    count(READ, np.ones(len(copies), np.int64))
    counts.add_lengths(source, sizes)
    for reason in sorted(set(drawn.reasons.tolist()) - {""}):
        count(reason, (drawn.reasons == reason).astype(np.int64))
    count(LEFT_OUT, ((copies == 0) & (drawn.reasons == "")).astype(np.int64))
    count(REPEATED, np.maximum(copies - 1, 0))
    count(HELD_OUT, is_chosen.astype(np.int64))
    count(IN_HOLDOUT, np.where(in_holdout, copies - is_chosen, 0))
    count(WRITTEN, train)
    decided = np.where(is_chosen, HELD_OUT_COPY, train)
    reasons = np.where(drawn.reasons == "", LEFT_OUT, drawn.reasons)
    reasons = np.where(in_holdout, IN_HOLDOUT, reasons)
    reasons = np.where(decided != 0, "", reasons)
    return DecidedFile(facts.name, facts.rows, decided, sizes, bands[facts.bands]), reasons


def _contains(ordered: NDArray[np.bytes_], digests: NDArray[np.bytes_]) -> NDArray[np.bool_]:
    """Return whether each digest (n) is among the `ordered` ones."""
    if not len(ordered):
        return np.zeros(len(digests), np.bool_)
    at = np.minimum(np.searchsorted(ordered, digests), len(ordered) - 1)
    return ordered[at] == digests


def write_decisions(path: Path, files: Sequence[DecidedFile], reasons: Sequence[NDArray[np.str_]]) -> None:
    """Write the decisions on all documents of some files as a Parquet table; `reasons`: see _decide."""
    numbers = [np.empty(0, np.int32)]
    rows = [np.empty(0, np.int64)]
    copies = [np.empty(0, np.int64)]
    sizes = [np.empty(0, np.int64)]
    bands = list[str]()
    as_list = list[str]()
    for number, (file, of_file) in enumerate(zip(files, reasons, strict=True)):
        numbers.append(np.full(len(file.rows), number, np.int32))
        rows.append(file.rows)
        copies.append(file.copies)
        sizes.append(file.sizes)
        bands += file.bands.tolist()
        as_list += of_file.tolist()
    names = pa.array([file.name for file in files], pa.string())
    columns = {
        "file": pa.DictionaryArray.from_arrays(np.concatenate(numbers), names),
        "row": pa.array(np.concatenate(rows)),
        "copies": pa.array(np.concatenate(copies)),
        "bytes": pa.array(np.concatenate(sizes)),
        "band": pa.array(bands, pa.string()).dictionary_encode(),
        "reason": pa.array(as_list, pa.string()),
    }
    write_table(path, columns)


def load_decisions(path: Path) -> dict[str, DecidedFile]:
    """Return the decisions on the documents in the mix, by file, as write_decisions wrote them.

    Raises InputError if the table is damaged.
    """
    files: dict[str, DecidedFile] = {}
    tables = list(stream_table(path, _COLUMNS))
    if not tables:
        return files
    table = pa.concat_tables(tables)
    encoded = encode_names(table.column("file"), path)
    numbers = encoded.indices.to_numpy()
    columns = {name: table.column(name).to_numpy() for name in _NUMBERS}
    bands = np.array(table.column("band").to_pylist(), np.str_)
    for number, name in enumerate(encoded.dictionary.to_pylist()):
        chosen = np.flatnonzero((numbers == number) & (columns["copies"] != 0))
        rows = columns["row"][chosen]
        if np.any(np.diff(rows) <= 0):
            raise InputError(f"{path}: rows of {name} are not in order: remove it, and run mix again")
        files[name] = DecidedFile(name, rows, columns["copies"][chosen], columns["bytes"][chosen], bands[chosen])
    return files
