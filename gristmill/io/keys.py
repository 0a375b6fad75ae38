"""Key sets on disk, as SlimPajama's {file: {rows}} pickle or as a Parquet table; and Parquet tables in general."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
from numpy.typing import NDArray

from gristmill.errors import InputError, UsageError
from gristmill.io.files import atomic_write
from gristmill.io.pickles import dump_pickle, load_pickle

Rows = NDArray[np.int64]
KeySet = dict[str, Rows]  # file → its rows, ascending
Columns = Mapping[str, pa.Array]
ROW_GROUP = 1 << 17  # rows in each row group of a table


def read_keys(path: Path, files: Collection[str] | None = None) -> KeySet:
    """Read a key set from a .pickle or .parquet file; with `files`, only the keys in those files.

    Of a table sorted by file, as write_keys sorts it, only the row groups with those files are read,
    so that memory is bounded by their rows. A pickle is always loaded as a whole. Raises UsageError
    if there is no such file, InputError if it is damaged or no key set.
    """
    if is_table(path):
        return _from_table(read_table(path, {"file", "row"}, None if files is None else _is_one_of(files)))
    value = load_pickle(path)
    if not isinstance(value, Mapping):
        raise InputError(f"{path} holds a {type(value).__name__}: wanted a dict of file names to sets of rows")
    try:
        return {
            str(file): np.unique(np.array(sorted(rows), np.int64))
            for file, rows in value.items()
            if files is None or str(file) in files
        }
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{path} is not a dict of file names to sets of rows ({error})") from error


def stream_keys(path: Path) -> Iterator[tuple[str, Rows]]:
    """Yield (file, its rows) of a key set, sorted by file; of a sorted table, one file is in memory at a time."""
    if not is_table(path) or not _is_sorted(path):
        yield from read_keys(path).items()
        return
    name, held = "", np.empty(0, np.int64)
    for table in stream_table(path, ["file", "row"]):
        for file, rows in _from_table(table).items():
            if file != name and len(held):
                yield name, np.unique(held)
                held = held[:0]
            name, held = file, np.concatenate([held, rows])
    if len(held):
        yield name, np.unique(held)


def stream_table(path: Path, columns: Collection[str]) -> Iterator[pa.Table]:
    """Yield some columns of a Parquet table, a row group at a time. Raises UsageError or InputError."""
    read_table(path, columns, pa.compute.scalar(False))  # reads no rows, but checks the file and its columns
    try:
        with pa.parquet.ParquetFile(path, pre_buffer=False) as file:
            for number in range(file.num_row_groups):
                yield file.read_row_group(number, columns=list(columns))
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def write_keys(path: Path, keys: KeySet) -> None:
    """Write a key set atomically, as a pickle or a table, sorted by file and row; files without rows are left out."""
    keys = {file: keys[file] for file in sorted(keys) if len(keys[file])}
    if not is_table(path):
        dump_pickle(path, {file: set(rows.tolist()) for file, rows in keys.items()})
        return
    with open_table(path, pa.schema({"file": pa.string(), "row": pa.int64()})) as write:
        for file, rows in keys.items():
            write({"file": pa.repeat(file, len(rows)), "row": pa.array(rows, pa.int64())})


def is_table(path: Path) -> bool:
    """Whether the suffix is that of a Parquet table, not of a pickle. Raises UsageError for any other suffix."""
    if path.suffix not in (".pickle", ".pkl", ".parquet"):
        raise UsageError(f"{path}: wanted a name that ends in .pickle (as SlimPajama's) or .parquet (a typed table)")
    return path.suffix == ".parquet"


def read_table(path: Path, columns: Collection[str], where: pa.compute.Expression | None = None) -> pa.Table:
    """Read some `columns` of a Parquet table; with `where`, only the rows for which it is true.

    Row groups without such rows, by their statistics, are not read. The column `file` may come
    dictionary-encoded. Raises UsageError if there is no such file, InputError if it is damaged or
    lacks a column.
    """
    if not path.is_file():
        raise UsageError(f"{path}: wanted a .parquet file, and there is none. Run the stage that writes it")
    try:
        found = pa.parquet.read_schema(path).names
        if missing := set(columns) - set(found):
            raise InputError(f"{path} has no column {', '.join(sorted(missing))}: it has {', '.join(found)}")
        ordered = [name for name in found if name in columns]
        encoded = ["file"] if where is None else []  # saves memory, but Arrow then ignores statistics
        return pa.parquet.read_table(path, columns=ordered, filters=where, read_dictionary=encoded)
    except (pa.ArrowException, OSError) as error:  # Arrow raises OSError for damaged pages
        raise _unreadable(path, error) from error


def write_table(path: Path, columns: Columns) -> None:
    """Write a Parquet table atomically."""
    with open_table(path, pa.table(columns).schema) as write:
        write(columns)


@contextmanager
def open_table(path: Path, schema: pa.Schema) -> Iterator[Callable[[Columns], None]]:
    """Yield a function that appends rows to a Parquet table; publish the table when the block ends without an error.

    Row groups have ROW_GROUP rows, however many each call appends, so that the same rows give the
    same bytes. Memory holds one row group and the rows of one call.
    """
    with atomic_write(path) as temporary, pa.parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
        held = pa.Table.from_batches([], schema)

        def write(columns: Columns) -> None:
            nonlocal held
            held = pa.concat_tables([held, pa.table(columns, schema=schema)])
            while held.num_rows >= ROW_GROUP:
                writer.write_table(held.slice(0, ROW_GROUP))
                held = held.slice(ROW_GROUP)

        yield write
        if held.num_rows:
            writer.write_table(held)


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(f"{path} is not a readable Parquet file ({error}): make it again")


def _is_sorted(path: Path) -> bool:
    """Whether a table's row groups are sorted by file, by their statistics."""
    read_table(path, ["file", "row"], pa.compute.scalar(False))
    with pa.parquet.ParquetFile(path) as file:
        place = file.schema_arrow.get_field_index("file")
        columns = [file.metadata.row_group(number).column(place) for number in range(file.num_row_groups)]
    if any(column.statistics is None or not column.statistics.has_min_max for column in columns):
        return len(columns) <= 1
    return all(one.statistics.max <= other.statistics.min for one, other in pairwise(columns))


def _is_one_of(files: Collection[str]) -> pa.compute.Expression:
    named = pa.array(sorted(files), pa.string())
    return pa.compute.field("file").isin(named) if files else pa.compute.scalar(False)  # Arrow rejects an empty set


def _from_table(table: pa.Table) -> KeySet:
    if not table.num_rows:
        return {}
    encoded = table.column("file").dictionary_encode().unify_dictionaries().combine_chunks()
    codes, rows = encoded.indices.to_numpy(), table.column("row").to_numpy()
    order = np.lexsort((rows, codes))
    found, starts = np.unique(codes[order], return_index=True)
    names = encoded.dictionary.take(pa.array(found)).to_pylist()
    return dict(sorted(zip(names, np.split(rows[order], starts[1:]), strict=True)))
