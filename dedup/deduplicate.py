"""Near-duplicates of texts in memory: the stages of this folder as one call."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dedup.candidates.connected_components import UnionFind
from dedup.candidates.lsh import band_digests, check_bands, union_buckets
from dedup.minhash.shingles import shingle_sets
from dedup.minhash.signatures import Sketch, signatures
from dedup.removal.keeping import LAST, BySource, First, Keep, Longest, parse_keep, rank_longest, rank_newest
from dedup.removal.verify import KeptSets, Measure, Shingles, check_measure, judge
from dedup.tables import Indices, Table, as_table, text_batches
from gristmill.errors import UsageError

_TOGETHER = 256  # texts of clusters fetched at a time


@dataclass(frozen=True, eq=False)
class Deduplicated:
    """Which of n texts to keep. Indices are int64.

    `duplicate_of` (n) is for each text the one kept in its place, its own index where it is kept.
    `similarity` (n, float64) is that of both, NaN for a text that is kept and where none was measured.
    `kept` are the indices to keep, ascending: `dataset.select(found.kept)`, `table.take(found.kept)`.
    Each of `clusters` is a kept text and then all its duplicates, ascending.
    """

    duplicate_of: NDArray[np.int64]
    similarity: NDArray[np.float64]

    @property
    def kept(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.duplicate_of == np.arange(len(self.duplicate_of)))

    @property
    def clusters(self) -> list[NDArray[np.int64]]:
        is_removed = self.duplicate_of != np.arange(len(self.duplicate_of))
        order = np.lexsort((is_removed, self.duplicate_of))
        starts = np.flatnonzero(np.diff(self.duplicate_of[order]))
        return [cluster for cluster in np.split(order, starts + 1) if len(cluster) > 1]


def deduplicate(
    texts: Any,
    sketch: Sketch = Sketch(),
    range: int = 13,
    bands: int = 9,
    *,
    verify: Measure | None = None,
    threshold: float = 0.8,
    keep: str = "first",
    text: str = "text",
) -> Deduplicated:
    """Find near-duplicates: texts that share a band of `range` slots, and all that chains of them join.

    A text whose matching form is shorter than a shingle is nobody's duplicate. Beside the texts it
    takes 8 bytes a band and text: signatures are made and forgotten batch by batch.

    Args:
        texts: A list of strings; an Arrow table or column; or a Hugging Face datasets.Dataset.
        sketch: How signatures are made.
        range: Slots of a band.
        bands: Number of bands. 9 × 13 finds 40 % of the pairs of similarity 0.80, and 93 % at 0.90.
        verify: jaccard or containment: confirm on the texts. A text is then a duplicate only of the first
            one kept that it resembles by `threshold` or more, and what only chains join is kept.
        threshold: For verify, a similarity.
        keep: Which text of a cluster is kept: first, longest, or, where there are columns,
            source:COLUMN=wikipedia,book (in that order, then all others) or newest:COLUMN (a number, a date
            or an ISO 8601 string; newest:meta.timestamp is a field of a struct). Ties by position.
        text: The column that holds the texts.

    Returns:
        What to keep, what is a duplicate of what, and how similar they are.

    Raises:
        UsageError: for another `keep` or `verify`, texts that are null, a column that is not there, bands
            that do not fit into the sketch's permutations.

    >>> from dedup import deduplicate
    >>> texts = ["The mill grinds the grain.", "Bread is baked from flour.", "the mill grinds the grain"]
    >>> found = deduplicate(texts, verify="jaccard")
    >>> found.kept.tolist(), found.duplicate_of.tolist(), found.similarity.tolist()
    ([0, 1], [0, 1, 0], [nan, nan, 1.0])

    >>> import pyarrow as pa
    >>> table = pa.table({"text": texts, "year": [2001, 2002, 2003]})
    >>> table.take(deduplicate(table, keep="newest:year").kept).column("year").to_pylist()
    [2002, 2003]
    """
    check_bands(range, bands, sketch.permutations)
    if verify is not None:
        check_measure(verify, threshold)
    rank = _ranker(keep)
    table = as_table(texts, text)
    rank(table, np.empty(0, np.int64))  # a column that is not there is better missed now
    roots = _clusters(table, sketch, range, bands)
    members = _in_keep_order(table, roots, rank)
    if verify is None:
        return _remove_all_but_first(roots, members)
    return _remove_verified(_with_shingles(table, members, sketch), roots, KeptSets(verify, threshold))


def _remove_all_but_first(roots: NDArray[np.int64], members: Indices) -> Deduplicated:
    starts = np.diff(roots[members], prepend=-1) != 0
    duplicate_of = np.arange(len(roots))
    duplicate_of[members] = members[np.maximum.accumulate(np.where(starts, np.arange(len(members)), 0))]
    return Deduplicated(duplicate_of, np.full(len(roots), np.nan))


def _remove_verified(members: Iterable[tuple[int, Shingles]], roots: NDArray[np.int64], kept: KeptSets) -> Deduplicated:
    duplicate_of, similarity = np.arange(len(roots)), np.full(len(roots), np.nan)
    for _, cluster in groupby(members, lambda member: roots[member[0]]):
        kept.clear()
        for index, standing, similar in judge(cluster, kept):
            assert standing is not None  # there is room for all
            if standing != index:
                duplicate_of[index], similarity[index] = standing, similar
    return Deduplicated(duplicate_of, similarity)


def _clusters(table: Table, sketch: Sketch, rows: int, bands: int) -> NDArray[np.int64]:
    """For each text the first one of its cluster, itself where it is alone."""
    digests, signed = [np.empty((bands, 0), np.uint64)], [np.empty(0, bool)]
    for some in text_batches(table):
        values, shingles = signatures(some, sketch)
        digests.append(band_digests(values[shingles > 0], rows, bands))
        signed.append(shingles > 0)
    documents = np.flatnonzero(np.concatenate(signed))
    return _unite(np.concatenate(digests, axis=1), documents, len(table))


def _unite(digests: NDArray[np.uint64], documents: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The first document of each one's component, for digests (bands × n) of documents (n) among `count`."""
    union_find = UnionFind(count)
    for band in digests:
        union_buckets(band, documents.astype(union_find.parent.dtype), union_find.parent)
    return union_find.roots().astype(np.int64)


