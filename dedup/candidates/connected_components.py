"""Connected components: by union-find if it fits into memory, else by large-star and small-star with external sorts.

Nodes are document ids; the root of a component is its smallest node. They are written as a .parquet table, or as
SlimPajama's .pickle of (components, number of components, {id: key}).
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dedup.candidates.cluster_samples import ClusterSample, LargestClusters
from dedup.candidates.document_ids import DocumentIds
from dedup.clustering.union_find import LABEL, UnionFind, records, union_find_fits
from dedup.runs import is_start_of_run, starts_of_runs
from gristmill.io.artefacts import is_table, open_table_writer, stream_dict, stream_list, stream_value, write_tuple
from gristmill.io.external_sort import ExternalSorter, read_records, write_records

_SCHEMA = pa.schema({"cluster": pa.int64(), "file": pa.string(), "row": pa.int64()})
_EDGE = np.dtype([("node", "<u8"), ("other", "<u8")])
_BLOCK = 1 << 20  # nodes or edges processed together
_KEYS = 1 << 16  # keys made together


def component_labels(edges: Iterable[NDArray[np.uint64]], nodes: int, folder: Path, memory: int) -> Iterator[NDArray]:
    """Yield LABELs of all nodes that have an edge to another, in order of node, block by block.

    `edges` are arrays (n × 2) of nodes below `nodes`. Needs at most `memory` bytes for any number of
    nodes and edges; `folder` is for work files.
    """
    if not union_find_fits(nodes, memory):
        yield from _labels_on_disk(edges, folder, memory)
        return
    union_find = UnionFind(nodes)
    for block in edges:
        union_find.union(block)
    yield from union_find.labels()


def _labels_on_disk(edges: Iterable[NDArray[np.uint64]], folder: Path, memory: int) -> Iterator[NDArray]:
    """Alternate large-star and small-star until nothing changes: O(log² n) rounds, few for edges that form stars.

    Kiveris, Lattanzi, Mirrokni, Rastogi and Vassilvitskii, "Connected Components in MapReduce and Beyond", 2014.
    """
    path = folder / "edges.bin"
    write_records(path, _without_loops(edges))
    changed = True
    while changed:
        changed = _star_operation(path, folder, memory, large=True)
        changed |= _star_operation(path, folder, memory, large=False)
    with ExternalSorter(folder / "sort", LABEL, ("node",), memory) as sorter:
        for block in read_records(path, _EDGE, _BLOCK):
            roots = np.unique(block["other"])
            sorter.add(block.view(LABEL))
            sorter.add(records(LABEL, roots, roots))
        yield from _drop_repeats(sorter)
    path.unlink()


def _without_loops(edges: Iterable[NDArray[np.uint64]]) -> Iterator[NDArray]:
    """Yield _EDGEs, without self-loops."""
    for block in edges:
        ends = block[block[:, 0] != block[:, 1]]
        yield records(_EDGE, ends[:, 0], ends[:, 1])


def _star_operation(path: Path, folder: Path, memory: int, large: bool) -> bool:
    """Apply large-star or small-star to the edges in a file; return whether that changed an edge.

    Let m be the smallest of a node u and its neighbours. Large-star links u's larger neighbours to m;
    small-star links u and its smaller neighbours to m.
    """
    changed = False

    def linked(sorter: ExternalSorter) -> Iterator[NDArray]:
        nonlocal changed
        for block, minimum in _with_minima(_drop_repeats(sorter)):
            node = block["node"]
            other = block["other"]
            if large:
                chosen = other > node
                changed |= bool(np.any(minimum[chosen] != node[chosen]))
                yield records(_EDGE, other[chosen], minimum[chosen])
            else:
                chosen = other != minimum
                changed |= bool(np.any(chosen))
                yield records(_EDGE, other[chosen], minimum[chosen])
                yield records(_EDGE, node[~chosen], minimum[~chosen])

    with ExternalSorter(folder / "sort", _EDGE, ("node", "other"), memory) as sorter:
        for block in read_records(path, _EDGE, _BLOCK):
            low = np.minimum(block["node"], block["other"])
            high = np.maximum(block["node"], block["other"])
            sorter.add(records(_EDGE, high, low))
            if large:
                sorter.add(records(_EDGE, low, high))
        write_records(path, linked(sorter))
    return changed


def _with_minima(blocks: Iterable[NDArray]) -> Iterator[tuple[NDArray, NDArray[np.uint64]]]:
    """Yield blocks of sorted edges, and for each edge the smallest of its node and that node's neighbours."""
    last_node = None
    last_minimum = np.uint64(0)
    for block in blocks:
        node = block["node"]
        starts = starts_of_runs(node)
        minimum = np.minimum(block["other"][starts], node[starts])
        if node[0] == last_node:  # its smallest neighbour is in an earlier block
            minimum[0] = last_minimum
        last_node = node[-1]
        last_minimum = minimum[-1]
        yield block, np.repeat(minimum, np.diff([*starts, len(node)]))


