"""Facts: what a pass over a corpus noted of each raw record, in Parquet files that later stages read instead of texts.

FOLDER/<raw file>+<start>.facts.parquet has the records of one task, in their order: the raw file and row, what became
of it (`reason`, '' if it was written, and then `file` and `row`, its key), bytes as read and as written, and the facts
of steps, null where a step did not see the record. A fact that is a vector has a file of its own, next to it:
….<fact>.arrow, a vector for each record that was written. FOLDER/index.json lists the files in the order of keys.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from gristmill.errors import InputError
from gristmill.io.artefacts import open_table
from gristmill.storage.local import atomic_write

SUFFIX = ".facts.parquet"
INDEX_FILE = "index.json"
ROW_GROUP_ROWS = 1 << 16
_NAME = pa.dictionary(pa.int32(), pa.string())
CORE = pa.schema(
    {
        "raw_file": _NAME,
        "raw_row": pa.int64(),
        "file": _NAME,
        "row": pa.int64(),
        "reason": _NAME,
        "value": pa.float64(),
        "detail": pa.string(),
        "id": pa.string(),
        "raw_bytes": pa.int64(),
        "bytes": pa.int64(),
    }
)
"""Columns of all facts; `row` and `bytes` are null for records that were not written, `value` to `id` for others."""
TYPES = {
    "bool": pa.bool_(), "int64": pa.int64(), "uint64": pa.uint64(), "float32": pa.float32(), "float64": pa.float64(),
    "string": pa.string(),
}  # fmt: skip


class WrittenSlice(msgspec.Struct):
    """The documents that a task wrote to one file, or found in it: their rows are from `first` to below `end`."""

    file: str
    first: int
    end: int
    documents: int

    def is_about(self, file: str, row: int) -> bool:
        """Return whether a document, which may have been removed, is in the slice."""
        return file == self.file and self.first <= row < self.end


def are_about(slices: Iterable[WrittenSlice], file: str, row: int) -> bool:
    """Return whether a document, which may have been removed, is in one of the slices."""
    return any(part.is_about(file, row) for part in slices)


class FactsFile(msgspec.Struct):
    """A file of facts: its path below the folder, its records, and the documents written, slice by slice."""

    path: str
    records: int
    slices: list[WrittenSlice]

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.slices)

    @property
    def corpus_files(self) -> tuple[str, ...]:
        """Return the names of the corpus files whose documents it has, in order."""
        return tuple(dict.fromkeys(part.file for part in self.slices))


def paths_of_facts(folder: Path, files: Iterable[FactsFile]) -> list[Path]:
    """Return the paths of files of facts in a folder."""
    return [folder / file.path for file in files]


def schema_of_facts(makes: Mapping[str, str]) -> pa.Schema:
    """Return the schema of facts of steps that make such facts, besides vectors."""
    return pa.schema([*CORE, *(pa.field(name, TYPES[kind]) for name, kind in makes.items())])


def vector_path(facts: Path, name: str) -> Path:
    """Return the path of the vectors of a file of facts."""
    return facts.with_name(f"{facts.name.removesuffix(SUFFIX)}.{name}.arrow")


@contextmanager
def open_facts_writer(path: Path, schema: pa.Schema) -> Iterator["FactsWriter"]:
    """Yield a writer of facts; publish the file when the block ends without an error."""
    of_text = list[str]()
    for field in schema:
        if pa.types.is_dictionary(field.type) or pa.types.is_string(field.type):
            of_text.append(field.name)
    with (
        atomic_write(path) as temporary,
        pa.parquet.ParquetWriter(
            temporary, schema, compression="zstd", compression_level=1, use_dictionary=of_text, write_statistics=False
        ) as writer,
    ):
        facts = FactsWriter(writer, schema)
        yield facts
        facts.flush()


class FactsWriter:
    """Appends rows to a file of facts; holds a row group in memory."""

    def __init__(self, writer: pa.parquet.ParquetWriter, schema: pa.Schema) -> None:
        self._writer = writer
        self.schema = schema
        self._held: list[pa.Table] = []
        self._rows = 0

    def add(self, columns: Mapping[str, Any]) -> None:
        """Append rows, given a list or an array for each column of the schema."""
        arrays = [_to_arrow(columns[field.name], field.type) for field in self.schema]
        table = pa.Table.from_arrays(arrays, schema=self.schema)
        self._held.append(table)
        self._rows += table.num_rows
        if self._rows >= ROW_GROUP_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what is held as a row group."""
        if self._rows:
            table = pa.concat_tables(self._held).unify_dictionaries().combine_chunks()
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._held = []
        self._rows = 0


