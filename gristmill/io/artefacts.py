"""Artefacts between stages: Parquet tables, SlimPajama's .pickle files, and records of one size, which may be sorted.

Row groups of tables have one size. A pickle is loaded without running what it names, and written as a stream. Records
are sorted in memory, or in runs on disk that are merged. All files are written atomically.
"""

import pickle
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from io import BytesIO
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
from numpy.typing import NDArray

from gristmill.budget import reserve_memory
from gristmill.errors import GristmillError, InputError, UsageError, wrap_write_errors
from gristmill.storage.files import is_file
from gristmill.storage.local import atomic_write

Columns = Mapping[str, pa.Array]
ROW_GROUP_SIZE = 1 << 17  # rows in each row group of a table
PROTOCOL = 4
_UNFRAMED = 3  # the last protocol without frames, whose pickles can be concatenated
_MEMORY_A_BYTE = 16  # of a pickled set of rows, as Python objects
MAX_SCATTERED = 256  # files that scatter_records may write at the same time: processes can open few
_COPIES = 4  # copies of each record in memory during a sort or merge
_MIN_BLOCK = 1024  # minimum records in a block, even beyond the memory budget
_NAMES = {
    "builtins": {"set", "frozenset", "dict", "list", "tuple", "str", "int", "bytes"},
    "collections": {"defaultdict", "OrderedDict"},
}


def is_table(path: Path) -> bool:
    """True for the suffix of a Parquet table, False for that of a pickle. Raises UsageError for any other."""
    if path.suffix not in (".pickle", ".pkl", ".parquet"):
        raise UsageError(f"{path}: expected a name that ends in .pickle (as SlimPajama's) or .parquet (a typed table)")
    return path.suffix == ".parquet"


@contextmanager
def open_table(path: Path, columns: Collection[str] = ()) -> Iterator[pa.parquet.ParquetFile]:
    """Context: a Parquet file. UsageError if there is none, InputError if it is damaged or lacks one of `columns`."""
    if not is_file(path):
        raise UsageError(f"{path}: expected a .parquet file, got none of that name; run the stage that writes it")
    try:
        with pa.parquet.ParquetFile(path, pre_buffer=False) as file:
            found = file.schema_arrow.names
            for problem, names in (
                ("no column", set(columns).difference(found)),
                ("several columns", {name for name in columns if found.count(name) > 1}),
            ):
                if names:
                    raise InputError(f"{path} has {problem} {', '.join(sorted(names))}: it has {', '.join(found)}")
            yield file
    except (pa.ArrowException, OSError) as error:  # Arrow raises OSError for damaged pages
        raise InputError(f"{path} is not a readable Parquet file ({error}): make it again") from error


def stream_table(path: Path, columns: Collection[str]) -> Iterator[pa.Table]:
    """Yield some columns of a Parquet table, a row group at a time. Raises as open_table."""
    with open_table(path, columns) as file:
        for number in range(file.num_row_groups):
            yield file.read_row_group(number, columns=list(columns))


def integers(column: pa.Array | pa.ChunkedArray, name: str, path: Path) -> NDArray[np.int64]:
    """The numbers of a column (n, int64), such as rows. InputError unless all are integers from 0 to 2^63 - 1."""
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
    """The column `name` of files, dictionary-encoded. InputError unless all its values are strings.

    With `missing`, a name that is missing is that one.
    """
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not any(check(kind) for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)):
        raise InputError(f"{path}: column {name} is {column.type}: expected strings, the names of files")
    if pa.types.is_string_view(kind) or missing is not None:
        column = column.cast(pa.string())  # Arrow does not encode views, nor fill in dictionaries
    column = column if missing is None else column.fill_null(missing)
    column = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
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
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    write_table(path, {field.name: pa.array(it, field.type) for field, it in zip(schema, columns, strict=True)})


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
        self.sets, self.filled = sets, set[int]()

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
    """The pickle of a value that can be part of another pickle: without PROTO, frames, memo and STOP."""
    buffer = BytesIO()
    pickler = pickle.Pickler(buffer, _UNFRAMED)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[2:-1]


