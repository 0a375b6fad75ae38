"""Record batches of .parquet and .arrow files, and where a large .parquet file is cut."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from gristmill.errors import InputError

_BATCH = 1024  # rows


def parquet_batches(path: Path, start: int, end: int | None) -> Iterator[pa.Schema | pa.RecordBatch]:
    """Yield the schema, then the batches of the row groups from `start` up to `end`; None is the end of the file."""
    with pa.parquet.ParquetFile(path, pre_buffer=False) as file:
        yield file.schema_arrow
        groups = range(start, file.num_row_groups if end is None else end)
        yield from file.iter_batches(batch_size=_BATCH, row_groups=list(groups))


def ipc_batches(path: Path) -> Iterator[pa.Schema | pa.RecordBatch]:
    """Yield the schema, then the batches of an Arrow IPC stream (as Hugging Face datasets saves) or an IPC file."""
    with pa.memory_map(str(path)) as stored:
        try:
            reader = pa.ipc.open_stream(stored)
        except pa.ArrowInvalid:
            file = pa.ipc.open_file(stored)
            yield file.schema
            yield from map(file.get_batch, range(file.num_record_batches))
        else:
            yield reader.schema
            yield from reader


def row_group_starts(path: Path, size: int, slice_bytes: int) -> list[tuple[int, int]]:
    """First row group, and its first row, of each slice of about `slice_bytes` of a file of `size` bytes."""
    try:
        metadata = pa.parquet.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a readable .parquet file ({error}). Fetch it again, or remove it") from error
    starts, row, held = [(0, 0)], 0, 0
    for group in range(metadata.num_row_groups):
        if held >= slice_bytes:
            starts.append((group, row))
            held = 0
        row += metadata.row_group(group).num_rows
        held += size // metadata.num_row_groups
    return starts
