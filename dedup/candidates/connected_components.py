"""Connected components: by union-find if it fits into memory, else by large-star and small-star with external sorts.

Nodes are document ids; the root of a component is its smallest node.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dedup.clustering.union_find import LABEL, UnionFind, records, union_find_fits
from gristmill.io.external_sort import ExternalSorter, read_records, write_records

_EDGE = np.dtype([("node", "<u8"), ("other", "<u8")])
_BLOCK = 1 << 20  # nodes or edges processed together


def component_labels(edges: Iterable[NDArray[np.uint64]], nodes: int, folder: Path, memory: int) -> Iterator[NDArray]:
    """LABELs of all nodes that have an edge to another, in order of node, block by block.

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
    path, changed = folder / "edges.bin", True
    ends = (block[block[:, 0] != block[:, 1]] for block in edges)
    write_records(path, (records(_EDGE, block[:, 0], block[:, 1]) for block in ends))
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


def _star_operation(path: Path, folder: Path, memory: int, large: bool) -> bool:
    """Apply large-star or small-star to the edges in a file; return whether that changed an edge.

    Let m be the smallest of a node u and its neighbours. Large-star links u's larger neighbours to m;
    small-star links u and its smaller neighbours to m.
    """
    changed = False

    def linked(sorter: ExternalSorter) -> Iterator[NDArray]:
        nonlocal changed
        for block, minimum in _with_minima(_drop_repeats(sorter)):
            node, other = block["node"], block["other"]
            chosen = other > node if large else other != minimum
            changed |= bool(np.any(minimum[chosen] != node[chosen])) if large else bool(np.any(chosen))
            yield records(_EDGE, other[chosen], minimum[chosen])
            if not large:
                yield records(_EDGE, node[~chosen], minimum[~chosen])

    with ExternalSorter(folder / "sort", _EDGE, ("node", "other"), memory) as sorter:
        for block in read_records(path, _EDGE, _BLOCK):
            low, high = np.minimum(block["node"], block["other"]), np.maximum(block["node"], block["other"])
            sorter.add(records(_EDGE, high, low))
            if large:
                sorter.add(records(_EDGE, low, high))
        write_records(path, linked(sorter))
    return changed


def _with_minima(blocks: Iterable[NDArray]) -> Iterator[tuple[NDArray, NDArray[np.uint64]]]:
    """Blocks of sorted edges, and for each edge the smallest of its node and that node's neighbours."""
    last_node, last_minimum = None, np.uint64(0)
    for block in blocks:
        node = block["node"]
        starts = np.flatnonzero(np.diff(node, prepend=node[0] ^ np.uint64(1)))
        minimum = np.minimum(block["other"][starts], node[starts])
        if node[0] == last_node:  # its smallest neighbour is in an earlier block
            minimum[0] = last_minimum
        last_node, last_minimum = node[-1], minimum[-1]
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
