"""Key sets on disk, as SlimPajama's {file: {rows}} pickle or as a Parquet table."""

import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gristmill.batches import numbered
from gristmill.errors import InputError
from gristmill.io.artefacts import (
    encode_names,
    integers,
    is_table,
    load_pickle,
    open_table,
    open_table_writer,
    stream_table,
    write_sets,
)
from gristmill.io.external_sort import ExternalSorter, write_records

Rows = NDArray[np.int64]
KeySet = dict[str, Rows]  # file → its rows, ascending
KEY = np.dtype([("file", "<u4"), ("row", "<i8")])  # a key, its file by number
_ROW_BITS = np.uint64(40)  # of a packed key
_MAX_ROWS = 1 << 40  # of a file: a key beyond cannot be packed, and names no document
_SCHEMA = pa.schema({"file": pa.string(), "row": pa.int64()})
_PACKED = np.dtype([("key", "<u8")])


def iter_keys(path: Path) -> Iterator[tuple[str, Rows]]:
    """Yield the keys of a .pickle or .parquet file in its order, in blocks of one file's rows.

    Of a table a row group is in memory; a file may come several times. A pickle is loaded whole. UsageError if there is
    no such file, InputError if it is damaged or not a key set.
    """
    if is_table(path):
        for table in stream_table(path, ["file", "row"]):
            yield from _from_table(table, path)
        return
    value = load_pickle(path)
    if not isinstance(value, dict):
        raise InputError(f"{path} contains a {type(value).__name__}: expected a dict of file names to sets of rows")
    for file in list(value):
        yield file, _checked_rows(file, value.pop(file), path)


def read_keys(path: Path) -> KeySet:
    """Read a key set, sorted by file. Raises as iter_keys."""
    blocks = KeyBlocks()
    for file, rows in iter_keys(path):
        blocks.add(file, rows)
    return blocks.join()


class KeyBlocks:
    """Keys that come in blocks of one file's rows."""

    def __init__(self) -> None:
        self._blocks = defaultdict[str, list[Rows]](list)

    def add(self, file: str, rows: Rows) -> None:
        """Add rows of a file."""
        self._blocks[file].append(rows)

    def join(self) -> KeySet:
        """Return the key set, sorted by file; a key that came twice is in it once."""
        keys = KeySet()
        for file in sorted(self._blocks):
            keys[file] = np.unique(np.concatenate(self._blocks[file]))
        return keys


def stream_keys(path: Path) -> Iterator[tuple[str, Rows]]:
    """Yield (file, its rows) of a key set, sorted by file; of a table that is sorted, one file at a time."""
    if not is_table(path) or not _is_sorted(path):
        yield from read_keys(path).items()
        return
    for file, blocks in groupby(iter_keys(path), key=itemgetter(0)):
        yield file, np.unique(np.concatenate([rows for _, rows in blocks]))


@contextmanager
def sort_keys(paths: Sequence[Path], folder: Path, memory: int) -> Iterator[tuple[list[str], ExternalSorter]]:
    """Yield the names of files, ascending, and blocks of the KEYs of some sets by file and row, within `memory`.

    `folder` is for work files.
    """
    files = set[str]()
    for path in paths:
        files.update(file for file, _ in iter_keys(path))
    names = sorted(files)
    numbers = numbered(names)
    with ExternalSorter(folder, KEY, ("file", "row"), memory) as sorter:
        for path in paths:
            for file, rows in iter_keys(path):
                sorter.add(key_records(numbers[file], rows))
        yield names, sorter


