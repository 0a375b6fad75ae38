"""How much of `cluster` and `remove` is one process's work, however many cores there are: signatures of no documents.

    python benchmarks/bench_clusters.py FOLDER --documents 20_000_000 --duplicates 0.2 --memory 2GiB

Writes signatures at random, some of them copies of others, as `to_hash` would; clusters them within the memory, so on
disk as at scale, and removes all but one of each. Prints the core seconds of each step, and which steps are one task.
"""

import argparse
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np

from dedup.candidates.signature_shards import SUFFIX, write_shard
from dedup.generate_connected_components import generate_connected_components
from dedup.generate_duplicates_dict import generate_duplicates_dict
from dedup.minhash.signatures import Sketch
from gristmill.engine.options import RunOptions
from gristmill.engine.staleness.ledger import Ledger
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
    given = parser.parse_args()
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
