"""Numbers for documents: keys as integers in key order, so that clustering needs no strings."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gristmill.io.documents import source_of

INDEX = "index:"  # how the names of files begin that belong to an index, a corpus deduplicated before


def index_name(index: str, file: str) -> str:
    """The name that a file of an index goes by: no corpus has a source of that name."""
    return f"{INDEX}{index}:{file}"


def is_of_index(file: str) -> bool:
    return file.startswith(INDEX)


def scope_of(file: str) -> str:
    """The source that a file belongs to, in the corpus or in an index.

    >>> scope_of("wiki/a.jsonl"), scope_of("index:2023:wiki/b.jsonl")
    ('wiki', 'wiki')
    """
    return source_of(file.split(":", 2)[2] if is_of_index(file) else file)


@dataclass(frozen=True, eq=False)
class DocumentIds:
    """Files in order, those of indexes first, and the number of each one's row 0 (uint64, the end of all last).

    >>> document_ids = DocumentIds.of({"b.jsonl": 7, "a.jsonl": 2})
    >>> len(document_ids), document_ids.keys(np.array([1, 2, 8], np.uint64)).to_pylist()
    (9, ['a.jsonl@1', 'b.jsonl@0', 'b.jsonl@6'])
    """

    names: list[str]
    bases: NDArray[np.uint64]

    @classmethod
    def of(cls, rows: Mapping[str, int]) -> "DocumentIds":
        """Number the documents of files that have so many rows, or fewer."""
        names = sorted(rows, key=lambda name: (not is_of_index(name), name))
        return cls(names, np.cumsum([0, *(rows[name] for name in names)], dtype=np.uint64))

    def __len__(self) -> int:
        return int(self.bases[-1])

    @property
    def by_name(self) -> dict[str, int]:
        """The number of row 0 of every file."""
        return dict(zip(self.names, self.bases.tolist(), strict=False))

    @property
    def first_of_corpus(self) -> int:
        """The first number that belongs to no index."""
        return int(self.bases[sum(map(is_of_index, self.names))])

    def split(self, numbers: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The file (its place in `names`) and the row of each number."""
        files = np.searchsorted(self.bases, numbers, side="right") - 1
        return files, (numbers - self.bases[files]).astype(np.int64)

    def files(self, places: NDArray[np.int64]) -> pa.StringArray:
        """File names by their places."""
        return pa.array(self.names, pa.string()).take(pa.array(places))

    def keys(self, numbers: NDArray[np.uint64]) -> pa.StringArray:
        """Keys, `<file>@<row>`."""
        files, rows = self.split(numbers)
        return pc.binary_join_element_wise(self.files(files), pa.array(rows).cast(pa.string()), "@")
