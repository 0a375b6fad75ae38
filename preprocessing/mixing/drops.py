"""Drops: the rows of each corpus file to leave out, as short documents, as duplicates, or as a list of yours says."""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gristmill.counts import Counts
from gristmill.engine.options import RunOptions
from gristmill.engine.task import Result, Task
from gristmill.errors import InputError, UsageError, require
from gristmill.io.artefacts import encode_names, integers, open_table, stream_table
from gristmill.io.documents import DocKey, source_of
from gristmill.io.external_sort import ExternalSorter
from gristmill.io.keys import KeySet, PackedKeys, Rows, by_group, iter_keys, stream_keys
from gristmill.storage.files import is_file, read_file
from gristmill.storage.local import atomic_write

SHORT = "short"
DUPLICATE = "duplicate"
LOW = "low score"
LISTED = "in your list"
DROPPED = (SHORT, DUPLICATE, LISTED, LOW)  # and the arrays of a file of drops
_NO_ROWS = np.empty(0, np.int64)
# reasons in a _DROP; files are numbered as in the groups
_SHORT, _DUPLICATE, _REPLACEMENT, _LISTED, _LOW, _KEPT = range(6)
_DROP = np.dtype([("file", "<u4"), ("row", "<i8"), ("reason", "u1")])
_NO_DROPS = np.empty(0, _DROP)
# A duplicate and the document that was kept, files by number in name order.
_LINK = np.dtype([("kept_file", "<u4"), ("kept_row", "<i8"), ("rank", "<i8"), ("file", "<u4"), ("row", "<i8")])


class Drops(NamedTuple):
    """Rows of one file to leave out, ascending."""

    short: Rows
    duplicate: Rows
    listed: Rows = _NO_ROWS
    low: Rows = _NO_ROWS

    def reasons(self, rows: Rows) -> list[str]:
        """The reason for each row to leave out, '' for the others; of several LISTED, then SHORT, then LOW."""
        reasons = np.full(len(rows), "", object)
        for reason, own in ((DUPLICATE, self.duplicate), (LOW, self.low), (SHORT, self.short), (LISTED, self.listed)):
            reasons[np.isin(rows, own)] = reason
        found: list[str] = reasons.tolist()
        return found


def load_drops(path: Path, files: Sequence[str]) -> dict[str, Drops]:
    """Read what `split_drops` wrote for a group of `files`."""
    with np.load(path) as stored:
        columns = (np.split(stored[name], stored[f"{name}_ends"][:-1]) for name in DROPPED)
        return dict(zip(files, map(Drops, *columns), strict=True))


def note_provenance(duplicates: Path | None, is_of_others: bool, options: RunOptions) -> None:
    """Say that nothing tells which document of each cluster was kept, if there is no table of that, or a wrong one."""
    if duplicates and not options.quiet and (is_of_others or not _provenance(duplicates)):
        table = duplicates.with_suffix(".parquet")
        lacking = (
            f"{table} does not list the keys of {duplicates}, and is not used"
            if is_of_others
            else f"there is no {table}"
        )
        print(
            f"note: {lacking}, to say which document of each cluster was kept: where that one is short, or of a source "
            "with weight 0, the whole cluster is dropped (generate_duplicates_dict writes this table)",
            file=sys.stderr,
        )


def _provenance(duplicates: Path) -> Path | None:
    """The table of which document was kept in place of each duplicate: the .parquet file of the same name."""
    table = duplicates.with_suffix(".parquet")
    return table if is_file(table) else None


def drops_task(
    drops: dict[tuple[str, ...], Path],
    duplicates: Path | None,
    short_docs: Path | None,
    absent: tuple[str, ...],
    keep_list: Path | None,
    options: RunOptions,
    low_scores: Path | None = None,
) -> Task:
    """The task that splits the key sets by groups of corpus files; `drops` maps each group to its output."""
    outputs = list(drops.values())
    arguments = {
        "duplicates": duplicates, "provenance": duplicates and _provenance(duplicates), "short_docs": short_docs,
        "absent": absent, "groups": list(drops), "outputs": outputs, "keep_list": keep_list,
        "low_scores": low_scores,
    }  # fmt: skip
    return Task("drops", split_drops, arguments, tuple(outputs), memory=options.memory_bytes)


