"""Drops: the rows of each corpus file to leave out, as short documents or as duplicates."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gristmill.counts import Counts
from gristmill.errors import InputError
from gristmill.io.documents import DocKey
from gristmill.io.files import atomic_write
from gristmill.io.keys import KeySet, read_keys, stream_keys
from gristmill.io.parquet_tables import is_table, stream_table

SHORT = "short"
DUPLICATE = "duplicate"
_ROW_BITS = np.uint64(40)  # of a packed key


@dataclass(frozen=True)
class Drops:
    """Rows of one file to leave out, ascending."""

    short: NDArray[np.int64]
    duplicate: NDArray[np.int64]

    @classmethod
    def load(cls, path: Path) -> "Drops":
        """Read the .npz file that `write_drops` wrote for one corpus file."""
        with np.load(path) as stored:
            return cls(stored["short"], stored["duplicate"])

    def reasons(self, rows: NDArray[np.int64]) -> list[str]:
        """SHORT or DUPLICATE for each row to leave out, '' for the others; SHORT for a row that is both."""
        short, duplicate = np.isin(rows, self.short), np.isin(rows, self.duplicate)
        return np.where(short, SHORT, np.where(duplicate, DUPLICATE, "")).tolist()


def write_drops(duplicates: Path | None, short_docs: Path | None, files: list[str], outputs: list[Path]) -> Counts:
    """Split both key sets by corpus file: `outputs[i]` (.npz) gets the rows of `files[i]` to leave out.

    Where the kept document of a cluster is short, a duplicate replaces it (see find_replacements). A set
    in a .parquet table is streamed; the short documents' keys are in memory, 8 bytes each.
    Raises InputError if a set names a file that the corpus does not have.
    """
    short = read_keys(short_docs) if short_docs else {}
    replacements = find_replacements(duplicates, short) if duplicates else {}
    none, remaining = np.empty(0, np.int64), dict(zip(files, outputs, strict=True))
    _reject_unknown(short_docs, set(short) - set(files), files)
    for file, rows in stream_keys(duplicates) if duplicates else []:
        _reject_unknown(duplicates, {file} - set(remaining), files)
        _save(remaining.pop(file), short.get(file, none), np.setdiff1d(rows, replacements.get(file, none)))
    for file, output in remaining.items():
        _save(output, short.get(file, none), none)
    return Counts({}, [])


def find_replacements(duplicates: Path, short: KeySet) -> KeySet:
    """Duplicates to keep instead of a short document: of each cluster, the first one that is not short.

    Without replacements, a cluster whose kept document is short would lose its last copy. The provenance
    table (columns file, row, kept_file, kept_row) says which document was kept: `duplicates` itself or, if
    that is a pickle, the .parquet file of the same name. If there is no table, or it lists other duplicates than
    the pickle, there are no replacements.
    """
    table_path = duplicates.with_suffix(".parquet")
    numbers, packed = {file: number for number, file in enumerate(sorted(short))}, _pack(short)
    if not len(packed) or (not is_table(duplicates) and not _lists_exactly(table_path, read_keys(duplicates))):
        return {}
    first: dict[DocKey, DocKey] = {}  # short kept document → its replacement
    for table in stream_table(table_path, ["file", "row", "kept_file", "kept_row"]):
        is_short = _contains(packed, numbers, table, "file", "row")
        kept_is_short = _contains(packed, numbers, table, "kept_file", "kept_row")
        for line in table.filter(pa.array(~is_short & kept_is_short)).to_pylist():
            key, kept = DocKey(line["file"], line["row"]), DocKey(line["kept_file"], line["kept_row"])
            first[kept] = min(key, first.get(kept, key))
    rows: dict[str, list[int]] = defaultdict(list)
    for key in first.values():
        rows[key.file].append(key.row)
    return {file: np.array(sorted(found), np.int64) for file, found in rows.items()}


def check_all_found(counts: Counts, drops: Iterable[Path], key_sets: tuple[Path, ...]) -> None:
    """InputError unless pass 1 found every row to leave out; otherwise the key sets belong to another corpus."""
    rows = [np.union1d(loaded.short, loaded.duplicate) for loaded in map(Drops.load, drops)]
    named = sum(map(len, rows))
    found = counts.total(SHORT).documents + counts.total(DUPLICATE).documents
    if found != named:
        raise InputError(
            f"{' and '.join(map(str, key_sets))} name {named:,} documents, and {found:,} of them are in the corpus: "
            "they were made from another version of it. Run filter and the dedup stages again"
        )


def _reject_unknown(key_set: Path | None, unknown: set[str], files: list[str]) -> None:
    if unknown:
        raise InputError(
            f"{key_set} names {min(unknown)!r}, a file that the corpus does not have; it has {files[0]!r}, for "
            "example. Was it made from another folder? Names start with the source"
        )


def _save(output: Path, short: NDArray[np.int64], duplicate: NDArray[np.int64]) -> None:
    with atomic_write(output) as temporary, temporary.open("wb") as stored:
        np.savez(stored, short=short, duplicate=duplicate)


def _lists_exactly(table: Path, duplicates: KeySet) -> bool:
    """Whether a provenance table exists and lists these duplicates and no others."""
    if not table.is_file():
        return False
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
