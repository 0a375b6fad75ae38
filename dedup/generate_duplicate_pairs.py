"""Stage: candidate pairs, the documents that share a band of their signatures."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
from numpy.typing import NDArray

from dedup.lsh import RECORD, band_digests, check_bands, star_edges
from dedup.shards import list_shards, open_shard
from pipeline.command import command
from pipeline.documents import source_of
from pipeline.files import whole_file
from pipeline.ledger import READ, Counts, Ledger
from pipeline.partition import part_of
from pipeline.stage import STATE, How, Options, Task, is_done, outputs_of, run_stage

NAME = "generate_duplicate_pairs"
PAIRED = "paired"
ALONE = "alone"
_SORTING = 6  # bytes of memory a byte of records takes while they are sorted


def generate_duplicate_pairs(
    input_dir: Path,
    out_file: Path,
    range: int = 13,
    bands: int = 9,
    processes: int | None = None,
    how: Options = How(),
) -> Counts:
    """Write every pair of documents that share a band: a line `<key> :: <key>` each, ordered by band.

    Documents of a bucket are each paired with its first one in key order. Records of 16 bytes are
    partitioned by hash range and sorted within the memory budget, whatever the number of documents.

    Args:
        input_dir: MINHASH/, the folder that to_hash wrote to; all shards below it are compared.
        out_file: DUP/duplicate_pairs.txt.
        range: Rows of a band.
        bands: Number of bands. 9 × 13 finds 40 % of the pairs of similarity 0.80, and 93 % at 0.90.
        processes: SlimPajama's name for --workers.
        how: How to run.

    Returns:
        Signatures read, paired with another, and alone, per source.
    """
    shards = list_shards(input_dir)
    check_bands(range, bands, open_shard(shards[0]).head.permutations)
    how = replace(how, workers=how.workers or processes)
    state = out_file.parent / STATE
    name = f"{NAME}-{out_file.name}"
    work = state / f"{name}-{range}x{bands}"  # an argument of the last task, and so the bands are, too
    arguments = {"shards": shards, "work": work, "out_file": out_file}
    parts = _partitions(shards, how)
    # How many partitions there are changes nothing in the result, so it is no argument of the last task.
    final = Task("write", write_pairs, arguments, tuple(shards), (out_file,), sum(_size(path) for path in shards))
    entries = Ledger(state / f"{name}.jsonl").read()
    if not is_done(final, entries, final.fingerprint()):
        _run_parts(shards, range, bands, parts, work, how)
    counts = run_stage(name, [final], state, how)
    shutil.rmtree(work, ignore_errors=True)
    return counts


def partition_bands(shard: Path, first: int, rows: int, bands: int, parts: int, output: Path) -> Counts:
    """Write a shard's records, by band and then by hash range, and beside them where each range begins."""
    opened = open_shard(shard)
    digests = [band_digests(some, rows, bands) for some in opened.signatures()]
    table = np.concatenate([*digests, np.empty((bands, 0), np.uint64)], axis=1)
    documents = np.arange(first, first + table.shape[1], dtype=np.uint64)
    starts = np.zeros((bands, parts + 1), np.int64)
    with whole_file(output) as temporary, temporary.open("wb") as file:
        for band in np.arange(bands):
            part = part_of(table[band], parts)
            order = np.argsort(part, kind="stable")
            records = np.empty(len(order), RECORD)
            records["digest"], records["document"] = table[band][order], documents[order]
            starts[band] = file.tell() // RECORD.itemsize + np.searchsorted(part[order], np.arange(parts + 1))
            file.write(records.tobytes())
    with whole_file(output.with_suffix(".npy")) as temporary, temporary.open("wb") as file:
        np.save(file, starts)
    return Counts({}, [])


