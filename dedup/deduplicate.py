"""Deduplication of texts in memory, in one call: signatures, bands, connected components, removal."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dedup.clustering.keep_policy import LAST, BySource, First, Keep, Longest, parse_keep, rank_longest, rank_newest
from dedup.clustering.lsh import band_digests, check_bands, union_buckets
from dedup.clustering.similarity import Features, KeptDocuments, Measure, SimilarityCheck, decide_cluster
from dedup.clustering.union_find import UnionFind
from dedup.minhash.shingles import shingle_sets
from dedup.minhash.signatures import Sketch, check_sketch, note_compilation, signatures
from dedup.tables import Indices, Table, as_table, text_batches
from gristmill.errors import UsageError

_BATCH = 256  # texts of clusters read together
Ranks = list[tuple[int, int]]  # and fine ranks
Ranker = Callable[[Table, Indices], Ranks]


@dataclass(frozen=True, eq=False)
class Deduplicated:
    """The texts to keep among n, and for each duplicate the kept text that it repeats.

    `duplicate_of` (n, int64): for each text the index of the text kept in its place; its own index if it is kept.
    `similarity` (n, float64): similarity of the two; NaN for kept texts and without `verify`.
    `kept` (int64): indices of kept texts, ascending, as for `dataset.select(found.kept)` or `table.take(found.kept)`.
    `clusters`: for each kept text that has duplicates an int64 array of indices: its own, then theirs, ascending.
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
    """Find near-duplicates: texts whose signatures share a band, directly or through a chain of such pairs.

    A text whose matching form is shorter than a shingle is never a duplicate. Memory: 8 bytes per
    band and text, and the texts themselves; signatures are computed batch by batch and not kept.

    Args:
        texts: A list of strings, an Arrow table or column, a data frame, or a Hugging Face datasets.Dataset.
        sketch: Parameters of the signatures.
        range: Rows (slots) of a band.
        bands: Number of bands. 9 bands of 13 rows find 40 % of the pairs of similarity 0.80, and 93 % at 0.90.
        verify: jaccard or containment: check candidates by their exact similarity. A text is then a duplicate only
            of the first kept text of its cluster with a similarity of at least `threshold`, else it is kept.
        threshold: Least similarity of a duplicate, for verify.
        keep: The text of a cluster that is kept: first, longest, or, where there are columns,
            source:COLUMN=wikipedia,book (in that order, then all others) or newest:COLUMN (a number, a date
            or an ISO 8601 string; newest:meta.timestamp is a field of a struct). Ties by position.
        text: The column of the texts.

    Returns:
        The texts to keep, and for each other text the kept one that it duplicates, with their similarity.

    Raises:
        UsageError: for an unknown `keep` or `verify`, a text that is null, a missing column, or bands that do not
            fit into the sketch's permutations.

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
    check_sketch(sketch)
    check_bands(range, bands, sketch.permutations)
    check = SimilarityCheck("jaccard" if verify is None else verify, threshold, sketch.width, sketch.unit)
    rank = _parse_ranker(keep)
    table = as_table(texts, text)
    rank(table, np.empty(0, np.int64))  # raises now if a column is missing
    note_compilation(sketch)
    roots = _cluster_roots(table, sketch, range, bands)
    members = _in_keep_order(table, roots, rank, keep)
    if verify is None:
        return _remove_all_but_first(roots, members)
    return _remove_verified(_with_shingles(table, members, sketch), roots, KeptDocuments(check))


def _cluster_roots(table: Table, sketch: Sketch, rows: int, bands: int) -> NDArray[np.int64]:
    """For each text (n) the index of the first text of its cluster; its own index if it is alone."""
    digests, has_signature = [np.empty((bands, 0), np.uint64)], [np.empty(0, bool)]
    for batch in text_batches(table):
        values, shingles = signatures(batch, sketch)
        digests.append(band_digests(values[shingles > 0], rows, bands))
        has_signature.append(shingles > 0)
    documents = np.flatnonzero(np.concatenate(has_signature))
    return _find_roots(np.concatenate(digests, axis=1), documents, len(table))


def _find_roots(digests: NDArray[np.uint64], documents: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The smallest index in each text's component (count), for digests (bands × n) of the texts `documents` (n)."""
    union_find = UnionFind(count)
    for band in digests:
        union_buckets(band, documents.astype(union_find.parent.dtype), union_find.parent)
    return union_find.roots().astype(np.int64)


