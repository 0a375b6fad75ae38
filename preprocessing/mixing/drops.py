"""Drops: the rows of each corpus file to leave out, as short documents or as duplicates."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gristmill.counts import Counts
from gristmill.engine.task import Result
from gristmill.errors import InputError
from gristmill.io.documents import source_of
from gristmill.io.external_sort import ExternalSorter
from gristmill.io.keys import PackedKeys, Rows, by_file, iter_keys, stream_keys
from gristmill.io.parquet_tables import encode_names, integers, read_column_names, stream_table
from gristmill.storage.local import atomic_write

SHORT = "short"
DUPLICATE = "duplicate"
_NO_ROWS = np.empty(0, np.int64)
_SHORT, _DUPLICATE, _REPLACEMENT = range(3)  # reasons in a _DROP; files are numbered as in the groups
_DROP = np.dtype([("file", "<u4"), ("row", "<i8"), ("reason", "u1")])
_NO_DROPS = np.empty(0, _DROP)
# A duplicate and the document that was kept, files by number in name order.
_LINK = np.dtype([("kept_file", "<u4"), ("kept_row", "<i8"), ("rank", "<i8"), ("file", "<u4"), ("row", "<i8")])


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
    """Read what `split_drops` wrote for a group of `files`."""
    with np.load(path) as stored:
        columns = (np.split(stored[name], stored[f"{name}_ends"][:-1]) for name in (SHORT, DUPLICATE))
        return dict(zip(files, map(Drops, *columns), strict=True))


def split_drops(
    duplicates: Path | None,
    provenance: Path | None,
    short_docs: Path | None,
    absent: tuple[str, ...],
    groups: list[tuple[str, ...]],
    outputs: list[Path],
    memory: int,
) -> Result:
    """Task: split both key sets by corpus file: `outputs[i]` (.npz) gets the rows of the files in `groups[i]`.

    Where the kept document of a cluster is short, or of one of the sources `absent`, which have weight 0, a duplicate
    replaces it (see _replacements). Sets are sorted on disk within `memory`; the rows of one file are in memory. The
    result's value is the number of documents to leave out, how many of them are short and duplicates, too, and whether
    `provenance` is of no use, as it lists other duplicates. Raises InputError if a set names a file that the corpus
    does not have.
    """
    table = provenance if duplicates and (short_docs or absent) else None
    is_of_others = bool(table and duplicates and not _is_of(table, duplicates))
    places = {file: place for place, file in enumerate(file for files in groups for file in files)}
    drops, short, links = (outputs[0].with_name(f"{outputs[0].name}.{name}") for name in ("drops", "short", "links"))
    with ExternalSorter(drops, _DROP, ("file", "row"), memory // 4) as sorter:
        for reason, key_set in ((_SHORT, short_docs), (_DUPLICATE, duplicates)):
            for file, rows in _iter_known(key_set, places):
                sorter.add(_records(_DROP, places[file], rows, reason))
        if table and not is_of_others:
            numbers = {file: number for number, file in enumerate(sorted(places))}
            place = np.array([places[file] for file in numbers], np.uint32)
            with PackedKeys.of([short_docs] if short_docs else [], numbers, short, memory // 4) as short_keys:
                left_out = _LeftOut.of(short_keys, absent)
                for found in _replacements(table, left_out, links, memory // 4):
                    sorter.add(_records(_DROP, place[found["file"]], found["row"], _REPLACEMENT))
        return Result(Counts({}, []), (*_save_all(groups, outputs, by_file(sorter)), is_of_others))


def _save_all(
    groups: list[tuple[str, ...]], outputs: list[Path], found: Iterator[tuple[int, NDArray]]
) -> tuple[int, int]:
    """Write the drops of all groups, given the _DROPs of files by place, in order; the groups one by one.

    Returns how many documents they are, and how many of these are both short and duplicates.
    """
    named, both, place, following = 0, 0, 0, next(found, None)
    for files, output in zip(groups, outputs, strict=True):
        drops = []
        for _ in files:
            records = _NO_DROPS
            if following and following[0] == place:
                records, following = following[1], next(found, None)
            drops.append(_drops_of(records))
            place += 1
        _save(output, drops)
        for of_file in drops:
            twice = len(np.intersect1d(of_file.short, of_file.duplicate, assume_unique=True))
            named, both = named + len(of_file.short) + len(of_file.duplicate) - twice, both + twice
    return named, both


def _drops_of(records: NDArray) -> Drops:
    """The drops of a file, given its _DROPs."""
    short, duplicate, replacement = (np.unique(records["row"][records["reason"] == it]) for it in range(3))
    return Drops(short, np.setdiff1d(duplicate, replacement))


@dataclass(frozen=True)
class _LeftOut:
    """Documents that the mix leaves out for other reasons than a copy: short ones, and those of absent sources.

    `is_absent` says it of each file by number, and of files that the corpus does not have last.
    """

    short: PackedKeys
    is_absent: NDArray[np.bool_]

    @classmethod
    def of(cls, short: PackedKeys, absent: Collection[str]) -> "_LeftOut":
        return cls(short, np.array([*(source_of(file) in absent for file in short.numbers), False]))

    def __bool__(self) -> bool:
        return bool(len(self.short) or self.is_absent.any())

    def contains(self, files: NDArray[np.integer], rows: Rows) -> NDArray[np.bool_]:
        """Whether each document (n) is left out, given the numbers of files (n) and rows (n)."""
        return self.short.contains(files, rows) | self.is_absent[files]


def _replacements(provenance: Path, left_out: _LeftOut, folder: Path, memory: int) -> Iterator[NDArray]:
    """Duplicates to keep instead of a document that is left out: of each cluster, the next that is not; as _LINKs.

    Without replacements, a cluster whose kept document is left out would lose its last copy. The table `provenance`
    (columns file, row, kept_file, kept_row) says which document was kept. The next is that of the lowest rank, a column
    that tables of generate_duplicates_dict have, so that the policy of --keep holds; else the first in key order.
    """
    columns = ["file", "row", "kept_file", "kept_row"]
    columns += {"rank"}.intersection(read_column_names(provenance))
    with ExternalSorter(folder, _LINK, ("kept_file", "kept_row", "rank", "file", "row"), memory) as sorter:
        for table in stream_table(provenance, columns) if left_out else ():
            links = _links(table, provenance, left_out.short.numbers)
            is_left_out = left_out.contains(links["file"], links["row"])
            sorter.add(links[~is_left_out & left_out.contains(links["kept_file"], links["kept_row"])])
        last = np.empty(0, _LINK)
        for block in sorter:
            both = np.concatenate([last, block])
            is_new = (np.diff(both["kept_file"].astype(np.int64)) != 0) | (np.diff(both["kept_row"]) != 0)
            yield block[is_new if len(last) else np.append(True, is_new)]
            last = block[-1:]


def _links(table: pa.Table, path: Path, numbers: Mapping[str, int]) -> NDArray:
    """The rows of the table `path` as _LINKs (n); a file without a number gets the next one."""
    links = np.zeros(table.num_rows, _LINK)
    for name in ("file", "kept_file"):
        encoded = encode_names(table.column(name), path, name, missing="")
        number = np.array([numbers.get(file, len(numbers)) for file in encoded.dictionary.to_pylist()], np.uint32)
        links[name] = number[encoded.indices.to_numpy()]
    for name in ("row", "kept_row", *({"rank"} & set(table.column_names))):
        links[name] = integers(table.column(name).fill_null(0), name, path)
    return links


def _records(dtype: np.dtype, file: int | NDArray, row: Rows, reason: int) -> NDArray:
    records = np.empty(len(row), dtype)
    records["file"], records["row"], records["reason"] = file, row, reason
    return records


def check_all_found(counts: Counts, named: int, key_sets: Iterable[Path]) -> None:
    """InputError unless pass 1 found all `named` rows to leave out; otherwise the key sets are of another corpus."""
    found = counts.total(SHORT).documents + counts.total(DUPLICATE).documents
    if found != named:
        raise InputError(
            f"{' and '.join(map(str, key_sets))} name {named:,} documents, and {found:,} of them are in the corpus: "
            "they were made from another version of it. Run filter and the dedup stages again"
        )


def _iter_known(key_set: Path | None, files: Mapping[str, int]) -> Iterator[tuple[str, Rows]]:
    """The files and rows of a key set, in any order. Raises InputError, at the end, for a file not in `files`."""
    unknown: set[str] = set()
    for file, rows in iter_keys(key_set) if key_set else ():
        if file in files:
            yield file, rows
        else:
            unknown.add(file)
    if unknown:
        example = next(iter(files))
        raise InputError(
            f"{key_set} names {min(unknown)!r}, a file that the corpus does not have; it has {example!r}, for "
            "example. Was it made from another folder? Names start with the source. If a source was removed, or "
            "renamed, run the stages that made it for the whole corpus at once (filter and to_hash with `all`)"
        )


def _save(output: Path, drops: Sequence[Drops]) -> None:
    found = [(of_file.short, of_file.duplicate) for of_file in drops]
    columns = dict(zip((SHORT, DUPLICATE), zip(*found, strict=True), strict=True))
    arrays: dict[str, Any] = {name: np.concatenate(found) for name, found in columns.items()}
    arrays |= {f"{name}_ends": np.cumsum([len(rows) for rows in found]) for name, found in columns.items()}
    with atomic_write(output) as temporary, temporary.open("wb") as stored:
        np.savez(stored, **arrays)


def _is_of(provenance: Path, duplicates: Path) -> bool:
    """Whether a provenance table lists these duplicates and no others."""
    if provenance == duplicates:
        return True
    both = zip_longest(stream_keys(provenance), stream_keys(duplicates), fillvalue=("", _NO_ROWS))
    return all(one[0] == other[0] and np.array_equal(one[1], other[1]) for one, other in both)
