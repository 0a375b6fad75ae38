"""Stage: what to remove, every document of a cluster but the one that is kept."""

import sys
from collections import defaultdict
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
import pyarrow as pa

from pipeline.command import command
from pipeline.documents import DocKey
from pipeline.errors import InputError
from pipeline.keys import is_table, read_table, write_keys, write_table
from pipeline.ledger import READ, Counts
from pipeline.pickles import load_pickle
from pipeline.stage import STATE, How, Options, Task, run_stage

NAME = "generate_duplicates_dict"
KEPT = "kept"
DUPLICATE = "duplicate"


def generate_duplicates_dict(input_file: Path, out_file: Path, how: Options = How()) -> Counts:
    """Write the keys of all duplicates: of each cluster, all but its first document.

    Beside a .pickle it writes a .parquet table of the same name, which says for each duplicate
    which document was kept in its place: shuffle_holdout uses it where the kept one is dropped.

    Args:
        input_file: DUP/connected_components.pickle, ours or SlimPajama's; or .parquet.
        out_file: DUP/duplicates.pickle, as SlimPajama's: {file: {rows}}; or .parquet, the table alone.
        how: How to run.

    Returns:
        Documents of clusters read, kept and duplicate, per source.
    """
    is_table(out_file)
    is_table(input_file)
    outputs = tuple(dict.fromkeys([out_file, out_file.with_suffix(".parquet")]))
    size = input_file.stat().st_size if input_file.is_file() else 0
    inputs = (input_file,) if size else ()
    task = Task("write", write_duplicates, {"input_file": input_file, "out_file": out_file}, inputs, outputs, size)
    return run_stage(f"{NAME}-{out_file.name}", [task], out_file.parent / STATE, how)


def write_duplicates(input_file: Path, out_file: Path) -> Counts:
    """Write which documents are duplicates, and of which."""
    clusters, counts = read_clusters(input_file), Counts({}, [])
    removed = sorted((key, cluster[0]) for cluster in clusters for key in cluster[1:])
    for cluster in clusters:
        for key in cluster:
            counts.add(key.source, READ, 0)
            counts.add(key.source, KEPT if key is cluster[0] else DUPLICATE, 0)
    write_table(
        out_file.with_suffix(".parquet"),
        {
            "file": pa.array([key.file for key, _ in removed], pa.string()),
            "row": pa.array([key.row for key, _ in removed], pa.int64()),
            "kept_file": pa.array([kept.file for _, kept in removed], pa.string()),
            "kept_row": pa.array([kept.row for _, kept in removed], pa.int64()),
        },
    )
    if not is_table(out_file):
        rows = defaultdict(list)
        for key, _ in removed:
            rows[key.file].append(key.row)
        write_keys(out_file, {file: np.array(found, np.int64) for file, found in rows.items()})
    return counts


def read_clusters(path: Path) -> list[list[DocKey]]:
    """The clusters of a connected_components file, each in its order there. UsageError or InputError."""
    if is_table(path):
        table = read_table(path, {"cluster", "file", "row"})
        found = defaultdict(list)
        for member in table.to_pylist():
            found[member["cluster"]].append(DocKey(member["file"], member["row"]))
        return list(found.values())
    value = load_pickle(path)
    try:
        components, _, keys = value
        return [[DocKey.parse(keys[number]) for number in component] for component in components]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(
            f"{path} holds no (components, how many, keys): generate_connected_components writes it"
        ) from error


if __name__ == "__main__":
    command(generate_duplicates_dict)
