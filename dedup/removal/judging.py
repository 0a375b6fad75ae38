"""Judging the gathered members of clusters, part by part: which are removed, for which, and how similar they are."""

import os
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from dedup.minhash.matching_form import Unit
from dedup.minhash.shingles import shingle_sets
from dedup.minhash.signatures import Sketch, signatures
from dedup.removal.clusters import KEEP_ORDER
from dedup.removal.gather import INDEXED_MEMBERS, PLACED, Plan, gathered_path
from dedup.removal.keeping import INDEXED
from dedup.removal.removals import DUPLICATE, ESTIMATED, EXACT, KEPT, REMOVAL, SPARED, Books, remove_all_but_first
from dedup.removal.verify import KeptSets, KeptSignatures, Measure, Shingles, Signature, check_measure, judge
from gristmill.batches import batched
from gristmill.counts import Counts
from gristmill.engine.stage import MemoryBudget
from gristmill.errors import UsageError, reading, writing
from gristmill.io.external_sort import ExternalSorter, read_records
from gristmill.io.files import atomic_write, atomic_write_bytes

_OPEN = 64  # text files at a time
_WORKING = 40  # bytes that a byte of text takes while its shingles are hashed
_MOST_TEXT = 8 << 20  # bytes of text fetched together
_RECORD = 512  # bytes of a record and its set beside its text, as Python objects
_BLOCK = 4096


@dataclass(frozen=True)
class Verification:
    """How candidates are confirmed."""

    measure: Measure
    threshold: float
    width: int
    unit: Unit
    sketch: Sketch | None = None  # of the index, whose documents are compared by signature

    def __post_init__(self) -> None:
        check_measure(self.measure, self.threshold)
        if self.width < 1:
            raise UsageError(f"--width {self.width}: wanted shingles of 1 {self.unit} or more")
        if self.sketch and (self.sketch.width, self.sketch.unit) != (self.width, self.unit):
            raise UsageError(
                f"--width {self.width} --unit {self.unit}: the signatures of --index are of {self.sketch.width}-"
                f"{self.sketch.unit} shingles, so wanted --width {self.sketch.width} --unit {self.sketch.unit}"
            )
        if self.sketch and self.measure != "jaccard":
            raise UsageError(f"--verify {self.measure}: signatures of an index tell the Jaccard similarity alone")


class Placed(NamedTuple):
    """A PLACED record."""

    cluster: int
    tier: int
    rank: int
    position: int
    file: int
    row: int
    slice: int
    offset: int
    size: int