Ranker = Callable[[Table, Indices], list[int]]


def _ranker(text: str) -> Ranker:
    """How a policy ranks rows of a table."""
    if text.startswith("source:"):
        column, equals, names = text.removeprefix("source:").partition("=")
        policy = parse_keep(f"source:{names}") if equals and column else None
        if not isinstance(policy, BySource):
            raise UsageError(f"keep {text!r}: wanted the column and its values in order, such as source:site=a,b")
        return lambda table, rows: [policy.rank(value) for value in table.values(column, rows)]
    keep = parse_keep(text)
    return lambda table, rows: _ranks(keep, table, rows)


def _ranks(keep: Keep, table: Table, rows: Indices) -> list[int]:
    if isinstance(keep, First):
        return [0] * len(rows)
    if isinstance(keep, Longest):
        return [rank_longest(len(some)) for some in table.texts(rows)]
    assert not isinstance(keep, BySource)
    column = keep.field.partition(".")[0]
    ranks = (rank_newest(keep.value({column: value})) for value in table.values(column, rows))
    return [LAST if rank is None else rank for rank in ranks]


def _in_keep_order(table: Table, roots: NDArray[np.int64], rank: Ranker) -> NDArray[np.int64]:
    """Texts that are not alone, cluster by cluster, each in keep order."""
    sizes = np.bincount(roots, minlength=len(roots))
    members = np.flatnonzero(sizes[roots] > 1)
    ranks = np.array([r for some in _chunks(members) for r in rank(table, some)], np.int64)
    return members[np.lexsort((members, ranks, roots[members]))]


def _with_shingles(table: Table, members: Indices, sketch: Sketch) -> Iterator[tuple[int, Shingles]]:
    for some in _chunks(members):
        yield from zip(some.tolist(), shingle_sets(table.texts(some), sketch.width, sketch.unit), strict=True)


def _chunks(members: Indices) -> Iterable[Indices]:
    return (members[start : start + _TOGETHER] for start in np.arange(0, len(members), _TOGETHER))
