"""Key sets on disk, as SlimPajama's {file: {rows}} pickle or as a Parquet table."""

import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
from numpy.typing import NDArray

from gristmill.errors import InputError
from gristmill.io.external_sort import ExternalSorter, read_records, write_records
from gristmill.io.parquet_tables import encode_names, integers, is_table, open_table_writer, read_table, stream_table
from gristmill.io.pickles import load_pickle, stream_rows, write_sets

Rows = NDArray[np.int64]
KeySet = dict[str, Rows]  # file → its rows, ascending
KEY = np.dtype([("file", "<u4"), ("row", "<i8")])  # a key, its file by number
_BLOCK = 1 << 17  # keys read together
_ROW_BITS = np.uint64(40)  # of a packed key
_MOST_ROWS = 1 << 40  # of a file: a key beyond cannot be packed, and names no document
_SCHEMA = pa.schema({"file": pa.string(), "row": pa.int64()})
_PACKED = np.dtype([("key", "<u8")])


def read_keys(path: Path, files: Collection[str] | None = None) -> KeySet:
    """Read a key set from a .pickle or .parquet file; with `files`, only the keys in those files.

    From a table sorted by file, as write_keys writes it, only the row groups with those files are read,
    which bounds memory. Raises UsageError
    if there is no such file, InputError if it is damaged or not a key set.
    """
    if is_table(path):
        where = None if files is None else _file_in(files, path)
        keys = _from_table(read_table(path, {"file", "row"}, where), path)
        return {file: rows for file, rows in keys.items() if files is None or file in files}
    if (found := stream_rows(path)) is not None:
        held: dict[str, list[Rows]] = defaultdict(list)
        for file, rows in found:
            if files is None or file in files:
                held[file].append(rows)
        return {file: np.unique(np.concatenate(blocks)) for file, blocks in held.items()}
    value = load_pickle(path)
    if not isinstance(value, Mapping):
        raise InputError(f"{path} holds a {type(value).__name__}: wanted a dict of file names to sets of rows")
    try:
        if sum(map(len, value.values())) > path.stat().st_size:  # one set, named many times
            raise ValueError("it has more rows than its size allows")
        return {
            file: np.unique(np.array(sorted(_checked_rows(file, rows)), np.int64))
            for file, rows in value.items()
            if files is None or file in files
        }
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InputError(f"{path} is not a dict of file names to sets of rows ({error})") from error


def stream_keys(path: Path) -> Iterator[tuple[str, Rows]]:
    """Yield (file, its rows) of a key set, sorted by file; a set that is sorted by file is read one file at a time."""
    if not (_is_sorted(path) if is_table(path) else _is_sorted_pickle(path)):
        yield from sorted(read_keys(path).items())
        return
    name, held = "", list[Rows]()
    for file, rows in iter_keys(path):
        if file != name and held:
            yield name, np.unique(np.concatenate(held))
            held = []
        name = file
        held.append(rows)
    if held:
        yield name, np.unique(np.concatenate(held))


def iter_keys(path: Path) -> Iterator[tuple[str, Rows]]:
    """Yield the keys of a set in its own order, in blocks of one file's rows; a file may come several times.

    Memory holds a block, for pickles that stream_rows reads, and tables. Raises as read_keys.
    """
    if not is_table(path):
        found = stream_rows(path)
        yield from read_keys(path).items() if found is None else found
        return
    for table in stream_table(path, ["file", "row"]):
        yield from _from_table(table, path).items()