class ExternalSorter:
    """Stable external sort of records of a structured dtype by the fields `keys`, within `memory` bytes.

    Use it as a context: call `add` with arrays of records any number of times, then iterate once over
    arrays of sorted records. Runs are written to `folder`, which is removed when the context ends.

    >>> import tempfile
    >>> edge = np.dtype([("node", "<u8"), ("other", "<u8")])
    >>> with ExternalSorter(Path(tempfile.mkdtemp()) / "runs", edge, ("node", "other"), memory=1 << 20) as sorter:
    ...     sorter.add(np.array([(2, 9), (1, 5)], edge))
    ...     sorter.add(np.array([(1, 3)], edge))
    ...     [block.tolist() for block in sorter]
    [[(1, 3), (1, 5), (2, 9)]]
    """

    def __init__(self, folder: Path, dtype: np.dtype, keys: tuple[str, ...], memory: int) -> None:
        self.folder, self.dtype, self.keys = folder, dtype, keys
        self.capacity = max(_MIN_BLOCK, memory // (_COPIES * dtype.itemsize))  # records held
        self._held: list[NDArray] = []
        self._count = 0
        self._runs: list[Path] = []

    def __enter__(self) -> Self:
        shutil.rmtree(self.folder, ignore_errors=True)  # left by a process that was killed
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, records: NDArray) -> None:
        """Add records (n) of `dtype`; they are copied. Raises OutputError if a run cannot be written."""
        assert records.dtype == self.dtype, (records.dtype, self.dtype)
        while len(records):
            part, records = np.split(records, [self.capacity - self._count])
            self._held.append(part.copy())
            self._count += len(part)
            if self._count >= self.capacity:
                self._spill()

    def add_all(self, blocks: Iterable[NDArray]) -> None:
        """Add blocks of records, as `add`."""
        for records in blocks:
            self.add(records)

    def __iter__(self) -> Iterator[NDArray]:
        if not self._runs:
            yield from self._sort_held()
            return
        self._spill()
        yield from self._merge()

    def _sort_held(self) -> list[NDArray]:
        """The records in memory as one sorted array; an empty list if there are none."""
        held, self._held, self._count = self._held, [], 0
        return [self._sort(held)] if held else []

    def _sort(self, parts: list[NDArray]) -> NDArray:
        records = np.concatenate(parts)
        parts.clear()
        return records[np.lexsort([records[key] for key in reversed(self.keys)])]

    def _spill(self) -> None:
        for records in self._sort_held():
            path = self.folder / f"{len(self._runs):06}.run"
            with wrap_write_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(records.view(np.uint8).data)
            self._runs.append(path)

    def _merge(self) -> Iterator[NDArray]:
        """Merge block by block: all records up to the smallest of the current blocks' last records can be yielded."""
        size = max(_MIN_BLOCK, self.capacity // len(self._runs))
        runs = [_Run(path, self.dtype, size) for path in self._runs]
        while runs := [run for run in runs if run.fill()]:
            first = min(range(len(runs)), key=lambda i: tuple(runs[i].block[-1][key] for key in self.keys))
            bound = runs[first].block[-1]
            # For a stable sort, records equal to the bound in later runs wait: run `first` may have more of them.
            yield self._sort([run.take(self._count_up_to(run.block, bound, i <= first)) for i, run in enumerate(runs)])

    def _count_up_to(self, records: NDArray, bound: np.void, equal: bool) -> int:
        """Number of sorted `records` below `bound`; with `equal`, also those equal to it."""
        low, high = 0, len(records)
        for key in self.keys:
            column, value = records[key][low:high], bound[key]
            low, high = low + int(np.searchsorted(column, value)), low + int(np.searchsorted(column, value, "right"))
        return high if equal else low


class _Run:
    """A sorted run on disk, read block by block."""

    def __init__(self, path: Path, dtype: np.dtype, size: int) -> None:
        self.path, self.size, self.read = path, size, 0
        self.block = np.empty(0, dtype)

    def fill(self) -> bool:
        """Read the next block if the current one is used up; False at the end of the run."""
        if not len(self.block):
            offset = self.read * self.block.dtype.itemsize
            self.block = np.fromfile(self.path, self.block.dtype, self.size, offset=offset)
            self.read += len(self.block)
        return len(self.block) > 0

    def take(self, count: int) -> NDArray:
        """Remove the first `count` records of the block and return them."""
        taken, self.block = self.block[:count], self.block[count:]
        return taken


def write_records(path: Path, blocks: Iterable[NDArray]) -> None:
    """Write arrays of records to a file atomically."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        for records in blocks:
            file.write(np.ascontiguousarray(records).view(np.uint8).data)


def scatter_records(paths: Sequence[Path], blocks: Iterable[tuple[NDArray, NDArray[np.integer]]]) -> None:
    """Write each record to one of up to MAX_SCATTERED files, atomically, in their order.

    `blocks` are records (n) and the number of each one's file (n).
    """
    assert len(paths) <= MAX_SCATTERED, len(paths)
    with ExitStack() as stack:
        files = [stack.enter_context(stack.enter_context(atomic_write(path)).open("wb")) for path in paths]
        for records, numbers in blocks:
            ends = np.cumsum(np.bincount(numbers, minlength=len(paths)))
            for file, part in zip(files, np.split(records[np.argsort(numbers, kind="stable")], ends[:-1]), strict=True):
                if len(part):
                    file.write(part.view(np.uint8).data)


def read_records(paths: Path | Iterable[Path], dtype: np.dtype, size: int) -> Iterator[NDArray]:
    """Yield the records of a file, or of several one after another, in arrays of up to `size` records."""
    for path in [paths] if isinstance(paths, Path) else paths:
        with path.open("rb") as file:
            while len(records := np.fromfile(file, dtype, size)):
                yield records


def write_array(path: Path, array: NDArray) -> None:
    """Write an array to a .npy file atomically."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        np.save(file, array)
