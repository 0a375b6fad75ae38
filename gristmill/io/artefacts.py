"""Artefacts between stages: Parquet tables, with row groups of one size, and SlimPajama's .pickle files.

A pickle is loaded without running what it names, and written as a stream. All files are written atomically.
"""

import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
from numpy.typing import NDArray

from gristmill.budget import reserve_memory
from gristmill.errors import GristmillError, InputError, UsageError
from gristmill.io.parquet_files import open_parquet
from gristmill.storage.files import is_file
from gristmill.storage.local import atomic_write

Columns = Mapping[str, pa.Array]
ROW_GROUP_SIZE = 1 << 17  # rows in each row group of a table
PROTOCOL = 4
_UNFRAMED = 3  # the last protocol without frames, whose pickles can be concatenated
_MEMORY_A_BYTE = 16  # of a pickled set of rows, as Python objects
_NAMES = {
    "builtins": {"set", "frozenset", "dict", "list", "tuple", "str", "int", "bytes"},
    "collections": {"defaultdict", "OrderedDict"},
}


def is_table(path: Path) -> bool:
    """Return True for the suffix of a Parquet table, False for that of a pickle. Raises UsageError for any other."""
    if path.suffix not in (".pickle", ".pkl", ".parquet"):
        raise UsageError(f"{path}: expected a name that ends in .pickle (as SlimPajama's) or .parquet (a typed table)")
    return path.suffix == ".parquet"


@contextmanager
def open_table(path: Path, columns: Collection[str] = ()) -> Iterator[pa.parquet.ParquetFile]:
    """Context: a Parquet file. UsageError if there is none, InputError if it is damaged or lacks one of `columns`."""
    if not is_file(path):
        raise UsageError(f"{path}: expected a .parquet file, got none of that name; run the stage that writes it")
    try:
        with open_parquet(path) as file:
            present = file.schema_arrow.names
            for problem, names in (
                ("no column", set(columns).difference(present)),
                ("several columns", {name for name in columns if present.count(name) > 1}),
            ):
                if names:
                    raise InputError(f"{path} has {problem} {', '.join(sorted(names))}: it has {', '.join(present)}")
            yield file
    except (pa.ArrowException, OSError) as error:  # Arrow raises OSError for damaged pages
        raise InputError(f"{path} is not a readable Parquet file ({error}): make it again") from error


def stream_table(path: Path, columns: Collection[str]) -> Iterator[pa.Table]:
    """Yield some columns of a Parquet table, a row group at a time. Raises as open_table."""
    with open_table(path, columns) as file:
        for number in range(file.num_row_groups):
            yield file.read_row_group(number, columns=list(columns))


def integers(column: pa.Array | pa.ChunkedArray, name: str, path: Path) -> NDArray[np.int64]:
    """Return the numbers of a column (n, int64), such as rows.

    InputError unless all are integers from 0 to 2^63 - 1.
    """
    if column.null_count or not pa.types.is_integer(column.type):
        raise InputError(f"{path}: column {name} is {column.type} with {column.null_count} nulls: expected integers")
    limits = pa.compute.min_max(column).as_py()
    for number in limits.values():
        if number is not None and not 0 <= number < 1 << 63:
            raise InputError(f"{path}: column {name} has {number}: expected integers from 0 to 2^63 - 1")
    return column.cast(pa.int64()).to_numpy()


def encode_names(
    column: pa.Array | pa.ChunkedArray, path: Path, name: str = "file", missing: str | None = None
) -> pa.DictionaryArray:
    """Return the column `name` of files, dictionary-encoded. InputError unless all its values are strings.

    With `missing`, a name that is missing is that one.
    """
    kind = column.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not any(check(kind) for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)):
        raise InputError(f"{path}: column {name} is {column.type}: expected strings, the names of files")
    if pa.types.is_string_view(kind) or missing is not None:
        column = column.cast(pa.string())  # Arrow does not encode views, nor fill in dictionaries
    if missing is not None:
        column = column.fill_null(missing)
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    if isinstance(column, pa.ChunkedArray):
        column = column.unify_dictionaries().combine_chunks()
    if column.null_count or column.dictionary.null_count:
        raise InputError(f"{path}: a file name is missing: make it again")
    return pa.DictionaryArray.from_arrays(column.indices, column.dictionary.cast(pa.string()))


def write_table(path: Path, columns: Columns) -> None:
    """Write a Parquet table atomically."""
    with open_table_writer(path, pa.table(columns).schema) as write:
        write(columns)


def write_rows(path: Path, schema: pa.Schema, rows: Sequence[tuple[Any, ...]]) -> None:
    """Write a Parquet table of rows, each with a value for each field of the schema, atomically."""
    columns: Iterable[tuple[Any, ...]] = [()] * len(schema)
    if rows:
        columns = zip(*rows, strict=True)
    arrays = dict[str, pa.Array]()
    for field, values in zip(schema, columns, strict=True):
        arrays[field.name] = pa.array(values, field.type)
    write_table(path, arrays)


