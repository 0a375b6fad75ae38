"""Stage: find clusters of near-duplicates, the connected components of the graph of candidate pairs.

Pair files and, with --signatures, bands of signature shards → edges → union-find → clusters.
"""

import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
from numpy.typing import NDArray

from dedup.candidates.band_join import (
    LshOptions,
    fits_in_memory,
    join_bands,
    read_edges,
    read_signed,
    union_signatures,
)
from dedup.candidates.cluster_samples import ClusterSample, compare_samples, warn_of_clusters
from dedup.candidates.connected_components import component_labels, write_clusters
from dedup.candidates.document_ids import DocumentIds, count_joined
from dedup.candidates.input_shards import (
    Scope,
    SignatureShard,
    assign_ids,
    check_indexes,
    count_documents,
    list_shards_of,
    list_signature_shards,
)
from dedup.candidates.pair_files import ParsedPairs, list_pair_files, note_foreign_files, parse_pair_files
from dedup.clustering.lsh import Bands, choose_bands, describe_recall
from dedup.clustering.union_find import UnionFind
from gristmill.command import command, reads_no_documents
from gristmill.counts import Counts, LargeCluster
from gristmill.engine.options import RunOptions
from gristmill.engine.run import StageRun, open_stage
from gristmill.engine.task import FileSet, Result, Stage, Task
from gristmill.errors import UsageError, wrap_write_errors
from gristmill.io.artefacts import is_table
from gristmill.io.files import STATE_DIR

STAGE = Stage("generate_connected_components", version=2, libraries=("pyarrow",))
CLUSTERED = "clustered"


