"""The members of clusters, fetched out of the corpus file by file: their texts, and what a keep policy asks for."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from dedup.candidates.input_shards import SignatureShard
from dedup.removal.clusters import FIELDS, MEMBER, Clusters, Order
from dedup.removal.keeping import INDEXED, LAST, Keep, Longest, Newest, rank_longest, rank_newest
from gristmill.counts import READ, Counts
from gristmill.engine.stage import MemoryBudget
from gristmill.errors import InputError
from gristmill.io.documents import Document, source_of
from gristmill.io.external_sort import ExternalSorter, write_records
from gristmill.io.files import atomic_write, atomic_write_bytes
from gristmill.io.keys import read_keys
from gristmill.io.readers import Slice, read_documents
from gristmill.io.writers import Rejects
from gristmill.text import utf8_size

CLUSTERED = "in a cluster"
WITHOUT = "in a cluster, without the field"
UNREADABLE = "in a cluster, the field neither number nor date"
OTHER = "in no cluster"
MEMBERS, INDEXED_MEMBERS, PLAN = "members.bin", "index.bin", "plan.json"
_FEWEST, _PARTS = 4096, 512  # documents of a part at least, parts at most (but for large clusters)
_BATCH = 1024
# A member and where its text is: the slice by its number, -1 where there is no text; bytes
PLACED = np.dtype([*FIELDS, ("slice", "<i4"), ("offset", "<i8"), ("size", "<i8")])


class Plan(msgspec.Struct):
    """What sort_members found."""

    names: list[str]  # of files, ascending
    starts: list[int]  # where each one's members begin, and the last one's end
    cuts: list[int]  # the first cluster of every part

    @classmethod
    def load(cls, folder: Path) -> "Plan":
        return msgspec.json.decode((folder / PLAN).read_bytes(), type=cls)

    def places(self, name: str) -> tuple[int, int]:
        """The places in members.bin of a file's members."""
        number = bisect_left(self.names, name)
        return self.starts[number], self.starts[number + 1]


def gathered_path(work: Path, number: int) -> Path:
    """The PLACED records of a slice; beside them, with the suffix .text, their texts."""
    return work / "gathered" / f"{number:06}.index"