@contextmanager
def open_table_writer(path: Path, schema: pa.Schema) -> Iterator[Callable[[Columns], None]]:
    """Yield a function that appends rows to a Parquet table; publish the table when the block ends without an error.

    Row groups have ROW_GROUP_SIZE rows, and memory holds one and a call's rows: the same rows give the same bytes.
    """
    with atomic_write(path) as temporary, pa.parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
        held = pa.Table.from_batches([], schema)

        def write(columns: Columns) -> None:
            nonlocal held
            held = pa.concat_tables([held, pa.table(columns, schema=schema)])
            while held.num_rows >= ROW_GROUP_SIZE:
                writer.write_table(held.slice(0, ROW_GROUP_SIZE))
                held = held.slice(ROW_GROUP_SIZE)

        yield write
        if held.num_rows:
            writer.write_table(held)


class _BuiltinsUnpickler(pickle.Unpickler):
    """Makes the containers, strings and numbers of _NAMES, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it contains {module}.{name}, which is not a builtin container")
        return super().find_class(module, name)


def load_pickle(path: Path) -> Any:
    """Load a pickle of containers, numbers and strings.

    UsageError if there is no such file, or it is too large for the memory budget of a task; InputError if it is
    damaged or contains any other type.
    """
    if not is_file(path):
        raise UsageError(f"{path}: expected a .pickle file, got none of that name; run the stage that writes it")
    try:
        with reserve_memory(_MEMORY_A_BYTE * path.stat().st_size, str(path)), path.open("rb") as file:
            return _BuiltinsUnpickler(file).load()
    except GristmillError:
        raise
    except Exception as error:  # a damaged pickle can raise anything, such as MemoryError
        raise InputError(f"{path} is not a pickle that can be read ({error}): make it again") from error


def write_sets(path: Path, files: Iterable[str], sets: Iterator[Iterable[int]]) -> None:
    """Write the pickle of {file: set} atomically, with one set in memory at a time; `sets` are those of the files.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.pickle"
    >>> write_sets(path, ["a", "b"], iter([[1, 2], range(3)]))
    >>> load_pickle(path), path.read_bytes() == pickle.dumps({"a": {1, 2}, "b": {0, 1, 2}}, PROTOCOL)
    ({'a': {1, 2}, 'b': {0, 1, 2}}, True)
    """
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        _SetPickler(file, sets).dump({name: set[int]() for name in files})


class _SetPickler(pickle.Pickler):
    """Fills each set just before it is written, and empties it when the next one's turn comes."""

    def __init__(self, file: Any, sets: Iterator[Iterable[int]]) -> None:
        super().__init__(file, PROTOCOL)
        self.sets = sets
        self.filled = set[int]()

    def persistent_id(self, value: Any) -> None:
        """Called for every value before it is written."""
        if type(value) is set:
            self.filled.clear()
            value.update(next(self.sets))
            self.filled = value


def stream_list(items: Iterable[Any]) -> Iterator[bytes]:
    """Yield the pickle of list(items) in pieces, without PROTO and STOP; the list is never in memory."""
    yield pickle.EMPTY_LIST
    yield from chain([pickle.MARK], map(_pickle_body, items), [pickle.APPENDS])


def stream_dict(items: Iterable[tuple[Any, Any]]) -> Iterator[bytes]:
    """Yield the pickle of dict(items) in pieces, without PROTO and STOP; the dict is never in memory."""
    yield pickle.EMPTY_DICT
    yield from chain(
        [pickle.MARK], (_pickle_body(key) + _pickle_body(value) for key, value in items), [pickle.SETITEMS]
    )


def stream_value(value: Callable[[], Any]) -> Iterator[bytes]:
    """Yield the pickle of value(), without PROTO and STOP; `value` is called only when its turn comes."""
    yield _pickle_body(value())


def write_stream(path: Path, stream: Iterable[bytes]) -> None:
    """Write a pickle atomically from a stream of stream_list, stream_dict or stream_value."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        file.writelines(chain([pickle.PROTO + bytes([_UNFRAMED])], stream, [pickle.STOP]))


def write_tuple(path: Path, parts: Iterable[Iterable[bytes]]) -> None:
    """Write the pickle of a tuple atomically; each item is a stream.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.pickle"
    >>> write_tuple(path, [stream_list([[1, 2], [3]]), stream_dict([("a", 1)])])
    >>> load_pickle(path)
    ([[1, 2], [3]], {'a': 1})
    """
    write_stream(path, chain([pickle.MARK], chain.from_iterable(parts), [pickle.TUPLE]))


def _pickle_body(value: Any) -> bytes:
    """Return the pickle of a value that can be part of another pickle: without PROTO, frames, memo and STOP."""
    buffer = BytesIO()
    pickler = pickle.Pickler(buffer, _UNFRAMED)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[2:-1]
