"""Decisions: the documents to remove from each cluster, and the document kept in place of each.

Without a similarity check the first document of a cluster is kept. With one, a document is removed
if it is similar enough to an earlier kept document of its cluster. Documents of an index are never removed.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from dedup.candidates.document_ids import SourceRuns, SourceTallies
from dedup.clustering.keep_policy import INDEXED, KeepPolicy
from dedup.clustering.similarity import Features, KeptDocuments, SimilarityCheck, decide_cluster
from dedup.minhash.shingles import HASHING_FACTOR, compared_sets
from dedup.minhash.signatures import signatures
from dedup.removal.clusters import KEEP_ORDER, MEMBER, Clusters, open_keep_order
from dedup.removal.fetching import FETCHED, Fetched, read_texts, without_text
from dedup.removal.removal_table import (
    BELOW_THRESHOLD,
    DUPLICATE,
    ESTIMATED,
    EXACT,
    KEPT,
    NOT_MEASURED,
    REASONS,
    REMOVAL,
)
from dedup.runs import first_of_runs, is_start_of_run
from gristmill.batches import batched
from gristmill.budget import reserve_memory
from gristmill.counts import READ, Counts
from gristmill.engine.task import FileSet, Result
from gristmill.errors import wrap_write_errors
from gristmill.io.external_sort import ExternalSorter, read_records, write_records

_MAX_TEXT_BYTES = 8 << 20  # of text in memory together
_OVERHEAD = 512  # bytes of a member besides its text, as Python objects
_BLOCK = 4096  # records read or written together


def decide_part(
    fetched: FileSet,
    texts: FileSet,
    indexed: Path | None,
    low: int,
    high: int | None,
    sources: SourceRuns,
    check: SimilarityCheck | None,
    output: Path,
    memory: int,
) -> Counts:
    """Task: write the REMOVALs of clusters low ≤ number < high from files of their FETCHED records and texts.

    Without a check there are no texts, and `indexed` are the MEMBERs of indexes. `sources` are those of all files.
    """
    counts = SourceTallies(sources, REASONS)
    with (
        ExternalSorter(output.with_name(f"{output.name}.runs"), FETCHED, KEEP_ORDER, memory // 4) as sorter,
        ExitStack() as stack,
    ):
        for number, path in enumerate(fetched.paths):
            for block in read_records(path, FETCHED, _BLOCK):
                block["text_file"] = number
                sorter.add(block)
        if indexed:
            for block in _read_clusters(indexed, low, high):
                sorter.add(without_text(block))
        if check:
            later = output.with_name(f"{output.name}.later")
            opened = [stack.enter_context(path.open("rb")) for path in texts.paths]
            removals = VerifiedRemoval(check, opened, later, memory, counts).removals(sorter)
        else:
            removals = remove_all_but_first(sorter, counts)
        write_records(output, removals)
    return counts.counts(READ)


def decide_by_key(input_file: Path, keep: KeepPolicy, dropped: tuple[Path, ...], output: Path, memory: int) -> Result:
    """Task: write the REMOVALs of clusters whose documents are ordered by key and source alone; no document is read.

    The value is the names of files.
    """
    clusters = Clusters.open(input_file)
    counts = SourceTallies(SourceRuns.of(clusters.names), REASONS)
    with open_keep_order(clusters.names, keep, dropped, output, memory) as order:
        blocks = map(order.assign, clusters.blocks())
        if order.is_input_order:
            write_records(output, remove_all_but_first(blocks, counts))
        else:
            with ExternalSorter(output.with_name(f"{output.name}.runs"), MEMBER, KEEP_ORDER, memory) as sorter:
                sorter.add_all(blocks)
                write_records(output, remove_all_but_first(sorter, counts))
    return Result(counts.counts(READ), clusters.names)


def _read_clusters(path: Path, low: int, high: int | None) -> Iterator[NDArray]:
    """Yield blocks of the MEMBERs of clusters low ≤ number < high, from a file sorted by cluster."""
    if not path.stat().st_size:
        return
    records = np.memmap(path, MEMBER, "r")
    end = len(records) if high is None else bisect_left(records["cluster"], high)
    for start in range(bisect_left(records["cluster"], low), end, _BLOCK):
        yield np.array(records[start : min(start + _BLOCK, end)])


def remove_all_but_first(blocks: Iterable[NDArray], counts: SourceTallies) -> Iterator[NDArray]:
    """Yield blocks of REMOVALs, of all documents but the first of each cluster, from MEMBERs in keep order."""
    first: NDArray | None = None  # of the cluster that the last block ended in
    before = 0  # members of that cluster so far, without its first
    for block in blocks:
        members = block if first is None else np.concatenate([first, block])
        is_start = is_start_of_run(members["cluster"])
        is_ours = members["tier"] != INDEXED
        is_removed = ~is_start & is_ours
        is_kept = is_start & is_ours
        if first is not None:  # it was counted with the last block
            is_kept[0] = False
        counts.add(KEPT, members["file"][is_kept])
        counts.add(DUPLICATE, members["file"][is_removed])
        firsts = first_of_runs(is_start)
        ranks = np.arange(len(members)) - firsts
        ranks[firsts == 0] += before
        first = members[firsts[-1:]]
        before = int(ranks[-1])
        kept = members[firsts[is_removed]]
        removals = np.zeros(len(kept), REMOVAL)
        removals["file"] = members["file"][is_removed]
        removals["row"] = members["row"][is_removed]
        removals["kept_file"] = kept["file"]
        removals["kept_row"] = kept["row"]
        removals["similarity"] = np.nan
        removals["measured"] = NOT_MEASURED
        removals["rank"] = ranks[is_removed]
        yield removals


class VerifiedRemoval:
    """Removes the documents of each cluster that are similar to a kept one, within `memory` bytes and one document.

    A quarter of the memory holds the features of kept documents. Where a cluster needs more, documents
    that stay undecided are written to the file `later` and decided on in another round. Another quarter is for the
    texts whose shingles are hashed together; their last may exceed it, as no document is hashed in pieces: then the
    reserve is held for it.
    """

    def __init__(
        self, check: SimilarityCheck, texts: Sequence[BinaryIO], later: Path, memory: int, counts: SourceTallies
    ) -> None:
        self.check = check
        self.texts = texts
        self.counts = counts
        self.undecided = _Undecided(later)
        self.kept = KeptDocuments(check, memory // 4)
        self.batch = min(_MAX_TEXT_BYTES, memory // 4 // HASHING_FACTOR)  # bytes of text; the last text may exceed it

    def removals(self, blocks: Iterable[NDArray]) -> Iterator[NDArray]:
        """Yield blocks of REMOVALs from blocks of FETCHED in keep order."""
        for batch in batched(self._iter_removals(blocks), _BLOCK):
            yield np.array(batch, REMOVAL)

    def _iter_removals(self, blocks: Iterable[NDArray]) -> Iterator[tuple]:
        """Yield REMOVALs as tuples, cluster by cluster."""
        for _, members in groupby(self._with_features(blocks), lambda item: item[0].cluster):
            yield from self._removals_of_cluster(members)

    def _removals_of_cluster(self, members: Iterator[tuple[Fetched, Features]]) -> Iterator[tuple]:
        """Yield REMOVALs of a cluster as tuples; count all its documents."""
        is_first = True
        members = _with_ranks(members)
        while True:
            self.kept.clear()
            for member, kept, similarity in decide_cluster(members, self.kept):
                if kept is None:
                    self.undecided.add(member)
                elif kept is not member:
                    self.counts.add_one(DUPLICATE, member.file)
                    measured = ESTIMATED if kept.tier == INDEXED else EXACT
                    yield member.file, member.row, kept.file, kept.row, similarity, measured, member.rank
                else:
                    if member.tier != INDEXED:
                        self.counts.add_one(KEPT if is_first else BELOW_THRESHOLD, member.file)
                    is_first = False
            if not self.undecided.count:
                return
            members = self._with_features(self.undecided.take())

    def _with_features(self, blocks: Iterable[NDArray]) -> Iterator[tuple[Fetched, Features]]:
        """Yield members and their features, computed for as many texts at a time as the budget allows."""
        indexed = -1  # the last cluster with documents of an index, which precede its others
        members = _iter_members(blocks)
        for batch in batched(members, size=self.batch, size_of=lambda member: member.size + _OVERHEAD):
            data = dict(zip(batch, read_texts(self.texts, batch), strict=True))
            ours = [member for member in batch if member.tier != INDEXED]
            texts = [data[member].decode() for member in ours]
            longest = max((len(data[member]) for member in ours), default=0)
            with reserve_memory(HASHING_FACTOR * longest, "a document that --verify compares"):
                sets = dict(zip(ours, compared_sets(texts, self.check.width, self.check.unit), strict=True))
                for member in batch:
                    if member.tier == INDEXED:
                        indexed = member.cluster
                        yield member, Features(None, np.frombuffer(data[member], np.uint32))
                    else:
                        signature = None
                        if member.cluster == indexed and self.check.sketch:
                            (signature,), _ = signatures([data[member].decode()], self.check.sketch)
                        yield member, Features(sets[member], signature)


def _iter_members(blocks: Iterable[NDArray]) -> Iterator[Fetched]:
    for block in blocks:
        for record in block.tolist():
            yield Fetched(*record)


def _with_ranks(members: Iterable[tuple[Fetched, Features]]) -> Iterator[tuple[Fetched, Features]]:
    """Give each member of a cluster its number in keep order as its rank, in whichever round it is decided."""
    for number, (member, features) in enumerate(members):
        yield member._replace(rank=number), features


class _Undecided:
    """A file of members that are decided on in the next round."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.unlink(missing_ok=True)  # a killed run may have left it
        self.count = 0
        self.held: list[Fetched] = []

    def add(self, member: Fetched) -> None:
        self.count += 1
        self.held.append(member)
        if len(self.held) == _BLOCK:
            self._write()

    def take(self) -> Iterator[NDArray]:
        """Yield the members in blocks of FETCHED; members added from now on are for the round after."""
        self._write()
        taken = self.path.with_suffix(".taken")
        self.path.replace(taken)
        self.count = 0
        yield from read_records(taken, FETCHED, _BLOCK)
        taken.unlink()

    def _write(self) -> None:
        with wrap_write_errors(self.path), self.path.open("ab") as file:
            file.write(np.array(self.held, FETCHED).tobytes())
        self.held = []
