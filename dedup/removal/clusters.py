"""The clusters of a connected_components file as MEMBER records; all members sorted by file and row, for the fetch."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
from numpy.typing import NDArray

from dedup.candidates.document_ids import is_of_index
from dedup.clustering.keep_policy import DROPPED, INDEXED, ORDINARY, Candidate, KeepPolicy
from gristmill.batches import numbered
from gristmill.counts import Counts
from gristmill.engine.task import Result
from gristmill.errors import InputError, UsageError
from gristmill.io.artefacts import encode_names, integers, is_table, load_pickle, open_table
from gristmill.io.documents import DocKey, Ranges, ReadInParts, Slice, source_of
from gristmill.io.external_sort import MAX_SCATTERED, ExternalSorter, write_records
from gristmill.io.keys import PackedKeys
from gristmill.storage.local import atomic_write

# A document of a cluster. `file` is an index into the sorted file names, `position` the document's row in the input.
MEMBER_FIELDS = [
    ("cluster", "<i8"), ("tier", "u1"), ("rank", "<i8"), ("fine_rank", "<i8"), ("position", "<i8"), ("file", "<i4"),
    ("row", "<i8"),
]  # fmt: skip
MEMBER = np.dtype(MEMBER_FIELDS)
KEEP_ORDER = ("cluster", "tier", "rank", "fine_rank", "position")  # fields of a MEMBER to sort by
_BLOCK = 1 << 16  # members read together
_MAX_PARTS = MAX_SCATTERED // 2  # a part has two files
_MIN_PART_SIZE = 4096  # documents in a part, or more if there would be more than _MAX_PARTS
_NOTED = 4096  # the plan has the row of every such member

Span = tuple[int, int]  # records first ≤ i < last of the members


@dataclass(frozen=True)
class Clusters:
    """The clusters of one file: a .parquet table is read in blocks, a pickle is loaded at once."""

    path: Path
    names: list[str]  # of all files, ascending
    loaded: NDArray | None  # the MEMBERs of a pickle

    @classmethod
    def open(cls, path: Path) -> "Clusters":
        """Open a clusters file. UsageError if there is none of that name, InputError if it is something else."""
        if is_table(path):
            return cls(path, _read_names(path), None)
        files = list[str]()
        rows = list[int]()
        numbers = list[int]()
        for number, cluster in enumerate(_load_clusters(path)):
            for key in cluster:
                files.append(key.file)
                rows.append(key.row)
                numbers.append(number)
        names = sorted(set(files))
        number_of = numbered(names)
        members = np.zeros(len(files), MEMBER)
        members["cluster"] = numbers
        members["file"] = [number_of[file] for file in files]
        members["row"] = rows
        members["position"] = np.arange(len(members))
        return cls(path, names, members)

    @property
    def count(self) -> int:
        """Return the number of documents in all clusters."""
        if self.loaded is not None:
            return len(self.loaded)
        return int(pa.parquet.read_metadata(self.path).num_rows)

    def blocks(self) -> Iterator[NDArray]:
        """Yield blocks of MEMBERs in the input's order, cluster by cluster; tier and ranks are 0.

        InputError if the file is damaged, or clusters do not ascend.
        """
        if self.loaded is None:
            yield from _table_blocks(self.path, self.names)
        else:
            for start in range(0, len(self.loaded), _BLOCK):
                yield self.loaded[start : start + _BLOCK].copy()


def _load_clusters(path: Path) -> list[list[DocKey]]:
    """Return the keys of each cluster of a pickle. InputError if it holds something else."""
    value = load_pickle(path)
    try:
        components, _, keys = value
        return [[DocKey.parse(keys[number]) for number in component] for component in components]
    except UsageError as error:
        raise InputError(f"{path}: {error}. Run generate_connected_components again") from error
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise InputError(
            f"{path}: expected (components, number of components, {{id: key}}), got something else; give the file that "
            "generate_connected_components wrote"
        ) from error


def _read_names(path: Path) -> list[str]:
    names: set[str] = set()
    for batch in _batches(path, ["file"]):
        column = encode_names(batch.column("file"), path)
        names.update(column.dictionary.take(column.indices.unique()).to_pylist())
    return sorted(names)


def _table_blocks(path: Path, names: list[str]) -> Iterator[NDArray]:
    values = pa.array(names, pa.string())
    position = 0
    last = 0
    for batch in _batches(path, ["cluster", "file", "row"]):
        members = np.zeros(batch.num_rows, MEMBER)
        column = encode_names(batch.column("file"), path)
        number = pa.compute.index_in(column.dictionary, value_set=values).to_numpy(zero_copy_only=False)
        members["file"] = number[column.indices.to_numpy()]
        for name in ("cluster", "row"):
            members[name] = integers(batch.column(name), name, path)
        members["position"] = np.arange(position, position + len(members))
        if np.any(np.diff(members["cluster"], prepend=last) < 0):
            raise InputError(f"{path}: clusters do not ascend. Run generate_connected_components again")
        position = position + len(members)
        last = members["cluster"][-1]
        yield members


def _batches(path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
    with open_table(path, ("cluster", "file", "row")) as file:
        for batch in file.iter_batches(_BLOCK, columns=columns):
            if batch.num_rows:
                yield batch


@contextmanager
def open_keep_order(
    names: list[str], keep: KeepPolicy, dropped: Sequence[Path], output: Path, memory: int
) -> Iterator["KeepOrder"]:
    """Yield the KeepOrder for the keys in the sets `dropped`; work files are named after `output`."""
    numbers = numbered(names)
    with PackedKeys.of(dropped, numbers, output.with_name(f"{output.name}.dropped"), memory) as keys:
        yield KeepOrder(names, keep, keys)


class KeepOrder:
    """Assigns tiers, and the ranks that depend on the key alone, to members of clusters.

    `names` are the files that members refer to by number; `dropped` are the keys that other stages remove.
    """

    def __init__(self, names: list[str], keep: KeepPolicy, dropped: PackedKeys) -> None:
        self.tiers = np.full(len(names), ORDINARY, np.uint8)
        self.ranks = np.zeros(len(names), np.int64)
        for number, name in enumerate(names):
            if is_of_index(name):
                self.tiers[number] = INDEXED
            if not keep.reads_documents:
                self.ranks[number], _ = keep.rank_or_last(Candidate(source_of(name)))
        self.dropped = dropped

    def assign(self, members: NDArray) -> NDArray:
        """Fill in `tier` and `rank` of MEMBERs (n), in place."""
        members["tier"] = self.tiers[members["file"]]
        members["rank"] = self.ranks[members["file"]]
        is_dropped = self.dropped.contains(members["file"], members["row"])
        members["tier"][is_dropped & (members["tier"] == ORDINARY)] = DROPPED
        return members

    @property
    def is_input_order(self) -> bool:
        """Return whether all tiers and ranks are equal, so that members need no sorting."""
        return bool((self.tiers == ORDINARY).all() and not self.ranks.any() and not len(self.dropped))


class MemberPlan(msgspec.Struct):
    """The order of all members by file, and how clusters are divided into parts: one task decides on each part."""

    names: list[str]  # of files, ascending
    starts: list[int]  # number of the first member of each file; last, the number of members
    parts: list[int]  # the first cluster of each part
    rows: list[int] = []  # in their files, of every member whose number is a multiple of _NOTED

    def span(self, name: str, first_row: int = 0, end_row: int | None = None) -> Span:
        """Return the members of a file in rows first_row ≤ row < end_row (None: to the end), and some around them."""
        number = bisect_left(self.names, name)
        first = self.starts[number]
        last = self.starts[number + 1]
        # The noted rows of this file are those from `low` to `high`.
        low = -(-first // _NOTED)
        high = min(-(-last // _NOTED), len(self.rows))
        before = bisect_left(self.rows, first_row, low, high)
        if before > low:
            first = (before - 1) * _NOTED
        if end_row is not None:
            after = bisect_left(self.rows, end_row, low, high)
            if after < high:
                last = after * _NOTED
        return first, last


@dataclass(frozen=True)
class SliceMembers:
    """A slice of a corpus file, a span with its members, and the row after the slice's last (None: the end)."""

    part: Slice
    span: Span
    end_row: int | None

    def read(self, members: "MemberFile") -> NDArray:
        """Return the MEMBERs of the slice, memory-mapped."""
        near = read_span(members, self.span)
        first = bisect_left(near["row"], self.part.first_row)
        end = len(near) if self.end_row is None else bisect_left(near["row"], self.end_row)
        return near[first:end]