def link_part(files: list[Path], band: int, part: int, output: Path) -> Counts:
    """Sort the records of one band and hash range from all shards, and write its edges."""
    pieces = []
    for path in files:
        start, stop = np.load(path.with_suffix(".npy"), mmap_mode="r")[band, part : part + 2]
        pieces.append(np.fromfile(path, RECORD, stop - start, offset=start * RECORD.itemsize))
    with whole_file(output) as temporary, temporary.open("wb") as file:
        np.save(file, star_edges(np.concatenate(pieces)))
    return Counts({}, [])


def write_pairs(shards: list[Path], work: Path, out_file: Path) -> Counts:
    """Write edges as lines of keys, band by band in hash order, and count who is paired."""
    names, rows, firsts = _key_table(shards)
    paired = np.zeros(firsts[-1], bool)
    with whole_file(out_file) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        for path in sorted((work / "edges").glob("*.npy")):
            edges = np.load(path).astype(np.int64)
            paired[edges.reshape(-1)] = True
            shard = np.searchsorted(firsts, edges, side="right") - 1
            at = rows[edges]
            file.writelines(
                f"{names[a]}@{i} :: {names[b]}@{j}\n"
                for (a, b), (i, j) in zip(shard.tolist(), at.tolist(), strict=True)
            )
    return _count(shards, firsts, paired)


def _run_parts(shards: list[Path], rows: int, bands: int, parts: int, work: Path, how: How) -> None:
    files = [work / "bands" / f"{number:06}.bin" for number, _ in enumerate(shards)]
    firsts = _first_ids(shards)
    split = [
        Task(f"bands {file.stem}", partition_bands,
             {"shard": shard, "first": int(first), "rows": rows, "bands": bands, "parts": parts, "output": file},
             (shard,), (file, file.with_suffix(".npy")), _size(shard))
        for shard, file, first in zip(shards, files, firsts, strict=False)
    ]  # fmt: skip
    quiet = replace(how, quiet=True)
    run_stage("bands", split, work, quiet)
    sources = tuple(files)
    link = [
        Task(f"edges {band:04}-{part:06}", link_part, {"files": files, "band": band, "part": part, "output": path},
             sources, (path,))
        for band in np.arange(bands).tolist()
        for part in np.arange(parts).tolist()
        for path in [work / "edges" / f"{band:04}-{part:06}.npy"]
    ]  # fmt: skip
    planned = set(outputs_of(link))
    for stray in set((work / "edges").glob("*.npy")) - planned:  # of a killed run with another number of parts
        stray.unlink()
    run_stage("edges", link, work, quiet)


def _partitions(shards: list[Path], how: How) -> int:
    """Hash ranges of a band, so many that each fits into one worker's share of the memory."""
    records = int(_first_ids(shards)[-1]) * RECORD.itemsize * _SORTING
    share = how.memory_bytes // how.processes
    return 1 << max(0, (records // max(share, 1)).bit_length())


def _first_ids(shards: list[Path]) -> NDArray[np.int64]:
    """The number of the first document of each shard; the last item is the number of all."""
    return np.concatenate([[0], np.cumsum([len(open_shard(path)) for path in shards])]).astype(np.int64)


def _key_table(shards: list[Path]) -> tuple[list[str], NDArray[np.int64], NDArray[np.int64]]:
    opened = [open_shard(path) for path in shards]
    return [shard.head.file for shard in opened], np.concatenate([s.rows() for s in opened]), _first_ids(shards)


def _count(shards: list[Path], firsts: NDArray[np.int64], paired: NDArray[np.bool_]) -> Counts:
    counts = Counts({}, [])
    for path, start, stop in zip(shards, firsts, firsts[1:], strict=False):
        source = source_of(open_shard(path).head.file)
        linked = int(paired[start:stop].sum())
        counts.add(source, READ, 0, int(stop - start))
        counts.add(source, PAIRED, 0, linked)
        counts.add(source, ALONE, 0, int(stop - start) - linked)
    return counts


def _size(path: Path) -> int:
    return path.stat().st_size


if __name__ == "__main__":
    command(generate_duplicate_pairs)