def split_keys(key_set: Path, groups: Sequence[tuple[str, ...]], outputs: Sequence[Path], memory: int) -> int:
    """Write the keys in each group of files to one of `outputs`, for read_split, so that no task reads all.

    Returns the number of keys in the whole set.
    """
    total = 0
    numbers = numbered(chain.from_iterable(groups))
    with ExternalSorter(outputs[0].with_name(f"{outputs[0].name}.runs"), KEY, ("file", "row"), memory // 2) as sorter:
        for file, rows in iter_keys(key_set):
            total += len(rows)
            if file in numbers:
                sorter.add(key_records(numbers[file], rows))
        for keys_of_group, output in zip(by_group(sorter, map(len, groups)), outputs, strict=True):
            blocks = [key_records(number, records["row"]) for number, records in keys_of_group.items()]
            write_records(output, blocks)
    return total


def read_split(path: Path, files: tuple[str, ...]) -> KeySet:
    """Return the keys that split_keys wrote for a group of `files`."""
    keys = KeySet()
    for number, records in by_file([np.fromfile(path, KEY)]):
        keys[files[number]] = np.unique(records["row"])
    return keys


def key_records(file: int, rows: Rows) -> NDArray:
    """Return the KEYs (n) of rows (n) of one file."""
    records = np.empty(len(rows), KEY)
    records["file"] = file
    records["row"] = rows
    return records


def by_file(blocks: Iterable[NDArray]) -> Iterator[tuple[int, NDArray]]:
    """Yield the number of each file and its records (n), from records sorted by `file`; one file is in memory."""
    held: list[NDArray] = []
    for block in blocks:
        if not len(block):
            continue
        for part in np.split(block, np.flatnonzero(np.diff(block["file"])) + 1):
            if held and part["file"][0] != held[0]["file"][0]:
                yield int(held[0]["file"][0]), np.concatenate(held)
                held = []
            held.append(part)
    if held:
        yield int(held[0]["file"][0]), np.concatenate(held)


def by_group(blocks: Iterable[NDArray], sizes: Iterable[int]) -> Iterator[dict[int, NDArray]]:
    """Yield, for groups of consecutive files with these sizes, the records by the file's number in its group.

    The records are sorted by `file`; one group at a time is in memory.
    """
    first = 0
    files = by_file(blocks)
    following = next(files, None)
    for size in sizes:
        held = dict[int, NDArray]()
        while following and following[0] < first + size:
            number, records = following
            held[number - first] = records
            following = next(files, None)
        yield held
        first += size


class PackedKeys:
    """Keys of numbered files, to look others up in: sorted integers in a file that is mapped, 8 bytes each.

    `numbers` are the files' numbers by name. A key is its file's number above its row's 40 bits.
    """

    def __init__(self, path: Path, numbers: Mapping[str, int]) -> None:
        self.numbers = numbers
        self.packed: NDArray[np.uint64] = np.empty(0, np.uint64)
        if path.stat().st_size:
            self.packed = np.memmap(path, np.uint64, "r")

    @classmethod
    @contextmanager
    def of(cls, paths: Sequence[Path], numbers: Mapping[str, int], folder: Path, memory: int) -> Iterator["PackedKeys"]:
        """Yield the keys of some sets in files that have `numbers`; `folder` is for work files, and is removed."""

        def numbered() -> Iterator[tuple[NDArray[np.integer], Rows]]:
            for path in paths:
                for file, rows in iter_keys(path):
                    if file in numbers:
                        yield np.full(len(rows), numbers[file]), rows

        with cls.of_numbered(numbered(), numbers, folder, memory) as packed:
            yield packed

    @classmethod
    @contextmanager
    def of_numbered(
        cls,
        keys: Iterable[tuple[NDArray[np.integer], Rows]],
        numbers: Mapping[str, int],
        folder: Path,
        memory: int,
    ) -> Iterator["PackedKeys"]:
        """Pack keys that are given as numbers of files (n) and rows (n)."""
        path = folder / "packed.bin"
        try:
            with ExternalSorter(folder / "runs", _PACKED, ("key",), memory) as sorter:
                for files, rows in keys:
                    fits = rows < _MAX_ROWS
                    sorter.add(pack_keys(files[fits], rows[fits]).view(_PACKED))
                write_records(path, sorter)
            yield cls(path, numbers)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def __len__(self) -> int:
        return len(self.packed)

    def contains(self, files: NDArray[np.integer], rows: Rows) -> NDArray[np.bool_]:
        """Return whether each key is among them (n), given the numbers of files (n) and rows (n)."""
        return is_among(pack_keys(files, rows), self.packed) & (rows < _MAX_ROWS)


def is_among(values: NDArray[Any], ascending: NDArray[Any]) -> NDArray[np.bool_]:
    """Return for each value (n) whether a sorted array, which may be mapped, holds it."""
    positions = np.searchsorted(ascending, values)
    is_held = positions < len(ascending)
    is_held[is_held] = ascending[positions[is_held]] == values[is_held]
    return is_held


def pack_keys(files: NDArray[np.integer], rows: Rows) -> NDArray[np.uint64]:
    """Return keys (n) as integers that sort as they do, from the numbers of files (n) and rows (n) below 2^40."""
    return (files.astype(np.uint64) << _ROW_BITS) + rows.astype(np.uint64)


def write_sorted_keys(path: Path, names: Sequence[str], blocks: Iterable[NDArray]) -> None:
    """Write a key set atomically, as a pickle or a table, from KEYs sorted by file and row; all `names` have keys."""
    if not is_table(path):
        write_sets(path, names, (records["row"].tolist() for _, records in by_file(blocks)))
        return
    values = pa.array(names, pa.string())
    with open_table_writer(path, _SCHEMA) as write:
        for block in blocks:
            write({"file": values.take(pa.array(block["file"])), "row": pa.array(block["row"])})


def write_keys(path: Path, keys: KeySet) -> None:
    """Write a key set as write_sorted_keys does; files without rows are left out."""
    names = sorted(file for file, rows in keys.items() if len(rows))
    write_sorted_keys(path, names, (key_records(number, keys[name]) for number, name in enumerate(names)))


def _checked_rows(file: Any, rows: Any, path: Path) -> Rows:
    """Return the rows of a file in a pickle, ascending. InputError unless they are integers from 0 to 2^63 - 1."""
    is_valid = isinstance(file, str) and isinstance(rows, set | frozenset | list | tuple)
    is_valid = is_valid and set(map(type, rows)) <= {int}
    if is_valid and rows:
        is_valid = min(rows) >= 0 and max(rows) < 1 << 63
    if not is_valid:
        raise InputError(
            f"{path}: expected a dict of file names to sets of rows, got {rows!r:.80} for {file!r:.80}; make it again"
        )
    return np.unique(np.fromiter(rows, np.int64, len(rows)))


def _is_sorted(path: Path) -> bool:
    """Return whether a table's row groups are sorted by file, according to their statistics."""
    with open_table(path, ["file", "row"]) as file:
        column = file.schema_arrow.get_field_index("file")
        chunks = [file.metadata.row_group(number).column(column) for number in range(file.num_row_groups)]
    if any(chunk.statistics is None or not chunk.statistics.has_min_max for chunk in chunks):
        return len(chunks) <= 1
    return all(one.statistics.max <= other.statistics.min for one, other in pairwise(chunks))


def _from_table(table: pa.Table, path: Path) -> Iterator[tuple[str, Rows]]:
    """Yield the files of a table with their rows, both ascending."""
    encoded = encode_names(table.column("file"), path)
    rows = integers(table.column("row"), "row", path)
    codes = encoded.indices.to_numpy()
    order = np.lexsort((rows, codes))
    distinct, starts = np.unique(codes[order], return_index=True)
    names = encoded.dictionary.take(pa.array(distinct)).to_pylist()
    rows_of_files = np.split(rows[order], starts[1:])
    yield from sorted(zip(names, rows_of_files, strict=False))
