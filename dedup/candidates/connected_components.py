"""Connected components: union-find while it fits into memory, else stars by external sort.

Numbers of nodes stand for documents; the least of a component is its root.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numba as nb
import numpy as np
from numpy.typing import NDArray

from gristmill.io.external_sort import ExternalSorter, read_records, write_records

LABEL = np.dtype([("node", "<u8"), ("root", "<u8")])
_EDGE = np.dtype([("node", "<u8"), ("other", "<u8")])
_BLOCK = 1 << 20  # nodes or edges at a time
_SLACK = 64 * _BLOCK  # bytes that a block and what is made of it take beside the parents


class UnionFind:
    """Union-find over the nodes 0 … nodes − 1, by the smaller root, paths halved (Tarjan 1975)."""

    def __init__(self, nodes: int) -> None:
        self.parent: NDArray[np.unsignedinteger] = np.arange(nodes, dtype=_node_type(nodes))

    def unite(self, edges: NDArray[np.integer]) -> None:
        """Unite the two ends of every edge (n × 2)."""
        _unite(np.ascontiguousarray(edges), self.parent)

    def roots(self) -> NDArray[np.unsignedinteger]:
        """The root of every node."""
        _flatten(self.parent)
        return self.parent

    def labels(self) -> Iterator[NDArray]:
        """LABELs of every node that is not alone, in order of node."""
        roots = self.roots()
        joined = np.zeros(len(roots), bool)
        _mark(roots, joined)
        for start in range(0, len(roots), _BLOCK):
            (members,) = np.nonzero(joined[start : start + _BLOCK])
            yield _pairs(LABEL, members.astype(np.uint64) + np.uint64(start), roots[members + start])


def connected(edges: NDArray[np.int64], nodes: int) -> NDArray[np.int64]:
    """The smallest node of each node's component, for edges (n × 2) among 0 … nodes − 1.

    >>> connected(np.array([[1, 0], [3, 1], [4, 2]]), 6).tolist()
    [0, 0, 2, 0, 2, 5]
    """
    union_find = UnionFind(nodes)
    union_find.unite(edges)
    return union_find.roots().astype(np.int64)


def union_find_fits(nodes: int, memory: int) -> bool:
    """Whether a UnionFind of so many nodes, and finding its labels, stays within `memory` bytes."""
    return nodes * (_node_type(nodes).itemsize + 1) + _SLACK <= memory


def component_labels(edges: Iterable[NDArray[np.uint64]], nodes: int, folder: Path, memory: int) -> Iterator[NDArray]:
    """LABELs of every node in an edge, in order of node, for arrays of edges (n × 2) among so many nodes.

    Within `memory` bytes whatever the number of nodes and edges; `folder` is for work files.
    """
    if not union_find_fits(nodes, memory):
        yield from _external_labels(edges, folder, memory)
        return
    union_find = UnionFind(nodes)
    for some in edges:
        union_find.unite(some)
    yield from union_find.labels()


def _external_labels(edges: Iterable[NDArray[np.uint64]], folder: Path, memory: int) -> Iterator[NDArray]:
    """Large-star and small-star in turn until nothing changes: O(log² n) rounds, few for edges that are stars.

    Kiveris, Lattanzi, Mirrokni, Rastogi, Vassilvitskii: Connected Components in MapReduce and Beyond, 2014.
    """
    path, changed = folder / "edges.bin", True
    ends = (some[some[:, 0] != some[:, 1]] for some in edges)
    write_records(path, (_pairs(_EDGE, some[:, 0], some[:, 1]) for some in ends))
    while changed:
        changed = _star(path, folder, memory, large=True)
        changed |= _star(path, folder, memory, large=False)
    with ExternalSorter(folder / "sort", LABEL, ("node",), memory) as sorter:
        for some in read_records(path, _EDGE, _BLOCK):
            roots = np.unique(some["other"])
            sorter.add(some.view(LABEL))
            sorter.add(_pairs(LABEL, roots, roots))
        yield from _distinct(sorter)
    path.unlink()


def _star(path: Path, folder: Path, memory: int, large: bool) -> bool:
    """Replace the edges in a file by those of one operation; whether that changed anything.

    With m the least of a node u and its neighbours, large-star links the neighbours above u to m, and
    small-star u and those below it.
    """
    changed = False

    def linked(sorter: ExternalSorter) -> Iterator[NDArray]:
        nonlocal changed
        for some, least in _with_least(_distinct(sorter)):
            node, other = some["node"], some["other"]
            chosen = other > node if large else other != least
            changed |= bool(np.any(least[chosen] != node[chosen])) if large else bool(np.any(chosen))
            yield _pairs(_EDGE, other[chosen], least[chosen])
            if not large:
                yield _pairs(_EDGE, node[~chosen], least[~chosen])

    with ExternalSorter(folder / "sort", _EDGE, ("node", "other"), memory) as sorter:
        for some in read_records(path, _EDGE, _BLOCK):
            low, high = np.minimum(some["node"], some["other"]), np.maximum(some["node"], some["other"])
            sorter.add(_pairs(_EDGE, high, low))
            if large:
                sorter.add(_pairs(_EDGE, low, high))
        write_records(path, linked(sorter))
    return changed


def _with_least(blocks: Iterable[NDArray]) -> Iterator[tuple[NDArray, NDArray[np.uint64]]]:
    """Blocks of sorted edges, and for each edge the least of its node and that node's neighbours."""
    last_node, last_least = None, np.uint64(0)
    for some in blocks:
        node = some["node"]
        starts = np.flatnonzero(np.diff(node, prepend=node[0] ^ np.uint64(1)))
        least = np.minimum(some["other"][starts], node[starts])
        if node[0] == last_node:  # its least neighbour stood in a block before
            least[0] = last_least
        last_node, last_least = node[-1], least[-1]
        yield some, np.repeat(least, np.diff([*starts, len(node)]))


def _distinct(blocks: Iterable[NDArray]) -> Iterator[NDArray]:
    """Sorted records without those that repeat the one before, and without empty blocks."""
    last = None
    for some in blocks:
        new = np.ones(len(some), bool)
        new[1:] = some[1:] != some[:-1]
        new[:1] = last is None or some[0] != last
        if new.any():
            last = some[-1]
            yield some[new]


def _pairs(dtype: np.dtype, one: NDArray, other: NDArray) -> NDArray:
    records = np.empty(len(one), dtype)
    for name, values in zip(dtype.names or (), (one, other), strict=True):
        records[name] = values
    return records


def _node_type(nodes: int) -> np.dtype:
    return np.dtype(np.uint32 if nodes <= 1 << 32 else np.uint64)


@nb.njit(nogil=True, cache=True)
def find_root(parent: np.ndarray, node: int) -> int:
    """The root of a node; its path is halved on the way."""
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


@nb.njit(nogil=True, cache=True)
def _unite(edges: np.ndarray, parent: np.ndarray) -> None:
    for i in range(len(edges)):
        one, other = find_root(parent, edges[i, 0]), find_root(parent, edges[i, 1])
        parent[max(one, other)] = min(one, other)


@nb.njit(nogil=True, cache=True)
def _flatten(parent: np.ndarray) -> None:
    for node in range(len(parent)):
        parent[node] = find_root(parent, node)


@nb.njit(nogil=True, cache=True)
def _mark(roots: np.ndarray, joined: np.ndarray) -> None:
    """Mark the nodes of components of two or more."""
    for node in range(len(roots)):
        if roots[node] != node:
            joined[node] = joined[roots[node]] = True
