"""Bucket files, the intermediate files of the shuffle: rows of documents in compressed frames, each of one bucket.

A row is a copy of a document: its line, and the random numbers that place it. A frame is a zstd frame, with a checksum,
of an Arrow record batch of rows. The file ends with a table of its frames, so that those of a bucket can be read alone.
"""

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import zstandard
from numpy.typing import NDArray

from gristmill.batches import partition_of
from gristmill.errors import InputError, wrap_read_errors
from gristmill.io.files import atomic_write
from gristmill.io.writers import zstd_compressor

SUFFIX = ".bucket"
NOT_ELIGIBLE = 0xFFFFFFFFFFFFFFFF  # holdout number of a second or later copy, which is never held out
BUFFER_BYTES = 32 << 20  # of rows that a Scatter holds
_FRAME_BYTES = 4 << 20  # of lines in a frame, about: a reader has one in memory
ROWS = pa.schema({
    "draw": pa.uint64(),  # random number that decides the part
    "order": pa.uint64(),  # random number to sort the part by
    "holdout": pa.uint64(),  # random number to choose the holdout by, or NOT_ELIGIBLE
    "size": pa.int64(),  # UTF-8 bytes of the text
    "source": pa.string(),
    "line": pa.large_binary(),  # JSON, newline included
})  # fmt: skip
_END = struct.Struct("<Q8s")  # bytes of the compressed table of frames, and _MAGIC
_MAGIC = b"GRISTBKT"


class Frame(NamedTuple):
    """A frame of a bucket file: rows of one bucket."""

    bucket: int
    offset: int  # bytes from the start of the file
    size: int  # compressed bytes
    rows: int
    line_bytes: int  # bytes of their lines


@dataclass
class BucketWriter:
    """Writes frames to a file, and the table of frames at its end."""

    file: BinaryIO
    frames: list[Frame] = field(default_factory=list)

    def write(self, bucket: int, rows: pa.RecordBatch) -> None:
        """Write a frame: rows (ROWS) of one bucket."""
        data = zstd_compressor().compress(rows.serialize())
        line_bytes = int(np.ptp(line_offsets(rows)))
        self.frames.append(Frame(bucket, self.file.tell(), len(data), rows.num_rows, line_bytes))
        self.file.write(data)

    def finish(self) -> None:
        """Write the table of frames."""
        table = zstd_compressor().compress(np.array(self.frames, "<i8").tobytes())
        self.file.write(table + _END.pack(len(table), _MAGIC))


@contextmanager
def write_bucket_file(path: Path) -> Iterator[BucketWriter]:
    """Yield a writer; the bucket file appears atomically when the block ends without an error."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        writer = BucketWriter(file)
        yield writer
        writer.finish()


@dataclass(frozen=True)
class BucketFile:
    """A bucket file to read: the frames of one bucket, or all."""

    path: Path
    frames: list[Frame]

    @classmethod
    def open(cls, path: Path, bucket: int | None = None) -> "BucketFile":
        """Read the table of frames, and keep those of `bucket` if one is given; InputError if the file is damaged."""
        with _wrap_damage(path), path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - _END.size, 0))
            length, magic = _END.unpack(file.read())
            if magic != _MAGIC or length > size - _END.size:
                raise ValueError("it does not end as a bucket file")
            file.seek(size - _END.size - length)
            table = np.frombuffer(_decompress(file.read(length)), "<i8").reshape(-1, len(Frame._fields))
        chosen = table if bucket is None else table[table[:, 0] == bucket]
        return cls(path, [Frame(*frame) for frame in chosen.tolist()])

    def read(self) -> Iterator[pa.RecordBatch]:
        """The rows of each frame, in the order of the file; InputError if the file is damaged."""
        if not self.frames:
            return
        with _wrap_damage(self.path), self.path.open("rb") as file:
            for frame in self.frames:
                file.seek(frame.offset)
                yield pa.ipc.read_record_batch(pa.py_buffer(_decompress(file.read(frame.size))), ROWS)


def line_offsets(rows: pa.RecordBatch) -> NDArray[np.int64]:
    """Where each line begins and ends (rows + 1, bytes) in the buffer of all lines."""
    lines = rows.column("line")
    if not len(lines):  # may have no buffer
        return np.zeros(1, np.int64)
    return np.frombuffer(lines.buffers()[1], np.int64)[lines.offset : lines.offset + len(lines) + 1]


class Scatter:
    """Collects rows, and writes those of each bucket together when the buffer is full.

    `bucket_of` gives the bucket (n) of each of n rows; `write` gets a bucket, in ascending order, and rows for a frame.
    """

    def __init__(
        self,
        bucket_of: Callable[[pa.RecordBatch], NDArray[np.int64]],
        write: Callable[[int, pa.RecordBatch], None],
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self._bucket_of, self._write, self._buffer_bytes = bucket_of, write, buffer_bytes
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows (ROWS)."""
        self._held.append(rows)
        self._held_bytes += rows.nbytes
        if self._held_bytes >= self._buffer_bytes:
            self.flush()

    def flush(self) -> None:
        """Write all rows that are held."""
        rows = pa.Table.from_batches(self._held, ROWS).combine_chunks().to_batches()
        self._held, self._held_bytes = [], 0
        for batch in rows:
            buckets = self._bucket_of(batch)
            by_bucket = np.argsort(buckets, kind="stable")
            frames = np.cumsum(np.diff(line_offsets(batch))[by_bucket]) // _FRAME_BYTES
            is_last = (np.diff(buckets[by_bucket]) != 0) | (np.diff(frames) != 0)
            for chosen in np.split(by_bucket, np.flatnonzero(is_last) + 1):
                self._write(int(buckets[chosen[0]]), batch.take(pa.array(chosen)))


def numbers_of(rows: pa.RecordBatch, column: str) -> NDArray[np.uint64]:
    """A column of random numbers (n)."""
    return rows.column(column).to_numpy()


@dataclass(frozen=True)
class Share:
    """Where the rows of a part are: in the frames of `bucket`, or in all, beside rows of others of all `parts`."""

    part: int
    parts: int
    bucket: int | None = None
    parts_a_bucket: int = 1

    def select(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of the part."""
        if self.parts_a_bucket == 1:
            return rows
        return rows.filter(pa.array(partition_of(numbers_of(rows, "draw"), self.parts) == self.part))


@contextmanager
def _wrap_damage(path: Path) -> Iterator[None]:
    """Context: what a damaged file raises becomes an InputError that says so."""
    try:
        with wrap_read_errors(path):
            yield
    except (pa.ArrowException, zstandard.ZstdError, struct.error, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is damaged ({error}): run pass1 again") from error


def _decompress(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)
