"""Drops: the rows of each corpus file to leave out, as short documents, as duplicates, or as a list of yours says."""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gristmill.batches import numbered
from gristmill.counts import FAILED, Counts
from gristmill.engine.options import RunOptions
from gristmill.engine.task import FileSet, Result, Task
from gristmill.errors import InputError
from gristmill.io.artefacts import encode_names, integers, open_table, stream_table
from gristmill.io.documents import source_of
from gristmill.io.external_sort import ExternalSorter
from gristmill.io.keys import PackedKeys, Rows, by_group, iter_keys, stream_keys
from gristmill.storage.files import is_file
from gristmill.storage.local import atomic_write
from preprocessing.mixing.keep_list import KeepList

SHORT = "short"
DUPLICATE = "duplicate"
LOW = "low score"
LISTED = "in your list"
DROPPED = (SHORT, DUPLICATE, LISTED, LOW, FAILED)  # and the arrays of a file of drops
_NO_ROWS = np.empty(0, np.int64)
# reasons in a _DROP; files are numbered as in the groups
_SHORT, _DUPLICATE, _REPLACEMENT, _LISTED, _LOW, _FAILED, _KEPT = range(7)
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
    failed: Rows = _NO_ROWS

    def reasons(self, rows: Rows) -> list[str]:
        """Return the reason for each row to leave out, '' for the others; of several LISTED, then SHORT, then LOW.

        A document on which a score failed has no other reason than a line in a list.
        """
        reasons = np.full(len(rows), "", object)
        reasons[np.isin(rows, self.duplicate)] = DUPLICATE
        reasons[np.isin(rows, self.failed)] = FAILED
        reasons[np.isin(rows, self.low)] = LOW
        reasons[np.isin(rows, self.short)] = SHORT
        reasons[np.isin(rows, self.listed)] = LISTED
        as_list: list[str] = reasons.tolist()
        return as_list


def load_drops(path: Path, files: Sequence[str]) -> dict[str, Drops]:
    """Return what `split_drops` wrote for a group of `files`, by file."""
    rows_of_files = []
    with np.load(path) as stored:
        for name in DROPPED:
            rows_of_files.append(np.split(stored[name], stored[f"{name}_ends"][:-1]))
    return dict(zip(files, map(Drops, *rows_of_files), strict=True))


def note_provenance(duplicates: Path | None, is_of_others: bool, options: RunOptions) -> None:
    """Print a note if no table tells which document of each cluster was kept, or a wrong one."""
    if not duplicates or options.quiet:
        return
    table = duplicates.with_suffix(".parquet")
    if is_of_others:
        lacking = f"{table} does not list the keys of {duplicates}, and is not used"
    elif not _provenance(duplicates):
        lacking = f"there is no {table}"
    else:
        return
    print(
        f"note: {lacking}, to say which document of each cluster was kept: where that one is short, or of a source "
        "with weight 0, the whole cluster is dropped (generate_duplicates_dict writes this table)",
        file=sys.stderr,
    )


