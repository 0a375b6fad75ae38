"""Stage: candidate pairs, the documents that share a band of their signatures."""

import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from dedup.candidates.band_join import LshOptions, link, read_edges
from dedup.candidates.document_ids import DocumentIds, is_of_index
from dedup.candidates.input_shards import Scope, SignatureShard, assign_ids, list_signature_shards
from dedup.candidates.lsh import check_bands
from gristmill.command import command
from gristmill.counts import READ, Counts
from gristmill.engine.ledger import Ledger
from gristmill.engine.stage import STATE_DIR, RunOptions, Task, is_done, run_stage
from gristmill.io.documents import source_of
from gristmill.io.files import atomic_write

NAME = "generate_duplicate_pairs"
PAIRED = "paired"
ALONE = "alone"
_LINES = 1 << 18  # lines made at a time


def generate_duplicate_pairs(
    input_dir: Path,
    out_file: Path,
    range: int = 13,
    bands: int = 9,
    processes: int | None = None,
    index: tuple[str, ...] = (),
    scope: Scope = "global",
    options: RunOptions = RunOptions(),
) -> Counts:
    """Write every pair of documents that share a band: a line `<key> :: <key>` each, ordered by band.

    Documents of a bucket are each paired with its first one in key order. Records of 16 bytes are
    partitioned by hash range and linked within the memory budget, whatever the number of documents.

    Args:
        input_dir: MINHASH/, the folder that to_hash wrote to; all shards below it are compared.
        out_file: DUP/duplicate_pairs.txt.
        range: Rows of a band.
        bands: Number of bands. 9 × 13 finds 40 % of the pairs of similarity 0.80, and 93 % at 0.90.
        processes: SlimPajama's name for --workers.
        index: Folders of shards, or NAME=FOLDER, of corpora deduplicated before: their documents come
            first, as index:NAME:<key>, and are not paired among themselves. Their texts are not needed.
        scope: per-source compares documents only with those of their own source.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Signatures read, paired with another, and alone, per source; an index's are not counted.
    """
    start = time.perf_counter()
    shards, permutations = list_signature_shards(input_dir, index)
    check_bands(range, bands, permutations)
    options = replace(options, workers=options.workers or processes)
    lsh, document_ids = LshOptions(range, bands, scope), assign_ids(shards)
    state = out_file.parent / STATE_DIR
    name = f"{NAME}-{out_file.name}"
    work = state / f"{name}-work"
    arguments = {"shards": shards, "lsh": lsh, "work": work, "out_file": out_file}
    paths = tuple(shard.path for shard in shards)
    final = Task("write", write_pairs, arguments, paths, (out_file,), sum(path.stat().st_size for path in paths))
    entries = Ledger(state / f"{name}.jsonl").read()
    if not is_done(final, entries, final.fingerprint()):
        link(shards, document_ids, lsh, work, options)
    counts = run_stage(name, [final], state, options, started=start)
    shutil.rmtree(work, ignore_errors=True)
    return counts


def write_pairs(shards: list[SignatureShard], lsh: LshOptions, work: Path, out_file: Path) -> Counts:  # noqa: ARG001
    """Write edges as lines of keys, band by band in hash order, and count who is paired."""
    document_ids = assign_ids(shards)
    paired = np.zeros(len(document_ids) // 8 + 1, np.uint8)  # a bit a document
    with atomic_write(out_file) as temporary, temporary.open("wb") as file:
        for edges in read_edges(work):
            for start in np.arange(0, len(edges), _LINES):
                some = edges[start : start + _LINES]
                file.write(as_lines(document_ids, some))
                _set_bits(paired, some.reshape(-1))
    return _count(shards, document_ids, paired)


def as_lines(document_ids: DocumentIds, edges: NDArray[np.uint64]) -> bytes:
    """A line `<key> :: <key>` for each edge, in UTF-8."""
    pairs = pc.binary_join_element_wise(document_ids.keys(edges[:, 0]), document_ids.keys(edges[:, 1]), " :: ")
    return "".join(f"{pair}\n" for pair in pairs.to_pylist()).encode()


def _set_bits(bits: NDArray[np.uint8], numbers: NDArray[np.uint64]) -> None:
    np.bitwise_or.at(bits, numbers >> np.uint64(3), np.left_shift(1, numbers & np.uint64(7)).astype(np.uint8))


def _count(shards: list[SignatureShard], document_ids: DocumentIds, paired: NDArray[np.uint8]) -> Counts:
    counts = Counts({}, [])
    for shard in shards:
        if not is_of_index(shard.file):
            counts.add(source_of(shard.file), READ, 0, shard.documents)
            counts.add(source_of(shard.file), ALONE, 0, shard.documents)
    for name, start, stop in zip(document_ids.names, document_ids.bases, document_ids.bases[1:], strict=False):
        if not is_of_index(name):
            first, size = int(start), int(stop - start)
            bits = np.unpackbits(paired[first // 8 : (first + size) // 8 + 1], bitorder="little")
            linked = int(bits[first % 8 : first % 8 + size].sum())
            counts.add(source_of(name), PAIRED, 0, linked)
            counts.add(source_of(name), ALONE, 0, -linked)
    return counts


if __name__ == "__main__":
    command(generate_duplicate_pairs)
