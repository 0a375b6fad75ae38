"""Fetches texts of members from the corpus, or signatures from an index, into files for each part of the clusters.

So a part reads its own files alone, and each fetched file is read once, however many parts there are.
"""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from numpy.typing import NDArray

from dedup.candidates.input_shards import SignatureShard
from dedup.clustering.keep_policy import LAST, Candidate, KeepPolicy
from dedup.minhash.shingles import HASHING_FACTOR
from dedup.removal.clusters import MEMBER_FIELDS, MemberFile, SliceMembers, Span, read_span
from dedup.removal.removal_table import OWN_IDS
from gristmill.budget import MemoryReservation
from gristmill.counts import READ, Counts
from gristmill.engine.task import FileSet, Result
from gristmill.io.documents import Document, Slice, source_of
from gristmill.io.external_sort import read_records, scatter_records, write_records
from gristmill.io.keys import pack_keys
from gristmill.io.readers import read_chosen
from gristmill.storage.local import atomic_write, open_atomically

CLUSTERED = "in a cluster"
WITHOUT_FIELD = "in a cluster, without the field"
UNREADABLE_FIELD = "in a cluster, the field neither number nor date"
_BATCH = 1024  # members read at a time
_BLOCK = 4096  # records scattered together
MAX_OPEN = 64  # text files that a task reads from


class Fetched(NamedTuple):
    """A member with its rank, and the location of its text: a file's number (-1: no text), byte offset and size."""

    cluster: int
    tier: int
    rank: int
    fine_rank: int
    position: int
    file: int
    row: int
    text_file: int
    offset: int
    size: int


FETCHED = np.dtype([*MEMBER_FIELDS, ("text_file", "<i4"), ("offset", "<i8"), ("size", "<i8")])  # Fetched as a record


def without_text(members: NDArray) -> NDArray:
    """Return FETCHED records (n) of MEMBERs (n) that have no text."""
    fetched = np.zeros(len(members), FETCHED)
    for name, _ in MEMBER_FIELDS:
        fetched[name] = members[name]
    fetched["text_file"] = -1
    return fetched


def fetch_texts(
    parts: tuple[SliceMembers, ...], members: MemberFile, keep: KeepPolicy, output: Path, ids: Path, texts: Path | None
) -> Result:
    """Task: write the members of some slices to `output` as FETCHED by row, ranked, their own ids and texts (UTF-8).

    A FETCHED record's `text_file` is -1 here: who reads several outputs numbers them. The value is the number of ids.
    InputError if a slice lacks a member.
    """
    counts = Counts({}, [])
    with ExitStack() as stack:
        ids_file = stack.enter_context(open_atomically(ids))
        to_ids = stack.enter_context(pa.ipc.new_stream(ids_file, OWN_IDS))
        to_texts: BinaryIO | None = None
        if texts:
            to_texts = stack.enter_context(open_atomically(texts))
        fetcher = _Fetcher(keep, to_texts, to_ids, counts)

        def blocks() -> Iterator[NDArray]:
            for slice_members in parts:
                yield from fetcher.fetch(slice_members.part, slice_members.read(members))

        write_records(output, blocks())
    return Result(counts, fetcher.id_count)


def fetch_signatures(
    shards: tuple[tuple[SignatureShard, Span], ...], members: MemberFile, output: Path, texts: Path
) -> Counts:
    """Task: as fetch_texts, for shards of an index, with signatures (permutations, uint32) in place of texts."""
    counts = Counts({}, [])

    def blocks(file: BinaryIO) -> Iterator[NDArray]:
        for shard, span in shards:
            for fetched, values in _fetch_shard(shard, read_span(members, span)):
                fetched["offset"] = file.tell() + np.arange(len(fetched)) * fetched["size"]
                file.write(values.tobytes())
                counts.add(source_of(shard.file), READ, 0, len(fetched))
                counts.add(source_of(shard.file), CLUSTERED, 0, len(fetched))
                yield fetched

    with atomic_write(texts) as temporary, temporary.open("wb") as file:
        write_records(output, blocks(file))
    return counts


def _fetch_shard(shard: SignatureShard, clustered: NDArray) -> Iterator[tuple[NDArray, NDArray]]:
    """Yield FETCHED (n) and signatures (n × permutations) of the `clustered` MEMBERs of a shard, batch by batch."""
    for rows, values in shard.batches():
        first = bisect_left(clustered["row"], rows[0])
        end = bisect_right(clustered["row"], rows[-1])
        near = clustered[first:end]
        _, of_rows, of_near = np.intersect1d(rows, near["row"], assume_unique=True, return_indices=True)
        fetched = without_text(near[of_near])
        fetched["size"] = values.shape[1] * values.itemsize
        yield fetched, values[of_rows]


