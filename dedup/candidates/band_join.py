"""Band join: the edges between documents that share a band of their signatures, in memory or by hash partitions.

In memory, `union_signatures` feeds the buckets of each band straight to union-find. Otherwise `join_bands`
runs two steps of tasks: `partition_bands` writes records of 16 bytes (digest, document id) of many shards, those of a
hash range of a band to a file of their own; `join_partition` reads the files of one range of one band, cut into more
ranges if they exceed a worker's share of the memory, and writes its edges.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dedup.candidates.document_ids import DocumentIds
from dedup.candidates.input_shards import Scope, SignatureShard
from dedup.clustering.lsh import BAND_RECORD, band_digests, bucket_edges, union_buckets
from dedup.clustering.union_find import UnionFind, union_find_fits
from gristmill.batches import batched, partition_of
from gristmill.engine.run import StageRun
from gristmill.engine.task import FileSet, Task
from gristmill.io.external_sort import MAX_SCATTERED, read_records, scatter_records, write_records

_UNION_BYTES = 40  # memory per document for union-find, without its digests
_JOIN_FACTOR = 4  # memory per byte of records while a partition is joined
_PARTITION_BYTES = 64  # memory per document while its digests are partitioned, without the digests
_BLOCK = 1 << 16  # records or edges read together
_IN_ONE_PROCESS = 10_000_000  # documents whose bands one process joins in seconds; those of more are joined in parallel


@dataclass(frozen=True)
class LshOptions:
    """Locality-sensitive hashing: bands, rows per band, and whether sources are compared with each other."""

    rows: int
    bands: int
    scope: Scope = "global"


def fits_in_memory(shards: Sequence[SignatureShard], document_ids: DocumentIds, lsh: LshOptions, memory: int) -> bool:
    """Return whether union_signatures needs at most half of `memory` bytes, and seconds: one process does its work."""
    documents = sum(shard.documents for shard in shards)
    if documents > _IN_ONE_PROCESS:
        return False
    digests_fit = documents * (8 * lsh.bands + _UNION_BYTES) <= memory // 2
    return digests_fit and union_find_fits(len(document_ids), memory // 4)


def union_signatures(
    shards: Sequence[SignatureShard], document_ids: DocumentIds, lsh: LshOptions, union_find: UnionFind
) -> NDArray[np.unsignedinteger]:
    """Unite the documents that share a band, in memory: without files, sorting or a list of edges.

    Returns the ids of the signed documents, ascending.
    """
    count = sum(shard.documents for shard in shards)
    digests = np.empty((lsh.bands, count), np.uint64)
    documents = np.empty_like(union_find.parent, shape=count)
    first = 0
    for ids, values in iter_band_digests(shards, _first_ids(shards, document_ids), lsh):
        end = first + len(ids)
        documents[first:end] = ids
        digests[:, first:end] = values
        first = end
    for band in digests:
        union_buckets(band, documents, union_find.parent, document_ids.first_of_corpus)
    return documents


def _first_ids(shards: Sequence[SignatureShard], document_ids: DocumentIds) -> list[int]:
    """Return for each shard the id of row 0 of its file."""
    by_name = document_ids.by_name
    return [by_name[shard.file] for shard in shards]


def iter_band_digests(
    shards: Sequence[SignatureShard], first_ids: Sequence[int], lsh: LshOptions
) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64]]]:
    """Yield document ids (n) and digests (bands × n) by batch; first_ids[i] is the id of row 0 of shard i's file."""
    for shard, first_id in zip(shards, first_ids, strict=True):
        salt = shard.salt(lsh.scope)
        for rows, values in shard.batches():
            yield rows.astype(np.uint64) + np.uint64(first_id), band_digests(values, lsh.rows, lsh.bands, salt)


def join_bands(
    run: StageRun,
    shards: list[SignatureShard],
    document_ids: DocumentIds,
    lsh: LshOptions,
    lists_signed: bool = False,
) -> tuple[FileSet, FileSet]:
    """Run the steps that write the edges of all bands; return their files, ordered by band, then hash range.

    With `lists_signed`, also the files of the ids of all signed documents, ascending.
    """
    documents = sum(shard.documents for shard in shards)
    parts = _count_parts(documents, lsh.bands, run.options.memory_per_worker)
    names = list[str]()  # of the files of each band and hash range
    for band in range(lsh.bands):
        names += [f"{band:04}-{part:04}" for part in range(parts)]
    folder = run.work / f"{parts} parts"  # so that no file is of another number of parts
    partition = _partition_tasks(run, shards, document_ids, lsh, folder, names, lists_signed)
    run.step("bands", partition)
    size = documents * BAND_RECORD.itemsize // parts
    join = list[Task]()
    for number, name in enumerate(names):
        output = folder / f"edges/{name}.bin"
        arguments = {
            "files": FileSet.of(partition, number),
            "part": number % parts,
            "parts": parts,
            "first": document_ids.first_of_corpus,
            "output": output,
        }
        share = run.options.memory_per_worker
        join.append(Task(f"{name} of {parts}", join_partition, arguments, (output,), size, share))
    run.step("edges", join)
    signed = FileSet.of(partition, len(names)) if lists_signed else FileSet(())
    return FileSet.of(join), signed