def sort_members(input_file: Path, keep: Keep, dropped: tuple[Path, ...], folder: Path, budget: MemoryBudget) -> Counts:
    """Write members.bin, the MEMBERs of all clusters by file and row; index.bin, those of an index again; plan.json."""
    clusters = Clusters.open(input_file)
    order = Order(clusters.names, keep, [read_keys(path, clusters.names) for path in dropped])
    size = max(_FEWEST, clusters.count // _PARTS)
    sizes, cuts = np.zeros(len(clusters.names), np.int64), [0]
    with (
        ExternalSorter(folder / "runs", MEMBER, ("file", "row"), budget) as sorter,
        atomic_write(folder / INDEXED_MEMBERS) as index,
        index.open("wb") as indexed,
    ):
        for block in clusters.blocks():
            starts = set(block["cluster"][block["position"] % size == 0].tolist())
            cuts += [cluster for cluster in sorted(starts) if cluster > cuts[-1]]
            is_index = order.assign(block)["tier"] == INDEXED
            indexed.write(_without_text(block[is_index]).tobytes())
            sizes += np.bincount(block["file"], minlength=len(sizes))
            sorter.add(block)
        write_records(folder / MEMBERS, _once(sorter, clusters))
    begins = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    atomic_write_bytes(folder / PLAN, msgspec.json.encode(Plan(clusters.names, begins, cuts)))
    return Counts({}, [])


def members_of(part: Slice, following: Slice | None, plan: Plan, members: Path) -> tuple[int, int]:
    """The places in members.bin of a slice's members; `following` is the next slice of the same file, if any."""
    first, last = plan.places(part.name)
    if first == last or (following is None and part.first_row == 0):
        return first, last
    rows = _read_places(members, (first, last))["row"]
    ends = bisect_left(rows, following.first_row) if following else last - first
    return first + bisect_left(rows, part.first_row), first + ends


def gather_slice(
    part: Slice, number: int, places: tuple[int, int], members: Path, keep: Keep, has_texts: bool, output: Path,
    budget: MemoryBudget,
) -> Counts:  # fmt: skip
    """Write the members of a slice as PLACED by cluster, and beside them their texts, if wanted, in row order."""
    counts = Counts({}, [])
    wanted = _read_places(members, places)
    documents = read_documents(part, counts, Rejects(output))
    with (
        ExternalSorter(output.with_suffix(".runs"), PLACED, ("cluster", "position"), budget // 2) as sorter,
        atomic_write(output.with_suffix(".text")) as path,
        path.open("wb") as texts,
    ):
        gatherer = _Gatherer(keep, texts if has_texts else None, counts)
        for block in gatherer.place(documents, wanted, part):
            block["slice"] = number
            sorter.add(block)
        write_records(output, sorter)
    return counts


def gather_signatures(
    shard: SignatureShard, number: int, places: tuple[int, int], members: Path, output: Path, budget: MemoryBudget
) -> Counts:
    """Write the members of an index as gather_slice does, with signatures (permutations × uint32) in place of texts."""
    wanted, offset, counts = _read_places(members, places), 0, Counts({}, [])
    with (
        ExternalSorter(output.with_suffix(".runs"), PLACED, ("cluster", "position"), budget // 2) as sorter,
        atomic_write(output.with_suffix(".text")) as path,
        path.open("wb") as stored,
    ):
        for rows, values in shard.batches():
            if not len(rows):
                continue
            near = wanted[bisect_left(wanted["row"], rows[0]) : bisect_right(wanted["row"], rows[-1])]
            _, of_rows, of_near = np.intersect1d(rows, near["row"], assume_unique=True, return_indices=True)
            placed = _without_text(near[of_near])
            placed["slice"], placed["size"] = number, values.shape[1] * values.itemsize
            placed["offset"] = offset + np.arange(len(placed)) * placed["size"]
            stored.write(values[of_rows].tobytes())
            offset += int(placed["size"].sum())
            sorter.add(placed)
            counts.add(source_of(shard.file), READ, 0, len(placed))
            counts.add(source_of(shard.file), CLUSTERED, 0, len(placed))
        write_records(output, sorter)
    return counts


def _read_places(members: Path, places: tuple[int, int]) -> NDArray:
    """MEMBERs, mapped: they are read as they are used."""
    first, last = places
    return (
        np.memmap(members, MEMBER, "r", first * MEMBER.itemsize, last - first) if last > first else np.empty(0, MEMBER)
    )


class _Gatherer:
    """Finds members among documents, ranks them, and stores their texts."""

    def __init__(self, keep: Keep, texts: BinaryIO | None, counts: Counts) -> None:
        self.keep, self.texts, self.counts = keep, texts, counts
        self.offset = 0
        self.found: list[tuple[int, int, int]] = []  # rank, offset, size

    def place(self, documents: Iterator[Document], wanted: NDArray, part: Slice) -> Iterator[NDArray]:
        """PLACED of every wanted MEMBER, in blocks; both are in row order. InputError if one is not there."""
        done, rows = 0, _rows(wanted)
        row = next(rows, None)
        for document in documents:
            if row is None or document.key.row < row:
                self.counts.add(part.source, OTHER, utf8_size(document.text))
                continue
            if document.key.row > row:
                break
            self._take(document)
            row = next(rows, None)
            if len(self.found) == _BATCH:
                yield self._block(wanted[done : done + _BATCH])
                done += _BATCH
        if row is not None:
            raise InputError(
                f"{part.path} has no document in row {row}, and a cluster names {part.name}@{row}: was the corpus "
                "changed since it was signed? Run to_hash and what follows it again"
            )
        yield self._block(wanted[done:])

    def _take(self, document: Document) -> None:
        data = document.text.encode()
        rank, reason = self._rank(document)
        self.counts.add(document.key.source, reason, len(data))
        self.found.append((rank, self.offset, len(data)))
        if self.texts:
            self.texts.write(data)
            self.offset += len(data)

    def _rank(self, document: Document) -> tuple[int, str]:
        if isinstance(self.keep, Longest):
            return rank_longest(len(document.text)), CLUSTERED
        if not isinstance(self.keep, Newest):
            return 0, CLUSTERED
        value = self.keep.value(document.fields)
        rank = rank_newest(value)
        if rank is None and value is not None:
            self.counts.add_example(f"{document.key}: {str(value)[:80]!r}")
        return (LAST, WITHOUT if value is None else UNREADABLE) if rank is None else (rank, CLUSTERED)

    def _block(self, members: NDArray) -> NDArray:
        placed = _without_text(members)
        found = np.array(self.found, np.int64).reshape(-1, 3)
        if isinstance(self.keep, Longest | Newest):
            placed["rank"] = found[:, 0]
        placed["offset"], placed["size"] = found[:, 1], found[:, 2]
        self.found = []
        return placed


def _rows(wanted: NDArray) -> Iterator[int]:
    for start in range(0, len(wanted), _BATCH):
        yield from wanted["row"][start : start + _BATCH].tolist()


def _without_text(members: NDArray) -> NDArray:
    placed = np.zeros(len(members), PLACED)
    for name, _ in FIELDS:
        placed[name] = members[name]
    placed["slice"] = -1
    return placed


def _once(blocks: Iterable[NDArray], clusters: Clusters) -> Iterator[NDArray]:
    """Blocks of sorted MEMBERs; InputError if a document is in them twice."""
    last = np.full(1, -1, np.int64).astype(MEMBER)
    for block in blocks:
        both = np.concatenate([last, block])
        again = (np.diff(both["file"]) == 0) & (np.diff(both["row"]) == 0)
        if again.any():
            found = block[np.argmax(again)]
            key = f"{clusters.names[found['file']]}@{found['row']}"
            raise InputError(f"{clusters.path}: {key} is in it twice. Run generate_connected_components again")
        yield block
        last = block[-1:]
