"""Members of all clusters, sorted by file and row, so that each slice of the corpus reads only its own members."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from dedup.clustering.keep_policy import INDEXED, Keep
from dedup.removal.clusters import MEMBER, Clusters, open_keep_order
from gristmill.counts import Counts
from gristmill.engine.task import Result
from gristmill.errors import InputError
from gristmill.io.documents import Ranges, ReadInParts
from gristmill.io.external_sort import MAX_SCATTERED, ExternalSorter, write_records
from gristmill.io.readers import Slice
from gristmill.storage.local import atomic_write, atomic_write_bytes

_MAX_PARTS = MAX_SCATTERED // 2  # a part has two files
_MIN_PART_SIZE = 4096  # documents in a part, or more if there would be more than _MAX_PARTS
_NOTED = 4096  # the plan has the row of every such member

Span = tuple[int, int]  # records first ≤ i < last of the members


class MemberPlan(msgspec.Struct):
    """The order of all members by file, and how clusters are divided into parts: one task decides on each part."""

    names: list[str]  # of files, ascending
    starts: list[int]  # number of the first member of each file; last, the number of members
    parts: list[int]  # the first cluster of each part
    rows: list[int] = []  # in their files, of every member whose number is a multiple of _NOTED

    def span(self, name: str, first_row: int = 0, end_row: int | None = None) -> Span:
        """The members of a file in the rows first_row ≤ row < end_row (None: to the end), and some around them."""
        number = bisect_left(self.names, name)
        first, last = self.starts[number], self.starts[number + 1]
        low, high = -(-first // _NOTED), min(-(-last // _NOTED), len(self.rows))  # the rows of this file
        if (before := bisect_left(self.rows, first_row, low, high)) > low:
            first = (before - 1) * _NOTED
        if end_row is not None and (after := bisect_left(self.rows, end_row, low, high)) < high:
            last = after * _NOTED
        return first, last


@dataclass(frozen=True)
class SliceMembers:
    """A slice of a corpus file, a span with its members, and the row after the slice's last (None: the end)."""

    part: Slice
    span: Span
    end_row: int | None

    def read(self, members: "MemberFile") -> NDArray:
        """The MEMBERs of the slice, memory-mapped."""
        of_file = read_span(members, self.span)
        first = bisect_left(of_file["row"], self.part.first_row)
        return of_file[first : None if self.end_row is None else bisect_left(of_file["row"], self.end_row)]


def sort_members(
    input_file: Path, keep: Keep, dropped: tuple[Path, ...], members: Path, indexed: Path, names: Path, memory: int
) -> Result:
    """Task: write the MEMBERs of all clusters by file and row, with tier and rank; the value is the MemberPlan.

    Also writes those of an index, by cluster, to `indexed`, and the names of files to `names` (JSON).
    InputError if the input is damaged, or a document is in it twice.
    """
    clusters = Clusters.open(input_file)
    size, rows = max(_MIN_PART_SIZE, clusters.count // _MAX_PARTS), list[int]()
    sizes, parts = np.zeros(len(clusters.names), np.int64), [0]
    with (
        open_keep_order(clusters.names, keep, dropped, members, memory) as order,
        ExternalSorter(members.with_name(f"{members.name}.runs"), MEMBER, ("file", "row"), memory) as sorter,
        atomic_write(indexed) as temporary,
        temporary.open("wb") as index,
    ):
        for block in clusters.blocks():
            starts = set(block["cluster"][block["position"] % size == 0].tolist())
            parts += [cluster for cluster in sorted(starts) if cluster > parts[-1]]
            index.write(block[order.assign(block)["tier"] == INDEXED].tobytes())
            sizes += np.bincount(block["file"], minlength=len(sizes))
            sorter.add(block)
        write_records(members, _note_rows(_reject_repeated(sorter, clusters), rows))
    atomic_write_bytes(names, msgspec.json.encode(clusters.names))
    starts_of_files = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    return Result(Counts({}, []), MemberPlan(clusters.names, starts_of_files, parts, rows))


def read_names(path: Path) -> list[str]:
    """The names of the files that members refer to by number."""
    return msgspec.json.decode(path.read_bytes(), type=list[str])


@dataclass(frozen=True)
class MemberFile(ReadInParts):
    """The file of all members, of which a task reads the records `first` ≤ i < `last` alone."""

    path: Path
    first: int
    last: int

    @classmethod
    def of(cls, path: Path, spans: Sequence[Span]) -> "MemberFile":
        """The file as a task reads it that reads these spans."""
        full = [span for span in spans if span[0] < span[1]] or [(0, 0)]
        return cls(path, min(first for first, _ in full), max(last for _, last in full))

    @property
    def ranges(self) -> Ranges:
        """From the first byte that is read to the last."""
        return ((self.first * MEMBER.itemsize, self.last * MEMBER.itemsize),)


def read_span(members: MemberFile, span: Span) -> NDArray:
    """The MEMBERs of a span, memory-mapped."""
    first, last = span
    if first == last:
        return np.empty(0, MEMBER)  # an empty range cannot be mapped
    return np.memmap(members.path, MEMBER, "r", first * MEMBER.itemsize, last - first)


def _reject_repeated(blocks: Iterable[NDArray], clusters: Clusters) -> Iterator[NDArray]:
    """Pass on blocks of sorted MEMBERs; InputError if a document is in them twice."""
    last = np.full(1, -1, np.int64).astype(MEMBER)
    for block in blocks:
        both = np.concatenate([last, block])
        repeated = (np.diff(both["file"]) == 0) & (np.diff(both["row"]) == 0)
        if repeated.any():
            found = block[np.argmax(repeated)]
            key = f"{clusters.names[found['file']]}@{found['row']}"
            raise InputError(f"{clusters.path}: {key} is in it twice. Run generate_connected_components again")
        yield block
        last = block[-1:]


def _note_rows(blocks: Iterable[NDArray], rows: list[int]) -> Iterator[NDArray]:
    """Pass on blocks of sorted MEMBERs; add to `rows` those that the plan has."""
    passed = 0
    for block in blocks:
        rows += block["row"][-passed % _NOTED :: _NOTED].tolist()
        passed += len(block)
        yield block
