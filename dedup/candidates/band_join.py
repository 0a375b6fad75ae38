"""From signatures to edges: bands in partitions of (band, hash range), each linked on its own.

Files of 16-byte records lie between: of a group of shards by block, band and range. A range of a
band is then gathered from all files within one worker's share of the memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dedup.candidates.connected_components import UnionFind, union_find_fits
from dedup.candidates.document_ids import DocumentIds
from dedup.candidates.input_shards import Scope, SignatureShard
from dedup.candidates.lsh import RECORD, band_digests, bucket_edges, union_buckets
from gristmill.batches import batched
from gristmill.counts import Counts
from gristmill.engine.partition import partition_of
from gristmill.engine.stage import MemoryBudget, RunOptions, Task, outputs_of, run_stage
from gristmill.io.files import atomic_write

EDGES = "edges"  # the folder of what `link` writes
_LINKING = 4  # bytes of memory a byte of records takes while a range is linked
_UNITING = 40  # bytes a document takes beside its digests while it is united
_PARTITIONING = 64  # bytes a document takes beside its digests while they are partitioned


@dataclass(frozen=True)
class LshOptions:
    """What is compared: of a signature so many bands of so many rows, among documents of one scope."""

    rows: int
    bands: int
    scope: Scope = "global"


def link(
    shards: list[SignatureShard], document_ids: DocumentIds, lsh: LshOptions, work: Path, options: RunOptions
) -> None:
    """Write the edges of all bands below work/edges, in files whose names are in order of band and hash."""
    share = MemoryBudget(options.memory_bytes // options.processes)
    documents = sum(shard.documents for shard in shards)
    parts = _parts(documents, share)
    split = [
        Task(f"bands {number:06}-{parts}", partition_bands,
             {"shards": group, "bases": [bases[shard.file] for shard in group], "lsh": lsh, "parts": parts,
              "memory": share, "output": file},
             tuple(shard.path for shard in group), (file, file.with_suffix(".npy")),
             sum(shard.path.stat().st_size for shard in group))
        for bases in [document_ids.by_name]
        for number, group in enumerate(_groups(shards, lsh, share, options.processes))
        for file in [work / "bands" / f"{number:06}.bin"]
    ]  # fmt: skip
    run_stage("bands", split, work, options, summary=False)
    files = [task.outputs[0] for task in split]
    edges = [
        Task(f"edges {band:04}-{part:06}", join_partition,
             {"files": files, "band": band, "part": part, "first": document_ids.first_of_corpus, "output": path},
             tuple(files), (path,), documents * RECORD.itemsize // parts)
        for band in range(lsh.bands)
        for part in range(parts)
        for path in [work / EDGES / f"{band:04}-{part:06}.npy"]
    ]  # fmt: skip
    planned = set(outputs_of(edges))
    for stray in set((work / EDGES).glob("*.npy")) - planned:  # of a killed run with another number of parts
        stray.unlink()
    run_stage("edges", edges, work, options, summary=False)


def read_edges(work: Path) -> Iterator[NDArray[np.uint64]]:
    """The edges that `link` wrote (n × 2, each document and the first of its bucket), band by band."""
    for path in sorted((work / EDGES).glob("*.npy")):
        yield np.load(path)


def fits_in_memory(shards: Sequence[SignatureShard], document_ids: DocumentIds, lsh: LshOptions, memory: int) -> bool:
    """Whether union_signatures takes half of `memory` bytes or less."""
    documents = sum(shard.documents for shard in shards)
    return documents * (8 * lsh.bands + _UNITING) <= memory // 2 and union_find_fits(len(document_ids), memory // 4)


def union_signatures(
    shards: Sequence[SignatureShard], document_ids: DocumentIds, lsh: LshOptions, union_find: UnionFind
) -> None:
    """Unite the documents that share a band, in memory: no files between, no sort, no edges."""
    count = sum(shard.documents for shard in shards)
    digests = np.empty((lsh.bands, count), np.uint64)
    documents = np.empty_like(union_find.parent, shape=count)
    at, bases = 0, document_ids.by_name
    for numbers, found in digests_of(shards, [bases[shard.file] for shard in shards], lsh):
        documents[at : at + len(numbers)] = numbers
        digests[:, at : at + len(numbers)] = found
        at += len(numbers)
    for band in digests:
        union_buckets(band, documents, union_find.parent, document_ids.first_of_corpus)


def partition_bands(
    shards: list[SignatureShard], bases: list[int], lsh: LshOptions, parts: int, memory: int, output: Path
) -> Counts:
    """Write the records of shards by block, band and hash range, and beside them where each begins."""
    starts: list[NDArray[np.int64]] = []
    with atomic_write(output) as temporary, temporary.open("wb") as file:
        for documents, digests in _blocks(shards, bases, lsh, _most(lsh, memory)):
            for band in digests:
                part = partition_of(band, parts)
                order = np.argsort(part, kind="stable")
                records = np.empty(len(order), RECORD)
                records["digest"], records["document"] = band[order], documents[order]
                sizes = np.bincount(part, minlength=parts)
                starts.append(file.tell() // RECORD.itemsize + np.cumsum([0, *sizes]))
                file.write(records.view(np.uint8).data)
    with atomic_write(output.with_suffix(".npy")) as temporary, temporary.open("wb") as file:
        np.save(file, np.array(starts, np.int64).reshape(-1, lsh.bands, parts + 1))
    return Counts({}, [])


def join_partition(files: list[Path], band: int, part: int, first: int, output: Path) -> Counts:
    """Write the edges of one band and hash range, without those among documents before `first`, of an index."""
    edges = bucket_edges(read_partition(files, band, part))
    with atomic_write(output) as temporary, temporary.open("wb") as file:
        np.save(file, edges[edges[:, 0] >= np.uint64(first)])
    return Counts({}, [])


def read_partition(files: list[Path], band: int, part: int) -> NDArray:
    """The records of one band and hash range from all files, in order of document."""
    ranges = [np.load(path.with_suffix(".npy"), mmap_mode="r")[:, band, part : part + 2] for path in files]
    records = np.empty(sum(int(np.sum(pieces[:, 1] - pieces[:, 0])) for pieces in ranges), RECORD)
    at = 0
    for path, pieces in zip(files, ranges, strict=True):
        with path.open("rb") as file:
            for start, stop in pieces.tolist():
                file.seek(start * RECORD.itemsize)
                at += file.readinto(records[at : at + stop - start].view(np.uint8).data) // RECORD.itemsize
    assert at == len(records), (at, len(records))
    return records


def _blocks(
    shards: list[SignatureShard], bases: list[int], lsh: LshOptions, most: int
) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64]]]:
    """Numbers (n) and digests (bands × n) of about `most` documents at a time, or of one batch."""
    return map(_joined, batched(digests_of(shards, bases, lsh), size=most, size_of=lambda batch: len(batch[0])))


def digests_of(
    shards: Sequence[SignatureShard], bases: Sequence[int], lsh: LshOptions
) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64]]]:
    """Numbers (n) and digests (bands × n) of the documents of shards, batch by batch."""
    for shard, base in zip(shards, bases, strict=True):
        salt = shard.salt(lsh.scope)
        for rows, values in shard.batches():
            yield rows.astype(np.uint64) + np.uint64(base), band_digests(values, lsh.rows, lsh.bands, salt)


def _joined(held: list[tuple[NDArray[np.uint64], NDArray[np.uint64]]]) -> tuple[NDArray, NDArray]:
    return np.concatenate([numbers for numbers, _ in held]), np.concatenate([digests for _, digests in held], axis=1)


def _groups(shards: list[SignatureShard], lsh: LshOptions, share: int, processes: int) -> list[list[SignatureShard]]:
    """Shards in runs of as many documents as are partitioned at once: few files lie between, in large pieces."""
    total = sum(shard.documents for shard in shards)
    most = min(_most(lsh, share), total // (4 * processes))
    groups: list[list[SignatureShard]] = []
    room = 0
    for shard in shards:
        if not groups or shard.documents > room:
            groups.append([])
            room = most
        groups[-1].append(shard)
        room -= shard.documents
    return groups


def _most(lsh: LshOptions, memory: int) -> int:
    """Documents whose digests are partitioned at once within so many bytes."""
    return memory // (2 * 8 * lsh.bands + _PARTITIONING)  # digests as they come, and joined


def _parts(documents: int, share: int) -> int:
    """Hash ranges of a band, so many that each fits into one worker's share of the memory."""
    return 1 << max(0, (documents * RECORD.itemsize * _LINKING // max(share, 1)).bit_length())
