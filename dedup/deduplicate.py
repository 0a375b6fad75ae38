"""Deduplication of texts in memory, in one call: signatures, bands, connected components, removal."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dedup.clustering.keep_policy import LAST, BySource, Candidate, KeepPolicy, parse_keep
from dedup.clustering.lsh import Bands, band_digests, choose_bands, describe_recall, union_buckets
from dedup.clustering.similarity import Features, KeptDocuments, Measure, SimilarityCheck, decide_cluster
from dedup.clustering.union_find import UnionFind
from dedup.minhash.shingles import compared_sets, digest_texts
from dedup.minhash.signatures import Sketch, check_sketch, note_compilation, signatures
from dedup.runs import first_of_runs, is_start_of_run, starts_of_runs
from dedup.tables import Indices, Table, as_table, batches
from gristmill.errors import UsageError
from gristmill.wording import count_of

_THRESHOLD = 0.8
Decided = tuple[NDArray[np.int64], NDArray[np.float64]]  # duplicate_of and similarity
Ranks = list[tuple[int, int]]  # and fine ranks
Ranker = Callable[[Table, Indices], Ranks]


@dataclass(frozen=True, eq=False, repr=False)
class Deduplicated:
    """The texts to keep among n, and for each duplicate the kept text that it repeats; it prints as five lines.

    `duplicate_of` (n, int64): for each text the index of the text kept in its place; its own index if it is kept.
    `similarity` (n, float64): similarity of the two; NaN for kept texts and without `verify`.
    `kept` (int64): indices of kept texts, ascending, as for `dataset.select(found.kept)` or `table.take(found.kept)`.
    `clusters`: for each kept text that has duplicates an int64 array of indices: its own, then theirs, ascending.
    `without_signature`: how many texts are shorter than a shingle. `bands`, `verify`, `threshold`: as they were used.
    """

    duplicate_of: NDArray[np.int64]
    similarity: NDArray[np.float64]
    without_signature: int
    bands: Bands
    verify: Measure | None
    threshold: float

    @property
    def kept(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.duplicate_of == np.arange(len(self.duplicate_of)))

    @property
    def clusters(self) -> list[NDArray[np.int64]]:
        is_removed = self.duplicate_of != np.arange(len(self.duplicate_of))
        order = np.lexsort((is_removed, self.duplicate_of))
        starts = starts_of_runs(self.duplicate_of[order])
        return [cluster for cluster in np.split(order, starts[1:]) if len(cluster) > 1]

    def __repr__(self) -> str:
        texts = len(self.duplicate_of)
        removed = texts - len(self.kept)
        sizes = [len(cluster) for cluster in self.clusters] or [0]
        return (
            f"texts: {texts:,}, of which {texts - removed:,} are kept; "
            f"duplicates: {removed:,} ({removed / max(texts, 1):.1%})\n"
            f"clusters: {np.count_nonzero(sizes):,}; texts in the largest: {max(sizes):,}\n"
            f"similarity to the kept text: {self._similarity_in_words()}\n"
            f"shorter than a shingle, so without a signature: {count_of(self.without_signature, 'text')} "
            f"({self.without_signature / max(texts, 1):.1%})\n"
            f"candidates: {describe_recall(self.bands, self.threshold)}"
        )

    def _similarity_in_words(self) -> str:
        if not self.verify:
            return "not measured: texts that share a band by chance, or by a chain of others, are duplicates here"
        similar = f"{self.verify}, at least {self.threshold:g}"
        measured = self.similarity[~np.isnan(self.similarity)]
        if len(measured):
            similar += f"; median {np.median(measured):.2f}, least {measured.min():.2f}"
        return similar


def deduplicate(
    texts: Any,
    sketch: Sketch = Sketch(),
    range: int | None = None,
    bands: int | None = None,
    *,
    verify: Measure | None = "jaccard",
    threshold: float = _THRESHOLD,
    keep: str = "first",
    text: str = "text",
) -> Deduplicated:
    """Find duplicates: candidates, whose signatures share a band or which a chain of such pairs connects, are compared.

    Identical texts are duplicates whatever their length; a text shorter than a shingle has no other duplicates. Memory:
    8 bytes per band and text, and the texts themselves; signatures are computed batch by batch and not kept.

    Args:
        texts: A list of strings, an Arrow table or column, a data frame, or a Hugging Face datasets.Dataset.
        sketch: Parameters of the signatures.
        range: Rows (slots) of a band; by default, with `bands`, the best for the threshold, as datasketch chooses them.
        bands: Number of bands. For 0.8 they are 9 of 13 rows, which find 40 % of the pairs of similarity 0.80, and 93 %
            at 0.90; the result prints this. Given alone, `bands` goes with 13 rows, and `range` with 9 bands.
        verify: jaccard or containment: check candidates by their exact similarity. A text is then a duplicate only
            of the first kept text of its cluster with a similarity of at least `threshold`, else it is kept. None: all
            candidates are duplicates, however they are linked.
        threshold: Least similarity of a duplicate.
        keep: The text of a cluster that is kept: first, longest, or, where there are columns,
            source:COLUMN=wikipedia,book (in that order, then all others) or newest:COLUMN (a number, a date
            or an ISO 8601 string; newest:meta.timestamp is a field of a struct). Ties by position.
        text: The column of the texts.

    Returns:
        The texts to keep, and for each other text the kept one that it duplicates, with their similarity.

    Raises:
        UsageError: for an unknown `keep` or `verify`, a text that is null, a missing column, bands that do not fit into
            the sketch's permutations, or an option without effect.

    >>> from dedup import deduplicate
    >>> texts = ["The mill grinds the grain.", "Bread is baked from flour.", "the mill grinds the grain"]
    >>> found = deduplicate(texts)
    >>> found.kept.tolist(), found.duplicate_of.tolist(), found.similarity.tolist()
    ([0, 1], [0, 1, 0], [nan, nan, 1.0])
    >>> found
    texts: 3, of which 2 are kept; duplicates: 1 (33.3%)
    clusters: 1; texts in the largest: 2
    similarity to the kept text: jaccard, at least 0.8; median 1.00, least 1.00
    shorter than a shingle, so without a signature: 0 texts (0.0%)
    candidates: 9 bands of 13 rows find 40 % of the pairs of similarity 0.8, and 83 % of those from 0.8 to 1

    >>> import pyarrow as pa
    >>> table = pa.table({"text": texts, "year": [2001, 2002, 2003]})
    >>> table.take(deduplicate(table, keep="newest:year").kept).column("year").to_pylist()
    [2002, 2003]
    """
    check_sketch(sketch)
    check = SimilarityCheck("jaccard" if verify is None else verify, threshold, sketch.width, sketch.unit)
    chosen = choose_bands(range, bands, threshold, sketch.permutations)
    if verify is None and threshold != _THRESHOLD and (range, bands) != (None, None):
        raise UsageError(
            f"threshold {threshold:g} has no effect, as bands are given and nothing is verified: leave out range and "
            "bands, or give verify"
        )
    rank = _parse_ranker(keep)
    table = as_table(texts, text)
    rank(table, np.empty(0, np.int64))  # raises now if a column is missing
    note_compilation(sketch)
    roots, short = _cluster_roots(table, sketch, chosen)
    members = _in_keep_order(table, roots, rank, keep)
    if verify is None:
        duplicate_of, similarity = _remove_all_but_first(roots, members)
    else:
        with_shingles = _with_shingles(table, members, sketch)
        duplicate_of, similarity = _remove_verified(with_shingles, roots, KeptDocuments(check))
    return Deduplicated(duplicate_of, similarity, short, chosen, verify, threshold)


def _cluster_roots(table: Table, sketch: Sketch, bands: Bands) -> tuple[NDArray[np.int64], int]:
    """Return for each text (n) the first of its cluster, or itself, by index; and how many texts have no signature."""
    digests_of_signed = [np.empty((bands.bands, 0), np.uint64)]
    digests_of_short = [np.empty(0, np.uint64)]
    has_signature = [np.empty(0, bool)]
    for batch in map(table.texts, batches(np.arange(len(table)))):
        values, shingles = signatures(batch, sketch)
        digests_of_signed.append(band_digests(values[shingles > 0], *bands))
        has_signature.append(shingles > 0)
        short = [batch[i] for i in np.flatnonzero(shingles == 0)]
        if short:  # these are compared as a whole
            digests_of_short.append(digest_texts(short)[:, 0])
    union_find = UnionFind(len(table))
    is_signed = np.concatenate(has_signature)
    for band in np.concatenate(digests_of_signed, axis=1):
        _unite(union_find, band, is_signed)
    _unite(union_find, np.concatenate(digests_of_short), ~is_signed)
    return union_find.roots().astype(np.int64), int(np.count_nonzero(~is_signed))


def _unite(union_find: UnionFind, digests: NDArray[np.uint64], chosen: NDArray[np.bool_]) -> None:
    """Unite the chosen texts that have equal digests."""
    documents = np.flatnonzero(chosen).astype(union_find.parent.dtype)
    union_buckets(digests, documents, union_find.parent)


def _parse_ranker(text: str) -> Ranker:
    """Parse a keep policy into a function that ranks rows of a table; the lowest rank is kept."""
    if not isinstance(text, str):
        raise UsageError(f"keep {text!r}: expected a policy, such as 'first' or 'longest'")
    if text.startswith("source:"):
        column, equals, names = text.removeprefix("source:").partition("=")
        policy = parse_keep(f"source:{names}") if equals and column else None
        if not isinstance(policy, BySource):
            raise UsageError(f"keep {text!r}: expected the column and its values in order, such as source:site=a,b")
        return lambda table, rows: [policy.rank(Candidate(value)) for value in table.values(column, rows)]
    keep = parse_keep(text)
    return lambda table, rows: _policy_ranks(keep, table, rows)


def _policy_ranks(keep: KeepPolicy, table: Table, rows: Indices) -> Ranks:
    """Return the ranks of rows (n) under any policy but BySource; the lowest rank is kept."""
    if not keep.reads_documents:
        return [keep.rank_or_last(Candidate())] * len(rows)
    values = [None] * len(rows)
    for column in keep.path[:1]:
        values = [keep.value({column: value}) for value in table.values(column, rows)]
    candidates = map(Candidate, repeat(""), table.texts(rows), values)
    return list(map(keep.rank_or_last, candidates))


def _in_keep_order(table: Table, roots: NDArray[np.int64], rank: Ranker, keep: str) -> NDArray[np.int64]:
    """Return texts in clusters of two or more by index, cluster by cluster, each sorted by rank, then by index."""
    sizes = np.bincount(roots, minlength=len(roots))
    members = np.flatnonzero(sizes[roots] > 1)
    ranked = Ranks()
    for indices in batches(members):
        ranked += rank(table, indices)
    ranks, fine_ranks = np.array(ranked, np.int64).reshape(-1, 2).T
    if keep.startswith("newest:") and len(ranks) and (ranks == LAST).all():
        raise UsageError(
            f"keep {keep!r}: none of the {len(ranks):,} texts in clusters has a number or a date there: name a column "
            "that has"
        )
    return members[np.lexsort((members, fine_ranks, ranks, roots[members]))]


def _with_shingles(table: Table, members: Indices, sketch: Sketch) -> Iterator[tuple[int, Features]]:
    """Yield indices and shingle sets of the texts `members`, in their order."""
    for indices in batches(members):
        sets = compared_sets(table.texts(indices), sketch.width, sketch.unit)
        yield from zip(indices.tolist(), map(Features, sets), strict=True)


def _remove_all_but_first(roots: NDArray[np.int64], members: Indices) -> Decided:
    """Keep the first member of each cluster; `members` are in keep order."""
    is_start = is_start_of_run(roots[members])
    firsts = first_of_runs(is_start)
    duplicate_of = np.arange(len(roots))
    duplicate_of[members] = members[firsts]
    return duplicate_of, np.full(len(roots), np.nan)


def _remove_verified(members: Iterable[tuple[int, Features]], roots: NDArray[np.int64], kept: KeptDocuments) -> Decided:
    """Keep each member unless its shingle set is similar enough to one kept earlier in its cluster."""
    duplicate_of = np.arange(len(roots))
    similarity = np.full(len(roots), np.nan)
    for _, cluster in groupby(members, lambda member: roots[member[0]]):
        kept.clear()
        for index, kept_index, value in decide_cluster(cluster, kept):
            assert kept_index is not None  # memory is unbounded here
            if kept_index != index:
                duplicate_of[index] = kept_index
                similarity[index] = value
    return duplicate_of, similarity
