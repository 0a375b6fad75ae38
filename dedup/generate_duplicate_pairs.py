"""Stage: find candidate pairs of near-duplicates, documents whose signatures share a band.

Signature shards → bands, partitioned by hash → edges of each bucket → lines of keys.
"""

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
import pyarrow.compute as pc

from dedup.candidates.band_join import LshOptions, join_bands, read_edges
from dedup.candidates.document_ids import DocumentIds, count_joined
from dedup.candidates.input_shards import (
    Scope,
    assign_ids,
    check_indexes,
    count_documents,
    list_shards_of,
    list_signature_shards,
)
from dedup.clustering.lsh import check_bands
from gristmill.command import command, reads_no_documents
from gristmill.counts import Counts
from gristmill.engine.options import RunOptions
from gristmill.engine.run import open_stage
from gristmill.engine.task import FileSet, Stage, Task
from gristmill.errors import require
from gristmill.storage.local import atomic_write

STAGE = Stage("generate_duplicate_pairs", version=1, libraries=())
PAIRED = "paired"
_BLOCK = 1 << 18  # lines formatted together


@reads_no_documents()
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
    folders = list_shards_of(input_dir, index)
    lsh = LshOptions(range, bands, scope)
    require(
        options.workers is None or processes in (None, options.workers),
        f"--processes {processes} has no effect with --workers {options.workers}, which means the same: leave one out",
    )
    options = replace(options, workers=options.workers or processes)
    with open_stage(
        STAGE, out_file.parent, options, label=out_file.name, reads={input_dir: folders[""].paths},
        files=[out_file],
    ) as run:  # fmt: skip
        check_indexes(run, folders, index)
        done = run.goal({"folders": folders, "lsh": lsh}, (out_file,))
        if done is not None:
            return run.finish(done)
        shards = list_signature_shards(run, folders)
        check_bands(range, bands, shards[0].header.permutations)
        document_ids = assign_ids(shards)
        edges, _ = join_bands(run, shards, document_ids, lsh)
        arguments = {"edges": edges, "document_ids": document_ids, "documents": count_documents(shards)}
        written = run.step("write", [Task("write", write_pairs, {**arguments, "out_file": out_file}, (out_file,))])
        return run.finish(written.counts)


def write_pairs(edges: FileSet, document_ids: DocumentIds, documents: dict[str, int], out_file: Path) -> Counts:
    """Task: write edges as lines of keys; count the documents paired, of `documents` in each file."""
    is_paired = np.zeros(len(document_ids) // 8 + 1, np.uint8)  # one bit per document
    with atomic_write(out_file) as temporary, temporary.open("wb") as file:
        for edge_block in read_edges(edges):
            for start in np.arange(0, len(edge_block), _BLOCK):
                block = edge_block[start : start + _BLOCK]
                one, other = (document_ids.keys(block[:, end]) for end in (0, 1))
                pairs = pc.binary_join_element_wise(one, other, " :: ").to_pylist()
                lines = "".join(f"{pair}\n" for pair in pairs)
                file.write(lines.encode())
                ids = block.reshape(-1)
                bits = np.left_shift(1, ids & np.uint64(7)).astype(np.uint8)
                np.bitwise_or.at(is_paired, ids >> np.uint64(3), bits)
    paired = []
    for start, stop in pairwise(document_ids.first_ids.tolist()):
        bits = np.unpackbits(is_paired[start // 8 : stop // 8 + 1], bitorder="little")
        paired.append(int(bits[start % 8 : start % 8 + stop - start].sum()))
    return count_joined(document_ids.names, (documents[name] for name in document_ids.names), paired, PAIRED)


if __name__ == "__main__":
    command(generate_duplicate_pairs)
