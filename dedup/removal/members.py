"""Members of all clusters, sorted by file and row, so that each slice of the corpus reads only its own members."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from dedup.removal.clusters import MEMBER, Clusters
from dedup.removal.keep_policy import INDEXED, Keep, KeepOrder
from gristmill.counts import Counts
from gristmill.engine.stage import MemoryBudget
from gristmill.errors import InputError
from gristmill.io.external_sort import ExternalSorter, write_records
from gristmill.io.files import atomic_write, atomic_write_bytes
from gristmill.io.keys import read_keys
from gristmill.io.readers import Slice

MEMBERS, INDEX_MEMBERS, PLAN = "members.bin", "index.bin", "plan.json"
_MIN_PART_SIZE, _MAX_PARTS = 4096, 512  # a part has about 4096 documents, or more if there would be more than 512 parts

Span = tuple[int, int]  # records first ≤ i < last of members.bin


class MemberPlan(msgspec.Struct):
    """The layout of members.bin, and how clusters are divided into parts: one task decides on each part."""

    names: list[str]  # of files, ascending
    starts: list[int]  # first record of each file in members.bin; last, the number of records
    parts: list[int]  # the first cluster of each part

    @classmethod
    def load(cls, folder: Path) -> "MemberPlan":
        return msgspec.json.decode((folder / PLAN).read_bytes(), type=cls)

    def span(self, name: str) -> Span:
        """The records of a file's members in members.bin."""
        number = bisect_left(self.names, name)
        return self.starts[number], self.starts[number + 1]


def sort_members(input_file: Path, keep: Keep, dropped: tuple[Path, ...], folder: Path, budget: MemoryBudget) -> Counts:
    """Task: write members.bin, index.bin and plan.json into `folder`; tier and rank are filled in.

    members.bin holds the MEMBERs of all clusters by file and row; index.bin only those of an index, by cluster.
    InputError if the input is damaged, or a document is in it twice.
    """
    clusters = Clusters.open(input_file)
    order = KeepOrder(clusters.names, keep, [read_keys(path, clusters.names) for path in dropped])
    size = max(_MIN_PART_SIZE, clusters.count // _MAX_PARTS)
    sizes, parts = np.zeros(len(clusters.names), np.int64), [0]
    with (
        ExternalSorter(folder / "runs", MEMBER, ("file", "row"), budget) as sorter,
        atomic_write(folder / INDEX_MEMBERS) as temporary,
        temporary.open("wb") as index,
    ):
        for block in clusters.blocks():
            starts = set(block["cluster"][block["position"] % size == 0].tolist())
            parts += [cluster for cluster in sorted(starts) if cluster > parts[-1]]
            index.write(block[order.assign(block)["tier"] == INDEXED].tobytes())
            sizes += np.bincount(block["file"], minlength=len(sizes))
            sorter.add(block)
        write_records(folder / MEMBERS, _reject_repeated(sorter, clusters))
    starts_of_files = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    atomic_write_bytes(folder / PLAN, msgspec.json.encode(MemberPlan(clusters.names, starts_of_files, parts)))
    return Counts({}, [])


def span_of_slice(part: Slice, following: Slice | None, plan: MemberPlan, members: Path) -> Span:
    """The records of a slice's members in members.bin; `following` is the next slice of the same file, if any."""
    first, last = plan.span(part.name)
    if first == last or (following is None and part.first_row == 0):
        return first, last
    rows = read_span(members, (first, last))["row"]
    end = bisect_left(rows, following.first_row) if following else last - first
    return first + bisect_left(rows, part.first_row), first + end


def read_span(members: Path, span: Span) -> NDArray:
    """The MEMBERs of a span, memory-mapped from members.bin."""
    first, last = span
    if first == last:
        return np.empty(0, MEMBER)  # an empty range cannot be mapped
    return np.memmap(members, MEMBER, "r", first * MEMBER.itemsize, last - first)


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