def _partition_tasks(
    run: StageRun,
    shards: list[SignatureShard],
    document_ids: DocumentIds,
    lsh: LshOptions,
    folder: Path,
    names: list[str],
    lists_signed: bool,
) -> list[Task]:
    """Return tasks that write the records of groups of shards to files of each of `names`."""
    parts = len(names) // lsh.bands
    documents = sum(shard.documents for shard in shards)
    in_group = documents // max(4 * run.options.processes, len(shards) // len(names))  # about a file for each shard
    tasks = list[Task]()
    for number, group in enumerate(batched(shards, size=max(1, in_group), size_of=lambda shard: shard.documents)):
        outputs = tuple(folder / f"bands/{number:06}/{name}.bin" for name in names)
        signed = (folder / f"signed/{number:06}.bin",) if lists_signed else ()
        arguments = {
            "shards": group,
            "first_ids": _first_ids(group, document_ids),
            "lsh": lsh,
            "outputs": outputs,
            "signed": signed,
        }
        name = f"{number:06} of {parts}"
        size = sum(4 * shard.documents * shard.header.permutations for shard in group)
        share = run.options.memory_per_worker
        tasks.append(Task(name, partition_bands, arguments, (*outputs, *signed), size, share))
    return tasks


def partition_bands(
    shards: list[SignatureShard],
    first_ids: list[int],
    lsh: LshOptions,
    outputs: tuple[Path, ...],
    signed: tuple[Path, ...],
    memory: int,
) -> None:
    """Task: write the BAND_RECORDs of a group of shards, in order of document; `outputs` are bands × hash ranges.

    `signed` is the file of the documents' ids, if they are asked for.
    """
    parts = len(outputs) // lsh.bands
    step = max(1, MAX_SCATTERED // parts)  # bands whose files are open together: all, if they are not very many

    def blocks(first: int) -> Iterator[tuple[NDArray, NDArray[np.int64]]]:
        for documents, digests in _iter_blocks(shards, first_ids, lsh, memory):
            for number, band in enumerate(digests[first : first + step]):
                records = np.empty(len(band), BAND_RECORD)
                records["digest"] = band
                records["document"] = documents
                yield records, partition_of(band, parts) + number * parts

    for first in range(0, lsh.bands, step):
        scatter_records(outputs[first * parts : (first + step) * parts], blocks(first))
    for path in signed:
        write_records(path, _iter_ids(shards, first_ids))


def _iter_ids(shards: list[SignatureShard], first_ids: list[int]) -> Iterator[NDArray[np.uint64]]:
    """Yield the ids of the signed documents, batch by batch."""
    for shard, first_id in zip(shards, first_ids, strict=True):
        for rows, _ in shard.batches():
            yield rows.astype(np.uint64) + np.uint64(first_id)


def join_partition(files: FileSet, part: int, parts: int, first: int, output: Path, memory: int) -> None:
    """Task: write the edges of hash range `part` of a band, from files of BAND_RECORDs in order of document.

    Edges within an index (both ids below `first`) are left out.
    """
    size = sum(path.stat().st_size for path in files.paths)
    ranges = min(MAX_SCATTERED, 1 + size * _JOIN_FACTOR // max(memory, 1))

    def edges() -> Iterator[NDArray[np.uint64]]:
        with _cut(files, part, parts, ranges, output.with_name(f"{output.name}.ranges")) as cut:
            for paths in cut:
                records = [np.fromfile(path, BAND_RECORD) for path in paths]
                in_bucket = bucket_edges(np.concatenate(records))
                yield in_bucket[in_bucket[:, 0] >= np.uint64(first)].reshape(-1)

    write_records(output, edges())


@contextmanager
def _cut(files: FileSet, part: int, parts: int, ranges: int, folder: Path) -> Iterator[list[tuple[Path, ...]]]:
    """Yield the files of each of so many hash ranges, into which range `part` of `parts` is cut; in `folder`."""
    if ranges == 1:
        yield [files.paths]
        return
    shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed
    paths = [folder / f"{number:04}.bin" for number in range(ranges)]

    def numbered() -> Iterator[tuple[NDArray, NDArray[np.int64]]]:
        for records in read_records(files.paths, BAND_RECORD, _BLOCK):
            yield records, partition_of(records["digest"], parts * ranges) - part * ranges

    scatter_records(paths, numbered())
    try:
        yield [(path,) for path in paths]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read_edges(files: FileSet) -> Iterator[NDArray[np.uint64]]:
    """Yield the edges that `join_bands` wrote, band by band: n × 2, a document and the first of its bucket."""
    for ends in read_records(files.paths, np.dtype("<u8"), 2 * _BLOCK):
        yield ends.reshape(-1, 2)


def read_signed(files: FileSet) -> Iterator[NDArray[np.uint64]]:
    """Return the ids of signed documents that `join_bands` wrote, ascending, block by block."""
    return read_records(files.paths, np.dtype("<u8"), _BLOCK)


def _iter_blocks(
    shards: list[SignatureShard], first_ids: list[int], lsh: LshOptions, memory: int
) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64]]]:
    """Yield batches of iter_band_digests joined into blocks of about `memory` bytes."""
    documents = memory // (2 * 8 * lsh.bands + _PARTITION_BYTES)  # digests twice: in batches and concatenated
    batches = iter_band_digests(shards, first_ids, lsh)
    for block in batched(batches, size=documents, size_of=lambda batch: len(batch[0])):
        ids, digests = zip(*block, strict=True)
        yield np.concatenate(ids), np.concatenate(digests, axis=1)


def _count_parts(documents: int, bands: int, share: int) -> int:
    """Return the number of hash ranges, a power of two: joining one takes at most `share` bytes, if files suffice."""
    shares = documents * BAND_RECORD.itemsize * _JOIN_FACTOR // max(share, 1)
    count = 1 << shares.bit_length()
    max_parts = 1 << max(0, (MAX_SCATTERED // bands).bit_length() - 1)
    return min(count, max_parts)
