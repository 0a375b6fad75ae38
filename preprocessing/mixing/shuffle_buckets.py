"""Bucket files, the intermediate files of the shuffle: rows of documents in compressed frames, each of one bucket.

A row is a copy of a document: its line, and the random numbers that place it. A frame is a zstd frame, with a checksum,
of an Arrow record batch of rows. The file ends with a table of its frames, so that those of a bucket can be read alone.
The manifest of pass 1, `pass1.json`, says where pass 2 finds the rows of each part, and how they were made.
"""

import io
import mmap
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import zstandard
from numpy.typing import NDArray

from gristmill.batches import partition_of
from gristmill.budget import reserve_memory, worker_share
from gristmill.engine.task import FileSet
from gristmill.errors import InputError, UsageError, wrap_read_errors
from gristmill.io.writers import ZSTD_LEVEL, zstd_compressor
from gristmill.storage.files import is_file, read_file
from gristmill.storage.local import atomic_write, atomic_write_bytes

SUFFIX = ".bucket"
MANIFEST_NAME = "pass1.json"  # in the folder of pass 1, with a folder for each source
NOT_ELIGIBLE = 0xFFFFFFFFFFFFFFFF  # holdout number of a second or later copy, which is never held out
_BUFFER_BYTES = 32 << 20  # of lines that a Scatter holds: where memory is short, in a file
_BUFFER_SHARE = 16  # part of a worker's share of memory that these lines may take
_BUFFER_ROWS = 1 << 16  # whose numbers a Scatter holds
_FRAME_BYTES = 1 << 20  # of lines in a frame, about: a reader has one in memory
_MEMORY_A_BYTE = 3  # bytes of memory for a byte of a line in a frame: the row, its frame, and that compressed
NUMBERS = pa.schema({
    "draw": pa.uint64(),  # random number that decides the part
    "order": pa.uint64(),  # random number to sort the part by
    "holdout": pa.uint64(),  # random number to choose the holdout by, or NOT_ELIGIBLE
    "size": pa.int64(),  # UTF-8 bytes of the text
    "source": pa.string(),
})  # fmt: skip
ROWS = NUMBERS.append(pa.field("line", pa.large_binary()))  # JSON, newline included
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
    """Writes frames to a file, and the table of frames at its end; `level` is that of their compression."""

    file: BinaryIO
    frames: list[Frame] = field(default_factory=list)
    level: int = ZSTD_LEVEL

    def write(self, bucket: int, rows: pa.RecordBatch) -> None:
        """Write a frame: rows (ROWS) of one bucket."""
        data = zstd_compressor(self.level).compress(rows.serialize())
        line_bytes = int(np.ptp(line_offsets(rows)))
        self.frames.append(Frame(bucket, self.file.tell(), len(data), rows.num_rows, line_bytes))
        self.file.write(data)

    def finish(self) -> None:
        """Write the table of frames."""
        table = zstd_compressor().compress(np.array(self.frames, "<i8").tobytes())
        self.file.write(table + _END.pack(len(table), _MAGIC))


@contextmanager
def write_bucket_file(path: Path, level: int = ZSTD_LEVEL) -> Iterator[BucketWriter]:
    """Yield a writer; the bucket file appears atomically when the block ends without an error."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        writer = BucketWriter(file, level=level)
        yield writer
        writer.finish()


@dataclass(frozen=True)
class BucketFile:
    """A bucket file to read: the frames of one bucket, or all."""

    path: Path
    frames: list[Frame]

    @classmethod
    def open(cls, path: Path, bucket: int | None = None) -> "BucketFile":
        """Read the table of frames, and keep only those of a given `bucket`; InputError if the file is damaged."""
        with wrap_damage(path), path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - _END.size, 0))
            length, magic = _END.unpack(file.read())
            if magic != _MAGIC or length > size - _END.size:
                raise ValueError("it does not end as a bucket file")
            file.seek(size - _END.size - length)
            table = np.frombuffer(decompress(file.read(length)), "<i8").reshape(-1, len(Frame._fields))
        chosen = table if bucket is None else table[table[:, 0] == bucket]
        return cls(path, [Frame(*frame) for frame in chosen.tolist()])

    def read(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows of each frame, in the order of the file; InputError if the file is damaged.

        The memory of a frame is held until the next is read.
        """
        if not self.frames:
            return
        with wrap_damage(self.path), self.path.open("rb") as file:
            for frame in self.frames:
                file.seek(frame.offset)
                with _held_frame(frame.line_bytes, self.path):
                    yield pa.ipc.read_record_batch(pa.py_buffer(decompress(file.read(frame.size))), ROWS)


