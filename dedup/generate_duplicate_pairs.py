"""Stage: find candidate pairs of near-duplicates, documents whose signatures share a band.

Signature shards → bands, partitioned by hash → edges of each bucket → lines of keys.
"""

import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from dedup.candidates.band_join import LshOptions, join_bands, read_edges
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
_BLOCK = 1 << 18  # lines formatted together


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
    """Write the candidate pairs, a line `<key> :: <key>` each, ordered by band.

    The documents that share a band form a bucket; each is paired with the bucket's first one in key order. Memory
    stays within the budget for any number of documents.

    Args:
        input_dir: MINHASH/, the folder of to_hash's signature shards; all of them are compared.
        out_file: DUP/duplicate_pairs.txt.
        range: Rows of a band.
        bands: Number of bands. 9 bands of 13 rows find 40 % of the pairs of similarity 0.80, and 93 % at 0.90.
        processes: SlimPajama's name for --workers.
        index: Folders of signature shards, or NAME=FOLDER, of corpora deduplicated before. Their documents
            come first, as index:NAME:<key>, and are not paired with one another; their texts are not needed.
        scope: per-source compares documents only with documents of their own source.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read, paired with another and alone, per source; without the documents of indexes.
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
        join_bands(shards, document_ids, lsh, work, options)
    counts = run_stage(name, [final], state, options, started=start)
    shutil.rmtree(work, ignore_errors=True)
    return counts


def write_pairs(shards: list[SignatureShard], lsh: LshOptions, work: Path, out_file: Path) -> Counts:  # noqa: ARG001
    """Task: write the edges in `work` as lines of keys; count the documents paired."""
    document_ids = assign_ids(shards)
    is_paired = np.zeros(len(document_ids) // 8 + 1, np.uint8)  # one bit per document
    with atomic_write(out_file) as temporary, temporary.open("wb") as file:
        for edges in read_edges(work):
            for start in np.arange(0, len(edges), _BLOCK):
                block = edges[start : start + _BLOCK]
                file.write(format_pairs(document_ids, block))
                _set_bits(is_paired, block.reshape(-1))
    return _count(shards, document_ids, is_paired)


def format_pairs(document_ids: DocumentIds, edges: NDArray[np.uint64]) -> bytes:
    """Lines `<key> :: <key>` of edges (n × 2), in UTF-8."""
    pairs = pc.binary_join_element_wise(document_ids.keys(edges[:, 0]), document_ids.keys(edges[:, 1]), " :: ")
    return "".join(f"{pair}\n" for pair in pairs.to_pylist()).encode()


def _set_bits(bits: NDArray[np.uint8], ids: NDArray[np.uint64]) -> None:
    """Set the bits at positions `ids`."""
    np.bitwise_or.at(bits, ids >> np.uint64(3), np.left_shift(1, ids & np.uint64(7)).astype(np.uint8))


def _count(shards: list[SignatureShard], document_ids: DocumentIds, is_paired: NDArray[np.uint8]) -> Counts:
    """Count documents per source: read, paired and alone."""
    counts = Counts({}, [])
    for shard in shards:
        if not is_of_index(shard.file):
            counts.add(source_of(shard.file), READ, 0, shard.documents)
            counts.add(source_of(shard.file), ALONE, 0, shard.documents)
    for name, start, stop in zip(document_ids.names, document_ids.first_ids, document_ids.first_ids[1:], strict=False):
        if not is_of_index(name):
            first, size = int(start), int(stop - start)
            bits = np.unpackbits(is_paired[first // 8 : (first + size) // 8 + 1], bitorder="little")
            paired = int(bits[first % 8 : first % 8 + size].sum())
            counts.add(source_of(name), PAIRED, 0, paired)
            counts.add(source_of(name), ALONE, 0, -paired)
    return counts


if __name__ == "__main__":
    command(generate_duplicate_pairs)
