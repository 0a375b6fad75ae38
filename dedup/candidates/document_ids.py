"""Document ids: keys as integers in key order, so that pairs and clusters need no strings."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gristmill.counts import READ, Counts
from gristmill.errors import InputError
from gristmill.io.documents import INDEX_PREFIX, source_of

ALONE = "alone"


def index_name(index: str, file: str) -> str:
    """The name of an index's file, distinct from any corpus file: index:<index>:<file>."""
    return f"{INDEX_PREFIX}{index}:{file}"


def is_of_index(file: str) -> bool:
    """Whether a file, by its name, belongs to an index."""
    return file.startswith(INDEX_PREFIX)


def scope_of(file: str) -> str:
    """The source of a file of the corpus or of an index.

    >>> scope_of("wiki/a.jsonl"), scope_of("index:2023:wiki/b.jsonl")
    ('wiki', 'wiki')
    """
    return source_of(file.split(":", 2)[2] if is_of_index(file) else file)


def count_joined(names: Sequence[str], read: Iterable[int], joined: Iterable[int], reason: str) -> Counts:
    """Counts per source of documents read, joined with others (`reason`) and alone, given those of each file.

    Files of indexes are left out.
    """
    counts = Counts({}, [])
    for name, documents, some in zip(names, read, joined, strict=True):
        if not is_of_index(name):
            for why, count in ((READ, documents), (reason, some), (ALONE, documents - some)):
                counts.add(source_of(name), why, 0, count)
    return counts


class SourceRuns(NamedTuple):
    """The sources of files that are numbered in name order, which are few runs of equal ones.

    >>> runs = SourceRuns.of(["a.jsonl", "book/b.jsonl", "book/c.jsonl", "d.jsonl"])
    >>> runs.sources, runs.find(np.array([2, 3])).tolist()
    (['corpus', 'book', 'corpus'], [1, 2])
    """

    first_files: list[int]
    sources: list[str]

    @classmethod
    def of(cls, names: Sequence[str]) -> Self:
        """Return the runs of sources of files by name, in name order."""
        sources = list(map(source_of, names))
        first_files = [i for i, source in enumerate(sources) if not i or source != sources[i - 1]]
        return cls(first_files, [sources[i] for i in first_files])

    def find(self, files: NDArray[np.integer]) -> NDArray[np.int64]:
        """The positions in `sources` (n) of files by number (n)."""
        return np.searchsorted(self.first_files, files, side="right") - 1


class SourceTallies:
    """Documents and bytes by source and reason, counted for files by number."""

    def __init__(self, sources: SourceRuns, reasons: Sequence[str]) -> None:
        self.sources = sources
        self.tallies = {reason: np.zeros((2, len(sources.sources)), np.int64) for reason in reasons}

    def add(self, reason: str, files: NDArray[np.integer], sizes: NDArray[np.integer] | None = None) -> None:
        """Count documents (n) under `reason`, given the numbers of their files (n) and their bytes (n)."""
        documents, size = self.tallies[reason]
        runs = self.sources.find(files)
        documents += np.bincount(runs, minlength=len(documents))
        if sizes is not None:
            np.add.at(size, runs, sizes.astype(np.int64))

    def add_one(self, reason: str, file: int) -> None:
        self.tallies[reason][0, bisect_right(self.sources.first_files, file) - 1] += 1

    def counts(self, total: str = "") -> Counts:
        """The counts per source and reason; under `total`, if it is given, those of all reasons together."""
        counts = Counts({}, [])
        sums = {total: np.sum([*self.tallies.values()], axis=0)} if total else {}
        for reason, tally in (sums | self.tallies).items():
            for run in np.flatnonzero(tally[0]):
                documents, size = tally[:, run].tolist()
                counts.add(self.sources.sources[run], reason, size, documents)
        return counts


@dataclass(frozen=True, eq=False)
class DocumentIds:
    """Ids of the documents of n files. The id of a document is the first id of its file plus its row.

    `names` are the files in name order, those of indexes first. `first_ids` (n + 1, uint64) has the id of
    each file's row 0; last, the number of ids.

    >>> document_ids = DocumentIds.of({"b.jsonl": 7, "a.jsonl": 2})
    >>> len(document_ids), document_ids.keys(np.array([1, 2, 8], np.uint64)).to_pylist()
    (9, ['a.jsonl@1', 'b.jsonl@0', 'b.jsonl@6'])
    """

    names: list[str]
    first_ids: NDArray[np.uint64]

    @classmethod
    def of(cls, rows: Mapping[str, int]) -> "DocumentIds":
        """Ids for files by name, of at most `rows[name]` rows each. InputError if 63 bits cannot number them."""
        if sum(rows.values()) >= 1 << 63:
            raise InputError(f"{len(rows):,} files have rows up to {max(rows.values()):,}: expected fewer than 2^63")
        names = sorted(rows, key=lambda name: (not is_of_index(name), name))
        return cls(names, np.cumsum([0, *(rows[name] for name in names)], dtype=np.uint64))

    def __len__(self) -> int:
        return int(self.first_ids[-1])

    @property
    def by_name(self) -> dict[str, int]:
        """File name → id of its row 0."""
        return dict(zip(self.names, self.first_ids.tolist(), strict=False))

    @property
    def first_of_corpus(self) -> int:
        """The first id of the corpus; all smaller ids belong to indexes."""
        return int(self.first_ids[sum(map(is_of_index, self.names))])

    def split(self, ids: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each id (n) its file, as a position in `names` (n), and its row (n)."""
        files = np.searchsorted(self.first_ids, ids, side="right") - 1
        return files, (ids - self.first_ids[files]).astype(np.int64)

    def files(self, positions: NDArray[np.int64]) -> pa.StringArray:
        """Names of files (n), given their positions in `names` (n)."""
        return pa.array(self.names, pa.string()).take(pa.array(positions))

    def keys(self, ids: NDArray[np.uint64]) -> pa.StringArray:
        """Keys `<file>@<row>` (n) of documents, given their ids (n)."""
        files, rows = self.split(ids)
        return pc.binary_join_element_wise(self.files(files), pa.array(rows).cast(pa.string()), "@")
