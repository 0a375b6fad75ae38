"""Clusters of a connected_components file, as records in blocks; and the order of documents within a cluster."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numba as nb
import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
from numpy.typing import NDArray

from dedup.candidates.document_ids import is_of_index
from dedup.removal.keeping import DROPPED, INDEXED, ORDINARY, BySource, Keep
from gristmill.errors import InputError, UsageError
from gristmill.io.documents import DocKey, source_of
from gristmill.io.keys import KeySet
from gristmill.io.parquet_tables import is_table
from gristmill.io.pickles import load_pickle

# A document of a cluster. `file` is the number of its name in name order, `position` its place in the input.
FIELDS = [("cluster", "<i8"), ("tier", "u1"), ("rank", "<i8"), ("position", "<i8"), ("file", "<i4"), ("row", "<i8")]
MEMBER = np.dtype(FIELDS)
KEEP_ORDER = ("cluster", "tier", "rank", "position")
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Clusters:
    """The clusters of one file. Of a table only a block is in memory; a pickle is loaded whole, as pickles are."""

    path: Path
    names: list[str]  # of all files, ascending
    loaded: NDArray | None

    @classmethod
    def open(cls, path: Path) -> "Clusters":
        """UsageError or InputError if the file is not there or holds something else."""
        if is_table(path):
            return cls(path, _names_in(path), None)
        clusters = _load_clusters(path)
        names = sorted({key.file for cluster in clusters for key in cluster})
        number = {name: i for i, name in enumerate(names)}
        found = np.zeros(sum(map(len, clusters)), MEMBER)
        found["cluster"] = np.repeat(np.arange(len(clusters)), [len(cluster) for cluster in clusters])
        found["file"] = [number[key.file] for cluster in clusters for key in cluster]
        found["row"] = [key.row for cluster in clusters for key in cluster]
        found["position"] = np.arange(len(found))
        return cls(path, names, found)

    @property
    def count(self) -> int:
        """How many documents are in clusters."""
        if self.loaded is not None:
            return len(self.loaded)
        return int(pa.parquet.read_metadata(self.path).num_rows)

    def blocks(self) -> Iterator[NDArray]:
        """MEMBERs in the input's order: cluster by cluster; tier and rank are 0."""
        if self.loaded is None:
            yield from _table_blocks(self.path, self.names)
        else:
            for start in range(0, len(self.loaded), _BLOCK):
                yield self.loaded[start : start + _BLOCK].copy()


class Order:
    """Puts each document into its tier, and into its rank where that depends on the key alone."""

    def __init__(self, names: list[str], keep: Keep, dropped: list[KeySet]) -> None:
        self.tiers = np.array([INDEXED if is_of_index(name) else ORDINARY for name in names], np.uint8)
        by_source = keep.rank if isinstance(keep, BySource) else lambda _: 0
        self.ranks = np.array([by_source(source_of(name)) for name in names], np.int64)
        none = np.empty(0, np.int64)
        rows = [np.unique(np.concatenate([none, *(keys.get(name, none) for keys in dropped)])) for name in names]
        self.starts = np.concatenate([[0], np.cumsum([len(some) for some in rows])]).astype(np.int64)
        self.dropped = np.concatenate([none, *rows])

    def assign(self, members: NDArray) -> NDArray:
        """MEMBERs with their tier and rank filled in, in place."""
        members["tier"], members["rank"] = self.tiers[members["file"]], self.ranks[members["file"]]
        is_dropped = _contains(members["file"], members["row"], self.starts, self.dropped)
        members["tier"][is_dropped & (members["tier"] == ORDINARY)] = DROPPED
        return members

    @property
    def is_of_keys(self) -> bool:
        """Whether it is the input's own order."""
        return bool((self.tiers == ORDINARY).all() and not self.ranks.any() and not len(self.dropped))


@nb.njit(nogil=True, cache=True)
def _contains(files: np.ndarray, rows: np.ndarray, starts: np.ndarray, sets: np.ndarray) -> np.ndarray:
    """Whether each row is in its file's sorted set, sets[starts[file] : starts[file + 1]]."""
    found = np.zeros(len(files), np.bool_)
    for i in range(len(files)):
        low, end = starts[files[i]], starts[files[i] + 1]
        at = low + np.searchsorted(sets[low:end], rows[i])
        found[i] = at < end and sets[at] == rows[i]
    return found


def _load_clusters(path: Path) -> list[list[DocKey]]:
    value = load_pickle(path)
    try:
        components, _, keys = value
        return [[DocKey.parse(keys[number]) for number in component] for component in components]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(
            f"{path} holds no (components, how many, keys): generate_connected_components writes it"
        ) from error


def _names_in(path: Path) -> list[str]:
    names: set[str] = set()
    for batch in _batches(path, ["file"]):
        column = _encoded(batch.column("file"), path)
        names.update(column.dictionary.take(column.indices.unique()).to_pylist())
    return sorted(names)


def _table_blocks(path: Path, names: list[str]) -> Iterator[NDArray]:
    values, position, last = pa.array(names, pa.string()), 0, 0
    for batch in _batches(path, ["cluster", "file", "row"]):
        found = np.zeros(batch.num_rows, MEMBER)
        column = _encoded(batch.column("file"), path)
        number = pa.compute.index_in(column.dictionary, value_set=values).to_numpy(zero_copy_only=False)
        found["file"] = number[column.indices.to_numpy()]
        for name in ("cluster", "row"):
            found[name] = _integers(batch.column(name), name, path)
        found["position"] = np.arange(position, position + len(found))
        if np.any(np.diff(found["cluster"], prepend=last) < 0):
            raise InputError(f"{path}: clusters do not ascend. Run generate_connected_components again")
        position, last = position + len(found), found["cluster"][-1]
        yield found


def _batches(path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
    if not path.is_file():
        raise UsageError(f"{path}: wanted a .parquet file, and there is none. Run generate_connected_components")
    try:
        with pa.parquet.ParquetFile(path, read_dictionary=["file"], pre_buffer=False) as file:
            if missing := {"cluster", "file", "row"} - set(file.schema_arrow.names):
                has = ", ".join(file.schema_arrow.names)
                raise InputError(f"{path} has no column {', '.join(sorted(missing))}: it has {has}")
            yield from (batch for batch in file.iter_batches(_BLOCK, columns=columns) if batch.num_rows)
    except (pa.ArrowException, OSError) as error:  # Arrow calls damaged pages an OSError
        raise InputError(f"{path} is not a readable Parquet file ({error}): make it again") from error


def _encoded(column: pa.Array, path: Path) -> pa.DictionaryArray:
    if column.null_count:
        raise InputError(f"{path}: a file name is missing. Run generate_connected_components again")
    column = column if isinstance(column, pa.DictionaryArray) else column.dictionary_encode()
    return pa.DictionaryArray.from_arrays(column.indices, column.dictionary.cast(pa.string()))


def _integers(column: pa.Array, name: str, path: Path) -> NDArray[np.int64]:
    if column.null_count or not pa.types.is_integer(column.type):
        raise InputError(f"{path}: column {name} is {column.type} with {column.null_count} nulls: wanted integers")
    return column.cast(pa.int64()).to_numpy()