def line_offsets(rows: pa.RecordBatch) -> NDArray[np.int64]:
    """Return where each line begins and ends (rows + 1, bytes) in the buffer of all lines."""
    lines = rows.column("line")
    if not len(lines):  # may have no buffer
        return np.zeros(1, np.int64)
    return np.frombuffer(lines.buffers()[1], np.int64)[lines.offset : lines.offset + len(lines) + 1]


def line_bytes(rows: pa.RecordBatch) -> NDArray[np.uint8]:
    """Return the bytes of all lines, one after another, without a copy."""
    offsets = line_offsets(rows)
    data = rows.column("line").buffers()[2]
    if not data or not offsets[-1]:
        return np.empty(0, np.uint8)
    return np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]


def join_lines(columns: dict[str, Any], sizes: NDArray[np.int64], lines: NDArray[np.uint8]) -> pa.RecordBatch:
    """The rows that have the `columns`, and lines of these sizes (rows), which lie one after another in `lines`."""
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(lines)]
    return pa.record_batch(columns | {"line": pa.Array.from_buffers(pa.large_binary(), len(sizes), buffers)})


class LineBuffer:
    """Bytes, appended piece by piece and read as a whole; a file without a name in `folder` if they exceed `room`.

    `room` None: they are always in memory. To be closed.
    """

    def __init__(self, folder: Path, room: int | None) -> None:
        self.size = 0
        self._folder = folder
        self._room = room
        self._stored: io.BytesIO | IO[bytes] = io.BytesIO()

    def append(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        size = self.size + len(data)
        if self._room is not None and size > self._room and isinstance(self._stored, io.BytesIO):
            self._move_to_file(self._stored)
        self._stored.write(data)
        self.size = size

    def view(self) -> NDArray[np.uint8]:
        """Return all bytes (size), without a copy; read them before the next call of a method but `close`."""
        if isinstance(self._stored, io.BytesIO):
            return np.frombuffer(self._stored.getbuffer(), np.uint8)[: self.size]
        if not self.size:
            return np.empty(0, np.uint8)  # no bytes cannot be mapped
        self._stored.flush()
        return np.frombuffer(mmap.mmap(self._stored.fileno(), self.size, access=mmap.ACCESS_READ), np.uint8)

    def cut(self, size: int) -> None:
        """Forget all bytes but the first `size`."""
        self._stored.seek(size)
        self.size = size

    def clear(self) -> None:
        """Forget all bytes; a file is written again from its beginning."""
        self.size = 0
        if isinstance(self._stored, io.BytesIO):
            self._stored = io.BytesIO()  # one that is viewed cannot shrink
        else:
            self._stored.seek(0)

    def close(self) -> None:
        """Remove the file; memory goes with the last view of it."""
        if not isinstance(self._stored, io.BytesIO):
            self._stored.close()

    def _move_to_file(self, memory: io.BytesIO) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stored = TemporaryFile(dir=self._folder)  # noqa: SIM115 (until close)
        self._stored.write(memory.getbuffer()[: self.size])


class Scatter:
    """Collects rows, and writes each bucket's rows together when the buffer is full: see open_scatter."""

    def __init__(
        self,
        bucket_of: Callable[[pa.RecordBatch], NDArray[np.int64]],
        write: Callable[[int, pa.RecordBatch], None],
        lines: LineBuffer,
        output: Path,
    ) -> None:
        self._bucket_of = bucket_of
        self._write = write
        self._lines = lines
        self._output = output
        self._numbers: list[pa.RecordBatch] = []
        self._sizes: list[NDArray[np.int64]] = []
        self._rows = 0

    def add(self, numbers: pa.RecordBatch, sizes: NDArray[np.int64], lines: Iterable[bytes | memoryview]) -> None:
        """Add rows: their numbers (NUMBERS), the sizes of their lines, and these lines, in pieces of any size."""
        self._numbers.append(numbers)
        self._sizes.append(sizes)
        self._rows += len(sizes)
        for line in lines:
            self._lines.append(line)

    def add_long(self, numbers: pa.RecordBatch, pieces: Iterable[bytes | memoryview]) -> None:
        """Add one row: its numbers (NUMBERS), and its line in pieces, of which one at a time is in memory.

        After an error of `pieces` nothing of it is added.
        """
        start = self._lines.size
        try:
            for piece in pieces:
                self._lines.append(piece)
                del piece  # before the next is made
        except BaseException:
            self._lines.cut(start)
            raise
        self.add(numbers, np.array([self._lines.size - start], np.int64), ())

    def write_full(self) -> None:
        """Write all rows if they are many; call it after `add`, when what was added is no longer in memory."""
        if self._lines.size >= _BUFFER_BYTES or self._rows >= _BUFFER_ROWS:
            self.flush()

    def add_rows(self, rows: pa.RecordBatch) -> None:
        """Add rows (ROWS), of which nothing is kept."""
        numbers = rows.select(NUMBERS.names).take(pa.array(np.arange(rows.num_rows)))  # a copy
        self.add(numbers, np.diff(line_offsets(rows)), [line_bytes(rows).data])

    def flush(self) -> None:
        """Write all rows that are held."""
        if self._rows:
            numbers = pa.Table.from_batches(self._numbers, NUMBERS).combine_chunks().to_batches()[0]
            columns = dict(zip(NUMBERS.names, numbers.columns, strict=True))
            self._write_frames(join_lines(columns, np.concatenate(self._sizes), self._lines.view()))
        self._numbers = []
        self._sizes = []
        self._rows = 0
        self._lines.clear()

    def _write_frames(self, rows: pa.RecordBatch) -> None:
        buckets = self._bucket_of(rows)
        sizes = np.diff(line_offsets(rows))
        by_bucket = np.argsort(buckets, kind="stable")
        frames = np.cumsum(sizes[by_bucket]) // _FRAME_BYTES
        is_last = (np.diff(buckets[by_bucket]) != 0) | (np.diff(frames) != 0)
        for chosen in np.split(by_bucket, np.flatnonzero(is_last) + 1):
            with _held_frame(int(sizes[chosen].sum()), self._output):
                self._write(int(buckets[chosen[0]]), rows.take(pa.array(chosen)))


@contextmanager
def open_scatter(
    bucket_of: Callable[[pa.RecordBatch], NDArray[np.int64]],
    write: Callable[[int, pa.RecordBatch], None],
    output: Path,
) -> Iterator[Scatter]:
    """Context: a Scatter, all of whose rows are written in the end.

    `bucket_of` gives the bucket (n) of each of n rows; `write` gets a bucket, in ascending order, and rows for a frame.
    Lines that take too much of the worker's memory are in a temporary file in the folder of `output`.
    """
    share = worker_share()  # a record may take all of it, and a buffer of some share as well would be too much
    with closing(LineBuffer(output.parent, None if share is None else share // _BUFFER_SHARE)) as lines:
        scatter = Scatter(bucket_of, write, lines, output)
        yield scatter
        scatter.flush()


def numbers_of(rows: pa.RecordBatch, column: str) -> NDArray[np.uint64]:
    """Return a column of random numbers (n)."""
    return rows.column(column).to_numpy()


@dataclass(frozen=True)
class Share:
    """Where the rows of a part are: in the frames of `bucket`, or in all, among rows of others of all `parts`."""

    part: int
    parts: int
    bucket: int | None = None
    parts_a_bucket: int = 1

    def select(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of the part."""
        if self.parts_a_bucket == 1:
            return rows
        return rows.filter(pa.array(partition_of(numbers_of(rows, "draw"), self.parts) == self.part))


class BucketManifest(msgspec.Struct, forbid_unknown_fields=True):
    """Manifest of pass 1's bucket files. Paths are relative to the manifest's folder."""

    parts: int  # number of parts that pass 2 writes
    seed: int
    weights: dict[str, float]  # epochs of each source
    documents: dict[str, int]  # source → documents that may be held out
    content: str  # SHA-256 of all that was mixed
    holdout_files: dict[str, str]  # files of the documents' holdout numbers → their source
    bucket_files: list[str] = []  # files that hold rows of all parts; none if each part has files of its own
    buckets: int = 0  # in each of `bucket_files`; a bucket is of parts // buckets consecutive parts
    files_a_part: int = 0  # that hold rows of one part alone, see part_path

    def save(self, path: Path) -> None:
        """Write pass1.json atomically."""
        atomic_write_bytes(path, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    @classmethod
    def load(cls, path: Path) -> "BucketManifest":
        """Read pass1.json; UsageError if there is none, InputError if it is damaged or an earlier version's."""
        if not is_file(path):
            raise UsageError(f"{path.parent} holds no {path.name}: expected the folder that pass1 wrote. Run pass1")
        try:
            return msgspec.json.decode(read_file(path), type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is damaged or of an earlier version ({error}): run pass1 again") from error

    def files_of(self, folder: Path, parts: Iterable[int]) -> Iterator[tuple[int, FileSet]]:
        """Yield each part, and the files that hold its rows: one set for all parts, or a set for each."""
        shared = FileSet(tuple(folder / name for name in self.bucket_files))
        for part in parts:
            paths = (part_path(parts_folder(folder), part, i) for i in range(self.files_a_part))
            yield part, shared if self.bucket_files else FileSet(tuple(paths))

    def share(self, part: int) -> Share:
        """Return where in its files the rows of a part are."""
        if not self.bucket_files:
            return Share(part, self.parts)
        parts_a_bucket = self.parts // self.buckets
        return Share(part, self.parts, part // parts_a_bucket, parts_a_bucket)


def manifest_path(folder: Path) -> Path:
    """Return the path of the manifest in the folder that pass 1 wrote."""
    return folder / MANIFEST_NAME


def part_path(folder: Path, part: int, number: int) -> Path:
    """Return the path of a bucket file that holds rows of the parts from `part` on."""
    return folder / f"{part}-{number}{SUFFIX}"


def parts_folder(folder: Path) -> Path:
    """Return the folder of the bucket files of single parts, in the folder that pass 1 wrote."""
    return folder / "parts"


@contextmanager
def _held_frame(size: int, path: Path) -> Iterator[None]:
    """Context: hold the memory of a frame with `size` bytes of lines, if one of them is long, and give it back."""
    if size <= 2 * _FRAME_BYTES:
        yield
        return
    with reserve_memory(_MEMORY_A_BYTE * size, f"a line of {path}"):
        yield
        pa.default_memory_pool().release_unused()  # Arrow would keep the row and its frame for later ones


@contextmanager
def wrap_damage(path: Path) -> Iterator[None]:
    """Context: what a damaged file raises becomes an InputError that says so."""
    try:
        with wrap_read_errors(path):
            yield
    except (pa.ArrowException, zstandard.ZstdError, struct.error, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is damaged ({error}): run pass1 again") from error


def decompress(data: bytes) -> bytes:
    """Return the content of a zstd frame. Raises ZstdError if it is damaged."""
    return zstandard.ZstdDecompressor().decompress(data)
