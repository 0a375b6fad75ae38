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
    """Return the name of an index's file, distinct from any corpus file: index:<index>:<file>."""
    return f"{INDEX_PREFIX}{index}:{file}"


def is_of_index(file: str) -> bool:
    """Return whether a file, by its name, belongs to an index."""
    return file.startswith(INDEX_PREFIX)


def scope_of(file: str) -> str:
    """Return the source of a file of the corpus or of an index.

    >>> scope_of("wiki/a.jsonl"), scope_of("index:2023:wiki/b.jsonl")
    ('wiki', 'wiki')
    """
    return source_of(file.split(":", 2)[2] if is_of_index(file) else file)


def count_joined(names: Sequence[str], read: Iterable[int], joined: Iterable[int], reason: str) -> Counts:
    """Return counts per source of documents read, joined with others (`reason`) and alone, given those of each file.

    Files of indexes are left out.
    """
    counts = Counts({}, [])
    for name, documents_read, documents_joined in zip(names, read, joined, strict=True):
        if not is_of_index(name):
            source = source_of(name)
            counts.add(source, READ, 0, documents_read)
            counts.add(source, reason, 0, documents_joined)
            counts.add(source, ALONE, 0, documents_read - documents_joined)
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
        first_files = list[int]()
        sources = list[str]()
        for file, source in enumerate(map(source_of, names)):
            if not sources or source != sources[-1]:
                first_files.append(file)
                sources.append(source)
        return cls(first_files, sources)

    def find(self, files: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the positions in `sources` (n) of files by number (n)."""
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
        """Count a document under `reason`, given the number of its file."""
        run = bisect_right(self.sources.first_files, file) - 1
        self.tallies[reason][0, run] += 1

    def counts(self, total: str = "") -> Counts:
        """Return the counts per source and reason; under `total`, if it is given, the sum of all reasons."""
        tallies = dict(self.tallies)
        if total:
            tallies = {total: np.sum([*self.tallies.values()], axis=0)} | tallies
        counts = Counts({}, [])
        for reason, tally in tallies.items():
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
        """Return ids for files by name, of at most `rows[name]` rows each. InputError if 63 bits cannot number them."""
        if sum(rows.values()) >= 1 << 63:
            raise InputError(f"{len(rows):,} files have rows up to {max(rows.values()):,}: expected fewer than 2^63")
        names = sorted(rows, key=lambda name: (not is_of_index(name), name))
        sizes = [rows[name] for name in names]
        return cls(names, np.cumsum([0, *sizes], dtype=np.uint64))

    def __len__(self) -> int:
        return int(self.first_ids[-1])

    @property
    def by_name(self) -> dict[str, int]:
        """Return for each file by name the id of its row 0."""
        return dict(zip(self.names, self.first_ids.tolist(), strict=False))

    @property
    def first_of_corpus(self) -> int:
        """Return the first id of the corpus; all smaller ids belong to indexes."""
        files_of_indexes = sum(map(is_of_index, self.names))
        return int(self.first_ids[files_of_indexes])

    def split(self, ids: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for each id (n) its file, as a position in `names` (n), and its row (n)."""
        files = np.searchsorted(self.first_ids, ids, side="right") - 1
        return files, (ids - self.first_ids[files]).astype(np.int64)

    def files(self, positions: NDArray[np.int64]) -> pa.StringArray:
        """Return the names of files (n), given their positions in `names` (n)."""
        return pa.array(self.names, pa.string()).take(pa.array(positions))

    def keys(self, ids: NDArray[np.uint64]) -> pa.StringArray:
        """Return the keys `<file>@<row>` (n) of documents, given their ids (n)."""
        files, rows = self.split(ids)
        return pc.binary_join_element_wise(self.files(files), pa.array(rows).cast(pa.string()), "@")
