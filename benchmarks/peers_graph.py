"""Contenders of bench_dedup's LSH and components tables: each counts connected components."""

from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

ROWS, BANDS = 13, 9
Table = Literal["lsh", "components"]
Count = Callable[[NDArray, int], int]  # (signatures or edges, number of nodes) → number of components


class GraphContender(NamedTuple):
    """A row of a table; `make` sets the contender up; a slow one gets a tenth of the input."""

    name: str
    package: str
    make: Callable[[], Count]
    slow: bool = False

    def installed(self) -> str | None:
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


def graph_contenders(table: Table) -> list[GraphContender]:
    """The contenders of a table, ours first."""
    if table == "lsh":
        return [
            GraphContender("ours: tables in cache, union-find", "numba", our_buckets),
            GraphContender("ours: records, star edges, union-find", "numba", our_stars),
            GraphContender("polars: group_by, join; SciPy's components", "polars", polars_bands),
            GraphContender("NumPy: unique; SciPy's components", "scipy", numpy_bands),
            GraphContender("Python: a dict of bytes, union-find", "numpy", python_dict, slow=True),
            GraphContender("datasketch: MinHashLSH, query and insert", "datasketch", datasketch_lsh, slow=True),
        ]
    return [
        GraphContender("ours: union-find", "numba", our_components),
        GraphContender("SciPy: csgraph", "scipy", lambda: scipy_components),
        GraphContender("NetworkX", "networkx", networkx_components, slow=True),
    ]


def our_buckets() -> Count:
    from dedup.clustering.lsh import band_digests, union_buckets
    from dedup.clustering.union_find import UnionFind

    def count(signatures: NDArray, nodes: int) -> int:
        union_find = UnionFind(nodes)
        documents = np.arange(nodes, dtype=union_find.parent.dtype)
        for digests in band_digests(signatures, ROWS, BANDS):
            union_buckets(digests, documents, union_find.parent)
        return _roots(union_find.roots())

    return count


def our_stars() -> Count:
    from dedup.clustering.lsh import BAND_RECORD, band_digests, bucket_edges

    components = our_components()

    def edges(digests: NDArray) -> NDArray:
        records = np.empty(len(digests), BAND_RECORD)
        records["digest"], records["document"] = digests, np.arange(len(digests))
        return bucket_edges(records).astype(np.int64)

    def count(signatures: NDArray, nodes: int) -> int:
        found = [edges(digests) for digests in band_digests(signatures, ROWS, BANDS)]
        return components(np.concatenate(found), nodes)

    return count


def our_components() -> Count:
    from dedup.clustering.union_find import UnionFind

    def count(edges: NDArray, nodes: int) -> int:
        union_find = UnionFind(nodes)
        union_find.union(edges)
        return _roots(union_find.roots())

    return count


def _roots(labels: NDArray) -> int:
    return int(np.count_nonzero(labels == np.arange(len(labels))))


def scipy_components(edges: NDArray, nodes: int) -> int:
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    graph = coo_matrix((np.ones(len(edges), bool), (edges[:, 0], edges[:, 1])), (nodes, nodes))
    return int(connected_components(graph, directed=False, return_labels=False))


def numpy_bands() -> Count:
    def count(signatures: NDArray, nodes: int) -> int:
        factors = np.random.default_rng(0).integers(1 << 63, size=ROWS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        found = []
        for band in range(BANDS):
            keys = np.zeros(nodes, np.uint64)
            for row in range(ROWS):
                keys = keys * np.uint64(0x9E3779B97F4A7C15) + signatures[:, band * ROWS + row] * factors[row]
            _, first, bucket = np.unique(keys, return_index=True, return_inverse=True)
            found.append(_without_loops(np.arange(nodes), first[bucket]))
        return scipy_components(np.concatenate(found), nodes)

    return count


def polars_bands() -> Count:
    import polars

    def count(signatures: NDArray, nodes: int) -> int:
        documents, found = polars.Series("document", np.arange(nodes)), []
        for band in range(BANDS):
            rows = np.ascontiguousarray(signatures[:, band * ROWS : band * ROWS + ROWS].T)
            columns = [polars.Series(f"{i}", row) for i, row in enumerate(rows)]
            keys = polars.DataFrame(columns).hash_rows(1).alias("key")
            frame = polars.DataFrame([documents, keys])
            firsts = frame.group_by("key").agg(polars.col("document").min().alias("first"))
            joined = frame.join(firsts, on="key")
            found.append(_without_loops(joined["document"].to_numpy(), joined["first"].to_numpy()))
        return scipy_components(np.concatenate(found), nodes)

    return count


def _without_loops(ones: NDArray, others: NDArray) -> NDArray:
    """Edges without self-loops."""
    return np.stack([ones, others], axis=1)[ones != others]


def python_dict() -> Count:
    def count(signatures: NDArray, nodes: int) -> int:
        size, parent = ROWS * signatures.itemsize, list(range(nodes))
        for band in range(BANDS):
            data = np.ascontiguousarray(signatures[:, band * ROWS : band * ROWS + ROWS]).tobytes()
            firsts: dict[bytes, int] = {}
            pairs = ((i, firsts.setdefault(data[i * size : i * size + size], i)) for i in range(nodes))
            _unite(parent, ((i, first) for i, first in pairs if i != first))
        return sum(parent[i] == i for i in range(nodes))

    return count


def datasketch_lsh() -> Count:
    from datasketch import LeanMinHash, MinHashLSH, __version__

    scheme = {} if __version__.startswith("1.") else {"scheme": "affine32"}

    def count(signatures: NDArray, nodes: int) -> int:
        lsh, parent = MinHashLSH(num_perm=signatures.shape[1], params=(BANDS, ROWS)), list(range(nodes))
        for i in range(nodes):
            signature = LeanMinHash(seed=1, hashvalues=signatures[i], **scheme)
            _unite(parent, ((i, other) for other in lsh.query(signature)))
            lsh.insert(i, signature, check_duplication=False)
        return sum(parent[i] == i for i in range(nodes))

    return count


def _unite(parent: list[int], pairs: Iterable[tuple[int, int]]) -> None:
    for pair in pairs:
        one, other = (_find(parent, node) for node in pair)
        parent[max(one, other)] = min(one, other)


def _find(parent: list[int], node: int) -> int:
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


def networkx_components() -> Count:
    import networkx

    def count(edges: NDArray, nodes: int) -> int:
        graph: Any = networkx.Graph()
        graph.add_nodes_from(range(nodes))
        graph.add_edges_from(edges.tolist())
        return networkx.number_connected_components(graph)

    return count