def _to_arrow(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.Array):
        return values
    if pa.types.is_dictionary(kind):
        return pa.array(values, pa.string()).dictionary_encode()
    return pa.array(values, kind)


def stream_facts(path: Path, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield columns of a file of facts, a row group at a time. Raises as open_table."""
    with open_table(path, columns) as file:
        for number in range(file.num_row_groups):
            yield file.read_row_group(number, columns=list(columns))


def written_by_file(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, pa.Table]]:
    """Yield (file, its rows) of the documents in a file of facts that were written: `row` and these columns."""
    for table in stream_facts(path, ["file", "row", *columns]):
        table = table.filter(table.column("row").is_valid())
        if not table.num_rows:
            continue
        names = table.column("file").unify_dictionaries().combine_chunks()
        codes = names.indices.to_numpy()
        ends = [*np.flatnonzero(np.diff(codes)) + 1, len(codes)]
        start = 0
        for end in ends:
            name = names.dictionary[int(codes[start])].as_py()
            yield name, table.slice(start, end - start).select(["row", *columns])
            start = end


@contextmanager
def open_vector_writer(path: Path, name: str, length: int) -> Iterator["VectorWriter"]:
    """Yield a writer of vectors of `length` numbers; publish the file when the block ends without an error."""
    schema = pa.schema({name: pa.list_(pa.uint32(), length)})
    with (
        atomic_write(path) as temporary,
        pa.output_stream(str(temporary), compression=None) as file,
        pa.ipc.new_file(file, schema) as writer,
    ):
        yield VectorWriter(writer, schema)


class VectorWriter:
    """Appends vectors to a file."""

    def __init__(self, writer: pa.ipc.RecordBatchFileWriter, schema: pa.Schema) -> None:
        self._writer = writer
        self._schema = schema

    def add(self, vectors: NDArray[np.uint32]) -> None:
        """Append vectors (n × length)."""
        if len(vectors):
            flat = pa.array(np.ascontiguousarray(vectors).reshape(-1), pa.uint32())
            column = pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
            self._writer.write_batch(pa.record_batch([column], schema=self._schema))


def stream_vectors(path: Path, name: str, length: int) -> Iterator[NDArray[np.uint32]]:
    """Yield the vectors (n × length) of a file, batch by batch. InputError if it is damaged."""
    try:
        with pa.OSFile(str(path)) as file:
            reader = pa.ipc.open_file(file)
            if reader.schema != pa.schema({name: pa.list_(pa.uint32(), length)}):
                raise ValueError(f"it holds {reader.schema.to_string()}: expected {name}, vectors of {length} numbers")
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                batch.validate(full=True)
                yield batch.column(0).flatten().to_numpy().reshape(batch.num_rows, length)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path} is not a readable file of vectors ({error}): make it again") from error


class VectorReader:
    """Reads the vectors of a file, so many at a time."""

    def __init__(self, path: Path, name: str, length: int) -> None:
        self._path = path
        self._batches = stream_vectors(path, name, length)
        self._rest = np.empty((0, length), np.uint32)

    def take(self, count: int) -> NDArray[np.uint32]:
        """Return the next vectors (count × length). InputError if fewer are left."""
        taken = [self._rest[:count]]
        self._rest = self._rest[count:]
        missing = count - len(taken[0])
        while missing:
            batch = next(self._batches, None)
            if batch is None:
                raise InputError(f"{self._path} has fewer vectors than documents: make it again")
            taken.append(batch[:missing])
            self._rest = batch[missing:]
            missing -= len(taken[-1])
        return np.concatenate(taken)


def write_index(path: Path, files: Sequence[FactsFile]) -> None:
    """Write the list of a folder's files of facts, in the order of keys."""
    ordered = sorted(files, key=lambda facts: [(part.file, part.first) for part in facts.slices])
    with atomic_write(path) as temporary:
        temporary.write_bytes(msgspec.json.encode(ordered) + b"\n")


def read_index(path: Path) -> list[FactsFile]:
    """Return the list that write_index wrote. InputError if it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[FactsFile])
    except msgspec.DecodeError as error:
        raise InputError(f"{path} is not a readable list of facts ({error}): run prepare again") from error
