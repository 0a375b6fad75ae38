"""Stage: find clusters of near-duplicates, the connected components of the graph of candidate pairs.

Pair files and, with --signatures, bands of signature shards → edges → union-find → clusters.
"""

import shutil
import sys
import time
from itertools import chain
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

from dedup.candidates.band_join import EDGES, LshOptions, fits_in_memory, join_bands, read_edges, union_signatures
from dedup.candidates.cluster_files import write_clusters
from dedup.candidates.connected_components import UnionFind, component_labels
from dedup.candidates.document_ids import DocumentIds, is_of_index
from dedup.candidates.input_shards import Scope, SignatureShard, assign_ids, list_signature_shards
from dedup.candidates.lsh import check_bands
from dedup.candidates.pair_files import ParsedPairs, parse_pairs
from gristmill.command import command
from gristmill.counts import READ, Counts
from gristmill.engine.ledger import Ledger
from gristmill.engine.stage import STATE_DIR, MemoryBudget, RunOptions, Task, is_done, run_stage
from gristmill.errors import UsageError
from gristmill.io.documents import source_of
from gristmill.io.parquet_tables import is_table

NAME = "generate_connected_components"
CLUSTERED = "clustered"
ALONE = "alone"


def generate_connected_components(
    input_dir: Path,
    out_file: Path,
    signatures: Path | None = None,
    range: int = 13,
    bands: int = 9,
    index: tuple[str, ...] = (),
    scope: Scope = "global",
    options: RunOptions = RunOptions(),
) -> Counts:
    """Write the clusters of near-duplicates: documents that are connected by a chain of pairs.

    With --signatures this stage finds the candidate pairs itself, so generate_duplicate_pairs need not run; pair
    files in input_dir are read as well. Runs in memory if the budget allows it, else with files on disk.

    Args:
        input_dir: DUP/, the folder of duplicate_pairs*.txt.
        out_file: DUP/connected_components.pickle, as SlimPajama's: (components, number of components,
            {number: key}), each component in key order; or .parquet, a table of cluster, file and row.
        signatures: MINHASH/, the folder of signature shards, to unite documents that share a band.
        range: Rows of a band, for --signatures.
        bands: Number of bands, for --signatures.
        index: For --signatures, folders of signature shards, or NAME=FOLDER, of corpora deduplicated before. Their
            documents come first, as index:NAME:<key>, and are not compared with one another.
        scope: For --signatures; per-source compares documents only with documents of their own source.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read (those with a signature or in a pair), clustered and alone, per source.
    """
    start = time.perf_counter()
    is_table(out_file)
    pairs = tuple(sorted(input_dir.glob("duplicate_pairs*.txt")))
    if not pairs and not signatures:
        raise UsageError(
            f"{input_dir}: wanted duplicate_pairs*.txt in it, which generate_duplicate_pairs writes, or --signatures"
        )
    shards, permutations = list_signature_shards(signatures, index) if signatures else ([], 0)
    lsh = LshOptions(range, bands, scope)
    if signatures:
        check_bands(range, bands, permutations)
    state, name = out_file.parent / STATE_DIR, f"{NAME}-{out_file.name}"
    work = state / f"{name}-work"
    arguments = {"pairs": pairs, "shards": shards, "lsh": lsh, "work": work, "out_file": out_file,
                 "memory": MemoryBudget(options.memory_bytes)}  # fmt: skip
    inputs = (*pairs, *(shard.path for shard in shards))
    size = sum(path.stat().st_size for path in inputs)
    final = Task("write", write_components, arguments, inputs, (out_file,), size)
    if not is_done(final, Ledger(state / f"{name}.jsonl").read(), final.fingerprint()):
        _find_edges(pairs, shards, lsh, work, options)
    counts = run_stage(name, [final], state, options, started=start)
    shutil.rmtree(work, ignore_errors=True)
    return counts


def _find_edges(
    pairs: tuple[Path, ...], shards: list[SignatureShard], lsh: LshOptions, work: Path, options: RunOptions
) -> None:
    """Parse the pair files and, if the signatures do not fit into memory, write the edges of their bands."""
    parsed = ParsedPairs(work)
    outputs, size = (parsed.pairs, parsed.files), sum(path.stat().st_size for path in pairs)
    parse = Task("parse", parse_pairs, {"files": pairs, "work": work}, pairs, outputs, size)
    run_stage("pairs", [parse], work, options, summary=False)
    document_ids = assign_ids(shards, parsed.rows())
    if shards and not fits_in_memory(shards, document_ids, lsh, options.memory_bytes):
        join_bands(shards, document_ids, lsh, work, options)
    else:
        shutil.rmtree(work / EDGES, ignore_errors=True)  # left by a killed run with less memory


def write_components(
    pairs: tuple[Path, ...],  # noqa: ARG001
    shards: list[SignatureShard],
    lsh: LshOptions,
    work: Path,
    out_file: Path,
    memory: int,
) -> Counts:
    """Task: find the connected components of the pairs and of the shards' bands, and write them as clusters."""
    parsed = ParsedPairs(work)
    document_ids = assign_ids(shards, parsed.rows())
    edges = parsed.edges(document_ids)
    if (work / EDGES).exists() or not shards:
        labels = component_labels(chain(edges, read_edges(work)), len(document_ids), work, memory // 2)
    else:
        union_find = UnionFind(len(document_ids))
        for block in edges:
            union_find.union(block)
        union_signatures(shards, document_ids, lsh, union_find)
        labels = union_find.labels()
    clustered = write_clusters(out_file, labels, document_ids, work, memory // 2)
    return _count(shards, document_ids, clustered)


def _count(shards: list[SignatureShard], document_ids: DocumentIds, clustered: list[int]) -> Counts:
    """Count documents read, clustered and alone; of a file without signatures only clustered ones are known."""
    counts, signatures = Counts({}, []), dict.fromkeys(document_ids.names, 0)
    for shard in shards:
        signatures[shard.file] += shard.documents
    for name, many in zip(document_ids.names, clustered, strict=True):
        if not is_of_index(name):
            read = max(signatures[name], many)
            counts.add(source_of(name), READ, 0, read)
            counts.add(source_of(name), CLUSTERED, 0, many)
            counts.add(source_of(name), ALONE, 0, read - many)
    return counts


if __name__ == "__main__":
    command(generate_connected_components)
