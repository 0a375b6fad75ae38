"""The clusters of a connected_components file: all of them as records in blocks, or the one that holds a key."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
from numpy.typing import NDArray

from dedup.candidates.document_ids import is_of_index
from dedup.clustering.keep_policy import DROPPED, INDEXED, ORDINARY, BySource, Keep
from gristmill.errors import InputError, UsageError
from gristmill.io.documents import DocKey, source_of
from gristmill.io.keys import PackedKeys
from gristmill.io.parquet_tables import check_columns, encode_names, integers, is_table, read_table
from gristmill.io.pickles import load_pickle
from gristmill.storage.files import is_file

# A document of a cluster. `file` is an index into the sorted file names, `position` the document's row in the input.
MEMBER_FIELDS = [
    ("cluster", "<i8"), ("tier", "u1"), ("rank", "<i8"), ("fine_rank", "<i8"), ("position", "<i8"), ("file", "<i4"),
    ("row", "<i8"),
]  # fmt: skip
MEMBER = np.dtype(MEMBER_FIELDS)
_BLOCK = 1 << 16  # members read together


@dataclass(frozen=True)
class Clusters:
    """The clusters of one file: a .parquet table is read in blocks, a pickle is loaded whole."""

    path: Path
    names: list[str]  # of all files, ascending
    loaded: NDArray | None  # the MEMBERs of a pickle

    @classmethod
    def open(cls, path: Path) -> "Clusters":
        """Open a clusters file. UsageError if there is none of that name, InputError if it holds something else."""
        if is_table(path):
            return cls(path, _read_names(path), None)
        clusters = _load_clusters(path)
        names = sorted({key.file for cluster in clusters for key in cluster})
        if not all(map(_is_unicode, names)):
            raise _not_clusters(path)
        number = {name: i for i, name in enumerate(names)}
        members = np.zeros(sum(map(len, clusters)), MEMBER)
        members["cluster"] = np.repeat(np.arange(len(clusters)), [len(cluster) for cluster in clusters])
        members["file"] = [number[key.file] for cluster in clusters for key in cluster]
        members["row"] = [key.row for cluster in clusters for key in cluster]
        members["position"] = np.arange(len(members))
        return cls(path, names, members)

    @property
    def count(self) -> int:
        """The number of documents in all clusters."""
        if self.loaded is not None:
            return len(self.loaded)
        return int(pa.parquet.read_metadata(self.path).num_rows)

    def blocks(self) -> Iterator[NDArray]:
        """Yield blocks of MEMBERs in the input's order, cluster by cluster; tier and ranks are 0.

        InputError if the file is damaged, or clusters do not ascend.
        """
        if self.loaded is None:
            yield from _table_blocks(self.path, self.names)
        else:
            for start in range(0, len(self.loaded), _BLOCK):
                yield self.loaded[start : start + _BLOCK].copy()


def read_cluster(path: Path, key: DocKey, most: int) -> list[DocKey]:
    """The keys of the cluster that holds `key`, in the input's order.

    UsageError if no cluster holds the key, or its cluster has more than `most` documents.
    """
    members = _select_cluster(path, key, most) if is_table(path) else _find_cluster(path, key, most)
    if not members:
        raise UsageError(
            f"{key} is in no cluster of {path}: no other document was found to be like it, "
            "or it is a key of another corpus"
        )
    return members


def _load_clusters(path: Path) -> list[list[DocKey]]:
    value = load_pickle(path)
    try:
        components, _, keys = value
        if sum(map(len, components)) > path.stat().st_size:  # one cluster, named many times
            raise ValueError("more members than its size allows")
        return [[DocKey.parse(keys[number]) for number in component] for component in components]
    except UsageError as error:
        raise InputError(f"{path}: {error}. Run generate_connected_components again") from error
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise _not_clusters(path) from error


def _read_names(path: Path) -> list[str]:
    names: set[str] = set()
    for batch in _batches(path, ["file"]):
        column = encode_names(batch.column("file"), path)
        names.update(column.dictionary.take(column.indices.unique()).to_pylist())
    return sorted(names)


def _table_blocks(path: Path, names: list[str]) -> Iterator[NDArray]:
    values, position, last = pa.array(names, pa.string()), 0, 0
    for batch in _batches(path, ["cluster", "file", "row"]):
        members = np.zeros(batch.num_rows, MEMBER)
        column = encode_names(batch.column("file"), path)
        number = pa.compute.index_in(column.dictionary, value_set=values).to_numpy(zero_copy_only=False)
        members["file"] = number[column.indices.to_numpy()]
        for name in ("cluster", "row"):
            members[name] = integers(batch.column(name), name, path)
        members["position"] = np.arange(position, position + len(members))
        if np.any(np.diff(members["cluster"], prepend=last) < 0):
            raise InputError(f"{path}: clusters do not ascend. Run generate_connected_components again")
        position, last = position + len(members), members["cluster"][-1]
        yield members


def _batches(path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
    if not is_file(path):
        raise UsageError(f"{path}: wanted a .parquet file, and there is none. Run generate_connected_components")
    try:
        with pa.parquet.ParquetFile(path, read_dictionary=["file"], pre_buffer=False) as file:
            check_columns(path, file.schema_arrow.names, ("cluster", "file", "row"))
            yield from (batch for batch in file.iter_batches(_BLOCK, columns=columns) if batch.num_rows)
    except (pa.ArrowException, OSError) as error:  # Arrow reports damaged pages as OSError
        raise InputError(f"{path} is not a readable Parquet file ({error}): make it again") from error


def _select_cluster(path: Path, key: DocKey, most: int) -> list[DocKey]:
    """The cluster of `key` in a table, reading only row groups that may hold it; [] if none does."""
    field = pyarrow.compute.field
    of_key = (field("file") == key.file) & (field("row") == key.row)
    found = read_table(path, {"cluster", "file", "row"}, of_key)
    for cluster in integers(found["cluster"], "cluster", path).tolist():
        members = field("cluster") == cluster
        _check_size(read_table(path, {"cluster"}, members).num_rows, key, most)
        table = read_table(path, {"file", "row"}, members)
        names, rows = encode_names(table["file"], path).to_pylist(), integers(table["row"], "row", path).tolist()
        return list(map(DocKey, names, rows))
    return []


def _find_cluster(path: Path, key: DocKey, most: int) -> list[DocKey]:
    """The cluster of `key` in a pickle, parsing the keys of that cluster alone; [] if none holds it."""
    value = load_pickle(path)
    try:
        components, _, keys = value
        number = next((number for number, name in keys.items() if name == str(key)), None)
        names = next(([keys[member] for member in component] for component in components if number in component), [])
        members = [DocKey.parse(name) for name in names]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise _not_clusters(path) from error
    _check_size(len(members), key, most)
    return members


def _check_size(size: int, key: DocKey, most: int) -> None:
    if size > most:
        raise UsageError(
            f"the cluster of {key} has {size:,} documents: {size * (size - 1) // 2:,} comparisons. "
            f"--most {most} allows {most:,} documents; give --most {size} to compare them"
        )


def _is_unicode(name: str) -> bool:
    """Whether a name has no half of a surrogate pair, which UTF-8 cannot hold."""
    return name == name.encode(errors="ignore").decode()


def _not_clusters(path: Path) -> InputError:
    return InputError(
        f"{path} does not hold (components, number of components, {{id: key}}): give the file that "
        "generate_connected_components wrote"
    )


@contextmanager
def open_keep_order(
    names: list[str], keep: Keep, dropped: Sequence[Path], output: Path, memory: int
) -> Iterator["KeepOrder"]:
    """Context: the KeepOrder for the keys in the sets `dropped`; work files are named after `output`."""
    numbers = {name: number for number, name in enumerate(names)}
    with PackedKeys.of(dropped, numbers, output.with_name(f"{output.name}.dropped"), memory) as keys:
        yield KeepOrder(names, keep, keys)


class KeepOrder:
    """Assigns tiers, and the ranks that depend on the key alone, to members of clusters.

    `names` are the files that members refer to by number; `dropped` are the keys that other stages remove.
    """

    def __init__(self, names: list[str], keep: Keep, dropped: PackedKeys) -> None:
        self.tiers = np.array([INDEXED if is_of_index(name) else ORDINARY for name in names], np.uint8)
        by_source = keep.rank if isinstance(keep, BySource) else lambda _: 0
        self.ranks = np.array([by_source(source_of(name)) for name in names], np.int64)
        self.dropped = dropped

    def assign(self, members: NDArray) -> NDArray:
        """Fill in `tier` and `rank` of MEMBERs (n), in place."""
        members["tier"], members["rank"] = self.tiers[members["file"]], self.ranks[members["file"]]
        is_dropped = self.dropped.contains(members["file"], members["row"])
        members["tier"][is_dropped & (members["tier"] == ORDINARY)] = DROPPED
        return members

    @property
    def is_input_order(self) -> bool:
        """Whether all tiers and ranks are equal, so that members need no sorting."""
        return bool((self.tiers == ORDINARY).all() and not self.ranks.any() and not len(self.dropped))
