"""Band join: the edges between documents that share a band of their signatures, in memory or by hash partitions.

In memory, `union_signatures` feeds the buckets of each band straight to union-find. Otherwise `join_bands`
runs two steps of tasks: `partition_bands` writes records of 16 bytes (digest, document id), partitioned by band
and hash range; `join_partition` reads one hash range of one band from all files, within a worker's share of
the memory, and writes its edges.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dedup.candidates.connected_components import UnionFind, union_find_fits
from dedup.candidates.document_ids import DocumentIds
from dedup.candidates.input_shards import Scope, SignatureShard
from dedup.candidates.lsh import BAND_RECORD, band_digests, bucket_edges, union_buckets
from gristmill.batches import batched, partition_of
from gristmill.engine.run import StageRun
from gristmill.engine.task import FileSet, Task
from gristmill.io.external_sort import write_array
from gristmill.io.files import atomic_write

_UNION_BYTES = 40  # memory per document for union-find, without its digests
_PARTITION_BYTES = 64  # memory per document while its digests are partitioned, without the digests
_JOIN_FACTOR = 4  # memory per byte of records while a partition is joined


@dataclass(frozen=True)
class LshOptions:
    """Locality-sensitive hashing: bands, rows per band, and whether sources are compared with each other."""

    rows: int
    bands: int
    scope: Scope = "global"


def fits_in_memory(shards: Sequence[SignatureShard], document_ids: DocumentIds, lsh: LshOptions, memory: int) -> bool:
    """Whether union_signatures needs at most half of `memory` bytes."""
    documents = sum(shard.documents for shard in shards)
    return documents * (8 * lsh.bands + _UNION_BYTES) <= memory // 2 and union_find_fits(len(document_ids), memory // 4)


def union_signatures(
    shards: Sequence[SignatureShard], document_ids: DocumentIds, lsh: LshOptions, union_find: UnionFind
) -> None:
    """Unite the documents that share a band, in memory: without files, sorting or a list of edges."""
    count = sum(shard.documents for shard in shards)
    digests = np.empty((lsh.bands, count), np.uint64)
    documents = np.empty_like(union_find.parent, shape=count)
    at, first_ids = 0, document_ids.by_name
    for ids, values in iter_band_digests(shards, [first_ids[shard.file] for shard in shards], lsh):
        documents[at : at + len(ids)] = ids
        digests[:, at : at + len(ids)] = values
        at += len(ids)
    for band in digests:
        union_buckets(band, documents, union_find.parent, document_ids.first_of_corpus)


def iter_band_digests(
    shards: Sequence[SignatureShard], first_ids: Sequence[int], lsh: LshOptions
) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64]]]:
    """Document ids (n) and digests (bands × n), batch by batch; first_ids[i] is the id of row 0 of shard i's file."""
    for shard, first_id in zip(shards, first_ids, strict=True):
        salt = shard.salt(lsh.scope)
        for rows, values in shard.batches():
            yield rows.astype(np.uint64) + np.uint64(first_id), band_digests(values, lsh.rows, lsh.bands, salt)


