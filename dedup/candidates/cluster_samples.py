"""Clusters that look wrong: a few members of each of the largest are noted as clusters are written, and compared."""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

import msgspec
import numpy as np
from numpy.typing import NDArray

from dedup.candidates.document_ids import DocumentIds
from dedup.candidates.input_shards import SignatureShard
from dedup.runs import starts_of_runs
from gristmill.counts import Counts, LargeCluster
from gristmill.wording import count_of

LARGE = 1000  # documents: a cluster with as many looks wrong if too few of its sampled pairs are alike
ALIKE = 0.5  # the share of sampled pairs below which such a cluster looks wrong
_CLUSTERS = 100  # the largest ones, which are noted
_MEMBERS = 9  # documents that are noted of each
_SMALLEST = 10  # documents: below that, pairs that share a band by chance are usual


class ClusterSample(msgspec.Struct, frozen=True):
    """A cluster: how many documents it has, and the files and rows of a few."""

    size: int
    members: list[tuple[str, int]]

    @property
    def example(self) -> str:
        """Return the key of a document."""
        file, row = self.members[0]
        return f"{file}@{row}"


class LargestClusters:
    """Notes the largest clusters, of ten documents or more, among LABELs in order of root that pass by."""

    def __init__(self) -> None:
        self._largest: list[tuple[int, int, NDArray[np.uint64]]] = []  # a heap of size, -root, some nodes
        # The cluster that the last block ends in, and which may continue in the next one.
        self._root = -1
        self._size = 0
        self._nodes = np.empty(0, np.uint64)

    def watch(self, blocks: Iterable[NDArray]) -> Iterator[NDArray]:
        """Pass on blocks of LABELs."""
        for block in blocks:
            roots = block["root"]
            starts = starts_of_runs(roots)
            ends = np.append(starts[1:], len(roots))
            is_open = np.arange(len(starts)) == len(starts) - 1
            is_open[0] |= int(roots[0]) == self._root
            chosen = is_open | (ends - starts >= self._min_size)
            for start, end in zip(starts[chosen].tolist(), ends[chosen].tolist(), strict=True):
                if int(roots[start]) != self._root:
                    self._note()
                    self._root = int(roots[start])
                    self._size = 0
                    self._nodes = self._nodes[:0]
                self._size += end - start
                self._nodes = np.append(self._nodes, _spread(block["node"][start:end]))
            yield block
        self._note()
        self._size = 0

    def samples(self, document_ids: DocumentIds, ids: NDArray[np.uint64] | None = None) -> list[ClusterSample]:
        """Return the clusters, largest first. Nodes are document ids, or positions in `ids`."""
        samples = list[ClusterSample]()
        for size, _, nodes in sorted(self._largest, key=lambda cluster: (-cluster[0], -cluster[1])):
            chosen = _spread(nodes)
            files, rows = document_ids.split(chosen if ids is None else ids[chosen])
            names = [document_ids.names[file] for file in files.tolist()]
            samples.append(ClusterSample(size, list(zip(names, rows.tolist(), strict=True))))
        return samples

    @property
    def _min_size(self) -> int:
        """Return the size of the smallest cluster that would be noted."""
        if len(self._largest) < _CLUSTERS:
            return _SMALLEST
        return max(_SMALLEST, self._largest[0][0])

    def _note(self) -> None:
        """Note the cluster that has ended, if it is among the largest."""
        if self._size >= self._min_size:
            heapq.heappush(self._largest, (self._size, -self._root, self._nodes))
            if len(self._largest) > _CLUSTERS:
                heapq.heappop(self._largest)


def _spread(nodes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a few nodes, spread over all of them."""
    count = min(_MEMBERS, len(nodes))
    return nodes[np.arange(count) * len(nodes) // max(count, 1)]


def compare_samples(samples: Sequence[ClusterSample], shards: Sequence[SignatureShard], threshold: float) -> Counts:
    """Task: the Counts' clusters say how many pairs of each sample are as similar as the threshold.

    Similarities are estimated from the `shards`; documents without a signature, as exact copies are, are passed over.
    """
    signatures = _read_signatures(samples, shards)
    counts = Counts({}, [])
    for sample in samples:
        signed = [signatures[member] for member in sample.members if member in signatures]
        pairs = 0
        alike = 0
        for one, other in combinations(signed, 2):
            pairs += 1
            alike += bool(np.mean(one == other) >= threshold)
        counts.clusters.append(LargeCluster(sample.size, sample.example, pairs, alike))
    return counts


def _read_signatures(
    samples: Sequence[ClusterSample], shards: Sequence[SignatureShard]
) -> dict[tuple[str, int], NDArray[np.uint32]]:
    """Return the signatures of the samples' members, by file and row."""
    rows_of = dict[str, set[int]]()
    for sample in samples:
        for file, row in sample.members:
            rows_of.setdefault(file, set()).add(row)
    signatures = dict[tuple[str, int], NDArray[np.uint32]]()
    for shard in shards:
        for rows, values in shard.batches():
            for number in np.flatnonzero(np.isin(rows, list(rows_of[shard.file]))).tolist():
                signatures[shard.file, int(rows[number])] = np.array(values[number])
    return signatures


def warn_of_clusters(
    clusters: Sequence[LargeCluster], large: int = LARGE, alike: float = ALIKE, is_verified: bool = False
) -> list[str]:
    """Return a sentence if clusters have `large` documents, and if few pairs of some are alike, which nothing verifies.

    A limit of 0 is none.
    """
    lines = list[str]()
    if large and clusters and clusters[0].size >= large:
        first = clusters[0]
        count = sum(cluster.size >= large for cluster in clusters)
        lines.append(
            f"clusters of {large:,} documents or more: {count:,}; the largest has {first.size:,}, such as "
            f"{first.example}"
        )
    unlike = [cluster for cluster in clusters if cluster.alike < alike * cluster.pairs]
    if unlike and not is_verified:
        first = unlike[0]
        lines.append(
            "documents that are not similar are removed: all but one of each cluster, and no text is compared. In "
            f"{len(unlike):,} of the {len(clusters):,} largest clusters less than {alike:.0%} of the sampled pairs are "
            f"similar; in the largest, of {count_of(first.size, 'document')} such as {first.example}, "
            f"{first.alike} of {first.pairs}"
        )
    return lines