def judge_part(
    folder: Path,
    slices: int,
    low: int,
    high: int | None,
    how: Verification | None,
    output: Path,
    budget: MemoryBudget,
) -> Counts:
    """Write the REMOVALs of the clusters low ≤ number < high, and beside them the counts, as JSON."""
    books = Books(Plan.load(folder).names)
    with (
        ExternalSorter(output.with_suffix(".runs"), PLACED, KEEP_ORDER, budget // 4) as sorter,
        atomic_write(output) as temporary,
        temporary.open("wb") as file,
        ExitStack() as stack,
    ):
        gathered = [gathered_path(folder, number) for number in range(slices)]
        for path in [*gathered, *([] if how else [folder / INDEXED_MEMBERS])]:
            for block in _read_clusters(path, low, high):
                sorter.add(block)
        if how is None:
            found = remove_all_but_first(sorter, books)
        else:
            texts = stack.enter_context(closing(Texts(folder)))
            found = Judge(texts, output.with_suffix(".later"), how, budget, books).removals(sorter)
        file.writelines(block.tobytes() for block in found)
    atomic_write_bytes(output.with_suffix(".json"), msgspec.json.encode(books.counts()))
    return books.counts()


def _read_clusters(path: Path, low: int, high: int | None) -> Iterator[NDArray]:
    if not path.stat().st_size:
        return
    records = np.memmap(path, PLACED, "r")
    end = len(records) if high is None else bisect_left(records["cluster"], high)
    for start in range(bisect_left(records["cluster"], low), end, _BLOCK):
        yield np.array(records[start : min(start + _BLOCK, end)])


class Evidence(NamedTuple):
    """What a document is compared by."""

    shingles: Shingles | None  # None for one of an index
    signature: Signature | None  # None unless the cluster has documents of an index


class KeptEvidence:
    """Documents kept in one cluster: those of an index, which come first, and then ours."""

    def __init__(self, how: Verification, room: int) -> None:
        self.indexed = KeptSignatures(how.threshold, how.sketch.permutations if how.sketch else 1, room // 2)
        self.ours = KeptSets(how.measure, how.threshold, room // 2)

    def clear(self) -> None:
        self.indexed.clear()
        self.ours.clear()

    def first_match(self, evidence: Evidence) -> tuple[int, float]:
        number, similarity = -1, 0.0
        if evidence.shingles is not None:
            if evidence.signature is not None:
                number, similarity = self.indexed.first_match(evidence.signature)
            if number < 0 and not self.indexed.is_full:
                number, similarity = self.ours.first_match(evidence.shingles)
                number += self.indexed.count if number >= 0 else 0
        return number, similarity

    def add(self, evidence: Evidence) -> bool:
        if evidence.shingles is None:
            assert evidence.signature is not None
            return self.indexed.add(evidence.signature)
        return not self.indexed.is_full and self.ours.add(evidence.shingles)


class Texts:
    """The gathered texts, read where a record says; a few files are open at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open: OrderedDict[int, int] = OrderedDict()

    def read(self, records: list[Placed]) -> list[bytes]:
        """UTF-8 of each, or a signature."""
        found = [b""] * len(records)
        for i in sorted(range(len(records)), key=lambda i: records[i][-3:]):  # in the order of files
            number, offset, size = records[i][-3:]
            found[i] = os.pread(self._file(number), size, offset)
            assert len(found[i]) == size, (number, offset, size)
        return found

    def _file(self, number: int) -> int:
        if number in self.open:
            self.open.move_to_end(number)
        else:
            if len(self.open) == _OPEN:
                os.close(self.open.popitem(last=False)[1])
            path = gathered_path(self.folder, number).with_suffix(".text")
            with reading(path):
                self.open[number] = os.open(path, os.O_RDONLY)
        return self.open[number]

    def close(self) -> None:
        for descriptor in self.open.values():
            os.close(descriptor)
        self.open.clear()


class _Spill:
    """Documents that wait for the next round, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.unlink(missing_ok=True)  # of a run that was killed
        self.count = 0
        self.held: list[Placed] = []

    def add(self, member: Placed) -> None:
        self.count += 1
        self.held.append(member)
        if len(self.held) == _BLOCK:
            self._write()

    def take(self) -> Iterator[NDArray]:
        """What was added, in blocks; what is added meanwhile is for the next time."""
        self._write()
        taken = self.path.with_suffix(".taken")
        self.path.replace(taken)
        self.count = 0
        yield from read_records(taken, PLACED, _BLOCK)
        taken.unlink()

    def _write(self) -> None:
        with writing(self.path), self.path.open("ab") as file:
            file.write(np.array(self.held, PLACED).tobytes())
        self.held = []


class Judge:
    """Judges cluster after cluster; of one it holds the kept documents' shingles, as far as there is room."""

    def __init__(self, texts: Texts, later: Path, how: Verification, budget: MemoryBudget, books: Books) -> None:
        self.texts, self.how, self.books = texts, how, books
        self.undecided = _Spill(later)
        self.kept = KeptEvidence(how, budget // 4)
        self.batch = min(_MOST_TEXT, budget // 4 // _WORKING)

    def removals(self, blocks: Iterable[NDArray]) -> Iterator[NDArray]:
        """REMOVALs from PLACED records in keep order."""
        clusters = groupby(self._with_evidence(blocks), lambda found: found[0].cluster)
        removals = (removal for _, members in clusters for removal in self._judge_cluster(members))
        for some in batched(removals, _BLOCK):
            yield np.array(some, REMOVAL)

    def _judge_cluster(self, members: Iterable[tuple[Placed, Evidence]]) -> Iterator[tuple]:
        """The cluster in rounds, each with as many kept documents as there is room for."""
        is_first = True
        while True:
            self.kept.clear()
            for member, kept, similarity in judge(members, self.kept):
                if kept is None:
                    self.undecided.add(member)
                elif kept is not member:
                    self.books.add_one(DUPLICATE, member.file)
                    measured = ESTIMATED if kept.tier == INDEXED else EXACT
                    yield member.file, member.row, kept.file, kept.row, similarity, measured
                else:
                    if member.tier != INDEXED:
                        self.books.add_one(KEPT if is_first else SPARED, member.file)
                    is_first = False
            if not self.undecided.count:
                return
            members = self._with_evidence(self.undecided.take())

    def _with_evidence(self, blocks: Iterable[NDArray]) -> Iterator[tuple[Placed, Evidence]]:
        """Members and what they are compared by, of as many texts at a time as there is room for."""
        indexed = -1  # the last cluster that was seen to have documents of an index, which come first
        members = (Placed(*record) for block in blocks for record in block.tolist())
        for some in batched(members, size=self.batch, size_of=lambda member: member.size + _RECORD):
            data = dict(zip(some, self.texts.read(some), strict=True))
            ours = [member for member in some if member.tier != INDEXED]
            texts = [data[member].decode() for member in ours]
            sets = dict(zip(ours, shingle_sets(texts, self.how.width, self.how.unit), strict=True))
            for member in some:
                if member.tier == INDEXED:
                    indexed = member.cluster
                    yield member, Evidence(None, np.frombuffer(data[member], np.uint32))
                else:
                    text = data[member] if member.cluster == indexed else None
                    yield member, Evidence(sets[member], None if text is None else self._sign(text))

    def _sign(self, text: bytes) -> Signature:
        assert self.how.sketch is not None
        values, _ = signatures([text.decode()], self.how.sketch)
        return values[0]