def _parse_ranker(text: str) -> Ranker:
    """Parse a keep policy into a function that ranks rows of a table; the lowest rank is kept."""
    if not isinstance(text, str):
        raise UsageError(f"keep {text!r}: expected a policy, such as 'first' or 'longest'")
    if text.startswith("source:"):
        column, equals, names = text.removeprefix("source:").partition("=")
        policy = parse_keep(f"source:{names}") if equals and column else None
        if not isinstance(policy, BySource):
            raise UsageError(f"keep {text!r}: expected the column and its values in order, such as source:site=a,b")
        return lambda table, rows: [(policy.rank(value), 0) for value in table.values(column, rows)]
    keep = parse_keep(text)
    return lambda table, rows: _policy_ranks(keep, table, rows)


def _policy_ranks(keep: Keep, table: Table, rows: Indices) -> Ranks:
    """Ranks of rows (n) under any policy but BySource; the lowest rank is kept."""
    if isinstance(keep, First):
        return [(0, 0)] * len(rows)
    if isinstance(keep, Longest):
        return [(rank_longest(len(text)), 0) for text in table.texts(rows)]
    assert not isinstance(keep, BySource)
    column = keep.field.partition(".")[0]
    ranks = (rank_newest(keep.value({column: value})) for value in table.values(column, rows))
    return [(LAST, 0) if rank is None else rank for rank in ranks]


def _in_keep_order(table: Table, roots: NDArray[np.int64], rank: Ranker, keep: str) -> NDArray[np.int64]:
    """Indices of texts in clusters of two or more, cluster by cluster, each sorted by rank, then by index."""
    sizes = np.bincount(roots, minlength=len(roots))
    members = np.flatnonzero(sizes[roots] > 1)
    found = [r for indices in _batches(members) for r in rank(table, indices)]
    ranks, fine_ranks = np.array(found, np.int64).reshape(-1, 2).T
    if keep.startswith("newest:") and len(ranks) and (ranks == LAST).all():
        raise UsageError(
            f"keep {keep!r}: none of the {len(ranks):,} texts in clusters has a number or a date there: name a column "
            "that has"
        )
    return members[np.lexsort((members, fine_ranks, ranks, roots[members]))]


def _with_shingles(table: Table, members: Indices, sketch: Sketch) -> Iterator[tuple[int, Features]]:
    """Indices and shingle sets of the texts `members`, in their order."""
    for indices in _batches(members):
        sets = shingle_sets(table.texts(indices), sketch.width, sketch.unit)
        yield from zip(indices.tolist(), map(Features, sets), strict=True)


def _remove_all_but_first(roots: NDArray[np.int64], members: Indices) -> Deduplicated:
    """Keep the first member of each cluster; `members` are in keep order."""
    starts = np.diff(roots[members], prepend=-1) != 0
    duplicate_of = np.arange(len(roots))
    duplicate_of[members] = members[np.maximum.accumulate(np.where(starts, np.arange(len(members)), 0))]
    return Deduplicated(duplicate_of, np.full(len(roots), np.nan))


def _remove_verified(
    members: Iterable[tuple[int, Features]], roots: NDArray[np.int64], kept: KeptDocuments
) -> Deduplicated:
    """Keep each member unless its shingle set is similar enough to one kept earlier in its cluster."""
    duplicate_of, similarity = np.arange(len(roots)), np.full(len(roots), np.nan)
    for _, cluster in groupby(members, lambda member: roots[member[0]]):
        kept.clear()
        for index, kept_index, value in decide_cluster(cluster, kept):
            assert kept_index is not None  # memory is unbounded here
            if kept_index != index:
                duplicate_of[index], similarity[index] = kept_index, value
    return Deduplicated(duplicate_of, similarity)


def _batches(members: Indices) -> Iterable[Indices]:
    """Slices of at most _BATCH indices."""
    return (members[start : start + _BATCH] for start in np.arange(0, len(members), _BATCH))