def _provenance(duplicates: Path) -> Path | None:
    """Return the table of which document was kept in place of each duplicate: the .parquet file of the same name."""
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
    listed: FileSet | None = None,
    low_after_copies: Path | None = None,
    failed: Path | None = None,
) -> Task:
    """Return the task that splits the key sets by groups of corpus files; `drops` maps each group to its output."""
    outputs = list(drops.values())
    arguments: dict[str, Any] = {
        "duplicates": duplicates, "provenance": duplicates and _provenance(duplicates), "short_docs": short_docs,
        "absent": absent, "groups": list(drops), "outputs": outputs, "keep_list": keep_list,
        "low_scores": low_scores,
    }  # fmt: skip
    if listed:
        arguments["listed"] = listed
    if low_after_copies:
        arguments["low_after_copies"] = low_after_copies
    if failed:
        arguments["failed"] = failed
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
    listed: FileSet | None = None,
    low_after_copies: Path | None = None,
    failed: Path | None = None,
) -> Result:
    """Task: split the key sets by corpus file: `outputs[i]` (.npz) gets the rows of the files in `groups[i]`.

    `keep_list` has the last word: what it keeps is no drop, what it drops is one; `listed` are the documents whose
    text it drops.

    Where the kept document of a cluster is short, has a low score, or is of one of the sources `absent`, which have
    weight 0, a duplicate replaces it (see _replacements). It does not for documents whose scores after
    copies are low, or failed: their copies have no score. Sets are sorted on disk within `memory`; the rows of one
    group are in memory. The result's value is the number of documents to leave out, how many duplicates of them are
    short, or have a low score, too, and whether `provenance` is of no use, as it lists other duplicates. Raises
    InputError if a set names a file that the corpus does not have.
    """
    unwanted = [key_set for key_set in (short_docs, low_scores) if key_set]
    table = provenance if duplicates and (unwanted or absent) else None
    is_of_others = bool(table and duplicates and not _is_of(table, duplicates))
    numbers = numbered(chain.from_iterable(groups))  # as _DROP and by_group number them
    first_output = outputs[0]
    sorted_drops = first_output.with_name(f"{first_output.name}.drops")
    sorted_short = first_output.with_name(f"{first_output.name}.short")
    sorted_links = first_output.with_name(f"{first_output.name}.links")
    with ExternalSorter(sorted_drops, _DROP, ("file", "row"), memory // 4) as sorter:
        for reason, key_set in (
            (_SHORT, short_docs),
            (_LOW, low_scores),
            (_LOW, low_after_copies),
            (_FAILED, failed),
            (_DUPLICATE, duplicates),
        ):
            if key_set:
                for file, rows in _only_known(iter_keys(key_set), numbers, key_set):
                    sorter.add(_records(numbers[file], rows, reason))
        if keep_list:
            by_key = KeepList.read(keep_list)
            for reason, keys in ((_KEPT, by_key.kept), (_LISTED, by_key.dropped)):
                for file, rows in _only_known(keys.items(), numbers, keep_list, is_by_hand=True):
                    sorter.add(_records(numbers[file], rows, reason))
        for path in listed.paths if listed else ():
            for file, rows in iter_keys(path):
                sorter.add(_records(numbers[file], rows, _LISTED))
        if table and not is_of_others:
            in_name_order = numbered(sorted(numbers))
            number_of = np.array([numbers[file] for file in in_name_order], np.uint32)
            with PackedKeys.of(unwanted, in_name_order, sorted_short, memory // 4) as short_keys:
                left_out = _LeftOut.of(short_keys, absent)
                for links in _replacements(table, left_out, sorted_links, memory // 4):
                    sorter.add(_records(number_of[links["file"]], links["row"], _REPLACEMENT))
        named = 0
        both = 0
        for records, files, output in zip(by_group(sorter, map(len, groups)), groups, outputs, strict=True):
            of_files = list[Drops]()
            for number in range(len(files)):
                of_file = _drops_of(records.get(number, _NO_DROPS))
                of_files.append(of_file)
                named += len(np.unique(np.concatenate(of_file)))
                unwanted_rows = np.union1d(of_file.short, of_file.low)
                both += len(np.intersect1d(unwanted_rows, of_file.duplicate, assume_unique=True))
            _save(output, of_files)
        return Result(Counts({}, []), (named, both, is_of_others))


def _drops_of(records: NDArray) -> Drops:
    """Return the drops of one file, given its _DROPs."""
    rows_of = []
    for reason in range(_KEPT + 1):
        rows_of.append(np.unique(records["row"][records["reason"] == reason]))
    kept = rows_of[_KEPT]
    copies = np.setdiff1d(rows_of[_DUPLICATE], np.union1d(rows_of[_REPLACEMENT], kept))
    short = np.setdiff1d(rows_of[_SHORT], kept)
    low = np.setdiff1d(rows_of[_LOW], kept)
    failed = np.setdiff1d(rows_of[_FAILED], kept)
    return Drops(short, copies, rows_of[_LISTED], low, failed)


@dataclass(frozen=True)
class _LeftOut:
    """Documents that the mix leaves out for other reasons than a copy: short ones, and all of absent sources.

    `is_absent` says it of each file by number, and of files that the corpus does not have last.
    """

    short: PackedKeys
    is_absent: NDArray[np.bool_]

    @classmethod
    def of(cls, short: PackedKeys, absent: Collection[str]) -> "_LeftOut":
        """Return the documents with the keys `short`, and all of the sources `absent`."""
        is_absent = [source_of(file) in absent for file in short.numbers]
        return cls(short, np.array([*is_absent, False]))

    def __bool__(self) -> bool:
        return bool(len(self.short) or self.is_absent.any())

    def contains(self, files: NDArray[np.integer], rows: Rows) -> NDArray[np.bool_]:
        """Return whether each document (n) is left out, given the numbers of files (n) and rows (n)."""
        return self.short.contains(files, rows) | self.is_absent[files]


def _replacements(provenance: Path, left_out: _LeftOut, folder: Path, memory: int) -> Iterator[NDArray]:
    """Yield duplicates to keep instead of a document that is left out, as _LINKs: of each cluster the next that is not.

    Without replacements, a cluster whose kept document is left out would lose its last copy. The table `provenance`
    (columns file, row, kept_file, kept_row) says which document was kept. The next is that of the lowest rank, a column
    that tables of generate_duplicates_dict have, so that the policy of --keep holds; else the first in key order.
    """
    if not left_out:
        return
    columns = ["file", "row", "kept_file", "kept_row"]
    with open_table(provenance) as table:
        if "rank" in table.schema_arrow.names:
            columns.append("rank")
    with ExternalSorter(folder, _LINK, ("kept_file", "kept_row", "rank", "file", "row"), memory) as sorter:
        for table in stream_table(provenance, columns):
            links = _links(table, provenance, left_out.short.numbers)
            is_left_out = left_out.contains(links["file"], links["row"])
            sorter.add(links[~is_left_out & left_out.contains(links["kept_file"], links["kept_row"])])
        last = np.empty(0, _LINK)
        for block in sorter:
            both = np.concatenate([last, block])
            is_new = (np.diff(both["kept_file"].astype(np.int64)) != 0) | (np.diff(both["kept_row"]) != 0)
            if not len(last):
                is_new = np.append(True, is_new)
            yield block[is_new]
            last = block[-1:]


def _links(table: pa.Table, path: Path, numbers: Mapping[str, int]) -> NDArray:
    """Return the rows of the table `path` as _LINKs (n); a file without a number gets the next one."""
    links = np.zeros(table.num_rows, _LINK)
    for name in ("file", "kept_file"):
        encoded = encode_names(table.column(name), path, name, missing="")
        names = encoded.dictionary.to_pylist()
        number_of = np.array([numbers.get(file, len(numbers)) for file in names], np.uint32)
        links[name] = number_of[encoded.indices.to_numpy()]
    of_numbers = ["row", "kept_row"]
    if "rank" in table.column_names:
        of_numbers.append("rank")
    for name in of_numbers:
        links[name] = integers(table.column(name).fill_null(0), name, path)
    return links


def _records(file: int | NDArray, row: Rows, reason: int) -> NDArray:
    records = np.empty(len(row), _DROP)
    records["file"] = file
    records["row"] = row
    records["reason"] = reason
    return records


def check_all_found(counts: Counts, named: int, key_sets: Iterable[Path]) -> None:
    """Raise InputError unless pass 1 found all `named` rows to leave out; else the key sets are of another corpus."""
    dropped = sum(counts.total(reason).documents for reason in DROPPED)
    if dropped != named:
        raise InputError(
            f"{' and '.join(map(str, key_sets))} name {named:,} documents, and {dropped:,} of them are in the corpus: "
            "they were made from another version of it, or a list names a row that is none. Run filter and the dedup "
            "stages again, or correct the list"
        )


def _only_known(
    keys: Iterable[tuple[str, Rows]], files: Mapping[str, int], key_set: Path, is_by_hand: bool = False
) -> Iterator[tuple[str, Rows]]:
    """Yield the keys of known files, in any order. Raises InputError, at the end, for a file not in `files`."""
    unknown: set[str] = set()
    for file, rows in keys:
        if file in files:
            yield file, rows
        else:
            unknown.add(file)
    if unknown:
        example = next(iter(files))
        hint = (
            "Was it made from another folder? Names start with the source. If a source was removed, or renamed, run "
            "the stages that made it for the whole corpus at once (filter and to_hash with `all`)"
        )
        if is_by_hand:
            hint = (
                "Names start with the source. If that was removed, take its lines out; if it was renamed, put the "
                "lines in their place that `gristmill trace OUT ID` shows, which hold for a text under any name"
            )
        raise InputError(
            f"{key_set} names {min(unknown)!r}, a file that the corpus does not have; it has {example!r}, for "
            f"example. {hint}"
        )


def _save(output: Path, drops: Sequence[Drops]) -> None:
    """Write the drops of some files: the rows of all files one after another, and where each file's rows end."""
    arrays = dict[str, Any]()
    for name, rows_of_files in zip(DROPPED, zip(*drops, strict=True), strict=True):
        arrays[name] = np.concatenate(rows_of_files)
        arrays[f"{name}_ends"] = np.cumsum(list(map(len, rows_of_files)))
    with atomic_write(output) as temporary, temporary.open("wb") as stored:
        np.savez(stored, **arrays)


def _is_of(provenance: Path, duplicates: Path) -> bool:
    """Return whether a provenance table lists these duplicates and no others."""
    if provenance == duplicates:
        return True
    both = zip_longest(stream_keys(provenance), stream_keys(duplicates), fillvalue=("", _NO_ROWS))
    for (file, rows), (other_file, other_rows) in both:
        if file != other_file or not np.array_equal(rows, other_rows):
            return False
    return True
