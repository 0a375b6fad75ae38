"""Tokenised Hugging Face datasets and other tables: .arrow and .parquet files with a column of lists of ids."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gristmill.errors import InputError, UsageError
from gristmill.io.arrow_tables import damaged_table, ipc_batches
from gristmill.io.parquet_files import open_parquet
from preprocessing.token_formats.token_file import TokenFile
from preprocessing.token_formats.token_stream import Chunk

COLUMNS = ("input_ids", "tokens")  # looked for if no column is named, in this order
MASK = "attention_mask"  # 0 for padding
_BUFFER_BYTES = 1 << 20
_ROWS = 1024  # of a batch


def read_table(file: TokenFile) -> Iterator[Chunk]:
    """Yield the ids of a table's rows, each a document; padding, which attention_mask names, is left out.

    Raises UsageError where the column is missing or holds no ids, InputError for a damaged file.
    """
    try:
        if file.path.suffix == ".parquet":
            yield from _read_parquet(file)
        else:
            yield from _read_arrow(file)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, InputError):
            raise
        raise damaged_table(file.path, "", error) from error


def _read_parquet(file: TokenFile) -> Iterator[Chunk]:
    with open_parquet(file.path, _BUFFER_BYTES) as table:
        column = _column_of(table.schema_arrow, file)
        names = [name for name in (column, MASK) if name in table.schema_arrow.names]
        for batch in table.iter_batches(_ROWS, columns=names, use_threads=False):
            yield _chunk(batch, column, file.path)


def _read_arrow(file: TokenFile) -> Iterator[Chunk]:
    batches = ipc_batches(file.path)
    schema = next(batches)
    assert isinstance(schema, pa.Schema)
    column = _column_of(schema, file)
    for batch in batches:
        yield _chunk(batch, column, file.path)


def _column_of(schema: pa.Schema, file: TokenFile) -> str:
    """Return the column that holds the ids, after a look at its type."""
    names = [file.column] if file.column else list(COLUMNS)
    column = next((name for name in names if name in schema.names), None)
    if column is None:
        raise UsageError(
            f"{file.path}: expected a column {' or '.join(names)} of token ids, got {', '.join(schema.names)}; try "
            "--column, or gristmill tokenize for text"
        )
    kind = schema.field(column).type
    is_list = any(check(kind) for check in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))
    if not is_list or not pa.types.is_integer(kind.value_type):
        raise UsageError(f"{file.path}: expected lists of integer ids in {column}, got {kind}; try another --column")
    return column


def _chunk(batch: pa.RecordBatch, column: str, path: Path) -> Chunk:
    lists = batch.column(column)
    lengths = _lengths(lists)
    ids = _values(lists, column, path)
    if MASK in batch.schema.names and column != MASK:
        kept = _mask(batch.column(MASK), lengths, path)
        if kept is not None:
            rows = np.repeat(np.arange(len(lengths)), lengths)
            lengths = np.bincount(rows[kept], minlength=len(lengths))
            ids = ids[kept]
    return Chunk(ids, np.cumsum(lengths, dtype=np.int64))


def _mask(lists: pa.Array, lengths: NDArray[np.int64], path: Path) -> NDArray[np.bool_] | None:
    """Return which ids are none of padding; None if all are."""
    if not np.array_equal(_lengths(lists), lengths):
        raise InputError(f"{path}: expected an {MASK} as long as the ids of its row; write it again without padding")
    kept = _values(lists, MASK, path) != 0
    if kept.all():
        return None
    return kept


def _lengths(lists: pa.Array) -> NDArray[np.int64]:
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    return np.asarray(lengths.to_numpy(zero_copy_only=False), np.int64)


def _values(lists: pa.Array, column: str, path: Path) -> NDArray[np.integer]:
    """Return the values of lists, concatenated; null lists have none."""
    values = lists.flatten()
    if values.null_count:
        raise InputError(f"{path}: expected an id everywhere in {column}, got null; write it again")
    ids: NDArray[np.integer] = values.to_numpy(zero_copy_only=False)
    return ids
