"""Stage: clusters, the connected components of the graph of candidate pairs."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dedup.lsh import connected
from pipeline.command import command
from pipeline.documents import source_of
from pipeline.errors import InputError, UsageError
from pipeline.keys import is_table, write_table
from pipeline.ledger import READ, Counts
from pipeline.pickles import dump_pickle
from pipeline.stage import STATE, How, Options, Task, run_stage

NAME = "generate_connected_components"
CLUSTERED = "clustered"
_PAIR = re.compile(r"(.+)@(\d+) :: (.+)@(\d+)")
_JOINT = re.compile(r"@\d+ :: ")
_CHUNK = 1 << 20  # pairs parsed at a time


def generate_connected_components(input_dir: Path, out_file: Path, how: Options = How()) -> Counts:
    """Write the clusters of near-duplicates: all documents that chains of pairs join.

    Args:
        input_dir: DUP, the folder that holds duplicate_pairs*.txt.
        out_file: DUP/connected_components.pickle, as SlimPajama's: (components, how many, {number: key}),
            each component ascending in key order; or .parquet, a table of cluster, file and row.
        how: How to run.

    Returns:
        Documents read (all those in a pair) and clustered, per source.
    """
    is_table(out_file)
    files = tuple(sorted(input_dir.glob("duplicate_pairs*.txt")))
    if not files:
        raise UsageError(f"{input_dir}: wanted duplicate_pairs*.txt in it; generate_duplicate_pairs writes them")
    arguments = {"files": files, "out_file": out_file}
    size = sum(path.stat().st_size for path in files)
    task = Task("write", write_components, arguments, files, (out_file,), size)
    return run_stage(f"{NAME}-{out_file.name}", [task], out_file.parent / STATE, how)


def write_components(files: tuple[Path, ...], out_file: Path) -> Counts:
    """Unite the pairs of all files and write the clusters."""
    names, nodes, edges = read_pairs(files)
    roots = connected(edges, len(nodes))
    order = np.argsort(roots, kind="stable")  # by cluster, within it by key
    starts = np.flatnonzero(np.diff(roots[order], prepend=-1))
    if is_table(out_file):
        clusters = np.repeat(np.arange(len(starts)), np.diff([*starts, len(order)]))
        files_of = pa.DictionaryArray.from_arrays(pa.array(nodes["file"][order]), pa.array(names, pa.string()))
        rows = pa.array(nodes["row"][order])
        write_table(out_file, {"cluster": pa.array(clusters), "file": files_of.cast(pa.string()), "row": rows})
    else:
        components = [part.tolist() for part in np.split(order, starts[1:])] if len(order) else []
        keys = {i: f"{names[file]}@{row}" for i, (file, row) in enumerate(nodes.tolist())}
        dump_pickle(out_file, (components, len(components), keys))
    return _count(names, nodes)


def read_pairs(files: tuple[Path, ...]) -> tuple[list[str], NDArray, NDArray[np.int64]]:
    """File names, nodes (file, row) in key order, and edges (n × 2) among their numbers."""
    numbers: dict[str, int] = {}
    chunks = [_parse(chunk, numbers) for path in files for chunk in _chunks(path)]
    ends = np.concatenate([*chunks, np.empty((0, 2, 2), np.int64)])
    names = sorted(numbers)
    rank = np.empty(len(names), np.int64)
    rank[[numbers[name] for name in names]] = np.arange(len(names))
    packed = np.empty((len(ends), 2), np.dtype([("file", "<i8"), ("row", "<i8")]))
    packed["file"], packed["row"] = rank[ends[:, :, 0]] if len(names) else ends[:, :, 0], ends[:, :, 1]
    nodes, edges = np.unique(packed, return_inverse=True)
    return names, nodes, edges.reshape(-1, 2)


def _chunks(path: Path) -> Iterator[list[tuple[str, ...]]]:
    found: list[tuple[str, ...]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = line.rstrip(b"\n").decode(errors="surrogateescape")  # which is not printable
            pair = _PAIR.fullmatch(text)
            if pair is None or not text.isprintable() or len(_JOINT.findall(text)) > 1:
                raise InputError(f"{path} line {number}: wanted `<file>@<row> :: <file>@<row>`, got {text[:80]!r}")
            found.append(pair.groups())
            if len(found) == _CHUNK:
                yield found
                found = []
    yield found


def _parse(pairs: list[tuple[str, ...]], numbers: dict[str, int]) -> NDArray[np.int64]:
    """Pairs × two ends × (file number, row); new files are numbered as they come."""

    def number(file: str) -> int:
        return numbers.setdefault(file, len(numbers))

    return np.array([(number(a), int(i), number(b), int(j)) for a, i, b, j in pairs], np.int64).reshape(-1, 2, 2)


def _count(names: list[str], nodes: NDArray) -> Counts:
    counts = Counts({}, [])
    for file, many in zip(*np.unique(nodes["file"], return_counts=True), strict=True):
        counts.add(source_of(names[file]), READ, 0, int(many))
        counts.add(source_of(names[file]), CLUSTERED, 0, int(many))
    return counts


if __name__ == "__main__":
    command(generate_connected_components)
