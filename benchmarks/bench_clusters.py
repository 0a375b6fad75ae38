"""How much of `cluster` and `remove` is one process's work, however many cores there are: signatures of no documents.

    python benchmarks/bench_clusters.py FOLDER --documents 20_000_000 --duplicates 0.2 --memory 2GiB

Writes signatures at random, some of them copies of others, as `to_hash` would; clusters them within the memory, so on
disk as at scale, and removes all but one of each. Prints the core seconds of each step, and which steps are one task.

With --edges it writes no signatures, of which 200 million have 100 GB, but edges as bands would have: of each copy
to its original, in so many bands. It then runs only what one process does, and prints its peak of memory, too.
"""

import argparse
import resource
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dedup.candidates.band_join import LshOptions
from dedup.candidates.document_ids import DocumentIds
from dedup.candidates.pair_files import ParsedPairs
from dedup.candidates.signature_shards import SUFFIX, write_shard
from dedup.generate_connected_components import generate_connected_components, write_components
from dedup.generate_duplicates_dict import generate_duplicates_dict
from dedup.minhash.signatures import Sketch
from gristmill.engine.options import RunOptions, parse_size
from gristmill.engine.staleness.ledger import Ledger
from gristmill.engine.task import FileSet
from gristmill.io.external_sort import write_records
from gristmill.io.files import STATE_DIR

_A_SHARD = 200_000  # documents
_BATCH = 10_000


def write_signatures(folder: Path, documents: int, duplicates: float) -> None:
    """Write shards of signatures; the given fraction have the signature of one of the documents before."""
    chance = np.random.default_rng(1)
    sketch = Sketch()
    for number, start in enumerate(range(0, documents, _A_SHARD)):
        file = f"web/{number:05}.jsonl"
        pool = chance.integers(0, 2**32, (_BATCH, sketch.permutations), np.uint32)
        with write_shard(folder / f"{file}{SUFFIX}", file, sketch) as shard:
            for row in range(0, min(_A_SHARD, documents - start), _BATCH):
                count = min(_BATCH, documents - start - row)
                batch = chance.integers(0, 2**32, (count, sketch.permutations), np.uint32)
                copies = np.flatnonzero(chance.random(count) < duplicates)
                batch[copies] = pool[chance.integers(0, len(pool), len(copies))]
                shard.add(np.arange(row, row + count), batch)
                pool = batch


def edges_of_copies(documents: int, duplicates: float) -> Iterator[NDArray[np.uint64]]:
    """Yield edges (n × 2) of the given fraction of the documents, each to one of the 10,000 before it."""
    chance = np.random.default_rng(1)
    for start in range(_BATCH, documents, _A_SHARD):
        count = min(_A_SHARD, documents - start)
        copies = start + np.flatnonzero(chance.random(count) < duplicates)
        originals = copies - 1 - chance.integers(0, _BATCH, len(copies))
        yield np.stack([copies, originals], axis=1).astype(np.uint64)


def cluster_edges(folder: Path, documents: int, duplicates: float, bands: int, memory: str) -> Path:
    """Write edges, and the clusters that they make, by the one task of `cluster` that has no others beside it."""
    files = [folder / f"edges/{band}.bin" for band in range(bands)]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_records(path, edges_of_copies(documents, duplicates))
    no_pairs = ParsedPairs(folder / "pairs.bin", {})
    no_pairs.path.touch()
    rows = {f"web/{number:05}.jsonl": _A_SHARD for number in range(documents // _A_SHARD)}
    clusters = folder / "dup/connected_components.parquet"
    clusters.parent.mkdir()
    began = time.process_time()
    write_components(
        no_pairs, [], FileSet(tuple(files)), None, LshOptions(13, 9, "global"), DocumentIds.of(rows), rows, clusters,
        parse_size(memory, "--memory"),
    )  # fmt: skip
    edges = sum(path.stat().st_size for path in files) // 16
    print_seconds(f"cluster: {edges:,} edges", time.process_time() - began, documents)
    return clusters


def print_seconds(what: str, seconds: float, documents: int) -> None:
    """Print core seconds, and the peak of this process's memory so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    each = 1e6 * seconds / documents
    print(f"{what}: {seconds:.1f} core s, {each:.2f} µs a document; peak of memory {peak:.2f} GiB", flush=True)


def core_seconds(state: Path) -> dict[tuple[str, str], list[float]]:
    """Return the core seconds of all tasks, by stage and step."""
    seconds = defaultdict[tuple[str, str], list[float]](list)
    for ledger in Ledger.all_in(state):
        for cost in ledger.costs():
            seconds[ledger.stage, cost.step].append(cost.core_seconds)
    return seconds


def main() -> None:
    """Measure one number of documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=2_000_000)
    parser.add_argument("--duplicates", type=float, default=0.2)
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--edges", type=int, default=0, metavar="BANDS")
    given = parser.parse_args()
    if given.edges:
        made = cluster_edges(given.folder, given.documents, given.duplicates, given.edges, given.memory)
        shutil.rmtree(given.folder / "edges")
        began = time.process_time()
        generate_duplicates_dict(
            made, made.with_name("duplicates.parquet"), RunOptions(workers=1, memory=given.memory, quiet=True)
        )
        print_seconds("remove, without texts", time.process_time() - began, given.documents)
    else:
        cluster_signatures(given)


def cluster_signatures(given: argparse.Namespace) -> None:
    """Write signatures, cluster them, and print the core seconds of each step."""
    signatures = given.folder / "minhash"
    duplicates = given.folder / "dup"
    write_signatures(signatures, given.documents, given.duplicates)
    duplicates.mkdir()
    options = RunOptions(memory=given.memory, quiet=True)
    clusters = duplicates / "connected_components.parquet"
    generate_connected_components(duplicates, clusters, signatures, options=options)
    shutil.rmtree(signatures)
    generate_duplicates_dict(clusters, duplicates / "duplicates.parquet", options)
    for (stage, step), seconds in core_seconds(duplicates / STATE_DIR).items():
        each = 1e6 * sum(seconds) / given.documents
        print(f"{stage:30} {step:10} {len(seconds):5} tasks {sum(seconds):9.1f} core s {each:7.2f} µs a document")


if __name__ == "__main__":
    main()