def split_drops(
    duplicates: Path | None,
    provenance: Path | None,
    short_docs: Path | None,
    absent: tuple[str, ...],
    groups: list[tuple[str, ...]],
    outputs: list[Path],
    memory: int,
    keep_list: Path | None = None,
    low_scores: Path | None = None,
) -> Result:
    """Task: split the key sets by corpus file: `outputs[i]` (.npz) gets the rows of the files in `groups[i]`.

    `keep_list` has the last word: what it keeps is no drop, what it drops is one.

    Where the kept document of a cluster is short, has a low score, or is of one of the sources `absent`, which have
    weight 0, a duplicate replaces it (see _replacements). Sets are sorted on disk within `memory`; the rows of one
    group are in memory. The result's value is the number of documents to leave out, how many duplicates of them are
    short, or have a low score, too, and whether `provenance` is of no use, as it lists other duplicates. Raises
    InputError if a set names a file that the corpus does not have.
    """
    unwanted = [key_set for key_set in (short_docs, low_scores) if key_set]
    table = provenance if duplicates and (unwanted or absent) else None
    is_of_others = bool(table and duplicates and not _is_of(table, duplicates))
    places = {file: place for place, file in enumerate(file for files in groups for file in files)}
    drops, short, links = (outputs[0].with_name(f"{outputs[0].name}.{name}") for name in ("drops", "short", "links"))
    with ExternalSorter(drops, _DROP, ("file", "row"), memory // 4) as sorter:
        for reason, key_set in ((_SHORT, short_docs), (_LOW, low_scores), (_DUPLICATE, duplicates)):
            for file, rows in _only_known(iter_keys(key_set) if key_set else (), places, key_set):
                sorter.add(_records(places[file], rows, reason))
        for reason, listed in zip((_KEPT, _LISTED), read_keep_list(keep_list) if keep_list else (), strict=False):
            for file, rows in _only_known(listed.items(), places, keep_list):
                sorter.add(_records(places[file], rows, reason))
        if table and not is_of_others:
            numbers = {file: number for number, file in enumerate(sorted(places))}
            place = np.array([places[file] for file in numbers], np.uint32)
            with PackedKeys.of(unwanted, numbers, short, memory // 4) as short_keys:
                left_out = _LeftOut.of(short_keys, absent)
                for found in _replacements(table, left_out, links, memory // 4):
                    sorter.add(_records(place[found["file"]], found["row"], _REPLACEMENT))
        named = 0
        both = 0
        for records, files, output in zip(by_group(sorter, map(len, groups)), groups, outputs, strict=True):
            of_files = [_drops_of(records.get(number, _NO_DROPS)) for number in range(len(files))]
            _save(output, of_files)
            for of_file in of_files:
                named += len(np.unique(np.concatenate(of_file)))
                unwanted_rows = np.union1d(of_file.short, of_file.low)
                both += len(np.intersect1d(unwanted_rows, of_file.duplicate, assume_unique=True))
        return Result(Counts({}, []), (named, both, is_of_others))


def _drops_of(records: NDArray) -> Drops:
    short, duplicate, replacement, listed, low, kept = (
        np.unique(records["row"][records["reason"] == it]) for it in range(_KEPT + 1)
    )
    copies = np.setdiff1d(duplicate, np.union1d(replacement, kept))
    return Drops(np.setdiff1d(short, kept), copies, listed, np.setdiff1d(low, kept))


def read_keep_list(path: Path) -> tuple[KeySet, KeySet]:
    """The keys to keep and those to drop, of lines `keep KEY` and `drop KEY`. Raises UsageError that names the line."""
    require(is_file(path), f"keep_list {path}: expected a file of lines keep KEY and drop KEY, but there is none")
    lines = read_file(path).decode("utf-8", "replace").splitlines()
    found: dict[str, dict[str, set[int]]] = {"keep": {}, "drop": {}}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        word, _, text = line.strip().partition(" ")
        try:
            key = DocKey.parse(text)
        except ValueError:
            word = ""
        if word not in found:
            raise UsageError(
                f"{path}, line {number}: expected keep KEY or drop KEY, such as keep web/a.jsonl@3, got {line!r}"
            )
        other = found["drop" if word == "keep" else "keep"]
        if key.row in other.get(key.file, ()):
            raise UsageError(f"{path}, line {number}: expected each key once, got {key} to keep and to drop")
        found[word].setdefault(key.file, set()).add(key.row)
    keep, drop = ({file: np.array(sorted(rows), np.int64) for file, rows in its.items()} for its in found.values())
    return keep, drop


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
    with open_table(provenance) as table:
        columns = ["file", "row", "kept_file", "kept_row", *({"rank"} & {*table.schema_arrow.names})]
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


def _records(file: int | NDArray, row: Rows, reason: int) -> NDArray:
    records = np.empty(len(row), _DROP)
    records["file"], records["row"], records["reason"] = file, row, reason
    return records


def check_all_found(counts: Counts, named: int, key_sets: Iterable[Path]) -> None:
    """InputError unless pass 1 found all `named` rows to leave out; otherwise the key sets are of another corpus."""
    found = sum(counts.total(reason).documents for reason in DROPPED)
    if found != named:
        raise InputError(
            f"{' and '.join(map(str, key_sets))} name {named:,} documents, and {found:,} of them are in the corpus: "
            "they were made from another version of it, or a list names a row that is none. Run filter and the dedup "
            "stages again, or correct the list"
        )


def _only_known(
    found: Iterable[tuple[str, Rows]], files: Mapping[str, int], key_set: Path | None
) -> Iterator[tuple[str, Rows]]:
    """Yield the keys of known files, in any order. Raises InputError, at the end, for a file not in `files`."""
    unknown: set[str] = set()
    for file, rows in found:
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
    columns = dict(zip(DROPPED, zip(*drops, strict=True), strict=True))
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
