"""Key sets on disk, as SlimPajama's {file: {rows}} pickle or as a Parquet table."""

from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
from numpy.typing import NDArray

from gristmill.errors import InputError
from gristmill.io.parquet_tables import encode_names, integers, is_table, open_table_writer, read_table, stream_table
from gristmill.io.pickles import dump_pickle, load_pickle

Rows = NDArray[np.int64]
KeySet = dict[str, Rows]  # file → its rows, ascending


def read_keys(path: Path, files: Collection[str] | None = None) -> KeySet:
    """Read a key set from a .pickle or .parquet file; with `files`, only the keys in those files.

    From a table sorted by file, as write_keys writes it, only the row groups with those files are read,
    which bounds memory. A pickle is always loaded whole. Raises UsageError
    if there is no such file, InputError if it is damaged or not a key set.
    """
    if is_table(path):
        where = None if files is None else _file_in(files, path)
        keys = _from_table(read_table(path, {"file", "row"}, where), path)
        return {file: rows for file, rows in keys.items() if files is None or file in files}
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
    """Yield (file, its rows) of a key set, sorted by file; a sorted table is read one file at a time."""
    if not is_table(path) or not _is_sorted(path):
        yield from sorted(read_keys(path).items())
        return
    name, held = "", np.empty(0, np.int64)
    for table in stream_table(path, ["file", "row"]):
        for file, rows in _from_table(table, path).items():
            if file != name and len(held):
                yield name, np.unique(held)
                held = held[:0]
            name, held = file, np.concatenate([held, rows])
    if len(held):
        yield name, np.unique(held)


def write_keys(path: Path, keys: KeySet) -> None:
    """Write a key set atomically, as a pickle or a table, sorted by file and row; files without rows are left out."""
    keys = {file: keys[file] for file in sorted(keys) if len(keys[file])}
    if not is_table(path):
        dump_pickle(path, {file: set(rows.tolist()) for file, rows in keys.items()})
        return
    with open_table_writer(path, pa.schema({"file": pa.string(), "row": pa.int64()})) as write:
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