def sort_members(
    input_file: Path, keep: KeepPolicy, dropped: tuple[Path, ...], members: Path, indexed: Path, memory: int
) -> Result:
    """Task: write the MEMBERs of all clusters by file and row, with tier and rank; the value is the MemberPlan.

    Also writes those of an index, by cluster, to `indexed`. InputError if the input is damaged, or a document is in it
    twice.
    """
    clusters = Clusters.open(input_file)
    size = max(_MIN_PART_SIZE, clusters.count // _MAX_PARTS)
    rows = list[int]()
    sizes = np.zeros(len(clusters.names), np.int64)
    parts = [0]
    with (
        open_keep_order(clusters.names, keep, dropped, members, memory) as order,
        ExternalSorter(members.with_name(f"{members.name}.runs"), MEMBER, ("file", "row"), memory) as sorter,
        atomic_write(indexed) as temporary,
        temporary.open("wb") as index,
    ):
        for block in clusters.blocks():
            starts = np.unique(block["cluster"][block["position"] % size == 0])
            parts += starts[starts > parts[-1]].tolist()
            order.assign(block)
            index.write(block[block["tier"] == INDEXED].tobytes())
            sizes += np.bincount(block["file"], minlength=len(sizes))
            sorter.add(block)
        write_records(members, _note_rows(reject_repeated(sorter, clusters.names), rows))
    starts_of_files = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    return Result(Counts({}, []), MemberPlan(clusters.names, starts_of_files, parts, rows))


@dataclass(frozen=True)
class MemberFile(ReadInParts):
    """The file of all members, of which a task reads the records `first` ≤ i < `last` alone."""

    path: Path
    first: int
    last: int

    @classmethod
    def of(cls, path: Path, spans: Sequence[Span]) -> "MemberFile":
        """Return the file as a task reads it that reads these spans."""
        filled = [(first, last) for first, last in spans if first < last]
        if not filled:
            return cls(path, 0, 0)
        return cls(path, min(first for first, _ in filled), max(last for _, last in filled))

    @property
    def ranges(self) -> Ranges:
        """Return the range from the first byte that is read to the last."""
        return ((self.first * MEMBER.itemsize, self.last * MEMBER.itemsize),)


def read_span(members: MemberFile, span: Span) -> NDArray:
    """Return the MEMBERs of a span, memory-mapped."""
    first, last = span
    if first == last:
        return np.empty(0, MEMBER)  # an empty range cannot be mapped
    return np.memmap(members.path, MEMBER, "r", first * MEMBER.itemsize, last - first)


def reject_repeated(blocks: Iterable[NDArray], names: Sequence[str]) -> Iterator[NDArray]:
    """Pass on blocks of records sorted by file and row. InputError if a document is in them twice."""
    last = None
    for block in blocks:
        both = block if last is None else np.concatenate([last, block])
        repeated = (np.diff(both["file"]) == 0) & (np.diff(both["row"]) == 0)
        if repeated.any():
            raise in_two_clusters(both[np.argmax(repeated)], names)
        yield block
        last = block[-1:]


def in_two_clusters(record: Any, names: Sequence[str], prefix: str = "") -> InputError:
    """Return the error for a document, of the fields `file` and `row` of a record, that is in the clusters twice."""
    key = f"{names[record[prefix + 'file']]}@{record[prefix + 'row']}"
    return InputError(f"{key} is in the clusters twice. Run generate_connected_components again")


def _note_rows(blocks: Iterable[NDArray], rows: list[int]) -> Iterator[NDArray]:
    """Pass on blocks of sorted MEMBERs; add to `rows` those that the plan has."""
    passed = 0
    for block in blocks:
        rows += block["row"][-passed % _NOTED :: _NOTED].tolist()
        passed += len(block)
        yield block