@contextmanager
def sort_keys(
    keys: Iterable[tuple[str, Rows]], folder: Path, memory: int
) -> Iterator[tuple[list[str], ExternalSorter]]:
    """Context: the names of files, ascending, and blocks of KEYs by file and row, within `memory`, from any order.

    `folder` is for work files, and is removed.
    """
    numbers: dict[str, int] = {}
    try:
        unsorted = folder / "unsorted.bin"
        write_records(unsorted, (key_records(numbers.setdefault(file, len(numbers)), rows) for file, rows in keys))
        names = sorted(numbers)
        rank = np.empty(len(names), np.uint32)
        rank[[numbers[name] for name in names]] = np.arange(len(names))
        with ExternalSorter(folder / "runs", KEY, ("file", "row"), memory) as sorter:
            for block in read_records(unsorted, KEY, _BLOCK):
                block["file"] = rank[block["file"]]
                sorter.add(block)
            unsorted.unlink()
            yield names, sorter
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def split_keys(key_set: Path, groups: Sequence[tuple[str, ...]], outputs: Sequence[Path], memory: int) -> None:
    """Task: write the keys in each group of files to one of `outputs`, for read_split, so that no task reads all."""
    places = {file: place for place, file in enumerate(file for files in groups for file in files)}
    with ExternalSorter(outputs[0].with_name(f"{outputs[0].name}.runs"), KEY, ("file", "row"), memory // 2) as sorter:
        for file, rows in iter_keys(key_set):
            if file in places:
                sorter.add(key_records(places[file], rows))
        first, found = 0, by_file(sorter)
        following = next(found, None)
        for files, output in zip(groups, outputs, strict=True):
            held: list[NDArray] = []
            while following and following[0] < first + len(files):
                held.append(key_records(following[0] - first, following[1]["row"]))
                following = next(found, None)
            write_records(output, held)
            first += len(files)


def read_split(path: Path, files: tuple[str, ...]) -> KeySet:
    """The keys that split_keys wrote for a group of `files`."""
    return {files[number]: np.unique(found["row"]) for number, found in by_file([np.fromfile(path, KEY)])}


def key_records(file: int, rows: Rows) -> NDArray:
    """KEYs (n) of rows (n) of one file."""
    records = np.empty(len(rows), KEY)
    records["file"], records["row"] = file, rows
    return records


def by_file(blocks: Iterable[NDArray]) -> Iterator[tuple[int, NDArray]]:
    """Yield the number of each file and its records (n), from records sorted by `file`; one file is in memory."""
    held: list[NDArray] = []
    for block in blocks:
        for part in np.split(block, np.flatnonzero(np.diff(block["file"])) + 1):
            if held and len(part) and part["file"][0] != held[0]["file"][0]:
                yield int(held[0]["file"][0]), np.concatenate(held)
                held = []
            held += [part] if len(part) else []
    if held:
        yield int(held[0]["file"][0]), np.concatenate(held)


class PackedKeys:
    """Keys of numbered files, to look others up in: sorted integers in a file that is mapped, 8 bytes each.

    `numbers` are those of files by name. A key is its file's number above its row's 40 bits.
    """

    def __init__(self, path: Path, numbers: Mapping[str, int]) -> None:
        self.numbers = numbers
        self.packed = np.memmap(path, np.uint64, "r") if path.stat().st_size else np.empty(0, np.uint64)

    @classmethod
    @contextmanager
    def of(cls, paths: Sequence[Path], numbers: Mapping[str, int], folder: Path, memory: int) -> Iterator["PackedKeys"]:
        """Context: the keys of some sets in files that have `numbers`; `folder` is for work files, and is removed."""
        named = (item for path in paths for item in iter_keys(path))
        keys = ((np.full(len(rows), numbers[file]), rows) for file, rows in named if file in numbers)
        with cls.of_numbered(keys, numbers, folder, memory) as packed:
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
        """As `of`, from keys as numbers of files (n) and rows (n)."""
        path = folder / "packed.bin"
        try:
            with ExternalSorter(folder / "runs", _PACKED, ("key",), memory) as sorter:
                for files, rows in keys:
                    fits = rows < _MOST_ROWS
                    sorter.add(_pack(files[fits], rows[fits]).view(_PACKED))
                write_records(path, sorter)
            yield cls(path, numbers)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def __len__(self) -> int:
        return len(self.packed)

    def contains(self, files: NDArray[np.integer], rows: Rows) -> NDArray[np.bool_]:
        """Whether each key is among them (n), given the numbers of files (n) and rows (n)."""
        keys = _pack(files, rows)
        at = np.searchsorted(self.packed, keys)
        found = (at < len(self.packed)) & (rows < _MOST_ROWS)
        found[found] = self.packed[at[found]] == keys[found]
        return found


def _pack(files: NDArray[np.integer], rows: Rows) -> NDArray[np.uint64]:
    return (files.astype(np.uint64) << _ROW_BITS) + rows.astype(np.uint64)


def write_sorted_keys(path: Path, names: list[str], blocks: Iterable[NDArray]) -> None:
    """Write a key set as write_keys does, from blocks of KEYs by file and row, one file's in memory; all have keys."""
    if not is_table(path):
        write_sets(path, names, (found["row"].tolist() for _, found in by_file(blocks)))
        return
    values = pa.array(names, pa.string())
    with open_table_writer(path, _SCHEMA) as write:
        for block in blocks:
            write({"file": values.take(pa.array(block["file"])), "row": pa.array(block["row"])})


def write_keys(path: Path, keys: KeySet) -> None:
    """Write a key set atomically, as a pickle or a table, sorted by file and row; files without rows are left out."""
    keys = {file: keys[file] for file in sorted(keys) if len(keys[file])}
    if not is_table(path):
        write_sets(path, keys, (rows.tolist() for rows in keys.values()))
        return
    with open_table_writer(path, _SCHEMA) as write:
        for file, rows in keys.items():
            write({"file": pa.repeat(file, len(rows)), "row": pa.array(rows, pa.int64())})


def _checked_rows(file: Any, rows: Any) -> Collection[int]:
    """The rows of a pickle's file. Raises TypeError or ValueError unless they are integers from 0, not bools."""
    if not isinstance(file, str) or not isinstance(rows, set | frozenset | list | tuple):
        raise TypeError(f"it has a {type(rows).__name__} for {file!r:.80}")
    if wrong := set(map(type, rows)) - {int}:
        raise TypeError(f"{file} has rows of type {', '.join(sorted(kind.__name__ for kind in wrong))}")
    if rows and min(rows) < 0:
        raise ValueError(f"{file} has the row {min(rows)}")
    return rows


def _is_sorted_pickle(path: Path) -> bool:
    found = stream_rows(path)
    return found is not None and all(one <= other for (one, _), (other, _) in pairwise(found))


def _is_sorted(path: Path) -> bool:
    """Whether a table's row groups are sorted by file, according to their statistics."""
    read_table(path, ["file", "row"], pa.compute.scalar(False))
    with pa.parquet.ParquetFile(path) as file:
        place = file.schema_arrow.get_field_index("file")
        columns = [file.metadata.row_group(number).column(place) for number in range(file.num_row_groups)]
    if any(column.statistics is None or not column.statistics.has_min_max for column in columns):
        return len(columns) <= 1
    return all(one.statistics.max <= other.statistics.min for one, other in pairwise(columns))


def _file_in(files: Collection[str], path: Path) -> pa.compute.Expression | None:
    """Where the file is one of `files`, or null, which is an error later; None if Arrow cannot filter the column.

    InputError unless the column has strings.
    """
    none = pa.compute.scalar(False)
    column, field = read_table(path, {"file", "row"}, none)["file"], pa.compute.field("file")
    encode_names(column, path)
    if pa.types.is_string_view(column.type):
        return None
    is_named = field.isin(pa.array(sorted(files), pa.string())) if files else none  # Arrow rejects an empty set
    return is_named | field.is_null()


def _from_table(table: pa.Table, path: Path) -> KeySet:
    encoded, rows = encode_names(table.column("file"), path), integers(table.column("row"), "row", path)
    codes = encoded.indices.to_numpy()
    order = np.lexsort((rows, codes))
    found, starts = np.unique(codes[order], return_index=True)
    names = encoded.dictionary.take(pa.array(found)).to_pylist()
    return dict(sorted(zip(names, np.split(rows[order], starts[1:]), strict=True))) if names else {}
