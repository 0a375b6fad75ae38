"""Union-find: the connected components of a graph that fits into memory.

Nodes are document ids; the root of a component is its smallest node.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel

LABEL = np.dtype([("node", "<u8"), ("root", "<u8")])
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
        """Return the root of every node (nodes), after flattening all paths."""
        _flatten(self.parent)
        return self.parent

    def labels(self) -> Iterator[NDArray]:
        """Yield LABELs of the nodes in components of two or more, in order of node, block by block."""
        roots = self.roots()
        joined = np.zeros(len(roots), bool)
        _mark_joined(roots, joined)
        for start in range(0, len(roots), _BLOCK):
            (members,) = np.nonzero(joined[start : start + _BLOCK])
            yield records(LABEL, members.astype(np.uint64) + np.uint64(start), roots[members + start])


def union_find_bytes(nodes: int) -> int:
    """Return the memory that a UnionFind of `nodes` nodes and its labels need."""
    return nodes * (_node_type(nodes).itemsize + 1) + _WORKING_MEMORY


def union_find_fits(nodes: int, memory: int) -> bool:
    """Return whether a UnionFind of `nodes` nodes and its labels need at most `memory` bytes."""
    return union_find_bytes(nodes) <= memory


def records(dtype: np.dtype, one: NDArray, other: NDArray) -> NDArray:
    """Return records (n) of two fields (n each)."""
    first, second = dtype.names or ()
    pairs = np.empty(len(one), dtype)
    pairs[first] = one
    pairs[second] = other
    return pairs


def _node_type(nodes: int) -> np.dtype:
    return np.dtype(np.uint32 if nodes <= 1 << 32 else np.uint64)


@kernel
def find_root(parent: np.ndarray, node: int) -> int:
    """Return the root of a node; halve the path to it."""
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


@kernel
def _union(edges: np.ndarray, parent: np.ndarray) -> None:
    for i in range(len(edges)):
        one = find_root(parent, edges[i, 0])
        other = find_root(parent, edges[i, 1])
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
            joined[node] = True
            joined[roots[node]] = True
