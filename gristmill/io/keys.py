"""Sets of document keys on disk: SlimPajama's {file: {rows}} pickle, or a .parquet table."""

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
ROW_GROUP = 1 << 17  # rows of a table that are written together, and the fewest that are read


def read_keys(path: Path, files: Collection[str] | None = None) -> KeySet:
    """Read a key set from a .pickle or .parquet file, or what it says of some `files`.

    Of a table that is sorted by file, as all of ours are, only the row groups of those files are
    read: memory is bounded by their rows, not by the set. A pickle is always loaded whole.
    Raises UsageError or InputError.
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
        raise InputError(f"{path} is no dict of file names to sets of rows ({error})") from error


def stream_keys(path: Path) -> Iterator[tuple[str, Rows]]:
    """(file, its rows) of a key set in order of file; of a table that is sorted, as ours are, one file at a time."""
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
    """Some columns of a Parquet table, a row group at a time. Raises UsageError or InputError."""
    read_table(path, columns, pa.compute.scalar(False))  # it is there and has them
    try:
        with pa.parquet.ParquetFile(path, pre_buffer=False) as file:
            for number in range(file.num_row_groups):
                yield file.read_row_group(number, columns=list(columns))
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def write_keys(path: Path, keys: KeySet) -> None:
    """Write a key set, sorted by file and row; files without a row are left out."""
    keys = {file: keys[file] for file in sorted(keys) if len(keys[file])}
    if not is_table(path):
        dump_pickle(path, {file: set(rows.tolist()) for file, rows in keys.items()})
        return
    with open_table(path, pa.schema({"file": pa.string(), "row": pa.int64()})) as write:
        for file, rows in keys.items():
            write({"file": pa.repeat(file, len(rows)), "row": pa.array(rows, pa.int64())})


def is_table(path: Path) -> bool:
    """Whether a path asks for the typed table rather than SlimPajama's pickle. UsageError if for neither."""
    if path.suffix not in (".pickle", ".pkl", ".parquet"):
        raise UsageError(f"{path}: wanted a name that ends in .pickle (as SlimPajama's) or .parquet (a typed table)")
    return path.suffix == ".parquet"


def read_table(path: Path, columns: Collection[str], where: pa.compute.Expression | None = None) -> pa.Table:
    """Some `columns` of a Parquet table, and of its rows those that an expression holds of.

    Row groups whose statistics rule it out are not read. Strings may come dictionary-encoded.
    Raises UsageError or InputError.
    """
    if not path.is_file():
        raise UsageError(f"{path}: wanted a .parquet file, and there is none. Run the stage that writes it")
    try:
        found = pa.parquet.read_schema(path).names
        if missing := set(columns) - set(found):
            raise InputError(f"{path} has no column {', '.join(sorted(missing))}: it has {', '.join(found)}")
        ordered = [name for name in found if name in columns]
        encoded = ["file"] if where is None else []  # lean for a whole table, but Arrow then uses no statistics
        return pa.parquet.read_table(path, columns=ordered, filters=where, read_dictionary=encoded)
    except (pa.ArrowException, OSError) as error:  # Arrow raises OSError for damaged pages
        raise _unreadable(path, error) from error


def write_table(path: Path, columns: Columns) -> None:
    """Write a Parquet table, whole or not at all."""
    with open_table(path, pa.table(columns).schema) as write:
        write(columns)


@contextmanager
def open_table(path: Path, schema: pa.Schema) -> Iterator[Callable[[Columns], None]]:
    """Yield a function that appends rows to a Parquet table; the table appears when the block ends well.

    However many rows each call brings, row groups hold ROW_GROUP of them: the same rows give the
    same bytes, and memory holds a row group and what one call brings.
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
    """Whether the statistics of a table's row groups say that it is in order of file from one group to the next."""
    read_table(path, ["file", "row"], pa.compute.scalar(False))
    with pa.parquet.ParquetFile(path) as file:
        place = file.schema_arrow.get_field_index("file")
        columns = [file.metadata.row_group(number).column(place) for number in range(file.num_row_groups)]
    if any(column.statistics is None or not column.statistics.has_min_max for column in columns):
        return len(columns) <= 1
    return all(one.statistics.max <= other.statistics.min for one, other in pairwise(columns))


def _is_one_of(files: Collection[str]) -> pa.compute.Expression:
    named = pa.array(sorted(files), pa.string())
    return pa.compute.field("file").isin(named) if files else pa.compute.scalar(False)  # Arrow cannot look in no set


def _from_table(table: pa.Table) -> KeySet:
    if not table.num_rows:
        return {}
    encoded = table.column("file").dictionary_encode().unify_dictionaries().combine_chunks()
    codes, rows = encoded.indices.to_numpy(), table.column("row").to_numpy()
    order = np.lexsort((rows, codes))
    found, starts = np.unique(codes[order], return_index=True)
    names = encoded.dictionary.take(pa.array(found)).to_pylist()
    return dict(sorted(zip(names, np.split(rows[order], starts[1:]), strict=True)))