class _Fetcher:
    """Finds the members among the documents of a slice, ranks them and stores their texts and own ids."""

    def __init__(
        self, keep: KeepPolicy, texts: BinaryIO | None, ids: pa.ipc.RecordBatchStreamWriter, counts: Counts
    ) -> None:
        self.keep = keep
        self.texts = texts
        self.ids = ids
        self.counts = counts
        self.offset = 0
        self.id_count = 0
        self.own_ids: list[str | None] = []  # of the documents found
        self.is_without_field = False  # whether a document without the policy's field was found
        self.ranked: list[tuple[int, int, int, int]] = []  # rank, fine rank, offset, size

    def fetch(self, part: Slice, members: NDArray) -> Iterator[NDArray]:
        """Yield blocks of FETCHED for all MEMBERs (n) of a slice, which are in row order. InputError if one is missing.

        Other documents are not decoded.
        """
        done = 0
        for document in read_chosen(part, members["row"].tolist()):
            self._store(document)
            if len(self.ranked) == _BATCH:
                yield self._block(members[done : done + _BATCH])
                done += _BATCH
        yield self._block(members[done:])

    def _store(self, document: Document) -> None:
        data = document.text.encode()
        (rank, fine_rank), reason = self._rank(document)
        self.counts.add(document.key.source, READ, len(data))
        self.counts.add(document.key.source, reason, len(data))
        self.ranked.append((rank, fine_rank, self.offset, len(data)))
        self.own_ids.append(document.own_id)
        if self.texts:
            hold = MemoryReservation()
            size = HASHING_FACTOR * len(data)
            if not hold.fits(size):  # refused here, where its name is known
                raise hold.refuse(f"{document.key}, which --verify compares,", size)
            self.texts.write(data)
            self.offset += len(data)

    def _rank(self, document: Document) -> tuple[tuple[int, int], str]:
        """Return the document's rank and fine rank by the policy, and the reason it is counted under."""
        if not self.keep.reads_documents:
            return (0, 0), CLUSTERED
        fields = {name: document.value(name) for name in self.keep.path[:1]}
        value = self.keep.value(fields)
        candidate = Candidate(document.key.source, document.text, value)
        rank = self.keep.rank(candidate)
        if rank is not None:
            return rank, CLUSTERED
        if value is None:
            if not self.is_without_field:  # one example suffices
                self.counts.add_example(f"{document.key} has the fields {', '.join(document.fields)}")
            self.is_without_field = True
            return (LAST, 0), WITHOUT_FIELD
        self.counts.add_example(f"{document.key}: {str(value)[:80]!r}")
        return (LAST, 0), UNREADABLE_FIELD

    def _block(self, members: NDArray) -> NDArray:
        """Return what was found of MEMBERs (n) as FETCHED, and write their own ids."""
        fetched = without_text(members)
        ranked = np.array(self.ranked, np.int64).reshape(-1, 4)
        if self.keep.reads_documents:  # other policies' ranks were assigned with the tiers
            fetched["rank"] = ranked[:, 0]
            fetched["fine_rank"] = ranked[:, 1]
        fetched["offset"] = ranked[:, 2]
        fetched["size"] = ranked[:, 3]
        ids_or_null = pa.array(self.own_ids, pa.string())
        has_id = ids_or_null.is_valid().to_numpy(zero_copy_only=False)
        if has_id.any():
            with_id = members[has_id]
            packed = pack_keys(with_id["file"], with_id["row"])
            own_ids = ids_or_null.drop_null()
            self.ids.write_batch(pa.record_batch([packed, own_ids], schema=OWN_IDS))
            self.id_count += len(own_ids)
        self.ranked = []
        self.own_ids = []
        return fetched


def read_texts(files: Sequence[BinaryIO], members: list[Fetched]) -> list[bytes]:
    """Return the texts (UTF-8) of members (n), or for those of an index their signatures (permutations × uint32)."""
    texts = [b""] * len(members)
    in_file_order = sorted(enumerate(members), key=lambda item: item[1][-3:])  # to seek forward only
    for i, member in in_file_order:
        texts[i] = os.pread(files[member.text_file].fileno(), member.size, member.offset)
        assert len(texts[i]) == member.size, member[-3:]
    return texts


def scatter_fetched(
    fetched: FileSet, texts: FileSet, parts: list[int], outputs: tuple[Path, ...], text_outputs: tuple[Path, ...]
) -> None:
    """Task: write the FETCHED records of each part of the clusters to one of `outputs`, its texts to `text_outputs`.

    `fetched` and `texts` are files of fetch tasks; where no similarity is checked there are no texts. `parts` are the
    first clusters of all parts.
    """
    with ExitStack() as stack:
        targets = [stack.enter_context(open_atomically(path)) for path in text_outputs]
        ends = [0] * len(targets)

        def blocks() -> Iterator[tuple[NDArray, NDArray[np.int64]]]:
            for number, path in enumerate(fetched.paths):
                with ExitStack() as opened:
                    source: BinaryIO | None = None
                    if targets:
                        source = opened.enter_context(texts.paths[number].open("rb"))
                    for block in read_records(path, FETCHED, _BLOCK):
                        part = np.searchsorted(parts, block["cluster"], side="right") - 1
                        if source:
                            _move_texts(block, part, source, targets, ends)
                        yield block, part

        scatter_records(outputs, blocks())


def _move_texts(
    block: NDArray, part: NDArray[np.int64], source: BinaryIO, targets: Sequence[BinaryIO], ends: list[int]
) -> None:
    """Append the texts of FETCHED records (n) to the files of their parts (n), of sizes `ends`; set their offsets."""
    texts = zip(part.tolist(), block["offset"].tolist(), block["size"].tolist(), strict=True)
    for i, (number, offset, size) in enumerate(texts):
        targets[number].write(os.pread(source.fileno(), size, offset))
        block["offset"][i] = ends[number]
        ends[number] += size