def join_bands(run: StageRun, shards: list[SignatureShard], document_ids: DocumentIds, lsh: LshOptions) -> FileSet:
    """Run the steps that write the edges of all bands; return their files, ordered by band, then hash range."""
    share, documents = run.options.memory_per_worker, sum(shard.documents for shard in shards)
    parts, first_ids = _count_parts(documents, share), document_ids.by_name
    folder = run.work / f"{parts} parts"  # so that no file is of another number of parts
    partition = [
        Task(f"{number:06} of {parts}", partition_bands,
             {"shards": group, "first_ids": [first_ids[shard.file] for shard in group], "lsh": lsh, "parts": parts,
              "output": records, "offsets": offsets},
             (records, offsets), _count_bytes(group), share)
        for number, group in enumerate(_group_shards(shards, lsh, share, run.options.processes))
        for records, offsets in [(folder / f"bands/{number:06}.bin", folder / f"bands/{number:06}.npy")]
    ]  # fmt: skip
    run.step("bands", partition)
    files = FileSet(tuple(path for task in partition for path in task.outputs))
    join = [
        Task(f"{band:04}-{part:06} of {parts}", join_partition,
             {"files": files, "band": band, "part": part, "first": document_ids.first_of_corpus, "output": path},
             (path,), documents * BAND_RECORD.itemsize // parts)
        for band in range(lsh.bands)
        for part in range(parts)
        for path in [folder / f"edges/{band:04}-{part:06}.npy"]
    ]  # fmt: skip
    run.step("edges", join)
    return FileSet(tuple(path for task in join for path in task.outputs))


def partition_bands(
    shards: list[SignatureShard], first_ids: list[int], lsh: LshOptions, parts: int, output: Path, offsets: Path,
    memory: int,
) -> None:  # fmt: skip
    """Task: write the BAND_RECORDs of a group of shards, block by block, each ordered by band and hash range.

    The file `offsets` (.npy) holds the offsets of the hash ranges, in records: blocks × bands × (parts + 1).
    """
    starts: list[NDArray[np.int64]] = []
    with atomic_write(output) as temporary, temporary.open("wb") as file:
        for documents, digests in _iter_blocks(shards, first_ids, lsh, _documents_per_block(lsh, memory)):
            for band in digests:
                part = partition_of(band, parts)
                order = np.argsort(part, kind="stable")
                records = np.empty(len(order), BAND_RECORD)
                records["digest"], records["document"] = band[order], documents[order]
                sizes = np.bincount(part, minlength=parts)
                starts.append(file.tell() // BAND_RECORD.itemsize + np.cumsum([0, *sizes]))
                file.write(records.view(np.uint8).data)
    write_array(offsets, np.array(starts, np.int64).reshape(-1, lsh.bands, parts + 1))


def join_partition(files: FileSet, band: int, part: int, first: int, output: Path) -> None:
    """Task: write the edges of one band and hash range; those within an index (both ids below `first`) are left out."""
    edges = bucket_edges(read_partition(files, band, part))
    write_array(output, edges[edges[:, 0] >= np.uint64(first)])


def read_partition(files: FileSet, band: int, part: int) -> NDArray:
    """The BAND_RECORDs of one band and hash range in order of document id; `files` are records, offsets, records, …"""
    ranges = [np.load(offsets, mmap_mode="r")[:, band, part : part + 2] for offsets in files.paths[1::2]]
    records = np.empty(sum(int(np.sum(blocks[:, 1] - blocks[:, 0])) for blocks in ranges), BAND_RECORD)
    at = 0
    for path, blocks in zip(files.paths[::2], ranges, strict=True):
        with path.open("rb") as file:
            for start, stop in blocks.tolist():
                file.seek(start * BAND_RECORD.itemsize)
                at += file.readinto(records[at : at + stop - start].view(np.uint8).data) // BAND_RECORD.itemsize
    assert at == len(records), (at, len(records))
    return records


def read_edges(files: FileSet) -> Iterator[NDArray[np.uint64]]:
    """Yield the edges that `join_bands` wrote, band by band: n × 2, a document and the first of its bucket."""
    for path in files.paths:
        yield np.load(path)


def _group_shards(
    shards: list[SignatureShard], lsh: LshOptions, share: int, processes: int
) -> list[list[SignatureShard]]:
    """Consecutive shards in groups of about one block each, so that files are few and their hash ranges long."""
    total = sum(shard.documents for shard in shards)
    capacity = min(_documents_per_block(lsh, share), total // (4 * processes))
    groups: list[list[SignatureShard]] = []
    left = 0
    for shard in shards:
        if not groups or shard.documents > left:
            groups.append([])
            left = capacity
        groups[-1].append(shard)
        left -= shard.documents
    return groups


def _iter_blocks(
    shards: list[SignatureShard], first_ids: list[int], lsh: LshOptions, size: int
) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64]]]:
    """Batches of iter_band_digests joined into blocks of at least `size` documents; the last may be smaller."""
    batches = iter_band_digests(shards, first_ids, lsh)
    return map(_concatenate, batched(batches, size=size, size_of=lambda batch: len(batch[0])))


def _concatenate(batches: list[tuple[NDArray[np.uint64], NDArray[np.uint64]]]) -> tuple[NDArray, NDArray]:
    return np.concatenate([ids for ids, _ in batches]), np.concatenate([digests for _, digests in batches], axis=1)


def _documents_per_block(lsh: LshOptions, memory: int) -> int:
    """Documents whose digests can be partitioned together in `memory` bytes."""
    return memory // (2 * 8 * lsh.bands + _PARTITION_BYTES)  # digests twice: in batches and concatenated


def _count_parts(documents: int, share: int) -> int:
    """The number of hash ranges, a power of two, so that joining one takes at most `share` bytes."""
    return 1 << max(0, (documents * BAND_RECORD.itemsize * _JOIN_FACTOR // max(share, 1)).bit_length())


def _count_bytes(shards: Sequence[SignatureShard]) -> int:
    """Bytes of the signatures of shards, for the progress bar."""
    return sum(4 * shard.documents * shard.header.permutations for shard in shards)