@reads_no_documents()
def generate_connected_components(
    input_dir: Path,
    out_file: Path,
    signatures: Path | None = None,
    range: int | None = None,
    bands: int | None = None,
    index: tuple[str, ...] = (),
    scope: Scope = "global",
    threshold: float = 0.8,
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
        range: Rows of a band, for --signatures; by default, with --bands, the best for the threshold: 13 for 0.8.
        bands: Number of bands, for --signatures: 9 for 0.8. The expected recall is printed.
        index: For --signatures, folders of signature shards, or NAME=FOLDER, of corpora deduplicated before. Their
            documents come first, as index:NAME:<key>, and are not compared with one another.
        scope: For --signatures; per-source compares documents only with documents of their own source.
        threshold: Similarity of near-duplicates, for --signatures, from which bands that are not given are chosen.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read (those with a signature or in a pair), clustered and alone, per source.
    """
    is_table(out_file)
    pairs = list_pair_files(input_dir)
    if not pairs and not signatures:
        raise UsageError(
            f"{input_dir}: expected duplicate_pairs*.txt in it, which generate_duplicate_pairs writes, or --signatures"
        )
    if not options.quiet:
        note_foreign_files(pairs)
    if signatures is None and (range, bands, threshold, index, scope) != (None, None, 0.8, (), "global"):
        raise UsageError(
            "--range, --bands, --threshold, --index and --scope have no effect on pairs that are already made: give "
            "--signatures MINHASH/, or leave them out"
        )
    folders = list_shards_of(signatures, index) if signatures else {}
    reads = {input_dir: None} | ({signatures: folders[""].paths} if signatures else {})
    with open_stage(
        STAGE, out_file.parent, options, label=out_file.name, reads=reads, files=[out_file],
    ) as run:  # fmt: skip
        check_indexes(run, folders, index if signatures else ())
        chosen = {"range": range, "bands": bands, "threshold": threshold, "scope": scope}
        done = run.goal({"pairs": pairs, "folders": folders, **chosen}, (out_file,))
        if done is not None:
            return run.finish(done)
        parsed = parse_pair_files(run, pairs)
        shards = list_signature_shards(run, folders)
        lsh = LshOptions(13, 9, scope)
        if shards:
            lsh = LshOptions(*choose_bands(range, bands, threshold, shards[0].header.permutations), scope)
            if not options.quiet:
                print(f"{STAGE.name}: {describe_recall(Bands(lsh.rows, lsh.bands), threshold)}", file=sys.stderr)
        document_ids = assign_ids(shards, parsed.rows)
        edges = None
        signed = None
        in_memory = shards
        if shards and not fits_in_memory(shards, document_ids, lsh, options.memory_bytes):
            edges, signed = join_bands(run, shards, document_ids, lsh, bool(parsed.rows))
            in_memory = []
        arguments = {
            "parsed": parsed,
            "shards": in_memory,
            "edges": edges,
            "signed": signed,
            "lsh": lsh,
            "document_ids": document_ids,
            "documents": count_documents(shards),
            "out_file": out_file,
        }
        task = Task("write", write_components, arguments, (out_file,), memory=options.memory_bytes)
        written = run.step("write", [task])
        (samples,) = written.values(list[ClusterSample])
        counts = written.counts
        counts.clusters = [LargeCluster(sample.size, sample.example) for sample in samples]
        if samples and shards:
            counts.clusters = _compare_samples(run, samples, shards, threshold)
        counts = run.finish(counts)
    if not (options.quiet or options.of_run):  # a run says it with its own limits
        for line in warn_of_clusters(counts.clusters):
            print(f"warning: {line}", file=sys.stderr, flush=True)
    return counts


def _compare_samples(
    run: StageRun, samples: list[ClusterSample], shards: list[SignatureShard], threshold: float
) -> list[LargeCluster]:
    """Run the step that compares the documents of samples; return how many of their pairs are alike."""
    files = set[str]()
    for sample in samples:
        files.update(file for file, _ in sample.members)
    chosen = [shard for shard in shards if shard.file in files]
    arguments = {"samples": samples, "shards": chosen, "threshold": threshold}
    return run.step("compare", [Task("compare", compare_samples, arguments)]).counts.clusters


def write_components(
    parsed: ParsedPairs,
    shards: list[SignatureShard],
    edges: FileSet | None,
    signed: FileSet | None,
    lsh: LshOptions,
    document_ids: DocumentIds,
    documents: dict[str, int],
    out_file: Path,
    memory: int,
) -> Result:
    """Task: write the connected components of the pairs and the edges or, in memory, of the pairs and the shards.

    The value is the largest clusters.

    `signed` has the ids of signed documents that are not in `shards`, if there are pairs, whose documents may have no
    signature; `documents` is how many there are of each file.
    """
    without = np.zeros(len(document_ids.names), np.int64)
    with _scratch_folder(out_file) as work:
        blocks = parsed.edges(document_ids)
        if shards:
            union_find = UnionFind(len(document_ids))
            for block in blocks:
                union_find.union(block)
            ids = iter([union_signatures(shards, document_ids, lsh, union_find)])
            labels = union_find.labels()
        else:
            blocks = chain(blocks, read_edges(edges) if edges else ())
            ids = read_signed(signed or FileSet(()))
            labels = component_labels(blocks, len(document_ids), work, memory // 2)
        if parsed.rows:
            labels = _count_unsigned(labels, ids, document_ids, without)
        clustered, samples = write_clusters(out_file, labels, document_ids, work, memory // 2)
    # Documents without a signature are known from their pairs, and so are all clustered.
    read = list[int]()
    for name, unsigned in zip(document_ids.names, without.tolist(), strict=True):
        read.append(documents.get(name, 0) + unsigned)
    return Result(count_joined(document_ids.names, read, clustered, CLUSTERED), samples)


def _count_unsigned(
    labels: Iterable[NDArray], signed: Iterator[NDArray], document_ids: DocumentIds, without: NDArray[np.int64]
) -> Iterator[NDArray]:
    """Yield LABELs; add to `without` how many of them, by file, are of documents that are not `signed`.

    Both are in order of document; a block of each is in memory at a time.
    """
    ids = np.empty(0, np.uint64)
    for block in labels:
        nodes = block["node"]
        is_signed = np.zeros(len(block), np.bool_)
        while len(nodes):
            positions = np.searchsorted(ids, nodes)
            inside = positions < len(ids)
            is_signed[inside] |= ids[positions[inside]] == nodes[inside]
            ids = ids[positions[-1] :]
            if len(ids):
                break
            ids = next(signed, ids)  # which may be of this block, too
            if not len(ids):
                break
        files, _ = document_ids.split(nodes[~is_signed])
        without += np.bincount(files, minlength=len(without))
        yield block


@contextmanager
def _scratch_folder(output: Path) -> Iterator[Path]:
    """Yield an empty folder for temporary files of the task that writes `output`; remove it at the end."""
    folder = output.parent / STATE_DIR / f"{output.name}.work"
    shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed
    with wrap_write_errors(folder):
        folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    command(generate_connected_components)