def _drop_repeats(blocks: Iterable[NDArray]) -> Iterator[NDArray]:
    """Drop repeated records from sorted blocks, and empty blocks."""
    last = None
    for block in blocks:
        new = np.ones(len(block), bool)
        new[1:] = block[1:] != block[:-1]
        new[:1] = last is None or block[0] != last
        if new.any():
            last = block[-1]
            yield block[new]


def write_clusters(
    path: Path, labels: Iterable[NDArray], document_ids: DocumentIds, work: Path, memory: int
) -> tuple[list[int], list[ClusterSample]]:
    """Write clusters in order of their first document, members by id; return how many members each file has.

    Also returns the largest clusters.

    `labels` are blocks of LABELs in order of node. Needs about `memory` bytes; a reader of the
    pickle has to load all of it.
    """
    clustered = np.zeros(len(document_ids.names), np.int64)

    def counted() -> Iterator[NDArray]:
        for block in labels:
            files, _ = document_ids.split(block["node"])
            clustered[:] += np.bincount(files, minlength=len(clustered))
            yield block

    with ExternalSorter(work / "clusters", LABEL, ("root",), memory) as sorter:  # stable: members stay ordered by id
        write = _write_table if is_table(path) else _write_pickle
        samples = write(path, counted(), document_ids, sorter)
    return clustered.tolist(), samples


def _write_table(
    path: Path, labels: Iterable[NDArray], document_ids: DocumentIds, sorter: ExternalSorter
) -> list[ClusterSample]:
    sorter.add_all(labels)
    last_cluster = -1
    last_root = None
    largest = LargestClusters()
    with open_table_writer(path, _SCHEMA) as write:
        for block in largest.watch(sorter):
            roots = block["root"]
            is_new = is_start_of_run(roots)
            is_new[0] = roots[0] != last_root
            clusters = last_cluster + np.cumsum(is_new)
            last_cluster = int(clusters[-1])
            last_root = roots[-1]
            files, rows = document_ids.split(block["node"])
            write({"cluster": pa.array(clusters), "file": document_ids.files(files), "row": pa.array(rows)})
    return largest.samples(document_ids)


def _write_pickle(
    path: Path, labels: Iterable[NDArray], document_ids: DocumentIds, sorter: ExternalSorter
) -> list[ClusterSample]:
    """Number members 0, 1, … in key order; a file holds their document ids until the dict is written."""
    sorter.folder.mkdir(parents=True, exist_ok=True)
    members = sorter.folder.parent / "members.bin"
    count = 0
    with members.open("wb") as file:
        for block in labels:
            file.write(np.ascontiguousarray(block["node"]).data)
            numbered = block.copy()
            numbered["node"] = np.arange(count, count + len(block))
            sorter.add(numbered)
            count += len(block)

    def keys() -> Iterator[str]:
        for ids in read_records(members, np.dtype("<u8"), _KEYS):
            yield from document_ids.keys(ids).to_pylist()

    largest = LargestClusters()
    components = _Components(largest.watch(sorter))
    number_of_components = stream_value(lambda: components.count)
    write_tuple(path, [stream_list(components), number_of_components, stream_dict(enumerate(keys()))])
    if not count:
        return []
    return largest.samples(document_ids, np.memmap(members, np.dtype("<u8"), "r"))


class _Components:
    """Iterates over the members of each component as a list, given LABELs in order of root; counts components."""

    def __init__(self, labels: Iterable[NDArray]) -> None:
        self.labels = labels
        self.count = 0

    def __iter__(self) -> Iterator[list[int]]:
        pending = np.empty(0, LABEL)
        for block in self.labels:
            pending = np.concatenate([pending, block])
            starts = starts_of_runs(pending["root"])
            *complete, pending = np.split(pending, starts[1:])
            self.count += len(complete)
            for component in complete:
                yield component["node"].tolist()
        if len(pending):
            self.count += 1
            yield pending["node"].tolist()
