"""Drops: the rows of each corpus file to leave out, as short documents or as duplicates."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gristmill.counts import Counts
from gristmill.engine.task import Result
from gristmill.errors import InputError
from gristmill.io.documents import DocKey, source_of
from gristmill.io.files import atomic_write
from gristmill.io.keys import KeySet, Rows, read_keys, stream_keys
from gristmill.io.parquet_tables import read_column_names, stream_table

SHORT = "short"
DUPLICATE = "duplicate"
_OF_INDEX = "index:"  # before the names of files of a corpus deduplicated before
_NO_ROWS = np.empty(0, np.int64)
_ROW_BITS = np.uint64(40)  # of a packed key


@dataclass(frozen=True)
class Drops:
    """Rows of one file to leave out, ascending."""

    short: Rows
    duplicate: Rows

    def reasons(self, rows: Rows) -> list[str]:
        """SHORT or DUPLICATE for each row to leave out, '' for the others; SHORT for a row that is both."""
        short, duplicate = np.isin(rows, self.short), np.isin(rows, self.duplicate)
        return np.where(short, SHORT, np.where(duplicate, DUPLICATE, "")).tolist()


def load_drops(path: Path, files: Sequence[str]) -> dict[str, Drops]:
    """Read what `write_drops` wrote for a group of `files`."""
    with np.load(path) as stored:
        short, duplicate = (np.split(stored[name], stored[f"{name}_ends"][:-1]) for name in (SHORT, DUPLICATE))
    return dict(zip(files, map(Drops, short, duplicate), strict=True))


def write_drops(
    duplicates: Path | None,
    provenance: Path | None,
    short_docs: Path | None,
    groups: list[tuple[str, ...]],
    outputs: list[Path],
) -> Result:
    """Task: split both key sets by corpus file: `outputs[i]` (.npz) gets the rows of the files in `groups[i]`.

    Where the kept document of a cluster is short, a duplicate replaces it (see find_replacements). A set
    in a .parquet table is streamed; the short documents' keys are in memory, 8 bytes each. The groups' files are
    sorted. The result's value is the number of documents to leave out. Raises InputError if a set names a
    file that the corpus does not have, or the kept document of a cluster is in such a file.
    """
    group_of = {file: number for number, files in enumerate(groups) for file in files}
    short = read_keys(short_docs) if short_docs else {}
    _reject_unknown(short_docs, short, group_of)
    if duplicates and provenance:
        _reject_kept_elsewhere(duplicates, provenance, group_of)
    replacements = find_replacements(duplicates, provenance, short) if duplicates else {}
    named, remaining = 0, dict(enumerate(groups))

    def save(number: int, found: KeySet) -> int:
        drops = [
            Drops(short.get(file, _NO_ROWS), np.setdiff1d(found.get(file, _NO_ROWS), replacements.get(file, _NO_ROWS)))
            for file in remaining.pop(number)
        ]
        _save(outputs[number], drops)
        return sum(len(np.union1d(of_file.short, of_file.duplicate)) for of_file in drops)

    for number, keys in groupby(_stream_known(duplicates, group_of), key=lambda item: group_of[item[0]]):
        named += save(number, dict(keys))
    for number in list(remaining):
        named += save(number, {})
    return Result(Counts({}, []), named)


def find_replacements(duplicates: Path, provenance: Path | None, short: KeySet) -> KeySet:
    """Duplicates to keep instead of a short document: of each cluster, the next that is not short.

    Without replacements, a cluster whose kept document is short would lose its last copy. The table `provenance`
    (columns file, row, kept_file, kept_row) says which document was kept. The next is that of the lowest rank, a column
    that tables of generate_duplicates_dict have, so that the policy of --keep holds; else the first in key order. If
    there is no table, or it lists other duplicates than the key set `duplicates`, there are no replacements.
    """
    numbers, packed = {file: number for number, file in enumerate(sorted(short))}, _pack(short)
    if not len(packed) or not provenance:
        return {}
    if provenance != duplicates and not _lists_exactly(provenance, read_keys(duplicates)):
        return {}
    columns = ["file", "row", "kept_file", "kept_row"]
    columns += {"rank"}.intersection(read_column_names(provenance))
    first: dict[DocKey, tuple[int, DocKey]] = {}  # short kept document → rank and key of its replacement
    for table in stream_table(provenance, columns):
        is_short = _contains(packed, numbers, table, "file", "row")
        kept_is_short = _contains(packed, numbers, table, "kept_file", "kept_row")
        for line in table.filter(pa.array(~is_short & kept_is_short)).to_pylist():
            key, kept = DocKey(line["file"], line["row"]), DocKey(line["kept_file"], line["kept_row"])
            found = (line.get("rank") or 0, key)
            first[kept] = min(found, first.get(kept, found))
    rows: dict[str, list[int]] = defaultdict(list)
    for _, key in first.values():
        rows[key.file].append(key.row)
    return {file: np.array(sorted(found), np.int64) for file, found in rows.items()}


def check_all_found(counts: Counts, named: int, key_sets: Iterable[Path]) -> None:
    """InputError unless pass 1 found all `named` rows to leave out; otherwise the key sets are of another corpus."""
    found = counts.total(SHORT).documents + counts.total(DUPLICATE).documents
    if found != named:
        raise InputError(
            f"{' and '.join(map(str, key_sets))} name {named:,} documents, and {found:,} of them are in the corpus: "
            "they were made from another version of it. Run filter and the dedup stages again"
        )


def _stream_known(key_set: Path | None, files: Mapping[str, int]) -> Iterator[tuple[str, Rows]]:
    """The files and rows of a key set, sorted by file. Raises InputError for a file that is not in `files`."""
    for file, rows in stream_keys(key_set) if key_set else ():
        _reject_unknown(key_set, [file], files)
        yield file, rows


def _reject_unknown(key_set: Path | None, named: Iterable[str], files: Mapping[str, int]) -> None:
    unknown = sorted(file for file in named if file not in files)
    if unknown:
        example = next(iter(files))
        raise InputError(
            f"{key_set} names {unknown[0]!r}, a file that the corpus does not have; it has {example!r}, for "
            "example. Was it made from another folder? Names start with the source"
        )


def _reject_kept_elsewhere(duplicates: Path, provenance: Path, files: Mapping[str, int]) -> None:
    """InputError if a document was kept in a file neither in `files` nor of an index: no copy of it would be left.

    A table of other duplicates says nothing of these, and is not looked at; see find_replacements.
    """
    if "kept_file" not in read_column_names(provenance):
        return
    kept: set[str] = set()
    for table in stream_table(provenance, ["kept_file"]):
        kept.update(filter(None, table.column("kept_file").unique().to_pylist()))
    gone = sorted(str(file) for file in kept if file not in files and not str(file).startswith(_OF_INDEX))
    if gone and (provenance == duplicates or _lists_exactly(provenance, read_keys(duplicates))):
        raise InputError(
            f"{provenance} keeps documents of {gone[0]!r}, a file that the corpus does not have, in place of copies "
            "that it has: their signatures are of a file that is gone. Run to_hash for all files, or, if the source is "
            f"gone, remove its signatures (MINHASH/{source_of(gone[0])}); then run the dedup stages after it again"
        )


def _save(output: Path, drops: Sequence[Drops]) -> None:
    columns = {SHORT: [of_file.short for of_file in drops], DUPLICATE: [of_file.duplicate for of_file in drops]}
    arrays: dict[str, Any] = {name: np.concatenate(found) for name, found in columns.items()}
    arrays |= {f"{name}_ends": np.cumsum([len(rows) for rows in found]) for name, found in columns.items()}
    with atomic_write(output) as temporary, temporary.open("wb") as stored:
        np.savez(stored, **arrays)


def _lists_exactly(table: Path, duplicates: KeySet) -> bool:
    """Whether a provenance table lists these duplicates and no others."""
    listed = read_keys(table)
    return listed.keys() == duplicates.keys() and all(
        np.array_equal(listed[file], rows) for file, rows in duplicates.items()
    )


def _pack(keys: KeySet) -> NDArray[np.uint64]:
    """Keys as ascending integers: the file's number in name order above the row's 40 bits."""
    parts = [(np.uint64(i) << _ROW_BITS) + keys[file].astype(np.uint64) for i, file in enumerate(sorted(keys))]
    return np.concatenate([*parts, np.empty(0, np.uint64)])


def _contains(
    packed: NDArray[np.uint64], numbers: dict[str, int], table: pa.Table, file: str, row: str
) -> NDArray[np.bool_]:
    """For each row of a table (n), whether `packed` contains the key in its columns `file` and `row`."""
    encoded = table.column(file).combine_chunks().dictionary_encode()
    number = np.array([numbers.get(name, len(numbers)) for name in encoded.dictionary.to_pylist()], np.uint64)
    keys = (number[encoded.indices.to_numpy()] << _ROW_BITS) + table.column(row).to_numpy().astype(np.uint64)
    at = np.searchsorted(packed, keys)
    return (at < len(packed)) & (packed[np.minimum(at, len(packed) - 1)] == keys)
