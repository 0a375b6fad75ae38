"""Connected components: by union-find if it fits into memory, else by large-star and small-star with external sorts.

Nodes are document ids; the root of a component is its smallest node.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gristmill.io.external_sort import ExternalSorter, read_records, write_records
from gristmill.kernels import kernel

LABEL = np.dtype([("node", "<u8"), ("root", "<u8")])
_EDGE = np.dtype([("node", "<u8"), ("other", "<u8")])
_BLOCK = 1 << 20  # nodes or edges processed together
_WORKING_MEMORY = 64 * _BLOCK  # bytes for a block and the arrays made of it, without the array of parents


class UnionFind:
    """Union-find of nodes 0, 1, … with path halving (Tarjan and van Leeuwen 1984); the root is the smallest node."""

    def __init__(self, nodes: int) -> None:
        self.parent: NDArray[np.unsignedinteger] = np.arange(nodes, dtype=_node_type(nodes))

    def union(self, edges: NDArray[np.integer]) -> None:
        """Unite the two ends of every edge (n × 2)."""
        _union(np.ascontiguousarray(edges), self.parent)

    def roots(self) -> NDArray[np.unsignedinteger]:
        """The root of every node (nodes), after flattening all paths."""
        _flatten(self.parent)
        return self.parent

    def labels(self) -> Iterator[NDArray]:
        """LABELs of the nodes in components of two or more, in order of node, block by block."""
        roots = self.roots()
        joined = np.zeros(len(roots), bool)
        _mark_joined(roots, joined)
        for start in range(0, len(roots), _BLOCK):
            (members,) = np.nonzero(joined[start : start + _BLOCK])
            yield _records(LABEL, members.astype(np.uint64) + np.uint64(start), roots[members + start])


def connected_components(edges: NDArray[np.int64], nodes: int) -> NDArray[np.int64]:
    """For each node the smallest node of its component, given edges (n × 2) between the nodes 0 … nodes − 1.

    >>> connected_components(np.array([[1, 0], [3, 1], [4, 2]]), 6).tolist()
    [0, 0, 2, 0, 2, 5]
    """
    union_find = UnionFind(nodes)
    union_find.union(edges)
    return union_find.roots().astype(np.int64)


def union_find_fits(nodes: int, memory: int) -> bool:
    """Whether a UnionFind of `nodes` nodes and its labels need at most `memory` bytes."""
    return nodes * (_node_type(nodes).itemsize + 1) + _WORKING_MEMORY <= memory


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
    write_records(path, (_records(_EDGE, block[:, 0], block[:, 1]) for block in ends))
    while changed:
        changed = _star_operation(path, folder, memory, large=True)
        changed |= _star_operation(path, folder, memory, large=False)
    with ExternalSorter(folder / "sort", LABEL, ("node",), memory) as sorter:
        for block in read_records(path, _EDGE, _BLOCK):
            roots = np.unique(block["other"])
            sorter.add(block.view(LABEL))
            sorter.add(_records(LABEL, roots, roots))
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
            yield _records(_EDGE, other[chosen], minimum[chosen])
            if not large:
                yield _records(_EDGE, node[~chosen], minimum[~chosen])

    with ExternalSorter(folder / "sort", _EDGE, ("node", "other"), memory) as sorter:
        for block in read_records(path, _EDGE, _BLOCK):
            low, high = np.minimum(block["node"], block["other"]), np.maximum(block["node"], block["other"])
            sorter.add(_records(_EDGE, high, low))
            if large:
                sorter.add(_records(_EDGE, low, high))
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


def _records(dtype: np.dtype, one: NDArray, other: NDArray) -> NDArray:
    records = np.empty(len(one), dtype)
    for name, values in zip(dtype.names or (), (one, other), strict=True):
        records[name] = values
    return records


def _node_type(nodes: int) -> np.dtype:
    return np.dtype(np.uint32 if nodes <= 1 << 32 else np.uint64)


@kernel
def find_root(parent: np.ndarray, node: int) -> int:
    """The root of a node; halves the path to it."""
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


@kernel
def _union(edges: np.ndarray, parent: np.ndarray) -> None:
    for i in range(len(edges)):
        one, other = find_root(parent, edges[i, 0]), find_root(parent, edges[i, 1])
        parent[max(one, other)] = min(one, other)


@kernel
def _flatten(parent: np.ndarray) -> None:
    for node in range(len(parent)):
        parent[node] = find_root(parent, node)


@kernel
def _mark_joined(roots: np.ndarray, joined: np.ndarray) -> None:
    """Mark the nodes of components of two or more."""
    for node in range(len(roots)):
        if roots[node] != node:
            joined[node] = joined[roots[node]] = True
